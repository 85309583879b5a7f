"""The backend that lets ranks share a GPU: here with tensors of the CPU, for which gloo is the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardwright import Booster
from shardwright.comm.compat import all_gather_single, reduce_scatter_single
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import RankError, compare_models, keep_float64, run_ranks, zoo

WORLD = 3
_Op = Callable[[int, Tensor], list[Tensor]]


def _all_reduce(kind: Any) -> _Op:
    def run(rank: int, x: Tensor) -> list[Tensor]:
        dist.all_reduce(x, kind)
        return [x]

    return run


def _reduce(rank: int, x: Tensor) -> list[Tensor]:
    dist.reduce(x, dst=1)
    return [x] if rank == 1 else []


def _broadcast(rank: int, x: Tensor) -> list[Tensor]:
    dist.broadcast(x, src=2)
    return [x]


def _all_gather(rank: int, x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(found, x)
    flat = x.new_empty(WORLD * x.numel())
    all_gather_single(flat, x.flatten())
    return [*found, flat]


def _reduce_scatter(rank: int, x: Tensor) -> list[Tensor]:
    parts = [x * (peer + 1) for peer in range(WORLD)]
    listed, flat = torch.empty_like(x), x.new_empty(x.numel())
    dist.reduce_scatter(listed, parts)
    reduce_scatter_single(flat, torch.cat([part.flatten() for part in parts]))
    return [listed, flat]


def _all_to_all(rank: int, x: Tensor) -> list[Tensor]:
    sizes = [[1, 2, 0], [3, 0, 1], [0, 2, 4]]
    taken = [sizes[peer][rank] for peer in range(WORLD)]
    found = x.new_empty(sum(taken))
    dist.all_to_all_single(found, x.flatten()[: sum(sizes[rank])].clone(), taken, sizes[rank])
    return [found]


def _gather_and_scatter(rank: int, x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(WORLD)] if rank == 2 else None
    dist.gather(x, found, dst=2)
    own = torch.empty_like(x)
    dist.scatter(own, None if found is None else [part + 1 for part in found], src=2)
    return [own]


def _messages(rank: int, x: Tensor) -> list[Tensor]:
    """All send first: to the next two messages, which must not overtake each other."""
    source, to = (rank - 1) % WORLD, (rank + 1) % WORLD
    works: list[Any] = [dist.isend(x + step, to) for step in range(2)]
    found = [torch.empty_like(x) for _ in range(2)]
    works += [dist.irecv(part, source) for part in found]
    for work in works:
        work.wait()
    batch = [dist.P2POp(dist.isend, x, source), dist.P2POp(dist.irecv, more := torch.empty_like(x), to)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [*found, more]


def _functional(rank: int, x: Tensor) -> list[Tensor]:
    group = dist.group.WORLD
    return [functional.wait_tensor(functional.all_reduce(x, "sum", group))]


_OPS: dict[str, _Op] = {
    "sum": _all_reduce(dist.ReduceOp.SUM),
    "largest": _all_reduce(dist.ReduceOp.MAX),
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather and scatter": _gather_and_scatter,
    "messages": _messages,
    "functional": _functional,
}


def _run_all(rank: int, world: int) -> dict[str, list[Tensor]]:
    found = {}
    for name, op in _OPS.items():
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            x = torch.randint(-9, 9, (2, 4), generator=torch.Generator().manual_seed(rank)).to(dtype)
            found[f"{name} of {dtype}"] = op(rank, x)
    return found


def test_collectives_and_messages_are_those_of_gloo() -> None:
    expected, found = run_ranks(_run_all, WORLD), run_ranks(_run_all, WORLD, backend="staged")
    for theirs, ours in zip(expected, found, strict=True):
        assert theirs.keys() == ours.keys()
        for name in theirs:
            for one, other in zip(theirs[name], ours[name], strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def _beyond_gloo(rank: int, world: int) -> None:
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [1.0] * 3
    small = torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn)
    parts = [torch.empty_like(small) for _ in range(world)]
    dist.all_gather(parts, small)
    assert [part.float()[0].item() for part in parts] == [1.0, 2.0, 3.0]
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    x = torch.ones(2)  # the call alone has the other one
    work.get_future().wait()
    assert work.is_completed()
    assert work.is_success()
    half = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(x, group=half)
        assert x.tolist() == [2.0, 2.0]
    dist.barrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.module.weight.grad is not None
    assert torch.equal(model.module.weight.grad, torch.full((2, 2), 2.0))


def test_means_8_bits_futures_groups_and_ddp() -> None:
    run_ranks(_beyond_gloo, WORLD, backend="staged", debug="OFF")


def _unequal(rank: int, world: int) -> None:
    dist.all_to_all_single(torch.empty(2), torch.empty(3), [1, 1], [2, 1])


def test_what_gloo_refuses_reaches_who_waits() -> None:
    with pytest.raises(RankError, match="staged: "):
        run_ranks(_unequal, 2, backend="staged", timeout=20)


_LAYOUTS = [
    {"tp_size": 2, "enable_sequence_parallelism": True, "zero_stage": 2},
    {"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2},
    {"zero_stage": 3, "precision": "fp32"},
]


def _train(rank: int, world: int, settings: dict[str, Any]) -> None:
    with keep_float64():
        reference, model = (zoo.build("llama-causal-lm", dtype=torch.float64) for _ in range(2))
        batch = zoo.inputs("llama-causal-lm", batch_size=4, seq_len=11)
        plugin = HybridParallelPlugin(**{"precision": "fp32", **settings})
        booster = Booster(plugin=plugin)
        trained, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        expected = reference(**batch).loss
        expected.backward()
        if plugin.mesh.size("pp") > 1:
            booster.execute_pipeline(iter([batch]), trained, lambda outputs, _: outputs.loss, optimizer)
        else:
            booster.backward(trained(**batch).loss, optimizer)
        compare_models(
            reference,
            trained,
            coordinate=plugin.mesh.coordinate,
            gradients=optimizer.gradients(),
            weights=False,
            tolerance=1e-10,
        )


@pytest.mark.parametrize("settings", _LAYOUTS, ids=str)
def test_layouts_train_over_it(settings: dict[str, Any]) -> None:
    run_ranks(_train, 2, settings, backend="staged")
