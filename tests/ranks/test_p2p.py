"""Messages between pipeline ranks: every structure and dtype, order, headers, and mismatches that must not hang."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.cluster import ParallelMesh
from shardwright.comm import p2p
from shardwright.comm.p2p import PipeComm
from shardwright.comm.payload import Header, TensorMeta, put_together, take_apart
from shardwright.testing import run_ranks

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]


def payload_of(seed: int, rows: int = 3) -> dict[str, Any]:
    """Every dtype, nested, with constants, zero sizes, no dims, non-contiguous tensors and tensors that require
    grad.
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, 4, generator=generator, dtype=torch.float64) * 3
    return {
        "dtypes": [base.abs().to(dtype) for dtype in DTYPES],
        "nested": {"none": None, 3: (base.t(), [base[:, ::2], "text", 2.5, True])},
        "empty": (torch.empty(0, 5), [], {}),
        "scalar": torch.tensor(float(seed)),
        "leaf": base.float().requires_grad_(),
        "inner": base.float().requires_grad_() * 2,
    }


def assert_same(received: Any, sent: Any) -> None:
    (header, tensors), (expected_header, expected) = take_apart(received), take_apart(sent)
    assert header == expected_header
    for tensor, other in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor, _bytes(other))
        assert tensor.is_leaf
        assert tensor.requires_grad == other.requires_grad


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def test_headers_describe_payloads() -> None:
    header, tensors = take_apart(payload_of(1))
    assert Header.from_bytes(header.to_bytes()) == header
    assert hash(header) == hash(take_apart(payload_of(2))[0])
    assert header != take_apart(payload_of(1, rows=4))[0]
    again = put_together(header, tensors)
    assert again["nested"][3][1][1:] == ["text", 2.5, True]
    with pytest.raises(ValueError, match=r"payload\['a'\]\[1\] is a set"):
        take_apart({"a": [1, {2}]})
    with pytest.raises(ValueError, match="keys of what a stage sends"):
        take_apart({(1, 2): 3})


def _exchange(rank: int, world_size: int) -> dict[str, int]:
    """Both ranks send first, in both directions, several stages between the same two ranks, shapes in turn."""
    assert dist.group.WORLD is not None
    comm = PipeComm(dist.group.WORLD)
    other = 1 - rank
    calls = {"isend": 0}
    original = dist.isend

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls["isend"] += 1
        return original(*args, **kwargs)

    dist.isend = counting
    per_step = []
    for step in range(3):
        before = calls["isend"]
        receives = []
        for microbatch in range(4):
            rows = 2 + microbatch % 2
            for stage in (0, 2):
                comm.isend(payload_of(100 * microbatch + stage, rows), other, ("F", stage, rows))
            comm.isend_tensors([torch.full((rows, 2), float(step))], other)
            receives.append([comm.irecv(other, ("F", stage, rows)) for stage in (0, 2)])
            receives[-1].append(comm.irecv_tensors([TensorMeta((rows, 2), torch.float32, False)], other))
        # Data may be taken in any order once receives are posted.
        for microbatch in (3, 0, 1, 2):
            rows = 2 + microbatch % 2
            first, second, bare = receives[microbatch]
            (tensor,) = bare.wait_tensors()
            assert torch.equal(tensor, torch.full((rows, 2), float(step)))
            assert_same(second.wait(), payload_of(100 * microbatch + 2, rows))
            assert_same(first.wait(), payload_of(100 * microbatch, rows))
        comm.flush()
        assert not any(comm._in_flight.values())
        per_step.append(calls["isend"] - before)
    dist.isend = original
    return {"first": per_step[0], "second": per_step[1], "third": per_step[2]}


def test_both_ranks_send_first() -> None:
    for counts in run_ranks(_exchange, 2, timeout=60):
        tensors = 8 * (len(DTYPES) + 2 + 3) + 4  # zero-size tensors are not sent
        assert counts["second"] == counts["third"] == tensors
        assert counts["first"] == tensors + 4 * 2  # a header, in two parts, for each of four keys


