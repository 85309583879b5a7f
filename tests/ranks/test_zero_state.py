"""What ZeRO stores and moves: bytes kept, bytes sent, state out and in, bitwise agreement of the stages."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from test_zero import TINY_BUCKET, assert_bitwise, assert_same, train
from torch import nn
from zero_cases import SAMPLES, Model, Plan, adamw, batch, loss_of, reference

from shardwright.cluster.mesh import ParallelMesh
from shardwright.interface.shards import LoadedShard
from shardwright.precision.policy import PrecisionPolicy
from shardwright.testing import run_ranks
from shardwright.zero.layout import ALIGN, closed_form_bytes
from shardwright.zero.optimizer import ZeroOptimizer
from shardwright.zero.settings import ZeroSettings


def bitwise(rank: int, world_size: int) -> None:
    """Two ranks add two numbers in either order; of four, those layouts agree that add in the same order."""
    full, none, half = ParallelMesh(), ParallelMesh(zero_group_size=1), ParallelMesh(zero_group_size=2)
    for plan in (Plan(max_norm=0.5, sometimes=True), Plan(accumulation=2)):
        one = train(plan, full, rank, world_size, stage=1, explicit=True)
        for options in (
            {"overlap_communication": False},
            {"overlap_allgather": True},
            {"overlap_communication": False, "overlap_allgather": True},
            {"cpu_offload": True},
        ):
            assert_bitwise(train(plan, full, rank, world_size, stage=1, explicit=True, **options), one, f"{options}")
        if plan.accumulation == 1:
            assert_bitwise(train(plan, full, rank, world_size, stage=2), one, "stage 2")
            assert_bitwise(train(plan, full, rank, world_size, stage=3), one, "stage 3")
        if world_size == 2:
            assert_bitwise(train(plan, none, rank, world_size, stage=0, explicit=True), one, "stage 0")
            assert_bitwise(train(plan, none, rank, world_size, stage=1, explicit=True), one, "k = 1")
        elif plan.accumulation == 1:
            hybrid = train(plan, half, rank, world_size, stage=1)
            assert_bitwise(train(plan, half, rank, world_size, stage=2), hybrid, "stage 2, k = 2")


@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_and_flags_agree_bit_by_bit(world_size: int) -> None:
    run_ranks(bitwise, world_size, timeout=100)


class Wide(nn.Module):
    """Enough parameters that padding is far below one percent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def memory(rank: int, world_size: int) -> None:
    gc.collect()
    gc.freeze()
    bucket = 0.25  # million elements: four layers, so that rounding shards up to whole blocks costs less than a percent
    for size in (1, 2, 4):
        if size > world_size:
            continue
        mesh = ParallelMesh(zero_group_size=size)
        for stage, expected in (
            (0, 2 + 4 + 12),
            (1, 2 + 4 + 12 / size),
            (2, 2 + (4 + 12) / size),
            (3, (4 + 12) / size),
        ):
            model = Wide()
            numel = sum(param.numel() for param in model.parameters())
            optim = ZeroOptimizer(
                torch.optim.AdamW(model.parameters()),
                model,
                mesh,
                ZeroSettings(stage=stage, bucket_size_in_m=bucket),
                precision=PrecisionPolicy("bf16"),
            )
            x = torch.randn(4, 256, dtype=torch.bfloat16)

            def step(model: Wide = model, optim: ZeroOptimizer = optim, x: torch.Tensor = x) -> None:
                optim.backward(model(x).float().pow(2).mean())
                optim.step()
                optim.zero_grad()

            step()
            step()
            rounding = 0.015 if stage == 3 else 0.01  # there buckets are single layers
            assert abs(optim.bytes() / numel / expected - 1) < rounding, (
                f"stage {stage}, k {size}: {optim.bytes() / numel} bytes, not {expected}"
            )
            largest = max(b.plan.numel for b in optim.buckets) * 4
            assert optim.reducer.pool.bytes <= 4 * largest  # two in flight, each a bucket and what arrives
            gc.collect()  # optimizers before this one
            before = live_bytes(), optim.reducer.pool.allocated
            for _ in range(3):
                step()
            after = live_bytes(), optim.reducer.pool.allocated
            assert after == before, f"stage {stage}, k {size}: memory grows in the steady state, {before} to {after}"
            optim.release()


