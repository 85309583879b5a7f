"""Dynamic loss scaling for fp16, kept on the device so that nobody waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_COUNT = 2**62


@dataclass(frozen=True)
class ScalerConfig:
    """How the loss scale moves.

    initial_scale    scale of the first step
    min_scale        the scale never falls below this
    growth_factor    multiplies the scale after `growth_interval` steps in a row without overflow
    backoff_factor   multiplies the scale when an overflow is not forgiven
    growth_interval  clean steps until the scale grows
    hysteresis       overflows until the scale falls: the first `hysteresis - 1` since the last growth only skip their
                     step
    max_scale        the scale never rises above this
    """

    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale", "max_scale"):
            value = getattr(self, name)
            if value > 0 and not _LEAST <= value <= _MOST:
                raise ValueError(
                    f"{name}={value!r} must be a number that fp32 can hold, from {_LEAST:.0e} to {_MOST:.0e}; losses "
                    "are multiplied by the scale"
                )
        for name in ("growth_interval", "hysteresis"):
            if getattr(self, name) > _COUNT:
                raise ValueError(f"{name}={getattr(self, name)} must be at most {_COUNT}; {_COUNT} is never reached")
        if not 0 < self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale={self.initial_scale}, min_scale={self.min_scale}, max_scale={self.max_scale}: "
                "they must be positive with min_scale <= initial_scale <= max_scale"
            )
        if self.growth_factor < 1:
            raise ValueError(f"growth_factor={self.growth_factor} must be at least 1 (2 is usual)")
        if not 0 < self.backoff_factor <= 1:
            raise ValueError(f"backoff_factor={self.backoff_factor} must be in (0, 1] (0.5 is usual)")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval={self.growth_interval} must be at least 1 step")
        if self.hysteresis < 1:
            raise ValueError(f"hysteresis={self.hysteresis} must be at least 1 overflow")


class DynamicScaler:
    """The loss scale and its counters, all 0-d tensors on `device`; `update` launches a handful of kernels and reads
    nothing back.
    """

    def __init__(self, config: ScalerConfig, device: torch.device) -> None:
        self.config = config
        self.scale = torch.tensor(config.initial_scale, dtype=torch.float32, device=device)
        self._clean = torch.zeros((), dtype=torch.int64, device=device)
        self._patience = torch.tensor(config.hysteresis, dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because of an overflow. Reads from the device."""
        return int(self._skipped)

    def can_fall(self) -> bool:
        """Whether another overflow would lower the scale, now or with the next ones. Where it would not, what is not
        finite is no overflow that a smaller scale mends. Reads from the device.
        """
        return self.config.backoff_factor < 1 and float(self.scale) > self.config.min_scale

    def update(self, found_inf: torch.Tensor) -> None:
        """Move the scale after a step; `found_inf` is 1.0 on every rank where any rank overflowed, else 0.0."""
        config, found = self.config, found_inf > 0
        self._skipped += found
        self._patience -= found.to(self._patience.dtype)
        lowered = (self.scale * config.backoff_factor).clamp(min=config.min_scale)
        self.scale = torch.where(found & (self._patience <= 0), lowered, self.scale)
        self._clean = torch.where(found, torch.zeros_like(self._clean), self._clean + 1)
        grow = self._clean >= config.growth_interval
        raised = (self.scale * config.growth_factor).clamp(max=config.max_scale)
        self.scale = torch.where(grow, raised, self.scale)
        self._clean = torch.where(grow, torch.zeros_like(self._clean), self._clean)
        self._patience = torch.where(grow, torch.full_like(self._patience, config.hysteresis), self._patience)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "clean": self._clean, "patience": self._patience, "skipped": self._skipped}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        device = self.scale.device
        self.scale = state["scale"].to(device, torch.float32).clone()
        self._clean, self._patience, self._skipped = (
            state[key].to(device).clone() for key in ("clean", "patience", "skipped")
        )
