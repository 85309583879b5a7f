"""Which of many proposals hold together, in few tries: all at once, then one of each kind, then halves of what fails.

N proposals that are right take one try, and each that is wrong some 2 log N more. Layers of one kind that go by names
of their own (`layer_a`, `layer_b`) are proposals each, of which the first one speaks for the others: what holds for it
is what they propose first, and where nothing does, they are not tried. So more layers do not mean more tries. What
comes out was tried as it is: no proposal is kept that was seen alone only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from .hf_plan import Proposal
from .rules import Rules

_LOGGER = logging.getLogger(__name__)
LONG = 30.0  # seconds after which a search says that it goes on, and each time they double

# Rules that passed, and more of them -> all of them, corrected where they had to be; None where they do not pass.
Try = Callable[[Rules, Rules], Rules | None]


class Search:
    """
    kept    proposals that hold, each with the rules of it that do
    failed  proposals of which no alternative does
    """

    def __init__(self, tried: Try, model: str, overlap: bool = True) -> None:
        """
        model       its name, for what is said when the search takes long
        overlap     whether proposals may name the same modules, where the last one counts; else the first that holds
                    has them, and others are passed over
        """
        self.kept: list[tuple[str, Rules]] = []
        self.failed: list[Proposal] = []
        self._tried, self._model, self._overlap = tried, model, overlap
        self._places: dict[str, int | None] = {}  # kind -> the alternative of it that holds, None where none does
        self._began, self._told, self._count = time.monotonic(), LONG, 0

    def grown(self, rules: Rules, proposals: Sequence[Proposal]) -> Rules:
        """`rules`, which pass, with those of the proposals that pass with them."""
        left = [each for each in proposals if each.alternatives]
        if not self._overlap:  # what may be done in one way alone is seldom wrong
            left.sort(key=lambda each: len(each.alternatives) > 1)
        kinds = {each.kind: each for each in reversed(left)}
        firsts = [each for each in left if not each.kind or kinds[each.kind] is each]
        if len(firsts) == len(left):
            return self._grown(rules, left, is_new=True)[0]
        more = self._first_rules(rules, left)
        if (together := self._passing(rules, more)) is not None:
            self._keep(left, more)
            return together
        rules, _ = self._grown(rules, firsts, is_new=True)
        others = [each for each in left if each.kind and kinds[each.kind] is not each]
        return self._grown(rules, list(self._as_known(others)), is_new=True)[0]

    def _as_known(self, proposals: Iterable[Proposal]) -> Iterator[Proposal]:
        """The proposals with what holds for their kind in front; those whose kind fails are among the failed now."""
        for each in proposals:
            place = self._places.get(each.kind, 0)
            if place is None:
                self.failed.append(each)
                continue
            if place < len(each.alternatives):
                each.alternatives.insert(0, each.alternatives.pop(place))
            yield each

    def _first_rules(self, rules: Rules, proposals: Iterable[Proposal]) -> Rules:
        """Of the proposals, what they propose first, but for those that are about modules with rules."""
        more: Rules = {}
        for each in proposals:
            if self._overlap or not {*rules, *more} & each.alternatives[0].keys():
                more |= each.alternatives[0]
        return more

    def _keep(self, proposals: Iterable[Proposal], rules: Rules) -> None:
        for each in proposals:
            first = each.alternatives[0]
            if self._overlap or all(rules.get(pattern) is style for pattern, style in first.items()):
                self.kept.append((each.name, first))
                self._places[each.kind] = 0

    def _grown(self, rules: Rules, proposals: Sequence[Proposal], is_new: bool) -> tuple[Rules, bool]:
        """Also whether all were kept as they were proposed first; `is_new` unless that is known to fail."""
        more = self._first_rules(rules, proposals)
        if not more:
            return rules, True
        if is_new and (together := self._passing(rules, more)) is not None:
            self._keep(proposals, more)
            return together, True
        if len(proposals) == 1:
            return self._other(rules, proposals[0]), False
        half = len(proposals) // 2
        rules, first = self._grown(rules, proposals[:half], True)
        rules, _ = self._grown(rules, proposals[half:], not first)  # else it is what has failed
        return rules, False

    def _other(self, rules: Rules, proposal: Proposal) -> Rules:
        for place, more in enumerate(proposal.alternatives[1:], 1):
            if (together := self._passing(rules, more)) is not None:
                self.kept.append((proposal.name, more))
                self._places[proposal.kind] = place
                return together
        self.failed.append(proposal)
        self._places[proposal.kind] = None
        return rules

    def _passing(self, rules: Rules, more: Rules) -> Rules | None:
        passed = self._tried(rules, more)
        self._count += 1
        seconds = time.monotonic() - self._began
        if seconds > self._told:
            self._told = 2 * seconds
            _LOGGER.warning(
                f"{self._model}: {self._count} plans were tried on a small copy in {seconds:.0f} s, and the search "
                "goes on; a policy of its own (custom_policy=, docs/adding_a_model.md) is used without one, a shorter "
                "batch in example_inputs= makes every try shorter"
            )
        return passed
