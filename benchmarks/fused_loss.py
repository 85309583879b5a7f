"""What a loss without logits costs and saves, through the Booster: time and peak memory of a step, fused and plain.

    python benchmarks/fused_loss.py [--steps 10] [--vocab 32000] [--hidden 256] [--layers 2] [--batch 4] [--length 512]
                                    [--precision fp32] [--tp 1] [--threads 1]

Two models with the same weights, `enable_fused_cross_entropy` True and False, take turns step by step on the same
batches, in one process or on --tp ranks. Printed are medians of wall and CPU time (of all ranks together) per step, and
the median of the ratios of a turn. Memory is counted in a step of each that is not timed: bytes of all tensors that are
alive at once, beyond those that stay between steps. Losses are compared first.
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Booster
from shardwright.kernels.lazy_logits import LazyLogits
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks

Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


class Peak(TorchDispatchMode):
    """Bytes of what operators have returned and is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._met: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not isinstance(leaf, LazyLogits):
                storage = leaf.untyped_storage()
                self._met.setdefault(storage._cdata, StorageWeakRef(storage))
        total = 0
        for key, reference in list(self._met.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._met[key]
            else:
                total += storage.nbytes()
        self.most = max(self.most, total)
        return result


def boosted(options: argparse.Namespace, fused: bool) -> Step:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model: Any = LlamaForCausalLM(config)
    plugin = HybridParallelPlugin(precision=options.precision, tp_size=options.tp, enable_fused_cross_entropy=fused)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    assert optimizer is not None

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def run(rank: int, world: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, options.vocab, (options.batch, options.length), generator=generator) for _ in range(3)]
    batches = [{"input_ids": each, "labels": each} for each in ids]
    steps = {name: boosted(options, name == "fused") for name in ("plain", "fused")}
    losses = {name: [float(step(batch)) for batch in batches] for name, step in steps.items()}
    apart = max(abs(one - other) / one for one, other in zip(losses["plain"], losses["fused"], strict=True))
    peaks = {}
    for name, step in steps.items():
        gc.collect()
        with Peak() as peak:
            step(batches[0])
        peaks[name] = peak.most
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(options.steps):
        for name in sorted(steps, reverse=bool(turn % 2)):
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name](batches[turn % 3])
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {"apart": apart, "peaks": peaks, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "steps": 10, "vocab": 32000, "hidden": 256, "layers": 2, "batch": 4, "length": 512, "tp": 1, "threads": 1
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    found = run_ranks(run, options.tp, options, timeout=3600)
    turns = {
        name: [
            (max(each["times"][name][turn][0] for each in found), sum(each["times"][name][turn][1] for each in found))
            for turn in range(options.steps)
        ]
        for name in ("plain", "fused")
    }
    report: dict[str, Any] = {**vars(options), "torch": torch.__version__, "losses apart": found[0]["apart"]}
    for place, kind in enumerate(("wall", "cpu")):
        for name, values in turns.items():
            report[f"{name} {kind} ms"] = round(1e3 * median(value[place] for value in values), 1)
        ratios = [one[place] / other[place] for one, other in zip(turns["fused"], turns["plain"], strict=True)]
        report[f"fused / plain {kind}"] = round(median(ratios), 3)
    for name in turns:
        report[f"{name} peak MB"] = round(max(each["peaks"][name] for each in found) / 1e6, 1)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
