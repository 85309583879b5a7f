"""Experts that are stored one by one are read by slices: the same numbers as transformers' conversion, and no byte
of another rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from shardwright.files.boxes import Box, parts_of
from shardwright.files.huggingface import HfFiles, HfSource
from shardwright.lazy import LazyInitContext
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


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_read_by_slices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = MODELS[name]()
    whole.save_pretrained(tmp_path)
    with LazyInitContext():
        lazy = type(whole).from_pretrained(tmp_path)
    source = getattr(lazy, SOURCE)
    assert isinstance(source, HfSource)
    read: list[int] = []
    original = HfFiles.read

    def reading(self: HfFiles, key: str, box: Box, out: torch.Tensor) -> None:
        assert box.size == out.shape
        read.append(out.numel())
        original(self, key, box, out)

    def converting(self: HfFiles, key: str) -> NoReturn:
        raise AssertionError(f"{key} is read whole")

    monkeypatch.setattr(HfFiles, "read", reading)
    monkeypatch.setattr(HfFiles, "tensor", converting)
    expected = dict(whole.named_parameters())
    checked = 0
    for full_name, param in expected.items():
        for dim, split in CUTS.get(full_name.rpartition(".")[2], []) if ".experts." in full_name else []:
            for ranks in (2, 3):
                spec = ParamSpec(full_name, tuple(param.shape), dim, split.pieces(param.shape[dim], ranks, whole))
                for rank in range(ranks):
                    read.clear()
                    local = source.shard(spec, rank)
                    assert torch.equal(local, spec.shard(param.data, rank))
                    real = spec.shard(torch.ones_like(param), rank).count_nonzero()
                    assert sum(read) == real, "what other ranks hold was read too"
                    checked += 1
        if ".experts." in full_name:
            assert torch.equal(source.shard(ParamSpec(full_name, tuple(param.shape)), 0), param.data)
    assert checked == 2 * 5 * 7
    source.close()


@pytest.mark.parametrize("name", MODELS)
def test_flat_ranges_of_experts(name: str, tmp_path: Path) -> None:
    """Those that a rank of ZeRO holds begin and end anywhere."""
    torch.manual_seed(0)
    whole = MODELS[name]()
    whole.save_pretrained(tmp_path)
    source = HfSource(HfFiles(tmp_path), whole, whole.state_dict())
    for full_name, param in whole.named_parameters():
        if ".experts." not in full_name:
            continue
        spec = ParamSpec(full_name, tuple(param.shape), 1, Packed(2).pieces(param.shape[1], 2, whole))
        local = spec.shard(param.data, 1)
        for start, stop in ((0, 7), (5, local.numel() - 3), (local.numel() // 2 - 1, local.numel())):
            flat = torch.full((stop - start,), 9.0)
            for part in parts_of(spec, 1, local.shape, start, stop, owned=False):
                source.read(full_name, part.box, part.view(flat))
            assert torch.equal(flat, local.flatten()[start:stop])


def test_an_expert_that_is_missing_or_odd_is_not_passed_over(tmp_path: Path) -> None:
    whole = MODELS["mixtral"]()
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (odd,) = [key for key in tensors if "layers.0" in key and "experts.2.w3" in key]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    spec = ParamSpec(name, tuple(whole.get_parameter(name).shape))
    for change in (None, tensors[odd][:-1].clone(), tensors[odd][:, :-1].clone()):
        changed = {key: tensor for key, tensor in tensors.items() if key != odd}
        save_file(changed if change is None else {**changed, odd: change}, file, metadata={"format": "pt"})
        source = HfSource(HfFiles(tmp_path), whole, whole.state_dict())
        with pytest.raises((ValueError, RuntimeError)):
            source.shard(spec, 0)
