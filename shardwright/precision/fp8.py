"""What is asked of products in 8 bits, and which devices have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..utils.argument_types import check_types
from ..utils.errors import nearest, one_of

GRANULARITIES, SCALINGS = ("tensorwise", "rowwise"), ("current", "delayed")
LEAST_CAPABILITY = (8, 9)
USUAL_HISTORY = 16
_OTHERWISE = (
    "use precision='bf16', or Fp8Options(emulate=True), which computes the same numbers on any device, slower than "
    "without fp8"
)


@dataclass(frozen=True)
class Fp8Options:
    """How linears compute in 8 bits (`precision="fp8"`, `use_fp8=True`); see `ops.fp8` for what the words mean.

    granularity   "tensorwise": one scale for each of activations, weights and gradients. "rowwise": one for each row of
                  both factors of a product, which outliers spoil less; on devices for parameters in bf16
    scaling       "current": scales follow the tensors. "delayed": the last steps, which saves the agreement of
                  tensor-parallel ranks at each product; tensorwise only
    amax_history  steps that delayed scaling looks back on; None: 16
    emulate       round to 8 bits and multiply in fp32: for devices that have no such products
    """

    granularity: str = "tensorwise"
    scaling: str = "current"
    amax_history: int | None = None
    emulate: bool = False

    def __post_init__(self) -> None:
        check_types(Fp8Options, vars(self))
        if self.granularity not in GRANULARITIES:
            raise one_of("fp8_options.granularity", self.granularity, GRANULARITIES)
        if self.scaling not in SCALINGS:
            raise one_of("fp8_options.scaling", self.scaling, SCALINGS)
        if self.is_delayed and self.granularity != "tensorwise":
            raise ValueError(
                "fp8_options.scaling='delayed' with granularity='rowwise': rows are tokens, and those of the next step "
                "are others, so that there is no history of them; use granularity='tensorwise', or scaling='current'"
            )
        if self.amax_history is not None and not self.is_delayed:
            raise ValueError(
                f"fp8_options.amax_history={self.amax_history} with scaling='current', which looks back on nothing; "
                "use scaling='delayed', or leave amax_history out"
            )
        if self.amax_history is not None and not 1 <= self.amax_history <= 4096:
            raise ValueError(
                f"fp8_options.amax_history={self.amax_history} must be 1 to 4096 steps, or None for {USUAL_HISTORY}"
            )

    @property
    def is_delayed(self) -> bool:
        return self.scaling == "delayed"

    @property
    def is_rowwise(self) -> bool:
        return self.granularity == "rowwise"

    @property
    def history(self) -> int:
        return self.amax_history or USUAL_HISTORY

    @classmethod
    def of(cls, given: Any) -> Fp8Options:
        """From what a plugin is given: options, a mapping of them (from a recipe), or None."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"fp8_options={given!r} must be Fp8Options, a mapping of its fields, or None")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(
                    f"fp8_options.{name}={given[name]!r} is not known; there are {', '.join(known)}"
                    f"{nearest(str(name), known)}"
                )
        return cls(**given)

    def __str__(self) -> str:
        words = [self.granularity, f"{self.scaling} scaling"]
        return ", ".join([*words, "emulated"] if self.emulate else words)


def why_not(device: torch.device) -> str | None:
    """What keeps `device` from products in 8 bits; None: nothing."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.version.hip is not None:
        return f"{torch.cuda.get_device_name(device)} is driven by ROCm, whose formats of 8 bits differ"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
    return None


def require_device(option: str, options: Fp8Options, device: torch.device) -> None:
    """ValueError where `device` cannot do what `option` (as text) asks."""
    if options.emulate:
        return
    missing = why_not(device)
    if missing is not None:
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise ValueError(
            f"{option}: {missing}, and products in 8 bits need an NVIDIA GPU of compute capability {least} or higher "
            f"(Ada, Hopper, Blackwell); {_OTHERWISE}"
        )
