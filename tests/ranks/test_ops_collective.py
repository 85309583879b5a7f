"""Collectives with gradients: each rank's part of y and dx against the same thing written down for the whole tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import CountCollectives
from torch.utils.checkpoint import checkpoint

from shardwright.ops import collective as C
from shardwright.testing import run_ranks


def _tensors(world: int, shape: list[int], seed: int) -> list[torch.Tensor]:
    """The tensors of all ranks, made alike everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(world)]


def _check(name: str, fn: Any, xs: list[torch.Tensor], want_y: Any, want_dx: Any, rank: int, world: int) -> None:
    """`want_y(xs)` and `want_dx(dys)` give all ranks' results from all ranks' inputs."""
    x = xs[rank].clone().requires_grad_()
    before = x.detach().clone()
    y = fn(x)
    ys = want_y([one.clone() for one in xs])
    assert y.is_contiguous(), name
    torch.testing.assert_close(y, ys[rank], rtol=1e-12, atol=1e-12, msg=f"{name} forward")
    generator = torch.Generator().manual_seed(5)
    dys = [torch.randn(one.shape, dtype=torch.float64, generator=generator) for one in ys]
    dy = dys[rank].clone()
    for _ in range(2):  # a second backward through the same graph must give the same
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.testing.assert_close(dx, want_dx(dys)[rank], rtol=1e-12, atol=1e-12, msg=f"{name} backward")
    assert torch.equal(dy, dys[rank]), f"{name} wrote to its gradient"
    assert torch.equal(x.detach(), before), f"{name} wrote to its input"
    # Both sides of a strided pair: input and gradient that are not contiguous.
    strided = xs[rank].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y2 = fn(strided)
    torch.testing.assert_close(y2, ys[rank])
    (dx,) = torch.autograd.grad(y2, strided, dys[rank].transpose(0, 1).contiguous().transpose(0, 1))
    torch.testing.assert_close(dx, want_dx(dys)[rank])


def _parts(whole: torch.Tensor, dim: int, sizes: list[int]) -> list[torch.Tensor]:
    return list(whole.split(sizes, dim))


def _collectives(rank: int, world: int) -> None:
    group = dist.group.WORLD
    full = [5, 7, 6]

    def same(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return xs

    def total(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.stack(xs).sum(0)] * world

    xs = _tensors(world, full, 1)
    _check("copy", lambda x: C.copy_to_group(x, group), xs, same, total, rank, world)
    _check("reduce", lambda x: C.reduce_from_group(x, group), xs, total, same, rank, world)
    for dim in (0, 1, 2, -1):
        even = [full[dim] // world + (r < full[dim] % world) for r in range(world)]
        lopsided = [0] * (world - 1) + [full[dim]]
        for sizes, given in ((even, None), (lopsided, lopsided)):

            def cut(xs: list[torch.Tensor], dim: int = dim, sizes: list[int] = sizes) -> list[torch.Tensor]:
                return [_parts(x, dim, sizes)[r] for r, x in enumerate(xs)]

            def cut_total(xs: list[torch.Tensor], dim: int = dim, sizes: list[int] = sizes) -> list[torch.Tensor]:
                return _parts(torch.stack(xs).sum(0), dim, sizes)

            def join(xs: list[torch.Tensor], dim: int = dim) -> list[torch.Tensor]:
                return [torch.cat(xs, dim)] * world

            replicated = [xs[0]] * world
            pieces = _parts(xs[0], dim, sizes)
            tag = f"dim {dim} sizes {sizes}"
            _check(f"split {tag}", lambda x: C.split_to_group(x, group, dim, given), replicated, cut, join, rank, world)  # noqa: B023
            _check(
                f"reduce_scatter {tag}",
                lambda x, dim=dim, given=given: C.reduce_scatter_to_group(x, group, dim, given),
                xs,
                cut_total,
                join,
                rank,
                world,
            )
            _check(f"gather {tag}", lambda x: C.gather_from_group(x, group, dim, sizes), pieces, join, cut, rank, world)  # noqa: B023
            _check(
                f"gather_for_shards {tag}",
                lambda x, dim=dim, sizes=sizes: C.gather_for_shards(x, group, dim, sizes),
                pieces,
                join,
                cut_total,
                rank,
                world,
            )

    for scatter, gather in ((2, 1), (1, 2), (0, 1), (-1, 0)):
        shapes = []
        gathers = [1 + r for r in range(world)]
        for r in range(world):
            shape = list(full)
            shape[gather] = gathers[r]
            shapes.append(shape)
        inputs = [_tensors(1, shape, 10 + r)[0] for r, shape in enumerate(shapes)]
        scatters = [full[scatter] // world + (r < full[scatter] % world) for r in range(world)]

        def trade(
            xs: list[torch.Tensor], a: int = scatter, b: int = gather, sizes: list[int] = scatters
        ) -> list[torch.Tensor]:
            return [torch.cat([x.split(sizes, a)[r] for x in xs], b) for r in range(world)]

        def trade_back(
            xs: list[torch.Tensor], a: int = scatter, b: int = gather, sizes: list[int] = gathers
        ) -> list[torch.Tensor]:
            return [torch.cat([x.split(sizes, b)[r] for x in xs], a) for r in range(world)]

        _check(
            f"all_to_all {scatter} {gather}",
            lambda x: C.all_to_all_in_group(x, group, scatter, gather, None, gathers),  # noqa: B023
            inputs,
            trade,
            trade_back,
            rank,
            world,
        )

    with pytest.raises(ValueError, match="one length for each"):
        C.split_to_group(xs[0], group, 0, [5])
    with pytest.raises(ValueError, match="for rank"):
        C.gather_from_group(xs[0], group, 0, [4] * world)

    # Checkpointing reruns the collectives; results stay what they were.
    for reentrant in (False, True):
        x = xs[rank].clone().requires_grad_()

        def block(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(C.reduce_from_group(torch.sin(C.copy_to_group(x, group)) * (rank + 1), group))

        (plain,) = torch.autograd.grad(block(x).sum(), x)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_against_whole_tensors(world: int) -> None:
    run_ranks(_collectives, world)


def _group_of_one(rank: int, world: int) -> None:
    groups = [dist.new_group([r]) for r in range(world)]
    group, x = groups[rank], torch.randn(3, 4, requires_grad=True)
    with CountCollectives() as counted:
        for y in (
            C.copy_to_group(x, group),
            C.reduce_from_group(x, group),
            C.gather_from_group(x, group),
            C.gather_for_shards(x, group),
            C.split_to_group(x, group),
            C.reduce_scatter_to_group(x, group),
            C.all_to_all_in_group(x, group, 0, 1),
        ):
            assert y is x
    assert not counted.calls


def test_a_group_of_one_costs_nothing() -> None:
    run_ranks(_group_of_one, 2)
