"""Times of collectives and messages between ranks of this machine, for `calibration`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from ..comm.compat import all_gather_single, all_to_all_single, reduce_scatter_single
from .calibration import Point

Say = Callable[[str], None]
_ROUNDS = 20


def links(device: torch.device, powers: Sequence[int], say: Say) -> tuple[dict[str, list[Point]], list[Point]]:
    """Collectives by name, and messages; the same on every rank of the default group. `powers` of two are bytes of the
    largest tensor of a call.
    """
    world, found = dist.get_world_size(), dict[str, list[Point]]()
    for ranks in [2**power for power in range(1, world.bit_length()) if 2**power <= world]:
        group = dist.new_group(list(range(ranks)))
        say(f"collectives of {ranks} ranks")
        for name, call, sends in _CALLS:
            for power in powers:
                if dist.get_rank() < ranks:
                    elements = max(2**power // 4 // ranks, 1) * ranks
                    seconds, busy = _seconds(call(elements, ranks, device, group), group, device)
                    moved = round(4 * elements * sends * (ranks - 1) / ranks)
                    found.setdefault(name, []).append(Point(ranks, 0, moved, seconds, busy))
        dist.barrier()
    say("messages between two ranks")
    group = dist.new_group([0, 1])
    messages = []
    if dist.get_rank() < 2:
        for power in powers:
            tensor = torch.zeros(2**power // 4, device=device)
            messages.append(Point(2, 0, 2**power, *_seconds(_message(tensor, group), group, device)))
    dist.barrier()
    return found, messages


def _seconds(call: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """The least of several, each from when all ranks are there: what else keeps a rank busy is none of a link's. And
    what a rank's processor is busy with, on a CPU.
    """
    found, busy = [], []
    for _ in range(_ROUNDS):
        dist.barrier(group)
        _wait(device)
        began, worked = time.perf_counter(), time.process_time()
        call()
        _wait(device)
        found.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    slowest = torch.tensor([min(found), median(busy)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    seconds, processor = slowest.tolist()
    return max(seconds, 1e-9), max(processor, 1e-9) if device.type == "cpu" else 0.0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


Call = Callable[[int, int, torch.device, dist.ProcessGroup], Callable[[], object]]


def _all_reduce(elements: int, ranks: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], object]:
    tensor = torch.zeros(elements, device=device)
    return lambda: dist.all_reduce(tensor, group=group)


def _all_gather(elements: int, ranks: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], object]:
    whole, own = torch.zeros(elements, device=device), torch.zeros(elements // ranks, device=device)
    return lambda: all_gather_single(whole, own, group=group)


def _reduce_scatter(elements: int, ranks: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], object]:
    whole, own = torch.zeros(elements, device=device), torch.zeros(elements // ranks, device=device)
    return lambda: reduce_scatter_single(own, whole, group=group)


def _all_to_all(elements: int, ranks: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], object]:
    given, taken = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
    return lambda: all_to_all_single(taken, given, group=group)


# Name, what makes the call, and how often the largest tensor is sent, but for a rank's own part.
_CALLS: tuple[tuple[str, Call, int], ...] = (
    ("all_reduce", _all_reduce, 2),
    ("all_gather", _all_gather, 1),
    ("reduce_scatter", _reduce_scatter, 1),
    ("all_to_all", _all_to_all, 1),
)


def _message(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """There and back, of which one is half."""
    other = 1 - dist.get_rank()
    half = torch.split(tensor, max(tensor.numel() // 2, 1))[0]  # as much there and back together as a message has

    def there_and_back() -> None:
        if dist.get_rank() == 0:
            dist.send(half, other, group=group)
            dist.recv(half, other, group=group)
        else:
            dist.recv(half, other, group=group)
            dist.send(half, other, group=group)

    return there_and_back
