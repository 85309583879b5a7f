"""Ranks that must hold the same and do not are named, with the parameter; those that do train on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import shardwright
from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin, replica_check
from shardwright.plugins.replica_check import ReplicaCheck, ReplicasDiffer
from shardwright.testing import run_ranks, zoo

NAME = "llama-causal-lm"
LAYOUTS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1, precision="bf16"),
    "tp2": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "pp2": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"),
    "sp": lambda: HybridParallelPlugin(
        tp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather", precision="bf16"
    ),
    "fp16": lambda: HybridParallelPlugin(precision="fp16", zero_stage=1),
    "zero3": lambda: LowLevelZeroPlugin(stage=3, precision="bf16"),
    "fsdp": TorchFSDPPlugin,
    "tp2 pp2 zero1": lambda: HybridParallelPlugin(
        tp_size=2, pp_size=2, num_microbatches=2, zero_stage=1, precision="bf16"
    ),
}


EXPERTS: dict[str, dict[str, Any]] = {
    "whole": {"ep_size": 2, "zero_stage": 1, "zero_group_size": 2},
    "tp2": {"ep_size": 2, "tp_size": 2},
    "pp2": {"ep_size": 2, "pp_size": 2, "num_microbatches": 2},
}


def _train(layout: str, disturb: Any, tied: bool = False, frozen: str = "") -> str:
    """What is said of two steps, of which `disturb(model, optimizer)` follows the first; looked at after each."""
    plugin = LAYOUTS[layout]()
    booster = Booster(plugin=plugin, check_replicas=1)
    model: nn.Module = zoo.build(NAME, num_hidden_layers=2, tie_word_embeddings=tied)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    count, place = plugin.data_parallel
    try:
        for step in range(3):
            batch = {name: value.chunk(count)[place] for name, value in zoo.inputs(NAME, 4, seed=step).items()}
            if isinstance(plugin, HybridParallelPlugin):
                booster.execute_pipeline(iter([batch]), model, None, optimizer)
            else:
                booster.backward(model(**batch).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                disturb(model.unwrap(), optimizer)
    except ReplicasDiffer as error:
        return str(error)
    return ""


def _edited(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[3] += 0.5


def _swapped(model: nn.Module, name: str) -> None:
    weight = dict(model.named_parameters())[name]
    with torch.no_grad():
        weight[[2, 5]] = weight[[5, 2]]


def _disturbed(rank: int, world: int) -> dict[str, str]:
    def rate(_: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)

    norm, query = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    return {
        "dp": _train("ddp", lambda model, _: _edited(model, query) if rank == 1 else None),
        "tp": _train("tp2", lambda model, _: _edited(model, norm) if rank == 1 else None),
        "lr": _train("zero1", rate),
        "frozen": _train("ddp", lambda model, _: _swapped(model, query) if rank == 1 else None, frozen=query),
        "well": _train("sp", lambda *_: None) + _train("pp2", lambda *_: None, tied=True),
    }


def test_what_differs_is_named_on_all_ranks() -> None:
    for told in run_ranks(_disturbed, 2, debug="OFF", timeout=100):
        assert "after step 1 ranks differ" in told["dp"]
        assert "model.layers.0.self_attn.q_proj.weight on rank 0 (dp 0" in told["dp"]
        assert "and rank 1 (dp 1" in told["dp"]
        assert "model.layers.1.input_layernorm.weight on rank 0" in told["tp"]
        assert "tp 1)" in told["tp"]
        assert "; and" not in told["tp"]
        assert "differ that must hold the same: model.layers.0.self_attn.q_proj.weight on rank 0" in told["frozen"]
        assert "after step 1 " in told["frozen"]
        assert "['lr'] is 0.01 on rank 0 (dp 0" in told["lr"]
        assert "0.02 on rank 1" in told["lr"]
        assert told["well"] == ""


def _experts(rank: int, world: int) -> dict[str, str]:
    """Of experts that two of four ranks hold each, and of a linear that ranks with other experts hold as well."""
    told = {}
    for name, sizes in EXPERTS.items():
        for part in ("", "q_proj.weight", "experts.down_proj"):
            plugin = HybridParallelPlugin(precision="fp32", **sizes)
            booster = Booster(plugin=plugin, check_replicas=1)
            model: nn.Module = zoo.build("qwen3-moe-causal-lm", num_hidden_layers=2)
            model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            count, place = plugin.data_parallel
            try:
                for step in range(2):
                    inputs = zoo.inputs("qwen3-moe-causal-lm", 4, seed=step)
                    batch = {name: value.chunk(count)[place] for name, value in inputs.items()}
                    booster.execute_pipeline(iter([batch]), model, None, optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                    if part and rank == world - 1:
                        _edited(model.unwrap(), next(n for n, _ in model.unwrap().named_parameters() if part in n))
                told[f"{name} {part}"] = ""
            except ReplicasDiffer as error:
                told[f"{name} {part}"] = str(error)
    return told


def test_experts_are_compared_where_they_are_the_same() -> None:
    """A layout in which each rank holds experts of its own says nothing of them, and of the others all the same."""
    told = run_ranks(_experts, 4, debug="OFF", timeout=200)
    for words in told:
        assert [words[f"{name} "] for name in EXPERTS] == [""] * 3
        for name in EXPERTS:
            assert "self_attn.q_proj.weight on rank" in words[f"{name} q_proj.weight"], name
            assert "and rank 3 (dp" in words[f"{name} q_proj.weight"]
        assert "mlp.experts.down_proj on rank 1 (dp 1" in words["whole experts.down_proj"]
        assert words["tp2 experts.down_proj"] == words["pp2 experts.down_proj"] == ""  # nobody has these besides


class _Owned(nn.Linear):
    """Each rank has a bias of its own, which torch's DDP is told to leave alone."""

    _ddp_params_and_buffers_to_ignore = ("bias",)


