"""Peaks that the planner replays without memory are those of real ranks, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.comm.payload import take_apart
from shardwright.comm.shape_rules import MessageKey
from shardwright.pipeline.runtime import PipelineError
from shardwright.pipeline.schedules import STYLES
from shardwright.planner.fakes import is_fake
from shardwright.planner.replay import Book, Job, replay
from shardwright.testing.peaks import Case, compare, draw, every

# Two chunks on each rank: the first rank has messages from one that is replayed after it.
OPTIONS = {
    "precision": "fp32",
    "pp_size": 2,
    "pp_style": "interleaved",
    "num_model_chunks": 2,
    "num_microbatches": 4,
}


def test_replayed_peaks_are_those_of_real_ranks() -> None:
    found = list(compare([Case("bert-masked-lm", OPTIONS)], world=2))
    assert [one.rank for one in found] == [0, 1]
    for one in found:
        assert one.replayed == one.measured, one


def test_peaks_of_sequences_that_are_gathered_in_parts_are_near_those_of_real_ranks() -> None:
    """What is gathered is of a class of its own while parts are missing, and so are tensors without memory.
    When a part that was sent is let go of is up to the backend."""
    split = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring"}
    for one in compare([Case("llama-causal-lm", {"precision": "bf16", "num_microbatches": 2, **split})], world=2):
        assert abs(one.off) <= 0.03, one


def test_copies_on_which_a_plan_is_tried_do_not_stay() -> None:
    """ViT has no policy of its own: what shards it is found out on small copies. A replay has it on paper."""
    for one in compare([Case("vit-image-classification", {"precision": "bf16", "tp_size": 2})], world=2):
        assert abs(one.off) <= 0.03, one


class Looped(Case):
    """Experts that run one after the other, each on the tokens that chose it."""

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "experts_implementation": "eager"}


def test_experts_that_are_called_one_by_one_get_their_share_of_the_tokens() -> None:
    """About what they get in a real step. They were replayed with a token each: a quarter of the peak was missing."""
    for one in compare([Looped("qwen3-moe-causal-lm", {"precision": "bf16", "num_microbatches": 2})], world=1):
        assert abs(one.off) <= 0.03, one


def look(module: Any, args: Any) -> None:
    if is_fake(args[0]):
        raise KeyError(f"expert_{args[0].shape[0]}")


@pytest.mark.parametrize("options", [{}, {"pp_size": 2, "num_microbatches": 2}])
def test_models_that_need_their_numbers_are_told_in_a_sentence(options: dict[str, Any]) -> None:
    case = Case("llama-causal-lm", {"precision": "fp32", **options})

    def model() -> Any:
        made = case.lazy_model()
        made.model.layers[2].mlp.register_forward_pre_hook(look)
        return made

    with pytest.raises(ValueError, match=r"cannot be replayed without data: .* raises KeyError: 'expert_.*Leave out"):
        replay(Job(case.plugin, model, case.optimizer, case.batch()), options.get("pp_size", 1))


def test_ranks_are_replayed_again_behind_those_whose_messages_they_need() -> None:
    """The first rank has the last stage, too, into which the second one sends more than a guess says."""
    book, tried = Book(), list[int]()

    def key(stage: int) -> MessageKey:
        return MessageKey((stage, "look", True), (2,))

    def replayed(place: int) -> int:
        tried.append(place)
        if place == 0:
            book[key(1)] = one
            if book[key(3)] != two:
                raise PipelineError("StopIteration", "3F0")
        else:
            assert book[key(1)] == one
            book[key(3)] = two
        return place

    one, two = (take_apart(tuple(torch.ones(2) for _ in range(count)))[0] for count in (1, 2))
    assert book.in_turn(range(2), replayed) == {0: 0, 1: 1}
    assert tried == [0, 1, 0]
    assert not book.mistaken()
    book.clear()
    assert book.in_turn([0], replayed, others=[1]) == {0: 0, 1: 1}
    book.clear()
    with pytest.raises(PipelineError, match="StopIteration"):
        book.in_turn([0], replayed)


@pytest.mark.sweep
def test_ranks_that_get_more_from_ranks_behind_them_are_replayed_after_these() -> None:
    """Into T5's decoder, whose last stage the first rank has, come two tensors; into its encoder comes one."""
    options = {**OPTIONS, "pp_style": "zbv"}
    for one in compare([Case("t5-conditional-generation", options, recomputed=0.0)], world=2):
        assert one.replayed == one.measured, one


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_replayed_peaks_of_drawn_layouts(world: int) -> None:
    off = [abs(one.off) for case in draw(seed=0, count=20, world=world) for one in compare([case], world)]
    assert max(off) <= 0.03


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("style", ["", *STYLES])
def test_replayed_peaks_of_every_stage_schedule_recomputation_and_loss(style: str) -> None:
    for case in every(style):
        for one in compare([case], world=4):
            assert abs(one.off) <= 0.03, one
