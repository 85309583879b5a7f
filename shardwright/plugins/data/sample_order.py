"""What makes the order of a sampler that was written for one process: the random numbers it draws.

Ranks must draw the same, and a resumed run must draw again what the interrupted pass had drawn:

    sampler has                           its order comes from                        noted for resuming
    a generator of its own                that, in rank 0's state on all ranks        the state when the pass began
    `generator=None`, several processes   a seed agreed on at boost, plus the epoch   the seed
    `generator=None`, one process         torch's global generator, as always         the seed that RandomSampler drew
    no `generator`                        whatever it does, alike on all ranks        the epoch, for its `set_epoch`
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import RandomSampler

_SEEDS = 2**63


class SampleOrder:
    """The order of `sampler` (or of the sampler inside of it); `seed` is what all ranks agreed on, None for one
    process alone.
    """

    def __init__(self, sampler: Any, seed: int | None) -> None:
        self._sampler = with_generator(sampler)
        self._with_epochs = next((part for part in inside(sampler) if hasattr(part, "set_epoch")), None)
        # of its own, whose state a position at the end of a pass has
        self.has_generator = self._sampler is not None and self._sampler.generator is not None
        self._seed = seed
        self._epoch = 0  # of the next pass
        self._running = 0
        self._drawn = False
        self._note: dict[str, Any] = {}  # how to draw the running pass's order again
        self._restore: dict[str, Any] = {}

    def announce(self) -> None:
        """A loader begins a pass; its order is drawn when the first sample is asked for."""
        self._running = self._next_epoch
        self._epoch = self._running + 1
        self._drawn = False

    def draw(self) -> None:
        """The sampler is about to make the order of the pass that was announced."""
        self._drawn = True
        restore, self._restore = self._restore, {}
        if self._sampler is None:
            self._note = {}
        elif self.has_generator:
            if "state" in restore:
                self._sampler.generator.set_state(_from_hex(restore["state"]))
            elif "seed" in restore:
                self._sampler.generator.manual_seed(restore["seed"])
            self._note = {"state": _to_hex(self._sampler.generator.get_state())}
        elif "state" in restore:
            self._sampler.generator = torch.Generator()
            self._sampler.generator.set_state(_from_hex(restore["state"]))
            self._note = restore
        else:
            self._draw_seeded(restore.get("seed"))

    def _draw_seeded(self, seed: int | None) -> None:
        if self._seed is not None:
            if seed is not None:
                self._seed = (seed - self._running) % _SEEDS
            seed = (self._seed + self._running) % _SEEDS
        elif seed is None:
            if type(self._sampler) is not RandomSampler:
                self._sampler.generator = None  # draws from the global generator in a way of its own
                self._note = {}
                return
            # the draw that RandomSampler would make now
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self._sampler.generator = torch.Generator().manual_seed(seed)
        self._note = {"seed": seed}

    @property
    def _next_epoch(self) -> int:
        return int(getattr(self._with_epochs, "epoch", self._epoch))

    def state(self, running: bool) -> dict[str, Any]:
        epoch = self._running if running else self._next_epoch
        if running and self._drawn:
            return {"epoch": epoch, "order": self._note}
        note = self._restore
        if not note and self.has_generator:
            note = {"state" if running else "state before": _to_hex(self._sampler.generator.get_state())}
        elif not note and self._sampler is not None and self._seed is not None:
            note = {"seed": (self._seed + epoch) % _SEEDS}
        return {"epoch": epoch, "order": note}

    def load(self, state: dict[str, Any], middle: bool) -> None:
        if middle and self._sampler is not None and not state["order"]:
            raise ValueError(
                f"the order in which {type(self._sampler).__name__} dealt the interrupted epoch was drawn from torch's "
                "global generator and cannot be drawn again: give the sampler a "
                "generator=torch.Generator().manual_seed(...), in the run that saves too"
            )
        self._epoch = int(state["epoch"])
        if self._with_epochs is not None:
            self._with_epochs.set_epoch(self._epoch)
        self._restore = dict(state["order"])
        before = self._restore.pop("state before", None)
        # now: a loader may draw from the generator too, before the sampler does
        if before is not None and self.has_generator:
            self._sampler.generator.set_state(_from_hex(before))


def inside(sampler: Any) -> list[Any]:
    """`sampler` and the samplers that it wraps, outermost first."""
    found: list[Any] = []
    while sampler is not None and all(sampler is not other for other in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def with_generator(sampler: Any) -> Any:
    """The one of `inside(sampler)` that draws from a torch.Generator; None where none says so."""
    for part in inside(sampler):
        generator = getattr(part, "generator", part)
        if generator is None or isinstance(generator, torch.Generator):
            return part
    return None


def _to_hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
