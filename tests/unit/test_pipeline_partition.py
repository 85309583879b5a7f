from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils import _pytree as pytree

from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.pipeline.layer_chain import Unit, find_units
from shardwright.pipeline.partition import given_units, partition_units, unit_costs
from shardwright.pipeline.placement import Placement
from shardwright.pipeline.survey import Part, Survey, Template, survey_model
from shardwright.pipeline.tied import find_tied_groups
from shardwright.testing import zoo


def survey_of(units: int, joined: tuple[tuple[int, int], ...] = ()) -> Survey:
    template = Template(pytree.tree_structure(0), (None,), ())
    parts = tuple(Part(frozenset({unit - 1} if unit else ()), frozenset(), frozenset()) for unit in range(units + 1))
    return Survey(
        tuple(Unit(f"layers.{unit}", f"layers.{unit}") for unit in range(units)),
        (template,) * units,
        parts,
        {},
        (),
        frozenset(),
        {},
        joined,
    )


def test_partition_is_the_best_of_all() -> None:
    rng = random.Random(0)
    for _ in range(60):
        units, stages = rng.randint(2, 8), rng.randint(1, 4)
        stages = min(stages, units)
        costs = [rng.choice([1.0, 2.0, 5.0, 0.5]) for _ in range(units)]
        found = partition_units(survey_of(units), costs, stages)
        assert [unit for part in found for unit in part] == list(range(units))
        every = [(0, *cuts, units) for cuts in itertools.combinations(range(1, units), stages - 1)]
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cuts)) for cuts in every)
        assert max(sum(costs[unit] for unit in part) for part in found) == best


def test_forbidden_cuts_are_avoided() -> None:
    survey = survey_of(6, joined=((1, 3),))
    assert [survey.can_cut(position) for position in range(1, 6)] == [True, False, False, True, True]
    assert partition_units(survey, [1.0] * 6, 2) == [range(4), range(4, 6)]
    with pytest.raises(ValueError, match="at most 4 stages"):
        partition_units(survey, [1.0] * 6, 5)
    with pytest.raises(ValueError, match="inner"):
        given_units(survey, [3, 3], 2)


def test_numbers_given() -> None:
    survey = survey_of(6)
    assert given_units(survey, [1, 2, 2, 1], 4) == [range(1), range(1, 3), range(3, 5), range(5, 6)]
    with pytest.raises(ValueError, match=r"has 2 entries.*4 stages.*\[2, 2, 1, 1\] would work"):
        given_units(survey, [3, 3], 4)
    with pytest.raises(ValueError, match=r"6 layers.*\[3, 3\] would work"):
        given_units(survey, [3, 4], 2)
    with pytest.raises(ValueError, match="at least 1"):
        given_units(survey, [6, 0], 2)
    with pytest.raises(ValueError, match="at most 6 stages"):
        partition_units(survey, [1.0] * 6, 7)


def test_costs_count_the_head_and_hardly_the_table() -> None:
    model = zoo.build("llama-causal-lm", vocab_size=4000)
    survey = survey_model(model)
    layer = sum(parameter.numel() for parameter in model.model.layers[1].parameters())
    costs = unit_costs(model, survey)
    assert costs[1] == costs[2] == layer
    assert costs[0] == pytest.approx(layer + 0.05 * 4000 * 48)
    assert costs[3] == pytest.approx(layer + 4000 * 48 + 48)
    assert [len(part) for part in partition_units(survey, costs, 2)] == [3, 1]


def test_tied_groups_are_the_same_everywhere() -> None:
    model = zoo.build("llama-tied-causal-lm")
    survey = survey_model(model)
    (group,) = find_tied_groups(survey, [range(2), range(2, 4)], Placement(2))
    assert group.names == ("model.embed_tokens.weight", "lm_head.weight")
    assert (group.stages, group.ranks) == ((0, 1), (0, 1))
    assert find_tied_groups(survey, [range(1), range(1, 2), range(2, 3), range(3, 4)], Placement(2, 2, "v")) == []


def test_units_of_an_encoder_decoder() -> None:
    units = find_units(zoo.build("t5-conditional-generation"))
    assert units[3] == Unit("encoder.block.3", "encoder")
    assert [unit.layer for unit in units[4:]] == [f"decoder.block.{index}" for index in range(4)]
    survey = survey_model(zoo.build("t5-conditional-generation"))
    assert survey.boundary(2) == (1,)
    assert survey.boundary(6) == (3, 5)  # the encoder's output goes to every stage of the decoder


def test_survey_needs_no_memory() -> None:
    with torch.device("meta"):
        import transformers

        model = transformers.LlamaForCausalLM(zoo.config("llama-causal-lm", num_hidden_layers=6, hidden_size=8192, vocab_size=100_000))
    survey = survey_model(model)
    assert survey.num_units == 6
    assert survey.boundary(3) == (2,)


def test_checkpoint_config() -> None:
    stages = [range(2), range(2, 5), range(5, 6), range(6, 8)]
    assert PipelineGradientCheckpointConfig(0.5).layers_of(stages, 0, [0, 2]) == {0: 1, 2: 0}
    assert PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 3, 0, 2]).layers_of(stages, 1, [1, 3]) == {1: 3, 3: 2}
    assert PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[3, 4]).layers_of(stages, 1, [1, 3]) == {1: 3, 3: 1}
    for bad in ({}, {"gradient_checkpointing_ratio": 1.5}, {"num_ckpt_layers_per_stage": [-1]}):
        with pytest.raises(ValueError, match=r"checkpoint|ckpt"):
            PipelineGradientCheckpointConfig(**bad)
    with pytest.raises(ValueError, match="3 entries"):
        PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 1, 1]).layers_of(stages, 0, [0, 2])
    with pytest.raises(ValueError, match="stage 2 has 1 layers"):
        PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 1, 2, 1]).layers_of(stages, 0, [0, 2])
