"""Convolutions dealt by channels without a policy: loss, gradients, weights and running statistics of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.channel_traffic import channel_traffic
from shardwright.plugins.hybrid.traffic import Tokens
from shardwright.shardformer import ModelSharder, Plan, ShardConfig
from shardwright.shardformer.channels import _apart_from, among_channels
from shardwright.shardformer.convolution import ChannelNorms, ConvColumn, ConvGroups, ConvRow
from shardwright.shardformer.feeding import find_feedings
from shardwright.shardformer.layer.parallel_module import ParallelGroup
from shardwright.shardformer.policies.inferred import InferredPolicy
from shardwright.shardformer.self_check import SelfCheck
from shardwright.shardformer.styles import Row
from shardwright.spec import get_spec
from shardwright.testing import adamw, compare_models, run_ranks
from shardwright.testing.matrix import Subject, pick_axes, run_cells
from tests.ranks.counting import CountCollectives

WIDTH = 10


class Inverted(nn.Module):
    """Wide inside, by channels; 15 of them do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(WIDTH, 15, 1, bias=False), nn.BatchNorm2d(15)
        self.c, self.d = nn.Conv2d(15, 15, 3, padding=1, groups=15), nn.BatchNorm2d(15)
        self.e = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(15, 4, 1), nn.ReLU(), nn.Conv2d(4, 15, 1))
        self.drop, self.f, self.g = nn.Dropout(0.0), nn.Conv2d(15, WIDTH, 1), nn.BatchNorm2d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.d(self.c(F.silu(self.b(self.a(x))))))
        return x + self.g(self.f(self.drop(y * self.e(y).sigmoid())))


class Groups(nn.Module):
    """Four groups of channels, three of them on no rank alone; then channels that a norm mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(WIDTH, 20, 3, padding=1), nn.GroupNorm(5, 20), nn.Conv2d(20, 20, 1, groups=5)
        self.d, self.e, self.f = nn.Conv2d(20, WIDTH, 1), nn.Conv2d(WIDTH, 12, 3, padding=1), nn.Conv2d(12, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.d(F.silu(self.c(F.silu(self.b(self.a(x))))))
        mixed = F.layer_norm(self.e(x).movedim(1, -1), (12,)).movedim(-1, 1)
        return x + self.f(mixed)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, WIDTH, 3, 2, 1), nn.ModuleList(Inverted() for _ in range(3))
        self.other, self.last, self.norm = Groups(), nn.Conv2d(WIDTH, 12, 1), nn.BatchNorm2d(12)
        self.out = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = F.relu(self.norm(self.last(self.other(x))))
        return self.out(F.adaptive_avg_pool2d(x, 2).flatten(1))


class Sounds(nn.Module):
    """A stem of two, then a gate of two halves beside a convolution along time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(6, 9, 3, padding=1), nn.Conv1d(9, 8, 3, 2, padding=1)
        self.c, self.d = nn.Conv1d(8, 16, 1), nn.Conv1d(8, 8, 5, padding=2, groups=8, bias=False)
        self.e, self.f = nn.Conv1d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.b(F.gelu(self.a(x)))).softmax(1)
        x = x + self.e(F.silu(self.d(F.glu(self.c(x), 1))))
        return self.f(x.mean(-1).softmax(-1))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batch(kind: type[nn.Module], seed: int) -> torch.Tensor:
    shape = (4, 3, 12, 12) if kind is Pictures else (4, 6, 14)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, torch.arange(4))


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