def memory_at_boost(rank: int, world_size: int) -> None:
    """Every bucket takes the place of what its parameters were loaded into before the next one is made, and
    gradients come last.
    """
    gc.collect()
    gc.freeze()
    broadcast, seen = dist.broadcast, []

    def noting(*args: object, **kwargs: object) -> object:
        seen.append(live_bytes())  # while a bucket is filled
        return broadcast(*args, **kwargs)

    dist.broadcast = noting
    for stage in (1, 2, 3):
        seen.clear()
        model = Wide()
        loaded = live_bytes()
        optim = ZeroOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            ParallelMesh(),
            ZeroSettings(stage=stage, bucket_size_in_m=0.06),
            precision=PrecisionPolicy("bf16"),
        )
        assert len(seen) >= len(optim.buckets) == 8
        # Parameters, masters and values on their way, and those of the bucket before, which gloo's thread lets go of
        # when it gets to it
        one = max(bucket.plan.numel for bucket in optim.buckets) * (2 + 4 / world_size + 4 + 4)
        assert max(seen) <= loaded + one, f"stage {stage}: {max(seen)} bytes at boost, {loaded} loaded"
        assert seen[-1] < seen[0], "the storage of parameters that have moved is given back"
        optim.release()


class Giant(nn.Module):
    """An embedding many times as large as a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(2003, 48)
        self.head = nn.Linear(48, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).tanh())


def in_pieces(rank: int, world_size: int) -> None:
    size = 0.004  # million elements
    mesh = ParallelMesh(zero_group_size=2)
    for stage in (0, 1, 2, 3):
        for wire in (None, torch.bfloat16):
            for precision, kind in (
                ("bf16", torch.optim.AdamW),
                ("fp32", torch.optim.AdamW if wire else torch.optim.Adafactor),
            ):
                weights = []
                for each in (12, size):
                    model = Giant()
                    optim = ZeroOptimizer(
                        kind(model.parameters(), lr=0.01),
                        model,
                        mesh,
                        ZeroSettings(
                            stage=stage,
                            communication_dtype=wire,
                            bucket_size_in_m=each,
                            overlap_communication=stage != 1,
                        ),
                        precision=PrecisionPolicy(precision),
                    )
                    for step in range(2):
                        ids = torch.randint(
                            0, 1500 + 100 * step, (5, 9), generator=torch.Generator().manual_seed(10 * step + rank)
                        )
                        for scale in (1.0, 0.3):
                            with optim.no_sync() if scale == 1.0 and precision == "fp32" else nullcontext():
                                optim.backward(scale * model(ids.flip(0) if scale < 1 else ids).float().square().mean())
                        optim.step()
                        optim.zero_grad()
                    if each == size:
                        most = 2 * size * 1e6 + world_size * ALIGN
                        buffers = 6  # two pieces under way with what arrives, two that are summed over other groups
                        assert optim.reducer.pool.bytes <= buffers * most * (4 if wire is None else 2), (stage, wire)
                    with torch.no_grad():
                        weights.append([param.clone() for param in model.parameters()])
                    optim.release()
                for one, other in zip(*weights, strict=True):
                    assert torch.equal(one, other), (stage, wire, precision, kind)


def test_large_parameters_are_reduced_in_pieces() -> None:
    run_ranks(in_pieces, 4, timeout=100)


def test_memory_at_boost() -> None:
    run_ranks(memory_at_boost, 4, timeout=60)


def live_bytes() -> int:
    """Bytes of all tensors of this process: those made before the test are frozen out of the collector's sight."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_per_parameter(world_size: int) -> None:
    run_ranks(memory, world_size, timeout=60)


