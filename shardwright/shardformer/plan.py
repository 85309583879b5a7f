"""Plans: which rule applies to which module of a model, and whether the rules cover it.

A plan is a dict from module-name patterns to styles. `*` stands for exactly one component of a name, and `name[Class]`
for one at which the module is of this class:

    Plan({"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"})

Where several rules match a name the last one counts, so a policy states its difference to a base family by adding
rules.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.nn as nn

from .adapters import parts_of, wrapped_parameters
from .layer.parallel_module import ParallelGroup
from .patterns import of_class, without_classes
from .regions import Region, find_regions, unclosed, undecided_parameters
from .side_by_side import proven
from .styles import NAMED, Decision, Site, Style
from .sum_at_exit import check_sums
from .ties import check_ties


@dataclass(frozen=True)
class Plan:
    """Rules and where they come from.

    rules       pattern -> style, or the name of a style that needs no arguments
    source      named in errors
    optional    patterns that may match nothing
    """

    rules: Mapping[str, Style | str]
    source: str = "plan"
    optional: frozenset[str] = field(default=frozenset())

    def extended(self, rules: Mapping[str, Style | str], optional: Iterable[str] = ()) -> Plan:
        """The same plan with `rules` after its own."""
        kept = {pattern: style for pattern, style in self.rules.items() if pattern not in rules}
        return Plan({**kept, **rules}, self.source, self.optional | set(optional))

    def without(self, patterns: Container[str]) -> Plan:
        kept = {pattern: style for pattern, style in self.rules.items() if pattern not in patterns}
        return Plan(kept, self.source, self.optional)

    def decide(self, model: nn.Module, parallel: ParallelGroup, complete: bool = True) -> list[Decision]:
        """Apply every rule on paper and verify the result; changes nothing.

        Raises ValueError naming module, rule and fix for unknown styles, rules that match nothing, styles that cannot
        convert what they match, contradicting layouts of tied parameters, and for what `check` finds.

        complete    whether to check; the caller does otherwise
        """
        styles = {pattern: self._style(pattern, style) for pattern, style in self.rules.items()}
        chosen = self._match(model, styles)
        decisions = []
        for name, pattern in chosen.items():
            site = _site(model, name, parallel)
            try:
                decisions += [
                    Decision(pattern, style, part, style.specs(part)) for style, part in parts_of(styles[pattern], site)
                ]
            except ValueError as error:
                raise ValueError(
                    f"{name} ({type(site.module).__name__}), rule {pattern!r} of {self.source}: {error}"
                ) from None
        check_ties(model, decisions, self.source)
        check_sums(decisions)
        decisions = proven(model, decisions)
        if complete:
            self.check(model, decisions, find_regions(model, decisions))
        return decisions

    def _style(self, pattern: str, style: Style | str) -> Style:
        if isinstance(style, Style):
            return style
        if style not in NAMED:
            raise ValueError(
                f"rule {pattern!r} of {self.source}: unknown style {style!r}; use one of {', '.join(NAMED)} or a Style"
            )
        return NAMED[style]

    def _match(self, model: nn.Module, styles: Mapping[str, Style]) -> dict[str, str]:
        """Name of every module and parameter that a rule names -> the rule that counts, in the order of the model."""
        wrapped = wrapped_parameters(model)
        modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
        names = list(dict.fromkeys([*modules, *_parameter_names(model), *wrapped]))
        shapes: dict[str, list[str]] = {}
        for name in names:
            shapes.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name), []).append(name)
        found: dict[str, str] = {}
        for pattern in styles:
            bare = without_classes(pattern)
            expression = re.compile(
                "".join(r"[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", bare))
            )
            exact = shapes.get(bare)
            hits = exact if exact is not None else [name for name in names if expression.fullmatch(name)]
            if bare != pattern:
                hits = list(filter(of_class(pattern, model), hits))
            if not hits and pattern not in self.optional:
                raise ValueError(
                    f"rule {pattern!r} of {self.source} matches no module or parameter of {type(model).__name__}; "
                    f"{_nearest(pattern, shapes)}correct the name or remove the rule"
                )
            found.update(dict.fromkeys((wrapped.get(hit, hit) for hit in hits), pattern))
        order = {name: index for index, name in enumerate(names)}
        return {name: found[name] for name in sorted(found, key=order.__getitem__)}

    def check(self, model: nn.Module, decisions: Sequence[Decision], regions: Sequence[Region]) -> None:
        """Raise ValueError for parameters that may meet sharded activations and are not decided on, and for regions
        that nothing closes.
        """
        if undecided := undecided_parameters(regions):
            shown = ", ".join(undecided[:5]) + (" ..." if len(undecided) > 5 else "")
            raise ValueError(
                f"{self.source} shards modules next to {shown} of {type(model).__name__} without deciding on these "
                "parameters; add a rule for each: 'replicated' if it is applied to whole activations, "
                "'partial_gradient' if it is applied to sharded ones, or a style that shards it"
            )
        if (region := unclosed(model, regions, decisions)) is not None:
            first = next(decision for decision in decisions if decision.site.module is region.opens[0])
            raise ValueError(
                f"{first.site.name} ({type(first.site.module).__name__}), rule {first.rule!r} of {self.source}: its "
                "output is this rank's features, and no linear near by takes these; add 'rowwise' for the linear that "
                "reads them, or make this one 'colwise_gathered' (Linear1D_Col(gather_output=True)), or 'vocab_head' "
                "if it makes logits"
            )


def _parameter_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _site(model: nn.Module, name: str, parallel: ParallelGroup) -> Site:
    parent, _, local = name.rpartition(".")
    owner = model.get_submodule(parent)
    above = model.get_submodule(parent.rpartition(".")[0]) if parent else None
    if local in owner._parameters:
        return Site(name, owner, local, owner, parallel, above)
    return Site(name, model.get_submodule(name), None, owner, parallel, above)


def _nearest(pattern: str, shapes: Mapping[str, list[str]]) -> str:
    """A hint: names that end like the pattern."""
    tail = pattern.rpartition(".")[2]
    close = [shape for shape in shapes if shape.rpartition(".")[2] == tail and shape]
    return f"there is {', '.join(repr(name) for name in close[:3])}; " if close else ""
