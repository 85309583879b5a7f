"""`custom_policy="auto"` on nets that are wired in unusual ways: what it deals trains as in one process, and what it
leaves whole it names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright import Booster
from shardwright.models.example_inputs import loss_of
from shardwright.plugins import HybridParallelPlugin
from shardwright.spec import get_spec
from shardwright.testing import adamw, compare_models, run_ranks
from tests.models.unusual_nets import ByHead, Clipped, Experts, InARow, Recurrent, Tokens, batch

# Net -> the share of its parameters that is dealt.
NETS: dict[type[nn.Module], float] = {
    Tokens: 0.9,
    InARow: 0.95,
    ByHead: 0.9,
    Experts: 0.95,
    Recurrent: 0.05,
    Clipped: 0.1,
}


def made(net: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net().double()


def trained(rank: int, world: int) -> dict[str, str]:
    reports = {}
    for net, share in NETS.items():
        example = batch(net, 5)
        plugin = HybridParallelPlugin(tp_size=2, custom_policy="auto", example_inputs=example, precision="fp32")
        plain, model = made(net), made(net)
        boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, adamw(model.parameters()))
        step: Any = adamw(plain.parameters())
        for seed in (1, 2):
            want, got = (loss_of(one(**batch(net, seed))) for one in (plain, boosted))
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
            want.backward()
            optimizer.backward(got)
            compare_models(plain, boosted, coordinate=rank, gradients=optimizer.gradients(), weights=False)
            step.step()
            optimizer.step()
            step.zero_grad()
            optimizer.zero_grad()
        compare_models(plain, boosted, coordinate=rank, gradients=False)
        whole = sum(param.numel() for param in boosted.parameters() if not (get_spec(param) or param).is_sharded)
        assert 1 - whole / sum(param.numel() for param in plain.parameters()) >= share, net
        reports[net.__name__] = str(plugin.layout)
    return reports


def test_what_is_dealt_is_right_and_what_is_not_is_named() -> None:
    for reports in run_ranks(trained, 2):
        wrong = "did not give the gradients of the whole model"
        assert [net for net, report in reports.items() if wrong in report] == ["Recurrent"]
        for words in (
            f"up: (up -> down) {wrong}",
            "cell.weight_ih_l0: no way to deal the parameters of LSTM",
            "both",
            "raw",
        ):
            assert words in reports["Recurrent"]
