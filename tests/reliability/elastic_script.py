"""Trains a tiny model by `elastic.run` and is hit once, or every few steps, by what its environment names.

    python elastic_script.py LAYOUT DIRECTORY        FAULT=kill|stop|terminate|nan RANK_HIT=1 AT=5 [EVERY=2]
    python elastic_script.py LAYOUT DIRECTORY        FAULT=slow        a second for each step
    python elastic_script.py LAYOUT DIRECTORY        SOAK=7:0.2        faults drawn from seed 7, one in five steps

Rank 0 writes the final weights to DIRECTORY/final.pt and appends a line per step to DIRECTORY/steps.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from shardwright import Booster, elastic
from shardwright.checkpoint.manifest import MARKER
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin

STEPS, SAMPLES, BATCH, SAVE = 8, 20, 4, 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


class Texts(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def plugin_of(layout: str, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    match layout:
        case "searched":
            asked: dict[str, Any] = {
                "global_batch_size": BATCH,
                "sequence_length": 8,
                "gpu": "h100",
                "gpus_per_node": 1,
            }
            found = HybridParallelPlugin.from_search(model, optimizer, precision="fp32", **asked)
            print(found.search_report, flush=True)
            return found
        case "pp":
            return HybridParallelPlugin(pp_size=dist.get_world_size(), num_microbatches=2, precision="fp32")
        case "tp":
            return HybridParallelPlugin(tp_size=dist.get_world_size(), precision="fp32")
        case "zero2":
            return LowLevelZeroPlugin(stage=2, precision="fp32")
        case _:
            return HybridParallelPlugin(zero_stage=1, precision="fp32")


def train(run: elastic.Run) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 16}
    layers = 4 if sys.argv[1] == "searched" else 2
    config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plugin = plugin_of(sys.argv[1], model, optimizer)
    replicas, _ = plugin.data_parallel
    booster = Booster(plugin=plugin, on_nan="stop")
    loader = plugin.prepare_dataloader(Texts(), batch_size=BATCH // replicas, shuffle=True, seed=3, drop_last=True)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    directory = Path(sys.argv[2])
    run.resume(booster, model, optimizer, dataloader=loader)
    while run.step < STEPS:
        for batch in loader:
            factor = float("nan") if _be_hit(run.step + 1, directory) == "nan" else 1.0
            if isinstance(plugin, HybridParallelPlugin):
                booster.execute_pipeline(iter([batch]), model, None, optimizer)
            else:
                booster.backward(model(**batch).loss * factor, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                with open(directory / "steps", "a") as file:
                    file.write(f"{run.step + 1} of {dist.get_world_size()}\n")
            run.completed()
            if run.step == STEPS:
                break
    booster.save_model(model, directory / "final.safetensors")


def _drawn(step: int) -> str | None:
    """The fault that `SOAK` has for this step and rank, if it has one. Of a job that is stopped as a whole, or whose
    other ranks are killed in that moment, nobody is left to end it: who would be stopped is killed.
    """
    seed, _, chance = os.environ.get("SOAK", "0:0").partition(":")
    drawn: list[str | None] = []
    for rank in range(dist.get_world_size()):
        draw = random.Random(f"{seed} {step} {rank}")
        drawn.append(draw.choice((*SIGNALS, "nan")) if draw.random() < float(chance) else None)
    if all(fault in ("stop", "kill") for fault in drawn):
        drawn = ["kill" for _ in drawn]
    return drawn[dist.get_rank()]


def _be_hit(step: int, directory: Path) -> str | None:
    """Once, or at every `EVERY`-th step at which this rank has not been hit before. Returns what it is to do itself."""
    drawn = _drawn(step)
    if drawn is not None and not (mark := directory / f"hit-{step}-{dist.get_rank()}").exists():
        mark.write_text(drawn)
        if drawn == "nan":
            return drawn
        os.kill(os.getpid(), SIGNALS[drawn])
    fault = os.environ.get("FAULT")
    if fault == "slow":
        time.sleep(1)
        return None
    every = int(os.environ.get("EVERY", "0"))
    due = step % every == 0 if every else step == int(os.environ.get("AT", "0"))
    mark = directory / f"hit-{step}"
    if fault and due and dist.get_rank() == int(os.environ.get("RANK_HIT", "1")) and not mark.exists():
        mark.touch()
        if fault != "terminate":  # what is being written is lost with a process; here the last save is to be on disk
            last = directory / "checkpoints" / f"step-{(step - 1) // SAVE * SAVE}"
            while not (last / MARKER).exists():
                time.sleep(0.05)
        os.kill(os.getpid(), SIGNALS[fault])
    return None


if __name__ == "__main__":
    limit = float(os.environ.get("STEP_TIMEOUT", "3"))
    elastic.run(train, Path(sys.argv[2]) / "checkpoints", save_every=SAVE, seed=1, timeout=60, step_timeout=limit)
