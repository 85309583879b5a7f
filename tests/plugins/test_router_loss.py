"""Router losses under pipelines and microbatches: the mean of what plain transformers computes for each of them,
weighed by tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from microbatch_ranks import compare_steps

from shardwright import Microbatches
from shardwright.pipeline.batch.microbatch import split_batch
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.testing import run_ranks, zoo

FAMILIES = {"mixtral": "mixtral-causal-lm", "qwen3-moe": "qwen3-moe-causal-lm"}
COEFFICIENT = 0.7  # large enough to be seen


def build(name: str) -> Any:
    return zoo.build(FAMILIES[name], output_router_logits=True, router_aux_loss_coef=COEFFICIENT)


def terms(outputs: Any, microbatch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, float]]:
    router = COEFFICIENT * outputs.aux_loss
    tokens = microbatch.get("attention_mask", microbatch["input_ids"].new_ones(microbatch["input_ids"].shape)).sum()
    return [(outputs.loss - router, int((microbatch["labels"][:, 1:] != -100).sum())), (router, int(tokens))]


def batch(name: str, seed: int, masked: bool) -> dict[str, torch.Tensor]:
    found = zoo.inputs(FAMILIES[name], batch_size=5, seq_len=11 + 2 * (seed % 2), seed=seed)
    if not masked:
        del found["attention_mask"]
    return found


def joined(microbatches: Any) -> dict[str, torch.Tensor]:
    return {key: torch.cat([microbatch[key] for microbatch in microbatches]) for key in microbatches[0]}


def own_coefficient(outputs: Any, inputs: Any) -> torch.Tensor:
    """Parts of the model's loss, put together by a criterion."""
    return (outputs.loss - COEFFICIENT * outputs.aux_loss) + COEFFICIENT * outputs.aux_loss


def on_ranks(rank: int, world: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    for number, (name, layout) in enumerate(cases):
        m, masked = layout.get("num_microbatches", 1), number % 2 == 0
        steps = [
            [split_batch(batch(name, 10 * step + replica, masked), m) for replica in range(2)] for step in (number,)
        ]
        criterion = own_coefficient if number % 3 == 1 else None
        result, mine = compare_steps(layout, partial(build, name), steps, joined, terms, criterion)
        if result["outputs"] is not None:
            outputs = result["outputs"]
            assert outputs.aux_loss.dim() == 0
            logits = outputs.router_logits
            assert len(logits) == 4  # of all layers
            assert all(
                (each.shape[0] if m == 1 else sum(len(part) for part in each))
                == sum(part["input_ids"].numel() for part in mine)
                for each in logits
            )


def test_two_ranks() -> None:
    cases = [
        ("mixtral", {"pp_size": 2, "num_microbatches": 1, "num_layers_per_stage": [4, 0]}),
        (
            "qwen3-moe",
            {
                "pp_size": 2,
                "num_microbatches": 4,
                "pp_style": "interleaved",
                "num_model_chunks": 2,
                "num_layers_per_stage": [0, 2, 2, 0],
            },
        ),
        ("qwen3-moe", {"pp_size": 2, "num_microbatches": 3, "pp_style": "zb"}),
        ("mixtral", {"pp_size": 2, "num_microbatches": 3, "pp_style": "zbv", "num_model_chunks": 2}),
        (
            "mixtral",
            {"pp_size": 2, "num_microbatches": 3, "gradient_checkpoint_config": PipelineGradientCheckpointConfig(0.5)},
        ),
        ("qwen3-moe", {"num_microbatches": 2}),
    ]
    run_ranks(on_ranks, 2, cases)


def test_four_ranks() -> None:
    cases = [
        ("mixtral", {"pp_size": 2, "tp_size": 2, "num_microbatches": 3, "num_layers_per_stage": [3, 1]}),
        ("qwen3-moe", {"pp_size": 4, "num_microbatches": 3}),
        ("qwen3-moe", {"pp_size": 2, "num_microbatches": 3, "zero_stage": 3}),
        ("mixtral", {"pp_size": 2, "ep_size": 2, "num_microbatches": 3}),
    ]
    run_ranks(on_ranks, 4, cases)


def test_ready_made() -> None:
    run_ranks(ready_made, 2)


def ready_made(rank: int, world: int) -> None:
    given = [zoo.inputs(FAMILIES["mixtral"], batch_size=b, seq_len=s, seed=b) for b, s in ((2, 9), (1, 15), (3, 7))]
    compare_steps({"pp_size": 2, "microbatch_size": 4}, partial(build, "mixtral"), [[given, []]], Microbatches, terms)
