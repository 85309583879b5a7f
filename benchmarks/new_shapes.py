"""What a microbatch of a new shape costs before its first step: milliseconds in which head and criterion are followed.

    python benchmarks/new_shapes.py
    python benchmarks/new_shapes.py --layers 40

A tiny Llama and a criterion on its logits. Medians of CPU milliseconds. Other versions can be measured with PYTHONPATH
pointing to them.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

from shardwright.models.layer_chain import find_units
from shardwright.pipeline.loss.check import LossCheck
from shardwright.testing import zoo


def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shapes", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=options.layers)
    check = LossCheck(model, find_units(model))
    found = []
    for length in range(10, 13 + options.shapes):
        ids = torch.randint(0, 64, (2, length))
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        start = time.process_time()
        check.check(criterion, [batch], [length], True, True)
        found.append((time.process_time() - start) * 1e3)
    print(f"{options.layers} layers: {median(found[3:]):.1f} ms per new shape, the first {found[0]:.1f} ms")


if __name__ == "__main__":
    main()
