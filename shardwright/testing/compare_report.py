"""What a comparison found, worst first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_SHOWN = 12  # differences in the text of an error


@dataclass(frozen=True)
class Difference:
    """One compared tensor, or one parameter that could not be compared.

    kind        "loss", "gradient", "weight", or "parameter" for one that has no counterpart
    max_abs     largest absolute error
    scale       what the error is measured against (see `compare`)
    allowed     largest relative error, max_abs / scale, that passes
    note        why it could not be compared, or what is wrong besides the numbers
    """

    kind: str
    name: str
    max_abs: float = math.inf
    scale: float = 1.0
    allowed: float = 0.0
    note: str = ""

    @property
    def relative(self) -> float:
        return self.max_abs / self.scale if self.max_abs else 0.0

    @property
    def failed(self) -> bool:
        return bool(self.note) or not self.relative <= self.allowed  # a NaN fails

    def __str__(self) -> str:
        if math.isinf(self.max_abs):
            return f"{self.kind} {self.name}: {self.note or 'infinite error'}"
        numbers = (
            f"max error {self.max_abs:.3e}, relative {self.relative:.3e} of scale {self.scale:.3e} "
            f"(allowed {self.allowed:.0e})"
        )
        return f"{self.kind} {self.name}: {self.note + ', ' if self.note else ''}{numbers}"


@dataclass
class Report:
    """All differences of one comparison and the names of the reference's parameters that were compared."""

    differences: list[Difference] = field(default_factory=list)
    held: set[str] = field(default_factory=set)

    def add(self, difference: Difference) -> None:
        self.differences.append(difference)

    @property
    def failures(self) -> list[Difference]:
        return [difference for difference in self.worst() if difference.failed]

    def worst(self, count: int | None = None) -> list[Difference]:
        """Differences, those that could not be compared first, then by relative error against what is allowed."""

        def badness(difference: Difference) -> float:
            if math.isnan(difference.relative):
                return math.inf
            return difference.relative / difference.allowed if difference.allowed else difference.relative

        return sorted(self.differences, key=lambda difference: (difference.failed, badness(difference)), reverse=True)[
            :count
        ]

    def check(self) -> None:
        """Raise `MismatchError` if anything failed, or if nothing was compared."""
        if not self.differences:
            raise MismatchError(
                "nothing was compared: this rank holds no parameter of the model and no losses were given"
            )
        if self.failures:
            raise MismatchError(str(self))

    def __str__(self) -> str:
        failures = self.failures
        if not failures:
            worst = f"; the worst: {self.worst(1)[0]}" if self.differences else ""
            return f"all {len(self.differences)} comparisons agree{worst}"
        lines = [f"{len(failures)} of {len(self.differences)} comparisons differ"]
        lines += [f"  {difference}" for difference in failures[:_SHOWN]]
        if len(failures) > _SHOWN:
            lines.append(f"  and {len(failures) - _SHOWN} more")
        return "\n".join(lines)


class MismatchError(AssertionError):
    """The parallel model differs from the reference."""