class Traffic:
    """Counts the bytes that this rank sends, by kind, as ring or pairwise algorithms move them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[str, float] = {"pairwise": 0.0, "all_reduce": 0.0, "small": 0.0}
        isend, all_reduce = dist.isend, dist.all_reduce

        def counted_isend(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            self.sent["pairwise"] += tensor.numel() * tensor.itemsize
            return isend(tensor, *args, **kwargs)

        def counted_all_reduce(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            ranks = dist.get_world_size(kwargs.get("group"))
            kind = "small" if tensor.dtype in (torch.uint8, torch.float64) else "all_reduce"
            self.sent[kind] += 2 * (ranks - 1) / ranks * tensor.numel() * tensor.itemsize
            return all_reduce(tensor, *args, **kwargs)

        monkeypatch.setattr(dist, "isend", counted_isend)
        monkeypatch.setattr(dist, "all_reduce", counted_all_reduce)


def traffic(rank: int, world_size: int) -> None:
    for size in (1, 2, 4):
        if size > world_size:
            continue
        mesh = ParallelMesh(zero_group_size=size)
        for stage in (1, 2):
            model = Wide()
            optim = ZeroOptimizer(
                torch.optim.AdamW(model.parameters()),
                model,
                mesh,
                ZeroSettings(stage=stage, max_norm=1.0, bucket_size_in_m=0.02),
                precision=PrecisionPolicy("bf16"),
            )
            with pytest.MonkeyPatch.context() as patch:
                counter = Traffic(patch)
                micros = 3
                for micro in range(micros):
                    optim.reducer.require_sync = micro == micros - 1
                    optim.backward(model(torch.randn(4, 256, dtype=torch.bfloat16)).float().pow(2).mean())
                optim.step()
            formula = closed_form_bytes(
                [bucket.plan for bucket in optim.buckets], world_size // size, gradient_itemsize=4
            )
            scatters = micros if stage == 2 else 1
            assert counter.sent["pairwise"] == scatters * formula["reduce_scatter"] + formula["all_gather"]
            assert counter.sent["all_reduce"] == formula["all_reduce"]
            assert counter.sent["small"] < 100  # the norm, and which parameters took part
            numel = sum(bucket.plan.numel for bucket in optim.buckets)
            assert formula["reduce_scatter"] + formula["all_gather"] == (size - 1) / size * numel * (4 + 2)
            optim.release()


def test_bytes_sent_equal_the_closed_form() -> None:
    run_ranks(traffic, 4, timeout=60)


def state_round_trip(rank: int, world_size: int) -> None:
    """Three steps, state out, two more; a second optimizer that takes the state in walks the same two, bit by bit."""
    share = SAMPLES // world_size
    mesh = ParallelMesh()

    def step(model: nn.Module, optim: ZeroOptimizer, number: int, sometimes: bool) -> None:
        optim.backward(loss_of(model, batch(number, 0)[rank * share : (rank + 1) * share], sometimes))
        optim.step()
        optim.zero_grad()

    for precision, stage in (("bf16", 1), ("fp32", 2), ("fp16", 1)):
        policy = PrecisionPolicy(precision)
        model = Model()
        optim = ZeroOptimizer(
            adamw(model), model, mesh, ZeroSettings(stage=stage, bucket_size_in_m=TINY_BUCKET), precision=policy
        )
        for number in range(3):
            step(model, optim, number, number != 1)
        saved = {
            shard.name: LoadedShard(
                shard.master.clone(),
                {k: v.clone() for k, v in shard.state.items()},
                {k: v.clone() for k, v in shard.extra.items()},
            )
            for shard in optim.shards()
        }
        whole = optim.state_dict()
        whole = {**whole, "shards": {name: vars(shard) for name, shard in saved.items()}}
        held = dict.fromkeys(saved, 0)
        for shard in optim.shards():
            held[shard.name] += shard.stop - shard.start
        totals = [None] * world_size
        dist.all_gather_object(totals, held)
        for name, param in model.named_parameters():
            if param.requires_grad:
                assert sum(total.get(name, 0) for total in totals) == param.numel(), (
                    f"{name} is not covered exactly once"
                )
        for number in range(3, 5):
            step(model, optim, number, True)
        other = Model()
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other.frozen.load_state_dict(model.frozen.state_dict())
        again = ZeroOptimizer(
            adamw(other), other, mesh, ZeroSettings(stage=stage, bucket_size_in_m=TINY_BUCKET), precision=policy
        )
        again.load_state_dict(whole)
        for number in range(3, 5):
            step(other, again, number, True)
        for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two), f"{precision}, stage {stage}: {name}"
        with pytest.raises(ValueError, match="does not fit"):
            again.load_shards({"nonsense": LoadedShard(None)})


def test_state_goes_out_and_in() -> None:
    run_ranks(state_round_trip, 2, timeout=60)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in model.parameters() if param.ndim == 2], lr=1e-2)


def whole_parameters(rank: int, world_size: int) -> None:
    """Muon iterates in bf16, where one flipped bit in the gradient's sum grows to 1e-2 of an update: layouts that add
    in the same order are compared bit by bit, one process within that noise."""
    plan = Plan(optimizer=muon, accumulation=2, sometimes=True)
    expected = reference(plan)
    one = train(plan, ParallelMesh(zero_group_size=1), rank, world_size, stage=0, explicit=True)
    for stage in (1, 2):
        trace = train(plan, ParallelMesh(), rank, world_size, stage=stage, explicit=True)
        if stage == 1:
            assert_bitwise(trace, one, f"Muon, stage {stage}")
        # the reference's are of all parameters, Muon has the matrices
        trace.norms, trace.grads = expected.norms, expected.grads
        assert_same(trace, expected, 2e-3, f"Muon, stage {stage}")


def test_muon_gets_whole_matrices() -> None:
    run_ranks(whole_parameters, 2, timeout=60)
