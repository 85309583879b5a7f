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
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Batch, Step, Turns, boosted

import shardwright
from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin

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


def plain(model: nn.Module) -> Step:
    return boosted(model, _plugin())


def pipeline(model: nn.Module) -> Step:
    booster = Booster(plugin=_plugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    assert optimizer is not None

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = booster.execute_pipeline(
            iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer
        )["loss"]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _plugin() -> HybridParallelPlugin:
    return HybridParallelPlugin(precision="fp32", enable_fused_cross_entropy=False)


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


def batches(args: argparse.Namespace) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    while True:
        ids = torch.randint(0, 1024, (args.batch, args.length), generator=generator).to(device)
        yield {"input_ids": ids, "labels": ids}


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
    kinds = {"hand": hand_written, "plain": plain, "pipeline": pipeline}
    steps = {name: kind(copy.deepcopy(model)) for name, kind in kinds.items()}
    supply = list(itertools.islice(batches(args), WARM_UP + args.steps))
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in kinds}
    loops = {name: lambda turn, name=name: losses[name].append(steps[name](supply[turn])) for name in kinds}
    found = Turns.take(loops, args.steps, warm_up=WARM_UP).summary("hand")

    report: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, **vars(args)}
    report["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for name in kinds:
        report[name] = {**found[name], "losses equal bit by bit": losses[name] == losses["hand"]}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
