"""What operators in one cost and save, through the Booster: time and peak memory of a step with norms, gated
activations and rotary positions in one, each alone and all together, against a model as it is.

    python benchmarks/fused_operators.py [--steps 10] [--hidden 512] [--layers 4] [--batch 4] [--length 256]
                                         [--precision fp32] [--threads 1]

A Llama of real proportions (heads of 64, a quarter of them for keys, an MLP of 8/3). Models with the same weights take
turns step by step on the same batches, in one process. Printed are medians of wall and CPU time per step, the median of
the ratios of a turn to the plain model's, and bytes: of all tensors that are alive at once in a step that is not timed,
beyond those that stay between steps. Losses are compared first.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from fused_loss import Peak
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks

Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]
KINDS = {"norms": "enable_fused_normalization", "gated": "enable_fused_activation", "rotary": "enable_fused_rotary"}
VARIANTS: dict[str, list[str]] = {"plain": [], **{name: [name] for name in KINDS}, "all": list(KINDS)}
VOCABULARY = 1000  # of little weight here


def build(options: argparse.Namespace, kinds: list[str]) -> Step:
    torch.manual_seed(1)
    heads = options.hidden // 64
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=VOCABULARY,
    )
    plugin = HybridParallelPlugin(precision=options.precision, **{KINDS[kind]: True for kind in kinds})
    booster, model = Booster(plugin=plugin), LlamaForCausalLM(config)
    trained, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    assert optimizer is not None

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = trained(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def run(rank: int, world: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCABULARY, (options.batch, options.length), generator=generator) for _ in range(3)]
    batches = [{"input_ids": each, "labels": each} for each in ids]
    steps = {name: build(options, kinds) for name, kinds in VARIANTS.items()}
    losses = {name: [float(step(batch)) for batch in batches] for name, step in steps.items()}
    report: dict[str, Any] = {**vars(options), "torch": torch.__version__}
    for name, step in steps.items():
        gc.collect()
        with Peak() as peak:
            step(batches[0])
        apart = max(abs(one - other) / one for one, other in zip(losses["plain"], losses[name], strict=True))
        report[name] = {"peak MB": round(peak.most / 1e6, 1), "losses apart": apart}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(options.steps):
        for name in sorted(steps, reverse=bool(turn % 2)):
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name](batches[turn % 3])
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    for name, values in times.items():
        for place, kind in enumerate(("wall", "cpu")):
            ratios = [one[place] / other[place] for one, other in zip(values, times["plain"], strict=True)]
            report[name][f"{kind} ms"] = round(1e3 * median(value[place] for value in values), 1)
            report[name][f"{kind} over plain"] = round(median(ratios), 3)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"steps": 10, "hidden": 512, "layers": 4, "batch": 4, "length": 256, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32")
    [report] = run_ranks(run, 1, parser.parse_args(), timeout=3600)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
