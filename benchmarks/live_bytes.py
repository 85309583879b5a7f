"""Bytes alive at the peak of a step against what the layout report says, for pipelines of two ranks and ZeRO on four.

    python benchmarks/live_bytes.py              schedules, recomputed or not, fused loss or not; then ZeRO 0 to 3
    python benchmarks/live_bytes.py --vocab 8192

Counted by torch's operators, so the figures are those of any device but for kernels that keep something else. Printed
per rank: the report's bytes between steps and what was found; the report's activations and what a step takes beside
what is kept.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
import transformers

from shardwright import Booster
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.testing.live_bytes import LiveBytes

LOOKED_AT = 16384
STYLES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2))


def layouts_on_two() -> list[dict[str, Any]]:
    found = []
    for (style, chunks), again, fused in itertools.product(STYLES, (False, True), (True, False)):
        if fused or style == "1f1b":
            recompute = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0) if again else None
            found.append(
                {
                    "pp_style": style,
                    "num_model_chunks": chunks,
                    "gradient_checkpoint_config": recompute,
                    "enable_fused_cross_entropy": fused,
                }
            )
    return found


def measure(rank: int, world: int, layouts: list[dict[str, Any]], vocab: int) -> list[tuple[int, int, int, int]]:
    """(kept by the report, kept, activations by the report, most beside what is kept) of every layout."""
    found = []
    for options in layouts:
        plugin = HybridParallelPlugin(
            pp_size=2, num_microbatches=4, precision="fp32", zero_bucket_size_in_m=0.02, **options
        )
        with LiveBytes(LOOKED_AT) as live:
            config = transformers.LlamaConfig(
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=8,
                num_attention_heads=4,
                num_key_value_heads=4,
                vocab_size=vocab,
            )
            model: Any = transformers.LlamaForCausalLM(config)
            optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
            layout = plugin.preflight(model, optimizer, batch_size=8, sequence_length=128)
            booster = Booster(plugin=plugin)
            model, optimizer, *_ = booster.boost(model, optimizer)
            ids = torch.randint(3, vocab, (8, 128), generator=torch.Generator().manual_seed(rank // 2))
            batch = {"input_ids": ids, "labels": ids}

            def step(batch: Any = batch, model: Any = model, optimizer: Any = optimizer) -> None:
                booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)  # noqa: B023
                optimizer.step()
                optimizer.zero_grad()

            kept, most = live.of_steps(step)
        place = plugin.mesh.coordinate("pp")
        found.append((layout.ranks[place].total, kept, layout.activations[place], most - kept))
    return found


def show(world: int, layouts: list[dict[str, Any]], vocab: int) -> None:
    for options, by_rank in zip(
        layouts, zip(*run_ranks(measure, world, layouts, vocab, timeout=600), strict=True), strict=True
    ):
        words = {name: value for name, value in options.items() if name != "gradient_checkpoint_config"}
        again = options.get("gradient_checkpoint_config") is not None
        print(", ".join(f"{name}={value}" for name, value in words.items()), "recomputed" if again else "")
        for rank, (total, kept, planned, besides) in enumerate(by_rank):
            print(
                f"    rank {rank}: between steps {total:>10,} by the report, {kept:>10,} found; "
                f"activations {planned:>10,}, a step takes {besides:>10,}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=512)
    options = parser.parse_args()
    show(2, layouts_on_two(), options.vocab)
    show(4, [{"zero_stage": stage} for stage in range(4)], options.vocab)


if __name__ == "__main__":
    main()
