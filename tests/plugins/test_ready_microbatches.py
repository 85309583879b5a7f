"""Ready-made microbatches, of lengths and sizes of their own, against plain transformers in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from microbatch_ranks import compare_steps

import shardwright
from shardwright.testing import run_ranks, zoo

LENGTHS = [  # of two steps, of two data-parallel ranks: (samples, tokens) of every microbatch
    [[(2, 13), (3, 9), (1, 17), (2, 13)], [(1, 8), (4, 11), (2, 10), (1, 16)]],
    [[(3, 9), (1, 12), (2, 15), (2, 9)], [(2, 14), (2, 14), (1, 9), (3, 7)]],
]


def steps(name: str, uneven: bool) -> list[list[list[Any]]]:
    def made(step: int, replica: int) -> list[Any]:
        sizes = LENGTHS[step][replica][: 4 - uneven * replica]
        return [
            zoo.inputs(name, batch_size=b, seq_len=s, seed=100 * step + 10 * replica + i)
            for i, (b, s) in enumerate(sizes)
        ]

    return [[made(step, replica) for replica in range(2)] for step in range(2)]


def by_hand(outputs: Any, inputs: Any) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
    counted = labels != -100
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (each * counted).sum() / counted.sum()


def on_ranks(rank: int, world: int, layouts: list[dict[str, Any]], name: str) -> None:
    for number, layout in enumerate(layouts):
        uneven = layout.get("num_microbatches") is None  # data-parallel ranks with unequal numbers of microbatches
        given = steps(name, uneven)
        result, mine = compare_steps(
            layout, partial(zoo.build, name), given, shardwright.Microbatches, criterion=by_hand if number % 2 else None
        )
        if result["outputs"] is not None:
            assert [logits.shape[:2] for logits in result["outputs"].logits] == [
                microbatch["labels"].shape for microbatch in mine
            ]


def test_two_ranks() -> None:
    layouts = [
        {"pp_size": 2, "microbatch_size": 4},
        {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 4},
        {"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2, "microbatch_size": 4},
        {"tp_size": 2},
    ]
    run_ranks(on_ranks, 2, layouts, "llama-tied-causal-lm")


def test_four_ranks() -> None:
    layouts = [
        {"pp_size": 2, "zero_stage": 2, "pp_style": "zb", "num_microbatches": 4},
        {"pp_size": 2, "zero_stage": 1, "microbatch_size": 4},
        {"pp_size": 2, "tp_size": 2, "num_microbatches": 4},
        {"zero_stage": 1, "tp_size": 2},
    ]
    run_ranks(on_ranks, 4, layouts, "llama-causal-lm")