def trained(rank: int, world: int, kind: type[nn.Module]) -> dict[str, Any]:
    plugin = HybridParallelPlugin(tp_size=world, custom_policy="auto", example_inputs=batch(kind, 9), precision="fp32")
    plain, model = made(kind), made(kind)
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, adamw(model.parameters()))
    step = adamw(plain.parameters())
    for seed in (1, 2):
        step.zero_grad()
        optimizer.zero_grad()
        loss, expected = loss_of(boosted(batch(kind, seed))), loss_of(plain(batch(kind, seed)))
        optimizer.backward(loss)
        expected.backward()
        compare_models(
            plain,
            boosted,
            coordinate=plugin.mesh.coordinate,
            losses=(expected.detach(), loss.detach()),
            gradients=optimizer.gradients(),
            weights=False,
        )
        optimizer.step()
        step.step()
    compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)
    for name, buffer in buffers_of(plain).items():
        torch.testing.assert_close(buffers_of(boosted.unwrap())[name], buffer, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(boosted.eval()(batch(kind, 3)), plain.eval()(batch(kind, 3)), rtol=1e-9, atol=1e-9)
    dealt = [name for name, param in boosted.unwrap().named_parameters() if (get_spec(param) or param).is_sharded]
    return {"dealt": dealt, "report": str(plugin.layout)}


def test_pairs_of_convolutions_and_what_is_between_are_dealt_by_channels() -> None:
    for found in run_ranks(trained, 2, Pictures):
        block = {f"blocks.1.{name}" for name in ("a", "b", "c", "d", "e.1", "e.3", "f")}
        block |= {f"other.{name}" for name in ("a", "b", "c", "d", "e", "f")} | {"last", "norm", "out"}
        assert block <= {name.rpartition(".")[0] for name in found["dealt"]}
        assert "blocks.1.g.weight" not in found["dealt"]  # behind the sum
        assert "tp" in found["report"]


def test_three_ranks_and_one_dim() -> None:
    for found in run_ranks(trained, 3, Sounds):
        assert {f"{name}.weight" for name in "abcde"} <= {*found["dealt"]}


def test_what_feeds_what_among_channels() -> None:
    net = made(Pictures)
    found = find_feedings(net, batch(Pictures, 0), lambda name: False)
    known = {feeding.rows[0]: feeding for feeding in found.feedings}
    inverted = next(feeding for row, feeding in known.items() if row.startswith("blocks"))
    around = inverted.rows[0].rpartition(".")[0].removesuffix(".e")
    assert {*inverted.columns} == {f"{around}.a", f"{around}.e.3"}
    assert {*inverted.rows} == {f"{around}.f", f"{around}.e.1"}
    assert {*inverted.between} == {f"{around}.{name}" for name in ("b", "c", "d", "drop")}
    assert known["other.d"].blocks == 5
    assert known["out"].columns == {"last": 1}
    assert "other.e" in found.reasons


def counted(rank: int, world: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Collectives of one step as planned, and as they were called."""
    model, pictures = made(Pictures), batch(Pictures, 1)
    sharder = ModelSharder(model, InferredPolicy(), ShardConfig(example_inputs=pictures))
    tokens = Tokens(None, 1, None, 8)
    planned = channel_traffic(model, [sharder.prepare()], tokens, len(pictures), pictures)
    sharder.shard()
    with CountCollectives() as count:
        loss_of(model(pictures)).backward()
    return {row.what.rpartition(" ")[2]: (row.count, row.sent) for row in planned}, dict(count.calls)


def test_the_plan_counts_what_convolutions_send() -> None:
    for planned, called in run_ranks(counted, 2):
        assert planned["all-reduce"][0] == called["allreduce_"] - 1  # the last linear sums, too
        assert planned["all-gather"][0] == called["_allgather_base_"]
        assert planned["all-reduce"][1] > 3 * 4 * WIDTH * 36 * 8  # three blocks of four samples with 36 pixels


def test_patterns_tell_what_is_dealt_in_another_way() -> None:
    assert _apart_from("a.3.layers.2.layer.0.conv", ["a.0.layers.0.layer.1.conv"]) == "a.*.layers.*.layer.0.conv"
    assert _apart_from("0.conv", ["1.conv"]) == "0.conv"
    assert _apart_from("a.3.conv", []) == "a.*.conv"


def test_a_norm_beside_a_convolution_is_in_no_pattern_of_its() -> None:
    stages = nn.ModuleList(nn.Sequential(nn.GroupNorm(1, 8), nn.Conv2d(8, 8, 2, 2), nn.Linear(8, 4)) for _ in range(2))
    net = nn.ModuleDict({"stages": stages})
    found = {each.name: each.alternatives for each in among_channels(net, ["stages.0.2"], lambda name: False, 0.01)}
    assert {*found} == {"stages.*.1", "stages.*.2"}
    assert found["stages.*.1"][0] == {"stages.*.1": ConvColumn(gather_output=True)}
    assert found["stages.*.2"][0] == {"stages.*.2": Row(split_input=True)}
    assert not [*among_channels(net, [], lambda name: name.endswith("1"), 0.01)]


def refused(rank: int, world: int) -> list[str]:
    parallel = ParallelGroup(dist.group.WORLD)
    found = []
    for rules in (
        {"blocks.*.c": ConvColumn()},
        {"blocks.*.a": ConvGroups()},
        {"out": ConvRow()},
        {"out": ChannelNorms()},
        {"other.c": ConvGroups()},
    ):
        with pytest.raises(ValueError) as caught:
            Plan(rules, "here").decide(made(Pictures), parallel, complete=False)
        found.append(str(caught.value))
    return found


def test_styles_refuse_what_they_cannot_deal_by_name() -> None:
    for groups, one, linear, norm, cut in run_ranks(refused, 3):
        assert "blocks.0.c (Conv2d), rule 'blocks.*.c' of here" in groups
        assert "groups=15; use ConvGroups" in groups
        assert "groups=1; use ConvColumn or ConvRow" in one
        assert "with a weight of their own, not Linear" in linear
        assert "compute channels by themselves, not Linear" in norm
        assert "groups of 4 channels cannot be cut apart" in cut


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).square().mean() + self.a.weight.sum()


def checked(rank: int, world: int) -> list[Any]:
    check = SelfCheck([made(Statistics).eval()], ParallelGroup(dist.group.WORLD), torch.randn(4, 6))

    def other_statistics(model: nn.Module) -> None:
        model.b.momentum = 0.3  # type: ignore[union-attr]

    return [check.failures(lambda model: None), check.failures(other_statistics)]


def same_checked(rank: int, world: int) -> list[Any]:
    torch.manual_seed(3)
    return checked(rank, world)


def test_the_check_of_a_plan_evaluates_after_training_and_compares_running_statistics() -> None:
    for right, wrong in run_ranks(same_checked, 2):
        assert right == []
        assert {"b.running_mean", "b.running_var"} <= {*wrong}


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["MobileNetV2ForImageClassification", "RegNetForImageClassification", "BitModel"])
def test_families_on_all_layouts(name: str) -> None:
    for cell in run_cells(Subject(name), pick_axes(["tp2", "fp32", "round_trip", "lazy", "lora"]), 240):
        assert cell["outcome"] in ("verified", "refused"), cell


def test_a_family_of_transformers_is_dealt_and_saved_whole() -> None:
    for cell in run_cells(Subject("RegNetForImageClassification"), pick_axes(["tp2", "round_trip"]), 60):
        assert cell["outcome"] == "verified", cell
        assert cell["axis"] != "tp2" or cell["share"] > 0.9, cell
