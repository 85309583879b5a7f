"""Bytes alive at the peak of real steps against those that the planner replays, over layouts that are drawn.

    python benchmarks/live_bytes.py                       20 layouts on 1, on 2 and on 4 ranks
    python benchmarks/live_bytes.py --count 5 --world 2 --seed 3

Models of the zoo, every ZeRO stage, schedule and share of recomputed layers in turn. Counted by torch's operators, so
the figures are those of any device but for kernels that keep something else.
"""

from __future__ import annotations

import argparse
from statistics import median

from shardwright.testing.peaks import compare, draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="layouts for each number of ranks")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    off, failed = [], 0
    for world in options.world:
        for case in draw(options.seed, options.count, world):
            words = f"{world} ranks, {case.name}, {case.options}, recomputed {case.recomputed}"
            try:
                found = list(compare([case], world))
            except Exception as error:  # a layout that cannot be had, or replayed: said, and the next
                failed += 1
                print(f"{words}: {type(error).__name__}: {str(error).splitlines()[-1][:200]}", flush=True)
                continue
            for one in found:
                off.append(abs(one.off))
                print(f"{words}, rank {one.rank}: {one.measured:,} {one.replayed:,} {one.off:+.2%}", flush=True)
    if off:
        print(f"{len(off)} ranks: median {median(off):.2%}, worst {max(off):.2%}; layouts not compared: {failed}")


if __name__ == "__main__":
    main()
