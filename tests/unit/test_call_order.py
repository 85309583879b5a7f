"""Calls of ranks that do not fit together, by hand: each is told apart, and what fits is let pass."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.testing.call_order import CallOrderError, check_order
from shardwright.testing.calls import Call


def _sum(group: str = "all", ranks: tuple[int, ...] = (0, 1), size: int = 4, **other: Any) -> Call:
    sizes = ((size,), (size,))
    return Call("allreduce", group, ranks, sizes, ("float32",), (), None, 0, "here:1")._replace(**other)


def _message(kind: str, peer: int, size: int = 3, ranks: tuple[int, ...] = (0, 1)) -> Call:
    sizes: Any = ((size,), ()) if kind == "send" else ((), (size,))
    return Call(kind, "pair", ranks, sizes, ("float32",), (), peer, 0, "here:2")


def _send(peer: int, size: int = 3) -> Call:
    return _message("send", peer, size)


def _recv(peer: int, size: int = 3) -> Call:
    return _message("recv", peer, size)


def test_what_fits_is_let_pass() -> None:
    check_order([[[_sum()], [_send(1)], [_recv(1)]], [[_sum()], [_recv(0)], [_send(0)]]])
    check_order([[[_send(1), _recv(1)], [_sum()]], [[_recv(0), _send(0)], [_sum()]]])  # of a batch none is first
    uneven = {"kind": "alltoall_base", "details": ("output_split_sizes",)}
    check_order([[[_sum(size=3, **uneven)]], [[_sum(size=5, **uneven)]]])
    check_order([[[_sum("mine", (0,))], [_sum()]], [[_sum()]]])
    check_order([[], []])


def test_collectives_of_a_group_are_the_same_on_its_ranks() -> None:
    with pytest.raises(
        CallOrderError, match=r"collective 1 of a group .*\n  rank 0: allreduce of \[4\] float32 in group"
    ):
        check_order([[[_sum()], [_sum()]], [[_sum()], [_sum(size=5)]]])
    for other in ({"dtypes": ("bfloat16",)}, {"kind": "broadcast"}, {"details": (1,)}):
        with pytest.raises(CallOrderError, match="collective 0 of a group is not the same"):
            check_order([[[_sum()]], [[_sum(**other)]]])
    with pytest.raises(CallOrderError, match="rank 1 does not make allreduce"):
        check_order([[[_sum()], [_sum()]], [[_sum()]]])
    with pytest.raises(CallOrderError, match="rank 1 does not make allreduce"):
        check_order([[[_sum()]], []])


def test_messages_are_received_as_they_were_sent() -> None:
    with pytest.raises(CallOrderError, match="message 1 is not what is received"):
        check_order([[[_send(1, 3)], [_send(1, 4)]], [[_recv(0, 3)], [_recv(0, 5)]]])
    with pytest.raises(CallOrderError, match="no rank answers send"):
        check_order([[[_send(1)]], []])


def test_no_two_ranks_wait_for_each_other() -> None:
    with pytest.raises(
        CallOrderError, match=r"rank 0 is at send .* with rank 1 .*\n  rank 1 is at send .* with rank 0"
    ):
        check_order([[[_send(1)], [_recv(1)]], [[_send(0)], [_recv(0)]]])
    with pytest.raises(CallOrderError, match="orders that wait for one another"):
        check_order([[[_sum("a")], [_sum("b")]], [[_sum("b")], [_sum("a")]]])
    ab, bc, ca = (_sum(name, ranks) for name, ranks in (("ab", (0, 1)), ("bc", (1, 2)), ("ca", (0, 2))))
    with pytest.raises(CallOrderError, match="orders that wait for one another"):  # a ring of three communicators
        check_order([[[ab], [ca]], [[bc], [ab]], [[ca], [bc]]])