def _owned(rank: int, world: int) -> str:
    booster = Booster(plugin=TorchDDPPlugin(), check_replicas=1)
    model: nn.Module = _Owned(3, 2)
    model.get_parameter("bias").data.fill_(rank)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer is not None
    for step in range(3):
        booster.backward(model(torch.full((2, 3), float(step + rank))).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return str(model.unwrap().get_parameter("bias").tolist())


def test_what_every_rank_has_for_itself_is_left_alone() -> None:
    biases = run_ranks(_owned, 2, debug="OFF", timeout=100)
    assert biases[0] != biases[1]


class _Odd(nn.Module):
    """What a check meets: numbers of many formats, other states, a frozen weight, statistics of this rank's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.arange(6).to(torch.int8), requires_grad=False)
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).square().sum()

    def get_extra_state(self) -> Any:
        return {"not": "a tensor"}

    def set_extra_state(self, state: Any) -> None:
        pass


class _OwnRate(torch.optim.SGD):
    """Finds its own learning rate, as Adafactor does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] = None
        return result


def _steps(rank: int, fails: bool) -> list[int]:
    """The steps of an odd model that were looked at."""
    booster = Booster(plugin=TorchDDPPlugin(), check_replicas=1)
    model: nn.Module = _Odd()
    model, optimizer, *_ = booster.boost(model, _OwnRate(model.parameters(), lr=0.1))
    assert optimizer is not None
    looked, guard = [], optimizer.loss_guard
    assert guard is not None
    assert isinstance(guard.each_step, ReplicaCheck)
    look = guard.each_step.check
    guard.each_step.check = lambda step: (looked.append(step), look(step))[1]  # type: ignore[method-assign]
    for step in range(5):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        booster.backward(model(x), optimizer)
        try:
            if fails and step == 2 and rank == 1:
                raise KeyError("before its step")
            optimizer.step()
        except (KeyError, RuntimeError):
            shardwright.recover(timeout=30)
        optimizer.zero_grad()
    return looked


def _odd(rank: int, world: int) -> list[list[int]]:
    shardwright.launch(rank, world, None, None, seed=1, timeout=30)
    return [_steps(rank, fails=False), _steps(rank, fails=True)]


def test_what_is_no_fault_ends_nothing() -> None:
    """Also where ranks have counted other steps, since one of them failed before its step and all recovered."""
    every = [1, 2, 3, 4]
    first, second = run_ranks(_odd, 2, debug="OFF", timeout=100)
    assert first == [every, [1, 2, 2, 3]]  # it had begun to look when the other failed
    assert second == [every, [1, 2, 3]]


FORMATS = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", FORMATS)
def test_sums_are_those_of_the_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randint(-8, 8, (5, 7)).to(dtype).t()
    whole = replica_check._sums(tensor, {})
    monkeypatch.setattr(replica_check, "_PIECE_OF_CPU", 8)
    pieces = replica_check._sums(tensor, {})
    assert torch.equal(whole[1], pieces[1])
    assert torch.equal(pieces[0], replica_check._sums(tensor.clone(), {})[0])
    plain = torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()
    assert whole[1].tolist() == [plain.sum(), plain.abs().sum()]


@pytest.mark.parametrize("piece", [8, 2**16])
@pytest.mark.parametrize("dtype", FORMATS)
def test_bits_tell_what_lies_elsewhere(dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, numbers and signs that are swapped, within a piece and between two, leave plain sums as they were."""
    monkeypatch.setattr(replica_check, "_PIECE_OF_CPU", piece)
    tensor = torch.arange(1, 61).view(6, 10)
    tensor = (tensor % 3 == 0 if dtype == torch.bool else tensor.where(tensor % 4 > 0, -tensor)).to(dtype)
    plain = tensor.to(torch.complex64 if dtype.is_complex else torch.float64)  # 8-bit numbers have no minus
    negative, tensors = (-plain).to(dtype), [tensor, tensor[[0, 4, 2, 3, 1, 5]]]
    for pair in itertools.combinations(range(60), 2):
        for values in (tensor.view(-1)[list(pair[::-1])], negative.view(-1)[list(pair)]):
            changed = tensor.clone()
            changed.view(-1)[list(pair)] = values
            tensors.append(changed)
    places: dict[torch.device, torch.Tensor] = {}
    sums = {int(replica_check._sums(each, places)[0]) for each in tensors}
    assert len(sums) == len({bytes(each.contiguous().view(torch.uint8).numpy()) for each in tensors})


def _well(rank: int, world: int, layout: str) -> list[str]:
    return [_train(layout, lambda *_: None, tied) for tied in (False, True)]


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_are_well_train_on(layout: str, world: int) -> None:
    if (world, layout) != (2, "tp2 pp2 zero1"):
        assert run_ranks(_well, world, layout, debug="OFF", timeout=200) == [["", ""]] * world
