"""What operators in one cost and save, through the Booster: time and peak memory of a step with norms, gated
activations and rotary positions in one, each alone and all together, against a model as it is.

    python benchmarks/fused_operators.py [--steps 10] [--hidden 512] [--layers 4] [--batch 4] [--length 256]
                                         [--precision fp32] [--threads 1]

A Llama of real proportions (heads of 64, a quarter of them for keys, an MLP of 8/3). Models with the same weights take
turns step by step on the same batches, in one process. Printed are medians of wall and CPU time per step, the median of
the ratios of a turn to the plain model's, and bytes: of all tensors that are alive at once in a step that is not timed,
beyond those that stay between steps. Losses are compared first. Then CPU time of the operators alone, forward and
backward, of one layer, over that of the model's own.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from turns import Step, Turns, boosted

from shardwright.kernels.gated import gated
from shardwright.kernels.norms import rms_norm
from shardwright.kernels.rotary import FORMS, rotated
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.testing.live_bytes import LiveBytes

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
    return boosted(LlamaForCausalLM(config), plugin)


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
        with LiveBytes(given=False) as peak:
            step(batches[0])
        apart = max(abs(one - other) / one for one, other in zip(losses["plain"], losses[name], strict=True))
        report[name] = {"peak MB": round(peak.most / 1e6, 1), "losses apart": apart}
    report["operators alone, cpu over plain"] = operators(options)
    loops = {name: lambda turn, step=step: step(batches[turn % 3]) for name, step in steps.items()}
    for name, times in Turns.take(loops, options.steps).summary("plain").items():
        report[name] |= times
    return report


def operators(options: argparse.Namespace) -> dict[str, float]:
    """Median ratios of CPU time, of what is computed in one over what the model does."""
    batch, length, hidden, heads = options.batch, options.length, options.hidden, options.hidden // 64
    gate, up = (torch.randn(batch, length, hidden * 8 // 3 // 64 * 64, requires_grad=True) for _ in range(2))
    x = torch.randn(batch, length, hidden, requires_grad=True)
    norm = LlamaRMSNorm(hidden)
    q = x.view(batch, length, heads, 64).transpose(1, 2)
    cos, sin = torch.randn(2, batch, length, 64)
    pairs: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
        "gated": (lambda: F.silu(gate) * up, lambda: gated(gate, up, "silu")),
        "norms": (lambda: norm(x), lambda: rms_norm(x, norm.weight, norm.variance_epsilon)),
        "rotary": (
            lambda: torch.cat(apply_rotary_pos_emb(q, q, cos, sin)),
            lambda: torch.cat([rotated(q, cos, sin, FORMS[0]), rotated(q, cos, sin, FORMS[0])]),
        ),
    }
    found = {}
    for name, functions in pairs.items():

        def twice(turn: int, function: Callable[[], torch.Tensor], given: list[torch.Tensor]) -> None:
            for _ in range(2):
                y = function()
                y.backward(torch.ones_like(y), inputs=given)

        given = [gate, up] if name == "gated" else [x]
        loops = {
            kind: partial(twice, function=function, given=given)
            for kind, function in zip(("plain", "in one"), functions, strict=True)
        }
        found[name] = Turns.take(loops, 4 * options.steps, warm_up=2).summary("plain")["in one"]["CPU ratio"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"steps": 10, "hidden": 512, "layers": 4, "batch": 4, "length": 256, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32")
    [report] = run_ranks(run, 1, parser.parse_args(), timeout=3600)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
