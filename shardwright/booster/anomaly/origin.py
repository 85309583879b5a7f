"""Where numbers that are not finite come from, as it is told to other ranks and to the user."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

PARAMETER, BATCH, OPERATION, ELSEWHERE = "parameter", "batch", "operation", "elsewhere"
_SHOWN = 8  # rows


@dataclass(frozen=True)
class Origin:
    """
    kind        a parameter or buffer that held it before, an entry of the batch, an operator that made it of finite
                numbers, or something that is not this rank's to tell: what another rank sent, a kernel of its own
    name        of the parameter, entry or operator
    made        "nan in 3 of 64 elements"
    rows        of the microbatch, where some of them alone have it
    backward    whether the operator is one of the backward
    stage, microbatch  -1 where there are none
    module      "model.layers.1.mlp (LlamaMLP)"
    line        of Python, "modeling_llama.py:176 forward: x / y"
    of          what it was made of: "[2, 8] float32", and where -inf in these came from
    is_mild     -inf, or written down by the script as it is: what masks are made of, and no fault by itself
    order       on its rank
    """

    kind: str
    name: str
    made: str
    rows: tuple[int, ...] = ()
    backward: bool = False
    stage: int = -1
    microbatch: int = -1
    module: str = ""
    line: str = ""
    of: str = ""
    is_mild: bool = False
    order: int = 0

    @property
    def is_sure(self) -> bool:
        return self.kind != ELSEWHERE

    @property
    def is_unread(self) -> bool:
        """An entry of the batch that no microbatch is known to have read, as on ranks that do not hold the stage."""
        return self.kind == BATCH and self.microbatch < 0

    @property
    def comes_before(self) -> tuple[int, ...]:
        """Smallest first: what is sure, the forward, the microbatch, the stage."""
        stage = -self.stage if self.backward else self.stage
        return not self.is_sure, self.is_unread, self.backward, self.microbatch, stage, self.order

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Origin:
        fields = json.loads(text)
        return Origin(**{**fields, "rows": tuple(fields["rows"])})

    def sentence(self, who: str) -> str:
        """`who`: the rank and its coordinates."""
        rows = f", in row{'s' * (len(self.rows) > 1)} {_listed(self.rows)} of it" if self.rows else ""
        match self.kind:
            case "parameter":
                return f"{self.name} on {who} held {self.made} before this step"
            case "batch":
                of = f"; microbatch {self.microbatch} reads it" if self.microbatch >= 0 else ""
                return f"{self.name} of the batch that {who} was given has {self.made}{of}{rows}"
        if self.kind == ELSEWHERE:
            first = (
                f"{who} was handed {self.made}, by another rank or a kernel that is no operator of torch's, and read it"
            )
        else:
            first = f"{who} made {self.made}"
        way = "backward" if self.backward else "forward"
        at = [f"in the {way}"]
        if self.microbatch >= 0:
            at.append(f"of microbatch {self.microbatch}{rows}")
        elif rows:
            at.append(f"of the batch{rows}")
        if self.stage >= 0:
            at.append(f"on stage {self.stage}")
        where = f" {'of' if self.backward else 'in'} {self.module}" if self.module else ""
        line = f", at {self.line}" if self.line else ""
        of = f", of {self.of}" if self.of else ""
        return f"{first} in {self.name}{where} {' '.join(at)}{line}{of}"


def first_of(found: list[Origin | None]) -> tuple[int, Origin, list[int]] | None:
    """(rank, origin, other ranks with the same) of what came first; None if no rank has found anything."""
    there = [(rank, origin) for rank, origin in enumerate(found) if origin is not None]
    if not there:
        return None
    rank, origin = min(there, key=lambda each: (each[1].comes_before, each[0]))
    same = replace(origin, order=0, made="", of="")
    others = [r for r, each in there if r != rank and replace(each, order=0, made="", of="") == same]
    return rank, origin, others


def _listed(rows: tuple[int, ...]) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(map(str, rows[:_SHOWN])) + more
