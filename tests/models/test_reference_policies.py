"""Policies as users of Colossal-AI write them train like one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.spec import get_spec
from shardwright.testing import keep_float64, run_ranks, zoo
from shardwright.testing.compare import check_complete, compare_models
from shardwright.testing.train import adamw, train_steps
from tests.models.reference_policies import POLICIES
from tests.models.tp_ranks import overrides

STEPS = 2
DROPOUT = {
    "gpt2-causal-lm": {"attn_pdrop": 0.2, "embd_pdrop": 0.2, "resid_pdrop": 0.2},
    "opt-causal-lm": {"dropout": 0.2, "attention_dropout": 0.2},
    "bert-masked-lm": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
    "t5-gated-conditional-generation": {"dropout_rate": 0.2},
}


def sharded(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Any, Any]:
    arguments = overrides(name, **settings)
    reference, model = (zoo.build(name, dtype=dtype, **arguments) for _ in range(2))
    former = ShardFormer(ShardConfig(make_vocab_size_divisible_by=8))
    return reference, former.shard_model(model, POLICIES[name]())


def as_one_process(rank: int, world_size: int) -> list[str]:
    problems = []
    for name in POLICIES:
        reference, model = sharded(name)
        batches = [zoo.inputs(reference, seed=seed) for seed in range(STEPS)]
        with keep_float64():
            expected = train_steps(reference, adamw(reference), batches)
            actual = train_steps(model, adamw(model), batches)
        report = compare_models(reference, model, coordinate=rank, losses=(expected, actual), check=False)
        try:
            report.check()
            check_complete(reference, [report.held])
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return problems


def test_they_train_like_one_process() -> None:
    for problems in run_ranks(as_one_process, 2, timeout=120):
        assert not problems, "\n".join(problems)


def with_dropout(rank: int, world_size: int) -> dict[str, Any]:
    """Losses, and what every rank holds whole, after some steps; the digest of the sharded part too."""
    found = {}
    for name, dropout in DROPOUT.items():
        reference, model = sharded(name, **dropout)
        model.train()
        batches = [zoo.inputs(reference, seed=seed) for seed in range(STEPS)]
        losses = train_steps(model, adamw(model), batches)
        whole = {
            key: param.detach().clone()
            for key, param in model.named_parameters()
            if not get_spec(param).is_sharded  # type: ignore[union-attr]
        }
        assert len(whole) > 10
        found[name] = (losses, whole, float(torch.rand(())))
    dist.barrier()
    return found


def test_their_dropouts_keep_ranks_together() -> None:
    first, second = run_ranks(with_dropout, 2, timeout=120)
    for name, (losses, whole, drawn) in first.items():
        others, weights, other = second[name]
        assert drawn == other, name
        torch.testing.assert_close(others, losses, rtol=0, atol=0)
        for key, weight in whole.items():
            assert torch.equal(weights[key], weight), f"{name}: {key}"
