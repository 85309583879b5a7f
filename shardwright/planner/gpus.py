"""Kinds of GPU, as published by their makers: products without sparsity by precision, memory, links.

row = gpu("h100-pcie")               a name of the table
row = gpu("NVIDIA H100 PCIe")        or what a driver calls it, as torch.cuda.get_device_name prints it
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..utils.errors import one_of

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")


class Gpu(NamedTuple):
    """A kind.

    fp32, tf32, fp16, bf16, fp8   TFLOP/s of products, dense; 0: it has no units for them
    bandwidth   TB/s of its memory
    memory      GiB
    inside      GB/s that it sends to others of its node, one way: links of its own where all of a node are joined by
                them, else the slot
    between     GB/s that it sends to other nodes, as machines with it mostly have
    """

    name: str
    fp32: float
    tf32: float
    fp16: float
    bf16: float
    fp8: float
    bandwidth: float
    memory: float
    inside: float
    between: float

    def peak(self, precision: str) -> float:
        """Operations a second of products; ValueError where it has no units for them."""
        if precision not in PRECISIONS:
            raise one_of("precision", precision, list(PRECISIONS))
        found: float = getattr(self, precision)
        if not found:
            able = [each for each in PRECISIONS if getattr(self, each)]
            raise ValueError(
                f"precision={precision!r}: a {self.name} has no units for it; it computes {', '.join(able)}"
            )
        return found * 1e12


# Slots: 16 GB/s for PCIe 3, 32 for PCIe 4, 64 for PCIe 5. Bridges between two or four cards are not counted, since
# they do not join the cards of a node.
GPUS = {
    row.name: row
    for row in (
        # name, fp32, tf32, fp16, bf16, fp8, TB/s, GiB, GB/s inside, GB/s between
        Gpu("v100", 15.7, 0, 125, 0, 0, 0.9, 32, 150, 12.5),
        Gpu("v100-16", 15.7, 0, 125, 0, 0, 0.9, 16, 150, 12.5),
        Gpu("v100-pcie", 14, 0, 112, 0, 0, 0.9, 32, 16, 12.5),
        Gpu("v100-pcie-16", 14, 0, 112, 0, 0, 0.9, 16, 16, 12.5),
        Gpu("t4", 8.1, 0, 65, 0, 0, 0.32, 16, 16, 6.25),
        Gpu("a10", 31.2, 62.5, 125, 125, 0, 0.6, 24, 32, 12.5),
        Gpu("a10g", 35, 35, 70, 70, 0, 0.6, 24, 32, 12.5),
        Gpu("a100-40", 19.5, 156, 312, 312, 0, 1.555, 40, 300, 25),
        Gpu("a100-80", 19.5, 156, 312, 312, 0, 2.039, 80, 300, 25),
        Gpu("a100-pcie-40", 19.5, 156, 312, 312, 0, 1.555, 40, 32, 25),
        Gpu("a100-pcie-80", 19.5, 156, 312, 312, 0, 1.935, 80, 32, 25),
        Gpu("l4", 30.3, 60, 121, 121, 242, 0.3, 24, 32, 12.5),
        Gpu("l40s", 91.6, 183, 362, 362, 733, 0.864, 48, 32, 25),
        Gpu("rtx4090", 82.6, 82.6, 165.2, 165.2, 330.3, 1.008, 24, 32, 12.5),
        Gpu("h100", 67, 494.5, 989, 989, 1979, 3.35, 80, 450, 50),
        Gpu("h100-pcie", 51, 378, 756, 756, 1513, 2.0, 80, 64, 50),
        Gpu("h100-nvl", 60, 417.5, 835.5, 835.5, 1671, 3.9, 94, 64, 50),
        Gpu("h200", 67, 494.5, 989, 989, 1979, 4.8, 141, 450, 50),
        Gpu("h200-nvl", 60, 417.5, 835.5, 835.5, 1671, 4.8, 141, 64, 50),
        Gpu("b200", 75, 1125, 2250, 2250, 4500, 8.0, 180, 900, 50),
        Gpu("mi300x", 163.4, 653.7, 1307, 1307, 2615, 5.3, 192, 448, 50),
    )
}
_FORMS = ("pcie", "nvl")
_OTHERS = {"mig", "laptop", "super", "ti", "d", "max"}  # parts of devices, and chips that are called alike
_WORDS = re.compile(r"[a-z]+\d*[a-z]*|\d+[a-z]*")


def gpu(name: str) -> Gpu:
    """By a name of the table, or by what a driver says."""
    if name in GPUS:
        return GPUS[name]
    alike = _alike(name)
    sizes = [float(word.removesuffix("gb")) for word in _words(name) if re.fullmatch(r"\d+gb", word)]
    if not alike:
        raise one_of("gpu", name, list(GPUS))
    return _nearest(alike, sizes[0] if sizes else max(row.memory for row in alike))


def like_device(device: tuple[str, float] | None) -> tuple[str, float]:
    """The name in the table by the name and GiB that a driver tells ("NVIDIA H100 80GB HBM3", 79.1); and its GiB."""
    if device is None:
        raise ValueError(f"gpu=None: this process has no device to go by; give one of {', '.join(map(repr, GPUS))}")
    name, memory = device
    alike = _alike(name)
    if not alike:
        raise ValueError(
            f"gpu=None: nothing is known of {name!r}; give the one of {', '.join(map(repr, GPUS))} that is most "
            "like it, and gpu_memory"
        )
    return _nearest(alike, memory).name, memory


def _alike(name: str) -> list[Gpu]:
    """Rows of its chip and form; none where a word says that it is another one."""
    said = _words(name)
    if said & _OTHERS:
        return []
    if "rtx" in said:  # "GeForce RTX 4090": the number alone is no name
        said = {*said, *(f"rtx{word}" for word in said if word.isdigit())}
    form = {word for word in _FORMS if word in said}
    return [row for row in GPUS.values() if row.name.split("-")[0] in said and form == _form(row)]


def _form(row: Gpu) -> set[str]:
    return set(row.name.split("-")).intersection(_FORMS)


def _nearest(rows: list[Gpu], memory: float) -> Gpu:
    return min(rows, key=lambda row: abs(row.memory - memory))


def _words(name: str) -> set[str]:
    return set(_WORDS.findall(name.lower()))
