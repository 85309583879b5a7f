"""ZeRO beside model axes: gradients that are partial over tp, rows that tp ranks share, copies tied over stages, one
norm.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.cluster.mesh import ParallelMesh
from shardwright.precision.policy import PrecisionPolicy
from shardwright.spec import ParamSpec, Piece, even_pieces, set_spec
from shardwright.testing import run_ranks
from shardwright.zero import layout
from shardwright.zero.optimizer import ZeroOptimizer
from shardwright.zero.settings import ZeroSettings

FULL = {"split": (6, 5), "heads": (9, 4), "norm": (7,), "alike": (3, 3), "tied": (4, 3)}
STEPS = 3


def full_gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + sorted(FULL).index(name))
    return torch.randn(FULL[name], generator=generator, dtype=torch.float64)


def spec_of(name: str, tp: int) -> ParamSpec:
    if name == "split":
        return ParamSpec(name, FULL[name], 0, even_pieces(6, tp))
    if name == "heads":  # rows 0..3 belong to every rank, the other five are dealt out, the last rank is padded
        own = even_pieces(5, tp, start=4)
        return ParamSpec(name, FULL[name], 0, tuple((Piece(0, 4), *pieces) for pieces in own))
    if name == "norm":
        return ParamSpec(name, FULL[name], partial=("tp",))
    return ParamSpec(name, FULL[name], tied="word" if name == "tied" else None)


class Local(nn.Module):
    """The tensor-parallel shards of `FULL`, all starting from the same full values."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in FULL.items():
            spec = spec_of(name, mesh.size("tp"))
            full = torch.randn(shape, generator=generator, dtype=torch.float64)
            param = nn.Parameter(spec.shard(full, mesh.coordinate("tp")))
            set_spec(param, spec)
            self.register_parameter(name, param)


def local_gradient(name: str, step: int, mesh: ParallelMesh, stage_rank: int) -> torch.Tensor:
    """What this rank's backward would compute: summed over ranks as the spec says and averaged over dp it is
    `full_gradient`.
    """
    tp, coordinate, dp = mesh.size("tp"), mesh.coordinate("tp"), mesh.coordinate("dp")
    spec, full = spec_of(name, tp), full_gradient(name, step)
    # Data-parallel ranks differ, with the mean right; so do the ranks that a sum runs over.
    full = full * (1.0 + (0.5 if dp % 2 else -0.5) * (mesh.size("dp") > 1))
    if name == "norm":
        full = full * ((coordinate + 1) / (tp * (tp + 1) / 2))
    if name == "tied" and mesh.size("pp") > 1:
        full = full * (0.25 if stage_rank else 0.75)
    local = spec.shard(full, coordinate)
    for run in spec.shared_runs:
        for _, offset, length in spec.local_runs(coordinate, run.start, run.length):
            holders = len(run.holders)
            local[offset : offset + length] *= (run.holders.index(coordinate) + 1) / (holders * (holders + 1) / 2)
    return local


def axes(rank: int, world_size: int, tp: int, pp: int, stage: int) -> None:
    layout.ALIGN = 16  # so that these small parameters are cut
    mesh = ParallelMesh(tp=tp, pp=pp)
    model = Local(mesh)
    full = {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in FULL.items()}
    generator = torch.Generator().manual_seed(5)
    for param in full.values():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    reference = torch.optim.AdamW(full.values(), lr=0.1)
    tied = {"word": mesh.tied_group([0, pp - 1])} if pp > 1 else {}
    stage_rank = mesh.coordinate("pp")
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = ZeroOptimizer(
        optim,
        model,
        mesh,
        ZeroSettings(stage=stage, max_norm=0.7, bucket_size_in_m=20e-6),
        tied_groups=tied,
        launch_in_backward=stage == 1,
    )
    for step in range(STEPS):
        loss = sum((getattr(model, name) * local_gradient(name, step, mesh, stage_rank)).sum() for name in FULL)
        zero.backward(loss)
        if stage in (0, 2):
            zero.reduce_grad(0)
        zero.step()
        zero.zero_grad()
        for name, param in full.items():
            param.grad = full_gradient(name, step)
        # Every stage has parameters of these names; only the tied one is the same parameter on both.
        squares = sum(param.grad.pow(2).sum() * (1 if name == "tied" else pp) for name, param in full.items())
        norm = squares.sqrt()
        assert abs(zero.get_grad_norm() - norm.item()) < 1e-10, f"step {step}: norm {zero.get_grad_norm()} != {norm}"
        for param in full.values():
            param.grad *= (0.7 / (norm + 1e-6)).clamp(max=1.0)
        reference.step()
        for name, param in full.items():
            spec = spec_of(name, tp)
            expected = spec.shard(param.detach(), mesh.coordinate("tp"))
            torch.testing.assert_close(
                getattr(model, name).detach(),
                expected,
                rtol=1e-10,
                atol=1e-10,
                msg=lambda m, n=name, s=step: f"{n} step {s}: {m}",
            )


def fsdp_axes(rank: int, world_size: int) -> None:
    """At stage 3 forward must run through the module: a linear layer whose rows tp ranks share, its input one-hot."""
    mesh = ParallelMesh(tp=2)
    spec = spec_of("heads", 2)
    layer = nn.Linear(4, spec.local_shape(0)[0], bias=False, dtype=torch.float64)
    full = nn.Parameter(torch.randn(FULL["heads"], generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    layer.weight = nn.Parameter(spec.shard(full.detach(), mesh.coordinate("tp")))
    set_spec(layer.weight, spec)
    optim = torch.optim.AdamW(layer.parameters(), lr=0.1)
    zero = ZeroOptimizer(optim, layer, mesh, ZeroSettings(stage=3, max_norm=0.7), precision=PrecisionPolicy("fp32"))
    reference = torch.optim.AdamW([full], lr=0.1)
    for step in range(STEPS):
        out = layer(torch.eye(4, dtype=torch.float64))  # [4, rows]: the weight, transposed
        zero.backward((out * local_gradient("heads", step, mesh, 0).t()).sum())
        zero.step()
        zero.zero_grad()
        full.grad = full_gradient("heads", step)
        norm = nn.utils.clip_grad_norm_([full], 0.7)
        assert abs(zero.get_grad_norm() - norm.item()) < 1e-10
        reference.step()
        expected = spec.shard(full.detach(), mesh.coordinate("tp"))
        torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("tp", "pp", "stage"), [(2, 1, 1), (2, 1, 2), (4, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 0), (2, 1, 0)]
)
def test_gradients_follow_their_spec(tp: int, pp: int, stage: int) -> None:
    run_ranks(axes, 4, tp, pp, stage, timeout=60)


def test_stage_3_sums_shared_rows() -> None:
    run_ranks(fsdp_axes, 4, timeout=60)
