"""Lazily built models: weights by slices that do not depend on the layout, and no more host memory than shards plus
one parameter.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.lazy import LazyInitContext
from shardwright.lazy.weights import LazyWeights
from shardwright.spec import ParamSpec, even_pieces, set_spec
from shardwright.testing import run_ranks


class Table(nn.Module):
    """Parameters made and initialised in every way that a constructor may choose."""

    def __init__(self, size: int = 7) -> None:
        super().__init__()
        self.ones = nn.Parameter(torch.ones(size))
        self.full = nn.Parameter(torch.full((size, 2), 0.25), requires_grad=False)
        self.values = nn.Parameter(torch.arange(size).float() / 3)
        self.scaled = nn.Parameter(torch.empty(size, size))
        nn.init.xavier_uniform_(self.scaled)
        with torch.no_grad():
            self.scaled.mul_(0.5).add_(1)
            self.scaled[2] = 9.0
        self.rows = nn.Parameter(torch.zeros(6, 3))
        for number, row in enumerate(self.rows.data.chunk(3)):
            row.fill_(number)
        self.trunc = nn.Parameter(torch.zeros(400, 5))
        nn.init.trunc_normal_(self.trunc, std=0.02)
        self.basis = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.basis)
        self.unit = nn.Parameter(torch.empty(4, 4))
        nn.init.eye_(self.unit)
        self.written = nn.Parameter(torch.zeros(3).normal_())
        self.embed = nn.Embedding(50, 8, padding_idx=3)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(8)
        self.rnn = nn.LSTM(8, 4)
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("frequencies", 1 / 10 ** torch.arange(4).float(), persistent=False)


def test_every_way_of_initialising() -> None:
    torch.manual_seed(1)
    eager = Table()
    state = torch.get_rng_state()
    with LazyInitContext(seed=5):
        lazy = Table()
    assert all(param.is_meta for param in lazy.parameters())
    assert lazy.head.weight is lazy.embed.weight
    before = {name: id(param) for name, param in lazy.named_parameters() if "rnn" not in name}
    LazyInitContext.materialize(lazy)
    assert {name: id(param) for name, param in lazy.named_parameters() if "rnn" not in name} == before
    lazy.rnn(torch.zeros(2, 1, 8))[0].sum().backward()
    assert lazy.rnn.weight_hh_l0.grad is not None
    assert lazy.head.weight is lazy.embed.weight
    assert torch.equal(lazy.frequencies, eager.frequencies)
    for name in ("ones", "full", "values", "rows", "unit", "norm.weight", "norm.bias"):
        assert torch.equal(lazy.get_parameter(name), eager.get_parameter(name)), name
    assert not lazy.full.requires_grad
    assert not lazy.embed.weight[3].any()
    assert (lazy.scaled[2] == 9).all()
    assert abs(lazy.scaled[:2].mean() - 1) < 0.3
    torch.testing.assert_close(lazy.basis @ lazy.basis.T, torch.eye(6))
    assert lazy.written.any()
    for name in ("trunc", "embed.weight", "rnn.weight_ih_l0", "conv.weight", "conv.bias"):
        got, want = lazy.get_parameter(name), eager.get_parameter(name)
        assert 0.7 < got.std() / want.std() < 1.4, name
    torch.set_rng_state(state)

    with LazyInitContext(seed=5):
        again, other = Table(), nn.Linear(3, 3)
    LazyInitContext.materialize(again.half())
    for name, param in again.named_parameters():
        if name != "written":
            assert torch.equal(param, lazy.get_parameter(name).half()), name
    assert other.weight.is_meta
    assert nn.Linear(3, 3).weight.device.type == "cpu"
    with LazyInitContext(seed=6):
        different = Table()
    LazyInitContext.materialize(different)
    assert not torch.equal(different.trunc, lazy.trunc)
    assert LazyWeights.of(eager) is None


def test_what_cannot_be_made_is_refused() -> None:
    class Derived(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.empty(3))
            self.b = nn.Parameter(torch.empty(3).zero_())
            nn.init.normal_(self.a)
            with torch.no_grad():
                self.b.copy_(self.a * 2)

    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.empty(3))

    for cls, text in (
        (Derived, "b is initialised from other lazy tensors by copy_"),
        (Forgotten, "a was never initialised"),
    ):
        with LazyInitContext():
            model = cls()
        with pytest.raises(ValueError, match=text):
            LazyInitContext.materialize(model)
        assert all(param.is_meta for param in model.parameters())
    with LazyInitContext():
        model = nn.Sequential(nn.Linear(2, 2))
    weights = LazyWeights.of(model)
    model.append(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=re.escape("1.weight is on the meta device but was not built")):
        weights.materialize(model)


def _shard(model: nn.Module, world: int, rank: int, dim_of: dict[str, int]) -> None:
    """What a sharder does, in five lines: local meta parameters with their specs."""
    for name, param in list(model.named_parameters()):
        dim = dim_of.get(name.split(".")[-2] + "." + name.split(".")[-1])
        spec = ParamSpec(name, tuple(param.shape), dim, even_pieces(param.shape[dim], world) if dim is not None else ())
        owner = model.get_submodule(name.rpartition(".")[0])
        local = nn.Parameter(torch.empty(spec.local_shape(rank), dtype=param.dtype, device="meta"))
        set_spec(local, spec)
        setattr(owner, name.rpartition(".")[2], local)


def _peak(reset: bool = False) -> int:
    """Highest resident size of this process since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


WIDTH, DEPTH = 1024, 8


def _big(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(
        *(nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)}) for _ in range(DEPTH))
    )


def _memory(rank: int, world: int) -> tuple[int, dict[str, torch.Tensor]]:
    with LazyInitContext():
        small = _big(16)
    LazyInitContext.materialize(small)  # the code that runs is resident from here on
    start = _peak(reset=True)
    torch.manual_seed(11)
    with LazyInitContext():
        model = _big()
    built = _peak()
    weights = LazyWeights.of(model)
    _shard(model, world, rank, {"up.weight": 0, "up.bias": 0, "down.weight": 1})
    del model[DEPTH // 2 :]  # a pipeline stage that holds half of the layers
    weights.materialize(model, {"tp": rank})
    peak = _peak()
    own = sum(param.numel() * 4 for param in model.parameters())
    one = 2 * WIDTH * WIDTH * 4
    assert built - start < one, f"building took {(built - start) >> 20} MiB"
    assert peak - start < own + one + 12 * 2**20, (
        f"{(peak - start) >> 20} MiB for {own >> 20} MiB of shards, {one >> 20} MiB a parameter"
    )
    total = 2 * one * DEPTH
    assert own + one + 12 * 2**20 < total / 2
    return own, {
        name: param.detach()[:3, :3].clone() if param.ndim == 2 else param.detach()[:3].clone()
        for name, param in model.named_parameters()
    }


def test_memory_is_bounded_by_shards_and_one_parameter() -> None:
    results = run_ranks(_memory, 2)
    torch.manual_seed(11)
    with LazyInitContext():
        whole = nn.Sequential(*list(_big())[:1])
    LazyInitContext.materialize(whole)
    for rank, (_, corner) in enumerate(results):
        assert torch.equal(corner["0.up.weight"], whole[0]["up"].weight[rank * WIDTH :][:3, :3])
        assert torch.equal(corner["0.down.weight"], whole[0]["down"].weight[:3, rank * WIDTH :][:, :3])
        assert torch.equal(corner["0.up.bias"], whole[0]["up"].bias[rank * WIDTH :][:3])
        assert torch.equal(corner["0.down.bias"], whole[0]["down"].bias[:3])
