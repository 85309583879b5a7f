"""Trains with dropout under `launch(deterministic=True)`, and prints a digest of every step: of its loss, and of the
weights at the end.

    python deterministic_script.py DIRECTORY LAYOUT FIRST LAST    from a checkpoint of step FIRST, where that is not 0

A checkpoint of step 3 is left in DIRECTORY.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardwright
from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.plugins.base import Plugin

SAVED = 3
PIPE = {"pp_size": 2, "num_microbatches": 2}
ULYSSES = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}


class Layout(NamedTuple):
    """A plugin for so many ranks, calls of the model per step, and whether adapters are trained."""

    plugin: Callable[[], Plugin]
    ranks: int = 2
    calls: int = 1
    lora: bool = False


def hybrid(**arguments: Any) -> Callable[[], Plugin]:
    return lambda: HybridParallelPlugin(**arguments)


LAYOUTS = {
    "pp2, ZeRO 1, bf16": Layout(hybrid(**PIPE, zero_stage=1, precision="bf16"), 4),
    "pp2 zbv, ZeRO 2, fp16": Layout(
        hybrid(**PIPE, pp_style="zbv", num_model_chunks=2, zero_stage=2, precision="fp16"), 4
    ),
    "tp2 x pp2, fp32": Layout(hybrid(**PIPE, tp_size=2, precision="fp32"), 4),
    "ZeRO 3, bf16": Layout(hybrid(zero_stage=3, precision="bf16")),
    "ZeRO 2, fp16, accumulated": Layout(lambda: LowLevelZeroPlugin(stage=2, precision="fp16"), calls=2),
    "tp2, LoRA": Layout(hybrid(tp_size=2, precision="bf16"), lora=True),
    "all_to_all": Layout(hybrid(**ULYSSES, precision="fp32", zero_stage=1)),
    "ring_attn": Layout(
        hybrid(**{**ULYSSES, "sequence_parallelism_mode": "ring_attn"}, precision="fp32", enable_jit_fused=True)
    ),
    "DDP": Layout(lambda: TorchDDPPlugin(), calls=2),
    "FSDP": Layout(lambda: TorchFSDPPlugin()),
}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha1(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def main() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    directory, layout, first, last = Path(sys.argv[1]), LAYOUTS[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4])
    shardwright.launch_from_torch(seed=1, timeout=120, deterministic=True)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    dropout = 0.0 if "ring" in sys.argv[2] else 0.2  # which no ring has in attention
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=dropout))
    plugin: Any = layout.plugin()
    booster = Booster(plugin=plugin)
    if layout.lora:
        from peft import LoraConfig

        model = booster.enable_lora(model, lora_config=LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.3))
    ids = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(3))
    samples = [{"input_ids": row, "labels": row} for row in ids]
    loader = plugin.prepare_dataloader(samples, batch_size=4, shuffle=True, seed=5)
    optimizer: Any = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    if first:
        found = booster.load(directory / f"step-{first}", model=model, optimizer=optimizer, dataloader=loader)
        assert found["step"] == first

    def loss_of_step(batches: Any) -> torch.Tensor | None:
        if getattr(plugin, "pp_size", 1) > 1:
            loss: torch.Tensor | None = booster.execute_pipeline(batches, model, None, optimizer)["loss"]
            return loss
        total = torch.zeros(())
        for call in range(layout.calls):
            more = call < layout.calls - 1
            with booster.no_sync(model, optimizer) if more else contextlib.nullcontext():
                each = model(**next(batches)).loss / layout.calls
                booster.backward(each, optimizer)
            total += each.detach().float()
        return total

    batches, told = iter(loader), []
    for step in range(first + 1, last + 1):
        try:
            loss = loss_of_step(batches)
        except StopIteration:
            batches = iter(loader)
            loss = loss_of_step(batches)
        optimizer.step()
        optimizer.zero_grad()
        told.append(f"loss of step {step}: {'' if loss is None else digest(loss.reshape(1))}")
        if step == SAVED and not first:
            state = {"model": model, "optimizer": optimizer, "dataloader": loader}
            booster.save(directory / f"step-{step}", **state, step=step)
    for name, param in model.unwrap().named_parameters():
        local = param.to_local() if isinstance(param, torch.distributed.tensor.DTensor) else param
        told.append(f"{name}: {digest(local)}")
    (directory / f"told-{dist.get_rank()}").write_text("\n".join(told))


if __name__ == "__main__":
    main()
