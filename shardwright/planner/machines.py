"""What devices and their links do, as published by their makers: peaks, of which products, kernels and collectives
reach the shares below. Estimates, until `Machine` is made of what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..utils.errors import one_of
from .operators import Operator

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """A device and its links.

    flops       of products in bf16, a second
    bandwidth   bytes of its memory, a second
    memory      bytes
    inside, between   bytes a second that a device sends within a node, and to other nodes
    per_node    devices of a node
    product, attention, moving, sending    shares of the peaks that are reached
    kernel      seconds that a call takes at least
    latency     seconds that a collective or message takes at least
    cores       that all ranks share, where they compute on a CPU; 0: each has a device of its own
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
    cores: int = 0

    @property
    def source(self) -> str:
        """Where its figures come from, in words."""
        return f"published peaks of {self.name}, and the shares of them that are assumed to be reached"

    def computing(self, calls: Mapping[Operator, float]) -> float:
        """Seconds of the kernels among them, for as many samples as they were counted for."""
        total = 0.0
        for (kind, flops, moved), count in calls.items():
            if kind in COMPUTED:
                rate = self.attention if kind == "attention" else self.product
                total += count * max(flops / (self.flops * rate), moved / (self.bandwidth * self.moving))
        return total

    def starting(self, calls: Mapping[Operator, float], samples: float = 1.0, backward: bool = False) -> float:
        """Seconds that starting them takes at least, beside `computing` for so many samples; here the same for all."""
        return self.kernel * sum(count for call, count in calls.items() if call.kind in COMPUTED)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {each.name: getattr(self, each.name) for each in fields(Machine)}

    def sent(self, size: float, ranks: int, reach: int) -> float:
        """Seconds in which each of `ranks` sends so many bytes to the next; they lie within `reach` devices."""
        if ranks < 2 or not size:
            return 0.0
        link = self.inside if reach <= self.per_node else self.between
        return size / (link * self.sending) + self.latency


COMPUTED = ("product", "attention", "other")

_TABLE = (
    # name, TFLOP/s bf16 dense, TB/s, GiB, GB/s inside, GB/s between
    ("v100", 125, 0.9, 32, 150, 12.5),
    ("a100-40", 312, 1.555, 40, 300, 25),
    ("a100-80", 312, 2.039, 80, 300, 25),
    ("h100", 989, 3.35, 80, 450, 50),
    ("h200", 989, 4.8, 141, 450, 50),
    ("b200", 2250, 8.0, 180, 900, 50),
    ("mi300x", 1307, 5.3, 192, 448, 50),
)
GPUS = {
    name: Machine(name, flops * 1e12, bandwidth * 1e12, memory * GIB, inside * 1e9, between * 1e9)
    for name, flops, bandwidth, memory, inside, between in _TABLE
}


def machine(
    name: str,
    memory: float | None = None,
    per_node: int | None = None,
    inside: float | None = None,
    between: float | None = None,
) -> Machine:
    """A published one, with what is known better: memory in GiB, links in GB/s."""
    if name not in GPUS:
        raise one_of("gpu", name, list(GPUS))
    for option, value in (
        ("gpu_memory", memory),
        ("gpus_per_node", per_node),
        ("inside_bandwidth", inside),
        ("between_bandwidth", between),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"{option}={value} must be above 0")
    found = GPUS[name]
    return replace(
        found,
        memory=found.memory if memory is None else memory * GIB,
        per_node=per_node or found.per_node,
        inside=found.inside if inside is None else inside * 1e9,
        between=found.between if between is None else between * 1e9,
    )


def like_device(device: tuple[str, float] | None) -> tuple[str, float]:
    """The published one, by the name and GiB that a driver tells ("NVIDIA H100 80GB HBM3", 79.1); and its GiB."""
    if device is None:
        raise ValueError(f"gpu=None: this process has no device to go by; give one of {', '.join(map(repr, GPUS))}")
    said, memory = device[0].lower(), device[1]
    alike = [name for name in GPUS if name.split("-")[0] in said.replace("-", " ").split()]
    if not alike:
        raise ValueError(
            f"gpu=None: nothing is known of {device[0]!r}; give the one of {', '.join(map(repr, GPUS))} that is most "
            "like it, and gpu_memory"
        )
    return min(alike, key=lambda name: abs(GPUS[name].memory / GIB - memory)), memory
