"""What devices and their links do, as published by their makers: peaks, of which products, kernels and collectives
reach the shares below. Estimates, until `Machine` is made of what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from .gpus import gpu
from .operators import Operator

GIB = 2**30
_LEAST, _MOST = 1e-9, 1e9  # of GiB, GB/s and devices: beyond, bytes and times are no longer finite


class Host(NamedTuple):
    """Seconds of a processor beside operators and what is sent, of one rank.

    collective   of a layer's tensor-parallel collective
    hooks        of a parameter's gradient, in a step, where other ranks have it too; below ZeRO-3 and in it
    replicas     of a step, where other ranks have the same parameters; the same two
    action       of a forward or a backward of a pipeline's stage
    waiting      of a layer's backward whose weight gradients wait
    again        of a layer that is recomputed, beside its forward: as a whole, and in part
    answered     of the clock, from a layer's tensor-parallel collective to its answer
    """

    collective: float = 0.0
    hooks: tuple[float, float] = (0.0, 0.0)
    replicas: tuple[float, float] = (0.0, 0.0)
    action: float = 0.0
    waiting: float = 0.0
    again: tuple[float, float] = (0.0, 0.0)
    answered: float = 0.0


@dataclass(frozen=True)
class Machine:
    """A device and its links.

    flops       of products in `precision`, a second
    bandwidth   bytes of its memory, a second
    memory      bytes
    inside, between   bytes a second that a device sends within a node, and to other nodes
    per_node    devices of a node
    product, attention, moving, sending    shares of the peaks that are reached
    kernel      seconds that a call takes at least
    latency     seconds that a collective or message takes at least
    precision   that products are computed in, one of `gpus.PRECISIONS`
    device      its type, which sizes of buckets and chunks go by
    cores       that all ranks share, where they compute on a CPU; 0: each has a device of its own
    around, step    seconds of the host for a microbatch and for a step, beside operators of layers, while which nothing
                    is computed
    host            more such seconds, where a processor computes: see `Host`
    waits           times that a step takes by the clock, over what its parts do: ranks wait for the slowest one
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    inside: float
    between: float
    per_node: int = 8
    product: float = 0.72
    attention: float = 0.5
    moving: float = 0.8
    sending: float = 0.75
    kernel: float = 4e-6
    latency: float = 1.2e-5
    precision: str = "bf16"
    device: str = "cuda"
    cores: int = 0
    around: float = 0.0
    step: float = 0.0
    host: Host = field(default_factory=Host)
    waits: float = 1.0

    @property
    def source(self) -> str:
        """Where its figures come from, in words."""
        return f"published peaks of {self.name}, and the shares of them that are assumed to be reached"

    def computing(self, calls: Mapping[Operator, float]) -> float:
        """Seconds of the kernels among them, for as many samples as they were counted for."""
        total = 0.0
        for (kind, flops, moved, _), count in calls.items():
            if kind in COMPUTED:
                rate = self.attention if kind == "attention" else self.product
                total += count * max(flops / (self.flops * rate), moved / (self.bandwidth * self.moving))
        return total

    def starting(self, calls: Mapping[Operator, float], backward: bool = False) -> float:
        """Seconds that starting them takes at least, beside `computing`; here the same for all."""
        return self.kernel * sum(count for call, count in calls.items() if call.kind in COMPUTED)

    def summing(self, size: float, tensors: float) -> float | None:
        """Seconds of adding gradients of so many bytes, in so many tensors, to their sums; None: what other operators
        take that move as much.
        """
        return None

    def stepping(self, moved: float, flops: float) -> float:
        """Seconds of an optimizer that moves so many bytes, and of its products."""
        return moved / (self.bandwidth * self.moving) + flops / (self.flops * self.product)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**{each.name: getattr(self, each.name) for each in fields(Machine)}, "host": self.host._asdict()}

    def sent(self, size: float, ranks: int, reach: int) -> float:
        """Seconds in which each of `ranks` sends so many bytes in a collective; they lie evenly within `reach` devices.

        Between nodes every device has a link of its own, and rings go through all of them: of ranks that share a node
        each sends but its part of what leaves the node.
        """
        if ranks < 2 or not size:
            return 0.0
        if reach <= self.per_node:
            link = self.inside
        else:
            link = min(self.inside, self.between * max(self.per_node * ranks // reach, 1))
        return size / (link * self.sending) + self.latency

    def busy(self, size: float, ranks: int) -> float:
        """Seconds of a rank's processor for a collective in which it sends so many bytes; a GPU's links need none."""
        return 0.0

    def message_busy(self, size: float) -> float:
        """Seconds of a rank's processor for sending or receiving so many bytes."""
        return 0.0

    def message(self, size: float, reach: int) -> float:
        """Seconds in which a device sends so many bytes to another one; both lie within `reach` devices."""
        link = self.inside if reach <= self.per_node else min(self.between, self.inside)
        return size / (link * self.sending) + self.latency if size else 0.0


COMPUTED = ("product", "attention", "other")


def machine(
    name: str,
    memory: float | None = None,
    per_node: int | None = None,
    inside: float | None = None,
    between: float | None = None,
    precision: str = "bf16",
) -> Machine:
    """A published one (see `gpus.gpu`), with what is known better: memory in GiB, links in GB/s. Products are in
    `precision`, one of `gpus.PRECISIONS`; those of fp32 in TF32 where torch is told so for this process
    (`torch.set_float32_matmul_precision`).
    """
    check_known(memory, per_node, inside, between)
    row = gpu(name)
    if precision == "fp32" and row.tf32 and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return Machine(
        row.name,
        row.peak(precision),
        row.bandwidth * 1e12,
        (row.memory if memory is None else memory) * GIB,
        (row.inside if inside is None else inside) * 1e9,
        (row.between if between is None else between) * 1e9,
        per_node or 8,
        precision=precision,
    )


def check_known(memory: float | None, per_node: int | None, inside: float | None, between: float | None) -> None:
    """ValueError where what is known better is nonsense."""
    for option, value in (
        ("gpu_memory", memory),
        ("gpus_per_node", per_node),
        ("inside_bandwidth", inside),
        ("between_bandwidth", between),
    ):
        if value is not None and not _LEAST <= value <= _MOST:
            raise ValueError(f"{option}={value} must be a finite number above 0, from {_LEAST:g} to {_MOST:g}")
