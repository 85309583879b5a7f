"""Trains with dropout in bf16 over two stages and two ZeRO shards, under `launch(deterministic=True)`, and prints a
digest of every step: of its loss, and of the weights at the end.

    python deterministic_script.py DIRECTORY FIRST LAST        from a checkpoint of step FIRST, where that is not 0

A checkpoint of step 3 is left in DIRECTORY.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright
from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin

SAVED = 3


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha1(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def main() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    directory, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    shardwright.launch_from_torch(seed=1, timeout=120, deterministic=True)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2))
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, zero_stage=1, precision="bf16")
    booster = Booster(plugin=plugin)
    ids = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(3))
    samples = [{"input_ids": row, "labels": row} for row in ids]
    loader = plugin.prepare_dataloader(samples, batch_size=4, shuffle=True, seed=5)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    if first:
        found = booster.load(directory / f"step-{first}", model=model, optimizer=optimizer, dataloader=loader)
        assert found["step"] == first
    batches, told = iter(loader), []
    for step in range(first + 1, last + 1):
        result = booster.execute_pipeline(batches, model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss = result["loss"]
        told.append(f"loss of step {step}: {'' if loss is None else digest(loss.reshape(1))}")
        if step == SAVED and not first:
            state = {"model": model, "optimizer": optimizer, "dataloader": loader}
            booster.save(directory / f"step-{step}", **state, step=step)
    for name, param in model.unwrap().named_parameters():
        told.append(f"{name}: {digest(param)}")
    (directory / f"told-{dist.get_rank()}").write_text("\n".join(told))


if __name__ == "__main__":
    main()
