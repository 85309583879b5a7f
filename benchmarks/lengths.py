"""What a length that was not seen before costs the host: python benchmarks/lengths.py

One process trains a small Llama with microbatches on batches of random lengths. Reported are the new lengths, how many of them the loss was
followed for, the CPU milliseconds that this took together, and those of a step with a known and with a new length, medians.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

import torch

from shardwright.pipeline.executor import PipelineExecutor, PipelineSettings, cut_model
from shardwright.testing import zoo

NAME = "llama-causal-lm"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = zoo.build(NAME, dtype=torch.float32, num_hidden_layers=options.layers)
    settings = PipelineSettings(num_microbatches=2)
    executor = PipelineExecutor(cut_model(model, settings), settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    check = executor.cut.loss_check
    assert check is not None
    times: list[float] = []
    judge = check._judge

    def judged(*args: object) -> object:
        times[-1] -= time.process_time()
        verdict = judge(*args)  # type: ignore[arg-type]
        times[-1] += time.process_time()
        return verdict

    check._judge = judged  # type: ignore[assignment, method-assign]
    lengths = random.Random(0)
    seen: set[int] = set()
    by_kind: dict[str, list[float]] = {"known": [], "new": []}
    followed = []
    for _ in range(options.steps):
        length = lengths.randrange(8, options.longest)
        kind = "known" if length in seen else "new"
        seen.add(length)
        batch = zoo.inputs(NAME, batch_size=4, seq_len=length)
        times.append(0.0)
        started = time.process_time()
        executor.execute(iter([batch]), lambda outputs, _: outputs.loss, optimizer)
        by_kind[kind].append(time.process_time() - started)
        if times[-1]:
            followed.append(times[-1])
    print(f"{len(seen)} lengths in {options.steps} steps; losses followed in {len(followed)}, {1000 * sum(followed):.0f} ms in all")
    for kind, taken in by_kind.items():
        if taken:
            print(f"step with a {kind} length: {1000 * median(taken):.1f} ms of CPU time")


if __name__ == "__main__":
    main()
