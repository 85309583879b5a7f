"""What a stage adds to the layers that it runs: microseconds of Python per F.

    python benchmarks/staging.py                          a tiny Llama of 80 layers on 16 ranks, a stage in the middle
    python benchmarks/staging.py --layers 126 --ranks 21
    python benchmarks/staging.py --ragged                 every microbatch with a padding mask of its own

Runs a middle stage on arrived activations, once as the executor does and once as a loop over the bare layers with the
arguments that the model would give them, turn by turn on one thread. One turn is a step of `--microbatches` F, without
gradients. Medians of CPU microseconds per F. Versions that know no steps (without `run_microbatch`) can be measured
too, with PYTHONPATH pointing to them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from shardwright.pipeline.cut.plan import plan_cut
from shardwright.pipeline.settings import PipelineSettings
from shardwright.testing import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-causal-lm", help="a Llama-like name of shardwright.testing.zoo")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mask", action="store_true", help="pass an attention mask of ones")
    parser.add_argument("--ragged", action="store_true", help="pass a padding mask that differs between microbatches")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = zoo.build(
        options.model, num_hidden_layers=options.layers, hidden_size=16, intermediate_size=32, dtype=torch.float32
    )
    stage = options.ranks // 2
    plan = plan_cut(model, PipelineSettings(num_microbatches=4), options.ranks)
    staged = plan.apply(model, stage).staged
    batches = []
    for index in range(options.microbatches):
        batch = {"input_ids": torch.randint(0, 64, (2, 8))}
        if options.mask or options.ragged:
            batch["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
        if options.ragged:
            batch["attention_mask"][0, 8 - index % 7 :] = 0
            batch["attention_mask"][1, 8 - index // 7 % 7 :] = 0
        batches.append(batch)
    arrived = (torch.randn(2, 8, 16),)
    layers = [model.get_submodule(plan.units[unit].layer) for unit in plan.stages[stage]]

    def through_stage() -> None:
        if not hasattr(staged, "run_microbatch"):
            for batch in batches:
                staged.run(stage, arrived, batch)
            return
        from shardwright.pipeline.batch.step_inputs import StepInputs

        inputs = StepInputs(batches, lambda batch: batch)
        for index in range(len(batches)):
            staged.run_microbatch(stage, arrived, inputs, index)

    seen: list[tuple[Any, dict[str, Any]]] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        for layer in layers
    ]
    with torch.no_grad():
        staged.run(stage, arrived, batches[0])
    for handle in handles:
        handle.remove()

    def bare() -> None:
        for _ in batches:
            hidden = arrived[0]
            for layer, (_, kwargs) in zip(layers, seen, strict=True):
                hidden = layer(hidden, **kwargs)

    with torch.no_grad():
        print(
            f"{options.layers} layers on {options.ranks} ranks, {len(layers)} in stage {stage}, "
            f"{options.microbatches} microbatches"
        )
        times: dict[Callable[[], None], list[float]] = {through_stage: [], bare: []}
        for _ in range(options.rounds + 2):
            for job, found in times.items():
                start = time.process_time()
                job()
                found.append((time.process_time() - start) / options.microbatches * 1e6)
        staged_time, bare_time = (median(found[2:]) for found in times.values())
        print(
            f"stage {staged_time:.0f} us, bare layers {bare_time:.0f} us, staging {staged_time - bare_time:.0f} us "
            "per F"
        )
        if options.profile:
            import cProfile
            import pstats

            with cProfile.Profile() as profile:
                for _ in range(5):
                    through_stage()
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
