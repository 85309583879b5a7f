"""Proposals from what feeds what (see `feeding`): linears and convolutions whose names say nothing become column and
row pairs.

What was found on a small copy is said in terms that hold for the model: features one by one need no number, heads need
the attribute that counts them, as the copy may have fewer. Attributes that an attention reads become this rank's where
the forward needs it, which is tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from ..spec import Piece, joined_pieces
from .attention import LocalHeads
from .channels import among_channels, channel_rules
from .feeding import Feeding, find_feedings, is_cut
from .hf_plan import Proposal
from .joined_rules import joined
from .layer.convolution import is_convolution
from .layer.linear import input_size, is_linear, output_size
from .mixer_styles import LocalSizes, number_at
from .patterns import any_of, home_of, shape_of_name, starred
from .rules import Rules
from .self_check import SelfCheck
from .splits import EVEN, Even, Packed, Pieces
from .styles import Column, HiddenEmbedding, Row, VocabEmbedding, VocabHead
from .torch_attention import TorchAttention

_WORTH = 0.01  # share of the parameters from which it pays to look for a way to deal linears, or to speak of one
_WORTH_GATHERING = 0.02  # the same for what is gathered at once
_UNKNOWN = "the batch that the plan was tried on does not reach it, or the forward reads its weight by itself"


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of features, in parts that lie one after the other, each of which has all blocks.

    count   how many, or where the module around keeps the number
    """

    count: int | str
    parts: int = 1

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        count = self.count if isinstance(self.count, int) else number_at(parent, self.count)
        part, rest = divmod(size, self.parts)
        if rest or part % count:
            raise ValueError(f"{size} features are not {self.parts} parts of {count} blocks")
        dealt = Even(part // count).pieces(part, ranks, parent)
        return joined_pieces(
            *(
                tuple(tuple(Piece(piece.start + start, piece.length) for piece in rank) for rank in dealt)
                for start in range(0, size, part)
            )
        )


class Inferred:
    """What the search came to.

    regions     proposals: pairs, then what is gathered at once
    """

    def __init__(self, regions: list[Proposal], reasons: Mapping[str, str]) -> None:
        self.regions = regions
        self._reasons = dict(reasons)  # by pattern

    def fails(self, region: Proposal) -> None:
        """No alternative of the region gave the gradients of the whole model."""
        patterns = chain.from_iterable(region.alternatives)
        self._reasons |= dict.fromkeys(patterns, f"{region.name} did not give the gradients of the whole model")

    def left(self, model: nn.Module, rules: Rules) -> dict[str, str]:
        """Pattern of what holds much and is dealt by no rule, linears first -> why, as far as it is known."""
        least = _WORTH * sum(param.numel() for param in model.parameters())
        sizes: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        why: dict[str, str] = {}
        deciding = {
            pattern: style for pattern, style in rules.items() if not isinstance(style, LocalHeads | LocalSizes)
        }
        taken, taken_around = _taken(rules), _taken(deciding)
        for name, param in model.named_parameters():
            owner = name.rpartition(".")[0]
            module = model.get_submodule(owner)
            if param.ndim < 2 or taken(name) or taken(owner) or any(map(taken_around, _around(owner))):
                continue
            shape = _above_starred(owner if is_linear(module) else name)
            sizes[not is_linear(module)][shape] += param.numel()
            why.setdefault(shape, self._reason(owner, module))
        found = [shape for kind in sizes for shape, size in kind.most_common() if size >= least]
        return {shape: why[shape] for shape in found}

    def _reason(self, name: str, module: nn.Module) -> str:
        known = next((why for pattern, why in self._reasons.items() if any_of([pattern])(name)), None)
        if is_convolution(module):
            return "its convolutions hold too little each, or no way to deal them gave the gradients of the whole model"
        if known is None and not is_linear(module):
            return f"no way to deal the parameters of {type(module).__name__} is known"
        return known or _UNKNOWN


def _around(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def inferred_regions(model: nn.Module, check: SelfCheck, rules: Rules, whole_model: bool) -> Inferred:
    """Proposals for the linears that `rules` say nothing about, the same on every rank. Collective where the rank has
    others.

    model           what the rules are for; `check` has a small copy of it and a batch
    whole_model     propose embeddings and the linears that make what the model returns, too
    """
    least = _WORTH * sum(param.numel() for param in model.parameters())
    taken = _taken(rules)
    mixing = [module for name, module in model.named_modules() if is_cut(module) and not taken(name)]
    if sum(module.get_parameter("weight").numel() for module in mixing) < least:
        return Inferred([], {})
    try:
        told = _search(model, check.whole, check.batch, rules, whole_model)
    except Exception:  # a forward that autograd cannot be asked about
        told = ([], {})
    if not check.parallel.is_played:
        said = [told]
        dist.broadcast_object_list(said, group=check.parallel.group, group_src=0)
        (told,) = said
    return Inferred(*told)


def _taken(rules: Rules) -> Callable[[str], bool]:
    """Whether a rule deals the module of a name."""
    dealt = any_of(pattern for pattern, style in rules.items() if style != "replicated")
    attention = any_of(pattern for pattern, style in rules.items() if isinstance(style, TorchAttention))
    return lambda name: dealt(name) or dealt(shape_of_name(name)) or attention(name.rpartition(".")[0])


def _search(
    model: nn.Module, small: nn.Module, batch: Any, rules: Rules, whole_model: bool
) -> tuple[list[Proposal], dict[str, str]]:
    found = find_feedings(small, batch, _taken(rules))
    known: dict[str, Proposal] = {}
    patterns: set[str] = set()
    for feeding in found.feedings:
        proposal = _Feeding(feeding, small, model).proposal()
        if proposal is None or proposal.name in known:
            continue
        own = proposal.alternatives[0].keys()
        if not patterns & own:  # else layers that go by one name are not wired alike
            known[proposal.name] = proposal
            patterns |= own
    regions = list(known.values())
    if whole_model:
        paired = {name for feeding in found.feedings if feeding.between for name in feeding.rows}
        regions += _ends(model, [name for name in found.outputs if name not in paired])
    taken = _taken({**rules, **joined(each.alternatives[0] for each in regions)})
    regions += _alone(model, [name for name in found.reasons if name not in found.outputs], taken)
    taken = _taken({**rules, **joined(each.alternatives[0] for each in regions)})
    regions += among_channels(model, found.of_pixels, taken, least=_WORTH)
    reasons = {_above_starred(name): why for name, why in reversed(found.reasons.items())}
    return regions, reasons


def _ends(model: nn.Module, outputs: Iterable[str]) -> Iterator[Proposal]:
    """Large embeddings, and large linears that make what the model returns; what shares a weight goes together."""
    least = _WORTH * sum(param.numel() for param in model.parameters())
    of_weight: dict[int, Rules] = {}
    shapes = {_above_starred(name) for name in outputs}
    for name, module in model.named_modules():
        shape = _above_starred(name)
        if isinstance(module, nn.Embedding) and module.weight.numel() >= least:
            of_weight.setdefault(id(module.weight), {})[shape] = VocabEmbedding()
        elif is_linear(module) and shape in shapes and input_size(module) * output_size(module) >= least:
            of_weight.setdefault(id(module.weight), {})[shape] = VocabHead(gather_output=True)
    for rules in of_weight.values():
        yield Proposal(", ".join(rules), [rules])


def _above_starred(name: str) -> str:
    """Layers by one name, whatever their number, and parts of an `nn.Sequential` by their own."""
    return starred(name, name.rpartition(".")[0])


def _alone(model: nn.Module, names: Iterable[str], taken: Callable[[str], bool]) -> Iterator[Proposal]:
    """Large linears of these names that stand before and behind the layers, and large embeddings there: they go with no
    other, so their outputs are gathered. Not those of layers, whose tokens may be dealt to the same ranks.
    """
    least = _WORTH_GATHERING * sum(param.numel() for param in model.parameters())
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if (
            name != _above_starred(name)
            or taken(name)
            or not isinstance(weight, nn.Parameter)
            or weight.numel() < least
        ):
            continue
        if sum(getattr(other, "weight", None) is weight for other in model.modules()) > 1:
            continue
        if isinstance(module, nn.Embedding):
            yield Proposal(name, [{name: HiddenEmbedding(gather_output=True)}])
        elif is_linear(module) and name in names:
            yield Proposal(name, [{name: "colwise_gathered"}])


@dataclass(frozen=True)
class _Feeding:
    """One that was found on `small`, to be said of `model`."""

    feeding: Feeding
    small: nn.Module
    model: nn.Module

    @property
    def around(self) -> str:
        """The module around all columns, by its name in the copy."""
        return home_of(self.feeding.columns)

    @property
    def label(self) -> str:
        prefix = f"{self.around}." if self.around else ""
        names = [
            ", ".join(name.removeprefix(prefix) for name in found)
            for found in (self.feeding.columns, self.feeding.rows)
        ]
        return f"{shape_of_name(self.around)} ({' -> '.join(names)})".strip()

    @property
    def kind(self) -> str:
        """The same for layers of one class that go by names of their own."""
        prefix = f"{self.around}." if self.around else ""
        names = (*self.feeding.columns, *self.feeding.rows)
        sizes = {name.removeprefix(prefix): self._sizes(name) for name in names}
        return f"{type(self.small.get_submodule(self.around)).__name__}, {self.feeding.blocks}: {sizes}"

    def proposal(self) -> Proposal | None:
        """None where it cannot be said for the model."""
        if any(self._is_of_other_number(name) for name in (*self.feeding.columns, *self.feeding.rows)):
            return None
        if any(not is_linear(self.small.get_submodule(name)) for name in self.feeding.patterns):
            alternatives = channel_rules(self.feeding, self.small, self.model, self._is_literal())
            return Proposal(self.label, alternatives, self.kind) if alternatives else None
        by_feature = all(self._sizes(row)[0] == self.feeding.blocks for row in self.feeding.rows)
        alternatives = self._by_feature() if by_feature else self._by_blocks()
        return Proposal(self.label, alternatives, self.kind) if alternatives else None

    def _by_feature(self) -> list[Rules]:
        called = self.feeding.patterns
        rules: Rules = {called[row]: Row(EVEN) for row in self.feeding.rows}
        for column, parts in self.feeding.columns.items():
            granule = self._sizes(column)[1] // (parts * self.feeding.blocks)
            if granule > 1 and parts > 1:
                return []
            rules[called[column]] = Column(Packed(parts) if parts > 1 else Even(granule))
        return [rules]

    def _by_blocks(self) -> list[Rules]:
        called = self.feeding.patterns
        whole: Rules = {called[row]: "rowwise_split" for row in self.feeding.rows}
        whole |= {called[column]: "colwise_gathered" for column in self.feeding.columns}
        count = self._count()
        if count is None:
            return [whole]
        rules: Rules = {called[row]: Row(Blocks(count)) for row in self.feeding.rows}
        columns = self.feeding.columns.items()
        rules |= {called[column]: Column(Blocks(count, parts)) for column, parts in columns}
        if isinstance(count, int) or not self.around:
            return [rules, whole]
        widths = {self._sizes(column)[1] // parts for column, parts in columns}
        parent = self.small.get_submodule(self.around)
        heads = [name for name in _numbers(parent, lambda value: value % self.feeding.blocks == 0) if _counts(name)]
        sizes = [name for name in _numbers(parent, widths.__contains__) if name not in heads]
        shape = shape_of_name(self.around)
        local = [{shape: LocalSizes(count, tuple(own)), **rules} for own in (heads, [*heads, *sizes])]
        return [rules, *local, whole]

    def _count(self) -> int | str | None:
        """The number of blocks, or the attribute that holds it; None where neither is known."""
        literal = self._is_literal()
        if all(name.rpartition(".")[0] == self.around for name in (*self.feeding.columns, *self.feeding.rows)):
            parent = self.small.get_submodule(self.around)
            names = [name for name in _numbers(parent, self.feeding.blocks.__eq__) if _counts(name)]
            if not literal:  # a number that is the same by chance may be another one in the model
                names = [name for name in names if "head" in name or "group" in name]
            real = next(iter(self._of_model([self.around]).values()), parent)
            if names and len({getattr(real, name, None) for name in names}) == 1:
                return names[0]
        return self.feeding.blocks if literal else None

    def _is_literal(self) -> bool:
        """Whether what is wired so in the model has the sizes that it has in the copy."""
        return all(
            self._sizes(name) == (input_size(module), output_size(module))
            for name, module in self._of_model((*self.feeding.columns, *self.feeding.rows)).items()
        )

    def _sizes(self, name: str) -> tuple[int, int]:
        module = self.small.get_submodule(name)
        return input_size(module), output_size(module)

    def _of_model(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Name in the copy -> a module of the model that goes by the same pattern."""
        home = home_of((*self.feeding.columns, *self.feeding.rows))
        modules = {starred(name, home): module for name, module in self.model.named_modules()}
        return {name: modules[starred(name, home)] for name in names if starred(name, home) in modules}

    def _is_of_other_number(self, name: str) -> bool:
        """Whether a number in what the linear is called is that of a layer which may be another one in the model, as
        the copy has fewer of them.
        """
        parts = name.split(".")
        kept = [place for place, part in enumerate(self.feeding.patterns[name].split(".")) if part.isdigit()]
        for place in kept:
            layers = self.small.get_submodule(".".join(parts[:place]))
            real = next(iter(self._of_model([".".join(parts[:place])]).values()), None)
            if isinstance(layers, nn.ModuleList) and (not isinstance(real, nn.ModuleList) or len(real) != len(layers)):
                return True
        return False


def _numbers(module: nn.Module, fits: Callable[[int], bool]) -> Iterator[str]:
    """Attributes of the module that are whole numbers above 1 which fit."""
    for name, value in vars(module).items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and fits(value):
            yield name


def _counts(name: str) -> bool:
    """Whether an attribute of this name may be a number of heads or of groups of them, and not of features in one."""
    words = name.lower()
    return not any(word in words for word in ("dim", "size", "width", "layer", "idx", "index", "embd"))
