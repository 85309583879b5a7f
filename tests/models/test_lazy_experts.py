"""Experts that are stored one by one are read by slices: the same numbers as transformers' conversion, and no byte
of another rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from shardwright.lazy import LazyInitContext
from shardwright.lazy.from_pretrained import PretrainedWeights
from shardwright.lazy.weights import SOURCE
from shardwright.shardformer.splits import Even, Packed, Split
from shardwright.spec import ParamSpec

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_SIZES, intermediate_size=10, num_local_experts=4)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(
            **_SIZES, intermediate_size=24, moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2, head_dim=8
        )
    ),
}
CUTS: dict[str, list[tuple[int, Split]]] = {
    "gate_up_proj": [(1, Packed(2)), (1, Even()), (0, Even()), (2, Even())],
    "down_proj": [(2, Even()), (0, Even()), (1, Even())],
}


class Counted:
    """A slice of safetensors that counts what is read of it."""

    def __init__(self, view: Any, count: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._view, self._count = view, count

    def get_shape(self) -> list[int]:
        return list(self._view.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._count(self._view[index])


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_read_by_slices(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = MODELS[name]()
    whole.save_pretrained(tmp_path)
    with LazyInitContext():
        lazy = type(whole).from_pretrained(tmp_path)
    weights = getattr(lazy, SOURCE)
    assert isinstance(weights, PretrainedWeights)
    weights.bind(lazy)
    read: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        read.append(tensor.numel())
        return tensor

    opened = weights._open

    class File:
        def __init__(self, key: str) -> None:
            self._file = opened(key)

        def get_slice(self, key: str) -> Counted:
            return Counted(self._file.get_slice(key), count)

    weights._open = File  # type: ignore[method-assign, assignment]
    expected = dict(whole.named_parameters())
    checked = 0
    for full_name, param in expected.items():
        for dim, split in CUTS.get(full_name.rpartition(".")[2], []) if ".experts." in full_name else []:
            for ranks in (2, 3):
                spec = ParamSpec(full_name, tuple(param.shape), dim, split.pieces(param.shape[dim], ranks, whole))
                for rank in range(ranks):
                    read.clear()
                    local = weights.read(spec, rank)
                    assert torch.equal(local, spec.shard(param.data, rank))
                    assert sum(read) == local.numel(), "what other ranks hold was read too"
                    checked += 1
        if ".experts." in full_name:
            assert torch.equal(weights.read(ParamSpec(full_name, tuple(param.shape)), 0), param.data)
    assert checked == 2 * 5 * 7
    weights.close()
