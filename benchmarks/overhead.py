"""What the framework costs where it has nothing to do: one process, every size 1, against a loop written by hand.

    python benchmarks/overhead.py [--steps 40] [--hidden 256] [--layers 4] [--batch 16] [--length 128] [--threads 1]

Three loops over the same batches take turns, step by step, in one process: transformers and torch alone (`hand`), the
boosted model called and `booster.backward` (`plain`), and `booster.execute_pipeline` (`pipeline`). Printed are medians
of wall and CPU time per step, and the median of the ratios to the `hand` step of the same turn. The losses of all three
are compared bit by bit, for which the head's loss is computed from whole logits (benchmarks/fused_loss.py has the
other).
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin

Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]
WARM_UP = 5


def hand_written(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def boosted(model: nn.Module, pipeline: bool) -> Step:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", enable_fused_cross_entropy=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    assert optimizer is not None

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if pipeline:
            loss = booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer)[
                "loss"
            ]
        else:
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    heads = max(1, args.hidden // 64)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    return LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def batches(args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    while True:
        ids = torch.randint(0, 1024, (args.batch, args.length), generator=generator).to(device)
        yield {"input_ids": ids, "labels": ids}


def measured(step: Step, batch: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """(loss, wall seconds, CPU seconds) of one step."""
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return loss.item(), wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("steps", 40),
        ("hidden", 256),
        ("layers", 4),
        ("batch", 16),
        ("length", 128),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shardwright.launch_from_torch(seed=0)

    model = build(args)
    loops: dict[str, Step] = {
        "hand": hand_written(copy.deepcopy(model)),
        "plain": boosted(copy.deepcopy(model), pipeline=False),
        "pipeline": boosted(copy.deepcopy(model), pipeline=True),
    }
    names = list(loops)
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    supply = batches(args)
    for turn in range(WARM_UP + args.steps):
        batch = next(supply)
        for name in names[turn % 3 :] + names[: turn % 3]:
            taken[name].append(measured(loops[name], batch))

    report: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, **vars(args)}
    report["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for name in names:
        rows, base = taken[name][WARM_UP:], taken["hand"][WARM_UP:]
        report[name] = {
            "wall ms": round(1000 * median(row[1] for row in rows), 2),
            "CPU ms": round(1000 * median(row[2] for row in rows), 2),
            "wall ratio": round(median(row[1] / other[1] for row, other in zip(rows, base, strict=True)), 4),
            "CPU ratio": round(median(row[2] / other[2] for row, other in zip(rows, base, strict=True)), 4),
            "losses equal bit by bit": [row[0] for row in taken[name]] == [row[0] for row in taken["hand"]],
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
