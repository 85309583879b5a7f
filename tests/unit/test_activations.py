"""Bytes that the meta device counts are, layer by layer, those that autograd saves in a real forward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwright.models.layer_chain import find_units
from shardwright.pipeline.cut.activations import count_activations
from shardwright.pipeline.saved_bytes import Storages
from shardwright.testing import zoo

SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@pytest.mark.parametrize("padding", ["no mask", "nothing is padding", "padding"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_layer_saves_what_was_counted(attention: str, groups: int, padding: str) -> None:
    model = zoo.build(
        "llama-causal-lm",
        dtype=torch.float32,
        num_key_value_heads=groups,
        attn_implementation=attention,
        **SIZES,
    ).train()
    batch = {"input_ids": torch.randint(0, 60, (2, 32))}
    if padding != "no mask":
        batch["attention_mask"] = torch.ones(2, 32, dtype=torch.long)
    if padding == "padding":
        batch["attention_mask"][0, 20:] = 0
    units = find_units(model)
    counted = count_activations(model, units, batch)

    fixed, met = Storages([*model.parameters(), *model.buffers()]), Storages()
    saved, place = [0] * (len(units) + 2), -1

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[place] += 0 if tensor in fixed else met.add(tensor)
        return tensor

    def go_to(number: int, *_: object) -> None:
        nonlocal place
        place = number

    for number, unit in enumerate(units):
        layer = model.get_submodule(unit.layer)
        layer.register_forward_pre_hook(partial(go_to, number))
        layer.register_forward_hook(partial(go_to, number + 1))
    with saved_tensors_hooks(save, lambda tensor: tensor):
        model(**batch, use_cache=False)
    assert [*counted.kept, counted.before[0]] == saved
