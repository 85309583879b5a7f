"""The policy for models without one of their own: transformers' plan where there is one, conventions of naming where
there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain

import torch.nn as nn

from ..adapters import without_adapters
from ..alternatives import further, is_computed_whole, of_vocabulary, tables
from ..apply import apply_plan
from ..conventions import conventional_regions
from ..fewer_sums import summed_together
from ..hf_plan import Proposal, plan_regions
from ..inferred import inferred_regions
from ..joined_rules import Findings, claimed_first, guess, joined
from ..patterns import modules_by_pattern, shape_of_name
from ..plan import Plan
from ..regions import find_regions, undecided_parameters
from ..rules import Rules
from ..search import Search
from ..self_check import SelfCheck
from ..small_copy import small_copies
from .base import Policy

_LOGGER = logging.getLogger(__name__)
ADVICE = (
    "`shardwright models` lists the models that are known to work, `shardwright models --check NAME` tries one here, "
    "and docs/adding_a_model.md says how to write a policy"
)


class GenericPolicy(Policy):
    """Collects regions, tries them together, then in parts, and keeps what gives the gradients of the whole model."""

    findings: Findings
    chosen_for = "has no policy here and could not be sharded"
    whole_model = False  # whether embeddings and heads are looked for too

    def plan(self) -> Plan:
        with without_adapters(self.model):  # rules for a linear hold for what adapts it
            return self._plan()

    def _plan(self) -> Plan:
        model = self.model
        regions = plan_regions(model)
        planned = {pattern for region in regions for pattern in region.alternatives[0]}
        regions += conventional_regions(model, planned)
        vocabulary = self.vocabulary_rules()
        modules = modules_by_pattern(model)
        for region in regions:
            region.alternatives = further(region, modules)
        regions = claimed_first(regions)
        regions += tables(model, vocabulary, {pattern for region in regions for pattern in region.alternatives[0]})
        if vocabulary:
            regions.append(Proposal("vocabulary", of_vocabulary(vocabulary)))
        self.findings = self._find(regions)
        if not self.findings.rules:
            raise ValueError(
                f"{type(self.model).__name__} {self.chosen_for}: {self.findings.why_none}; pass policy=, to the plugin "
                f"custom_policy=. {ADVICE}"
            )
        return Plan(self.findings.rules, type(self).__name__)

    def _find(self, regions: list[Proposal]) -> Findings:
        parallel = self.shard_config.parallel
        for region in regions:
            self._leave_out_impossible(region)
        best = self._completed(joined(region.alternatives[0] for region in regions if region.alternatives))
        example = self.shard_config.example_inputs
        copies = self._copies()
        smallest = next(copies, None)
        if parallel.is_played:
            return self._on_paper(best, smallest)
        if smallest is None:
            _LOGGER.warning(
                f"{type(self.model).__name__} has no policy of its own and no small copy to try its plan on: the plan "
                "is used untested"
            )
            return Findings(best)
        check = SelfCheck(chain([smallest], copies), parallel, example, self.whole_model)
        unseen = self._leave_out_unseen(check, regions)
        if unseen:
            best = self._completed(joined(region.alternatives[0] for region in regions if region.alternatives))
        if (rules := self._passing(check, best)) is not None:
            dropped = [region.name for region in regions if not region.alternatives]
            self._tell_of_computed_whole((each.name, each.alternatives[0]) for each in regions if each.alternatives)
            return self._finished(check, rules, dropped)
        search = self._search(check, overlap=True)
        rules = search.grown({}, regions)
        impossible = [region.name for region in regions if not region.alternatives]
        failed = [region.name for region in search.failed]
        if failed:
            _LOGGER.warning(
                f"{type(self.model).__name__}: {', '.join(failed)} stay whole on every rank, no way to shard them "
                "passed the check"
            )
        self._tell_of_computed_whole(search.kept)
        return self._finished(check, rules, [*impossible, *failed])

    def _copies(self) -> Iterator[nn.Module]:
        example = self.shard_config.example_inputs
        return small_copies(self.model, self.shard_config.parallel.size, keep_inputs=example is not None)

    def _finished(self, check: SelfCheck, rules: Rules, dropped: list[str]) -> Findings:
        """With what autograd finds for linears that nothing is known about, each found thing tried with all before."""
        inferred = inferred_regions(self.model, check, rules, self.whole_model)
        search = self._search(check, overlap=False)
        rules = search.grown(rules, inferred.regions)
        for region in search.failed:
            inferred.fails(region)
        self._tell_of_computed_whole(search.kept)
        left = inferred.left(self.model, rules)
        return Findings(self._with_fewer_sums(check.whole, rules, check), dropped, checked=True, left=left)

    def _search(self, check: SelfCheck, overlap: bool) -> Search:
        return Search(lambda known, more: self._together(check, known, more), type(self.model).__name__, overlap)

    def _together(self, check: SelfCheck, rules: Rules, more: Rules) -> Rules | None:
        """Both, with what was guessed for parameters before a rule for their module came."""
        named = {shape_of_name(pattern) for pattern in more}
        outdated = {name for name in self._guessed if shape_of_name(name).rpartition(".")[0] in named}
        kept = {pattern: style for pattern, style in rules.items() if pattern not in outdated}
        try:
            together = self._completed({**kept, **more})
        except ValueError:  # it does not fit the numbers
            return None
        return self._passing(check, together)

    def _on_paper(self, rules: Rules, smallest: nn.Module | None) -> Findings:
        """Where no rank can try anything: what would be tried first."""
        if smallest is None:
            return Findings(rules)
        try:
            check = SelfCheck([smallest], self.shard_config.parallel, self.shard_config.example_inputs)
        except Exception:  # no batch runs
            return Findings(self._with_fewer_sums(smallest, rules))
        inferred = inferred_regions(self.model, check, rules, self.whole_model)
        rules = self._completed(joined([rules, *(region.alternatives[0] for region in inferred.regions)]))
        return Findings(self._with_fewer_sums(smallest, rules), left=inferred.left(self.model, rules))

    def _tell_of_computed_whole(self, kept: Iterable[tuple[str, Rules]]) -> None:
        """Warn of regions whose parameters are dealt, but not what they compute."""
        names = [name for name, rules in kept if is_computed_whole(rules)]
        if names:
            _LOGGER.warning(
                f"{type(self.model).__name__}: {', '.join(names)} are computed whole on every rank from gathered "
                "activations, as no way to deal what is between their linears passed the check; their parameters are "
                "dealt"
            )

    def _with_fewer_sums(self, small: nn.Module, rules: Rules, check: SelfCheck | None = None) -> Rules:
        """The rules that passed, with those for what is reduced together where they pass too."""

        def added(model: nn.Module) -> Rules:
            return {**rules, **summed_together(model, rules, self.shard_config.parallel)}

        if len(added(small)) == len(rules):
            return rules
        if check is not None and check.failures(lambda copied: self._apply(copied, added(copied))) != []:
            return rules
        return added(self.model)

    def _leave_out_unseen(self, check: SelfCheck, regions: list[Proposal]) -> list[str]:
        """Keep regions whole that the batch of the check does not reach, as their rules would go untested; returns
        their names.
        """
        unseen = [
            region
            for region in regions
            if region.alternatives and not check.reaches(region.alternatives[0], shape_of_name)
        ]
        for region in unseen:
            region.alternatives = []
        names = [region.name for region in unseen]
        if names:
            _LOGGER.warning(
                f"{type(self.model).__name__}: {', '.join(names)} stay whole on every rank, since the batch that its "
                "plan was tried on does not reach them; pass example_inputs=, a batch like the real ones, to the "
                "plugin or to ShardConfig"
            )
        return names

    def _leave_out_impossible(self, region: Proposal) -> None:
        """Pass over what does not fit the numbers, which is no rule of the user's; a region of which nothing is left
        stays whole, and is told of.
        """
        possible: list[Rules] = []
        reason: ValueError | None = None
        for rules in region.alternatives:
            try:
                Plan(rules, type(self).__name__).decide(self.model, self.shard_config.parallel, complete=False)
                possible.append(rules)
            except ValueError as error:
                reason = error
        region.alternatives = possible
        if reason is not None and not possible:
            _LOGGER.warning(f"{type(self.model).__name__}: {region.name} stays whole on every rank: {reason}")

    def _passing(self, check: SelfCheck, rules: Rules) -> Rules | None:
        """The rules if they pass, with norms and the like that were guessed wrong corrected once."""
        for _ in range(2):
            failures = check.failures(lambda copied, rules=rules: self._apply(copied, rules))  # type: ignore[misc]
            if failures == []:
                return rules
            if failures is None:
                return None
            guesses = {shape_of_name(name) for name in failures} & self._guessed
            if not guesses:
                return None
            flipped = {"replicated": "partial_gradient", "partial_gradient": "replicated"}
            rules = {
                pattern: flipped.get(style, style) if pattern in guesses and isinstance(style, str) else style
                for pattern, style in rules.items()
            }
        return None

    def _apply(self, copied: nn.Module, rules: Rules) -> None:
        apply_plan(copied, Plan(rules, type(self).__name__), self.shard_config.parallel)

    def _completed(self, rules: Rules) -> Rules:
        """The rules and a guess for every parameter next to sharded ones that they leave undecided."""
        plan = Plan(rules, type(self).__name__)
        decisions = plan.decide(self.model, self.shard_config.parallel, complete=False)
        undecided = undecided_parameters(find_regions(self.model, decisions))
        decided = {shape_of_name(f"{each.site.name}.{name}") for each in decisions for name in each.specs}
        guessed = {}
        for name in undecided:
            shape = shape_of_name(name)  # a rule may name one of several that go by it
            guessed[name if shape in decided else shape] = guess(self.model, name, rules)
        self._guessed = getattr(self, "_guessed", set()) | set(guessed)
        return {**rules, **guessed}
