"""What boosting finds out and notes on parameters, also where a plan has tensors without memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ops.expert_exchange import find_routes
from shardwright.planner.fakes import Fakes
from shardwright.planner.replay import joined
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.sequence import probe_sequences
from shardwright.spec import ParamSpec, get_spec, set_spec
from shardwright.testing.peaks import Case
from shardwright.utils.device import move_model

CPU = torch.device("cpu")


def test_specs_stay_on_parameters_without_memory() -> None:
    """Experts have one of their own: without it ZeRO takes them for layers that all ranks have."""
    spec = ParamSpec("weight", (4, 3))
    with Fakes():
        model = nn.Linear(3, 4)
        set_spec(model.weight, spec)
        move_model(model, CPU)
        assert get_spec(model.weight) is spec


def test_models_whose_sequences_are_cut_are_tried_with_numbers() -> None:
    case = Case("llama-causal-lm", {}, layers=1)
    with joined(0, 2):
        plugin = HybridParallelPlugin(sp_size=2, enable_sequence_parallelism=True, precision="fp32")
        found = probe_sequences(plugin.settings, case.lazy_model())
        with Fakes():
            assert probe_sequences(plugin.settings, case.lazy_model()) == found


def test_experts_of_a_plan_are_chosen_alike() -> None:
    tokens, choices, experts, ranks = 60, 2, 4, 2
    with joined(0, ranks), Fakes():
        index = torch.rand(tokens, experts).topk(choices).indices
        routes = find_routes(index, experts, dist.group.WORLD)  # type: ignore[arg-type]
    # of the six pairs of experts one is of the other rank's alone
    assert routes.sent == routes.received
    assert all(abs(number - 50) <= 5 for number in routes.sent), routes.sent
    assert routes.arriving == tokens * choices
    assert len(routes.tokens) == sum(routes.sent)
