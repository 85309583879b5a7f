"""Which unit a call of a module is, where a model applies the same layer several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class Applications:
    """Counts the calls of modules in one forward."""

    def __init__(self) -> None:
        self._done: Counter[str] = Counter()

    def start(self, before: Iterable[str] = ()) -> None:
        """A forward begins, behind the applications of the layers `before`."""
        self._done = Counter(before)

    def next(self, name: str, numbers: Sequence[int]) -> int:
        """The unit that the next call of module `name` is; `numbers` are those of all its calls."""
        if len(numbers) == 1:  # which may be called again, by a model that throws the first result away
            return numbers[0]
        number = self._done[name]
        if number >= len(numbers):
            raise ValueError(
                f"{name} is applied more than {len(numbers)} times on this batch, as often as in the dry run from "
                "which the pipeline stages were cut; pass a batch like this one as example_inputs= to the plugin"
            )
        self._done[name] += 1
        return numbers[number]
