"""Mixed precision for plugins that leave the number format to the booster."""

from __future__ import annotations

from ...booster import FP16MixedPrecision, MixedPrecision
from ...booster.mixed_precision import resolve


class FP16TorchMixedPrecision(FP16MixedPrecision):
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval)


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision | None:
    return resolve(mixed_precision_type)