def _mismatch(rank: int, world_size: int) -> str:
    assert dist.group.WORLD is not None
    comm = PipeComm(dist.group.WORLD)
    message = ""
    if rank == 0:
        comm.isend(torch.zeros(2, 3), 1, "key")
        try:
            comm.isend(torch.zeros(2, 4), 1, "key")
        except ValueError as error:
            message = str(error)
        comm.isend(torch.ones(2, 3), 1, "key")  # the refused message has left no trace
        comm.flush()
    else:
        assert comm.irecv(0, "key").wait().sum() == 0
        assert comm.irecv(0, "key").wait().sum() == 6
    comm.forget_headers()
    if rank == 0:
        comm.isend({"now": torch.zeros(5)}, 1, "key")
        comm.isend(torch.zeros(1), 1, ("F", 1))
        comm.flush()
    else:
        assert comm.irecv(0, "key").wait()["now"].shape == (5,)
        try:
            comm.irecv(0, ("F", 2)).wait()
        except RuntimeError as error:
            message = str(error)
            dist.recv(torch.zeros(1), 0)
    return message


def test_mismatches_are_errors_with_both_sides_named() -> None:
    sender, receiver = run_ranks(_mismatch, 2, timeout=60)
    assert "[2, 4]" in sender
    assert "[2, 3]" in sender
    assert "enable_metadata_cache=False" in sender
    assert "('F', 2)" in receiver
    assert "('F', 1)" in receiver


def _long_run(rank: int, world_size: int) -> int:
    """Many messages to a receiver that lags behind: those in flight stay bounded."""
    assert dist.group.WORLD is not None
    comm = PipeComm(dist.group.WORLD)
    peak = 0
    for index in range(100):
        if rank == 0:
            comm.isend(torch.full((7,), float(index)), 1, "key")
            peak = max(peak, len(comm._in_flight[1]))
        else:
            assert comm.irecv(0, "key").wait()[3] == index
    comm.flush()
    return peak


def test_messages_in_flight_are_bounded() -> None:
    assert run_ranks(_long_run, 2, timeout=60)[0] <= 4


def _answered(rank: int, world_size: int) -> list[bool]:
    """Which of three messages still hold their data when the second has been answered."""
    mesh = ParallelMesh(pp=2)
    comm = PipeComm(mesh.group("pp"), mesh.message_groups(((0, 1), (1, 0))))
    comm.warm_up()
    metas = [TensorMeta((5,), torch.float32, False)]
    if rank == 1:
        for _ in range(2):
            comm.irecv_tensors(metas, 0).wait_tensors()
        comm.isend_tensors([torch.ones(5)], 0)
        dist.barrier()
        comm.irecv_tensors(metas, 0).wait_tensors()
        comm.flush()
        return []
    kept, messages = [], []
    for _ in range(3):
        tensor = torch.zeros(5)
        kept.append(weakref.ref(tensor.untyped_storage()))
        messages.append(comm.isend_tensors([tensor], 1))
    del tensor
    comm.irecv_tensors(metas, 1).wait_tensors()
    comm.has_arrived(messages[1], 1)
    held = [storage() is not None for storage in kept]
    dist.barrier()
    comm.flush()
    assert not any(storage() is not None for storage in kept)
    return held


def test_an_answer_lets_go_of_what_was_sent_before() -> None:
    assert run_ranks(_answered, 2, timeout=60)[0] == [False, False, True]


def _many_keys(rank: int, world_size: int) -> int:
    """More kinds of messages than headers are kept: both sides forget the same ones."""
    assert dist.group.WORLD is not None
    p2p.MAX_HEADERS = 3
    comm = PipeComm(dist.group.WORLD)
    exchanged = 0
    for index in range(60):
        size = 1 + (index * index) % 7
        if rank == 0:
            exchanged += comm._sent_headers.get(1, p2p._Edge()).find(size, None) is None
            comm.isend(torch.full((size,), float(index)), 1, size)
        else:
            assert comm.irecv(0, size).wait().tolist() == [index] * size
            assert len(comm._known_headers[0]._by_key) <= 3
    comm.flush()
    return exchanged


def test_both_sides_forget_the_same_headers() -> None:
    assert run_ranks(_many_keys, 2, timeout=60)[0] > 10
