"""What a message costs the host, beside its bytes: python benchmarks/messages.py

Two ranks over gloo pass small messages of `tensors` tensors to and fro. Reported are microseconds of CPU
time of both ranks and of wall time per message, medians over rounds:

    known     shapes that were seen before
    header    every message has another length, and is described
    rule      every message has another length, which follows from the sizes of the batch
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist

from shardwright.cluster import ParallelMesh
from shardwright.comm.p2p import PipeComm
from shardwright.comm.payload import Header
from shardwright.comm.shape_rules import MessageKey, ShapeRule, find_rule
from shardwright.pipeline.planning.placement import Placement
from shardwright.testing import run_ranks

SAMPLES, HIDDEN = 2, 16


def learn(key: MessageKey, header: Header) -> ShapeRule | None:
    """What dry runs of a model would have found."""
    seen = [((SAMPLES + 1, length), ((SAMPLES + 1, length, HIDDEN),) * len(header.tensors)) for length in (5, 11)]
    return find_rule(key.sizes, header, seen)


def run(rank: int, world: int, options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    groups = ParallelMesh(pp=2).message_groups(Placement(2).channels)
    found: dict[str, list[tuple[float, float]]] = {"known": [], "header": [], "rule": []}
    length = 7
    for turn in range(options.rounds + 1):
        for name, times in found.items():
            comm = PipeComm(dist.group.WORLD, groups)  # type: ignore[arg-type]
            comm.learn = learn if name == "rule" else None
            lengths = [7] * options.messages if name == "known" else range(length + 1, length + 1 + options.messages)
            for first in (7, 8):  # what is known before
                exchange(comm, rank, first, options.tensors)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for each in lengths:
                exchange(comm, rank, each, options.tensors)
            if turn:
                times.append((time.perf_counter() - wall, time.process_time() - cpu))
            comm.flush()
    return found


def exchange(comm: PipeComm, rank: int, length: int, tensors: int) -> None:
    key = MessageKey(("F",), (SAMPLES, length))
    payload = [torch.zeros(SAMPLES, length, HIDDEN) for _ in range(tensors)]
    if rank == 0:
        comm.isend(payload, 1, key)
        comm.irecv(1, key).wait_tensors()
    else:
        comm.irecv(0, key).wait_tensors()
        comm.isend(payload, 0, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200, help="to and fro in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tensors", type=int, default=1)
    options = parser.parse_args()
    ranks = run_ranks(run, 2, options, timeout=600, debug="OFF")
    print("| | CPU us per message | wall us per message |\n| --- | --- | --- |")
    for name in ranks[0]:
        rounds = list(zip(*(result[name] for result in ranks), strict=True))
        cpu = median(sum(seconds for _, seconds in both) for both in rounds)
        wall = median(max(seconds for seconds, _ in both) for both in rounds)
        print(f"| {name} | {1e6 * cpu / options.messages / 2:.0f} | {1e6 * wall / options.messages / 2:.0f} |")


if __name__ == "__main__":
    main()
