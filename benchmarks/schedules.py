"""How long it takes to plan a step, and how much memory: schedule, simulation and the lowered list of one rank.

    python benchmarks/schedules.py                       512 stages, 4096 microbatches, every style
    python benchmarks/schedules.py --stages 64 --microbatches 512

Every style runs in a process of its own, so that the peak is its own; what importing the package takes is subtracted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

from shardwright.pipeline import schedules
from shardwright.pipeline.lowering import lower
from shardwright.pipeline.simulate import simulate

STYLES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=512, help="even")
    parser.add_argument("--microbatches", type=int, default=4096)
    options = parser.parse_args()
    print("| style | build | simulate | lower one rank | peak | bubble |\n| --- | --- | --- | --- | --- | --- |")
    for style, chunks in STYLES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            build, run, lowering, peak, bubble = pool.apply(plan, (style, chunks, options.stages, options.microbatches))
        name = f"{style} x {chunks}" if chunks > 1 else style
        print(f"| {name} | {build:.2f} s | {run:.2f} s | {lowering:.2f} s | {peak:.2f} GiB | {100 * bubble:.2f} % |", flush=True)


if __name__ == "__main__":
    main()
