from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from shardwright.pipeline.batch.microbatch import batch_size, merge_outputs, microbatch_sizes, split_batch


def test_sizes() -> None:
    assert microbatch_sizes(7, num_microbatches=3) == [3, 2, 2]
    assert microbatch_sizes(2, num_microbatches=4) == [1, 1]
    assert microbatch_sizes(7, microbatch_size=3) == [3, 3, 1]
    assert microbatch_sizes(2, microbatch_size=3) == [2]
    assert microbatch_sizes(4, num_microbatches=2, microbatch_size=1) == [2, 2]
    assert microbatch_sizes(5) == [5]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_bad_sizes(bad: Any) -> None:
    with pytest.raises(ValueError, match="num_microbatches"):
        microbatch_sizes(4, num_microbatches=bad)
    with pytest.raises(ValueError, match="microbatch_size"):
        microbatch_sizes(4, microbatch_size=bad)


def test_every_kind_of_entry() -> None:
    batch = {
        "input_ids": torch.arange(20).view(5, 4),
        "position_ids": torch.arange(60).view(3, 5, 4),
        "attention_mask": torch.ones(1, 1, 4, 4),
        "row": torch.arange(4).view(1, 4),
        "temperature": torch.tensor(0.5),
        "cache_position": torch.arange(5),
        "output_attentions": False,
        "name": "batch",
    }
    parts = split_batch(batch, num_microbatches=2)
    assert [part["input_ids"].shape[0] for part in parts] == [3, 2]
    assert [tuple(part["position_ids"].shape) for part in parts] == [(3, 3, 4), (3, 2, 4)]
    assert torch.equal(torch.cat([part["position_ids"] for part in parts], 1), batch["position_ids"])
    for part in parts:
        for name in ("attention_mask", "row", "temperature", "cache_position", "output_attentions", "name"):
            assert part[name] is batch[name]


def test_multimodal_positions_of_three_samples_are_cut_on_dim_1() -> None:
    batch = {"input_ids": torch.zeros(3, 4), "position_ids": torch.arange(36).view(3, 3, 4)}
    first = split_batch(batch, num_microbatches=3)[0]
    assert torch.equal(first["position_ids"], batch["position_ids"][:, :1])


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_types_of_batches() -> None:
    x, y = torch.arange(4.0), torch.arange(8.0).view(4, 2)
    assert torch.equal(split_batch(x, 2)[1], x[2:])
    assert isinstance(split_batch((x, y), 2)[0], tuple)
    assert isinstance(split_batch([x, y], 2)[0], list)
    pair = split_batch(Pair(x, y), 2)[1]
    assert isinstance(pair, Pair)
    assert torch.equal(pair.y, y[2:])


def test_microbatches_do_not_share_memory_with_the_batch() -> None:
    batch = {"input_ids": torch.zeros(4, 2)}
    split_batch(batch, 2)[0]["input_ids"].fill_(1)
    assert not batch["input_ids"].any()


@pytest.mark.parametrize(
    "batch", [{"a": torch.zeros(4, 2), "b": torch.zeros(3, 2)}, {"a": 1}, "text", {"input_ids": torch.zeros(0, 2)}]
)
def test_batches_that_cannot_be_split(batch: Any) -> None:
    with pytest.raises(ValueError, match="batch"):
        split_batch(batch, 2)


def test_batch_size_is_read_from_the_entry_that_says_it() -> None:
    assert batch_size({"row": torch.zeros(1, 4), "input_ids": torch.zeros(6, 4)}) == 6


def test_merge() -> None:
    outputs = [
        {
            "loss": torch.tensor(0.25),
            "scale": torch.tensor(1.0),
            "logits": torch.ones(2, 3),
            "states": (torch.ones(2, 4), None),
        },
        {
            "loss": torch.tensor(0.5),
            "scale": torch.tensor(4.0),
            "logits": torch.zeros(1, 3),
            "states": (torch.zeros(1, 4), None),
        },
    ]
    merged = merge_outputs(outputs, [2, 1], summed={("loss",): torch.tensor(0.75)})
    assert merged["loss"] == 0.75
    assert torch.allclose(merged["scale"], torch.tensor(2.0))
    assert torch.equal(merged["logits"], torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))
    assert merged["states"][0].shape == (3, 4)
    assert merged["states"][1] is None


def test_merge_of_sequences_of_different_lengths_is_a_list() -> None:
    merged = merge_outputs([torch.ones(2, 3, 5), torch.ones(1, 4, 5)], [2, 1])
    assert [tuple(tensor.shape) for tensor in merged] == [(2, 3, 5), (1, 4, 5)]
