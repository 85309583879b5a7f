"""How long it takes to plan a step, and how much memory: schedule, simulation and the lowered list of one rank; and how
models are cut.

    python benchmarks/plans.py                       512 stages, 4096 microbatches, every style
    python benchmarks/plans.py --stages 64 --microbatches 512
    python benchmarks/plans.py cuts                  dearest rank of Llama-8B and Gemma-2 2B, and what "auto" chooses

Every style runs in a process of its own, so that the peak is its own; what importing the package takes is subtracted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

import torch
import transformers

from shardwright.pipeline import schedules
from shardwright.pipeline.cut.balance import by_rank
from shardwright.pipeline.cut.plan import plan_cut
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.simulate import simulate
from shardwright.pipeline.settings import PipelineSettings

STYLES = (("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2), ("dualpipev", 2))


def plan(style: str, chunks: int, stages: int, microbatches: int) -> tuple[float, float, float, float, float]:
    """CPU seconds of the three steps, the peak of memory in GiB beside the imports, and the bubble."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    marks = [time.process_time()]
    schedule = schedules.get(style, stages // chunks, microbatches, chunks)
    marks.append(time.process_time())
    bubble = simulate(schedule).bubble
    marks.append(time.process_time())
    lower(schedule, rank=stages // chunks // 2)
    marks.append(time.process_time())
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2], peak, bubble


def cuts() -> None:
    """Dearest rank over the mean, layers by stage, and the choice of the search, which may postpone all weight
    gradients.
    """
    llama = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    gemma = transformers.Gemma2Config(
        vocab_size=256000,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        models = {"Llama-8B": transformers.LlamaForCausalLM(llama), "Gemma-2 2B": transformers.Gemma2ForCausalLM(gemma)}
    print("| model | ranks | style | dearest rank over the mean | layers by stage |\n| --- | --- | --- | --- | --- |")
    cases = [
        ("Llama-8B", 8, "1f1b", 1),
        ("Llama-8B", 8, "zbv", 2),
        ("Llama-8B", 4, "interleaved", 4),
        ("Llama-8B", 4, "interleaved", 8),
    ]
    cases += [("Gemma-2 2B", 4, "1f1b", 1), ("Gemma-2 2B", 8, "1f1b", 1), ("Gemma-2 2B", 4, "zbv", 2)]
    for name, ranks, style, chunks in cases:
        plan = plan_cut(models[name], PipelineSettings(style, chunks, 32), ranks)
        assert plan.costs is not None
        costs = by_rank(plan.costs.of(plan.stages), plan.placement)
        layers = " ".join(str(len(units)) for units in plan.stages)
        print(f"| {name} | {ranks} | {style} x {chunks} | {costs.max() / costs.mean():.3f} | {layers} |")
    for name, ranks, deferred in (("Llama-8B", 8, 0.0), ("Llama-8B", 8, 1.0), ("Gemma-2 2B", 4, 1.0)):
        plan = plan_cut(models[name], PipelineSettings("auto", 1, 32), ranks, deferred=deferred)
        print(f"\n{name} on {ranks} ranks, 32 microbatches, {deferred:.0%} of weight gradients postponed: {plan.found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["scale", "cuts"], default="scale")
    parser.add_argument("--stages", type=int, default=512, help="even")
    parser.add_argument("--microbatches", type=int, default=4096)
    options = parser.parse_args()
    if options.what == "cuts":
        cuts()
        return
    print("| style | build | simulate | lower one rank | peak | bubble |\n| --- | --- | --- | --- | --- | --- |")
    for style, chunks in STYLES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            build, run, lowering, peak, bubble = pool.apply(plan, (style, chunks, options.stages, options.microbatches))
        name = f"{style} x {chunks}" if chunks > 1 else style
        print(
            f"| {name} | {build:.2f} s | {run:.2f} s | {lowering:.2f} s | {peak:.2f} GiB | {100 * bubble:.2f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
