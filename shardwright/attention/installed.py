"""Which packages and parts of torch attention can be computed with here."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

FLASH_2, FLASH_3, FLASH_4, XFORMERS, TRITON = "flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "triton"
VARLEN, VARLEN_WINDOWS = "varlen", "varlen windows"

INSTALL = {
    FLASH_2: "pip install flash-attn --no-build-isolation",
    FLASH_3: "build the hopper/ folder of github.com/Dao-AILab/flash-attention, or install its wheel for your torch",
    FLASH_4: "pip install --pre flash-attn-4",
    XFORMERS: "pip install xformers",
    TRITON: "pip install triton",
    VARLEN: "install a torch that has torch.nn.attention.varlen",
}
# What is imported of a package. `import flash_attn` alone says nothing: generation 4 brings a folder of that name too.
_IMPORTED = {
    FLASH_2: "flash_attn.flash_attn_interface",
    FLASH_3: "flash_attn_interface",
    FLASH_4: "flash_attn.cute",
    XFORMERS: "xformers.ops",
}


@dataclass(frozen=True)
class Installed:
    """versions    of the packages above that work here
    broken      why others, which are installed, do not
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)

    def has(self, package: str, least: tuple[int, ...]) -> bool:
        """Whether a package that works here is at least of this version."""
        numbers = tuple(int(number) for number in re.findall(r"\d+", self.versions[package])[:3])
        return numbers >= least

    def missing(self, package: str) -> str | None:
        """Why a package cannot be used, with what would help; None where it can."""
        if package in self.versions:
            return None
        if package in self.broken:
            return f"{package} is installed, but {self.broken[package]}"
        return f"{package} is not installed: {INSTALL[package]}"


@cache
def find_installed() -> Installed:
    """Packages are imported only where there is a GPU for them: nothing else shows that a build fits this torch."""
    versions: dict[str, str] = {}
    broken: dict[str, str] = {}
    for package in (FLASH_2, FLASH_3, FLASH_4, XFORMERS, TRITON):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        module = _IMPORTED.get(package)
        if module is None or not torch.cuda.is_available():
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a library that does not load raises what it likes
            del versions[package]
            broken[package] = f"import {module} fails with {type(error).__name__}: {str(error).splitlines()[:1]}"
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        versions[VARLEN] = torch.__version__
        if "window_size" in inspect.signature(varlen).parameters:
            versions[VARLEN_WINDOWS] = torch.__version__
    return Installed(versions, broken)
