"""Structure of what units pass on: taken apart into tensors and numbers where a stage ends, built again behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...utils import pytree
from ...utils.tensors import map_tensors, tensors_of
from ..encoded_numbers import numbers_in
from .unread import watched


@dataclass(frozen=True)
class Template:
    """Structure of a gate's output: where its tensors sit, and the values of everything else."""

    spec: pytree.TreeSpec
    others: tuple[Any, ...]  # non-tensor leaves; `TENSOR` marks the place of a tensor
    written: tuple[bool, ...]  # per tensor, whether the model writes to it later on
    unread: frozenset[int] = frozenset()  # numbers of the tensors that nothing reads, which get no gradient
    shapes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)  # of the dry run's tensors

    def is_like(self, other: Template) -> bool:
        """Whether both are of the same structure. Numbers may be others."""
        return self.spec == other.spec and all(
            one == two if isinstance(one, str | torch.dtype | None) else _kind_of(one) is _kind_of(two)
            for one, two in zip(self.others, other.others, strict=True)
        )

    def take_apart(self, output: Any, name: str) -> list[torch.Tensor]:
        """Tensors of `output`, which must have this structure. Values other than tensors and numbers must be those of
        the dry run.
        """
        leaves, spec = pytree.tree_flatten(output)
        same = spec == self.spec and all(
            _kind_of(leaf) is _kind_of(other) for leaf, other in zip(leaves, self.others, strict=True)
        )
        if not same:
            raise ValueError(
                f"the output of {name} differs in structure from the dry run's ({spec} here, {self.spec} there), so "
                "the next pipeline stage could not rebuild it; pass a batch like the real ones as example_inputs, "
                "without output_attentions and the like"
            )
        for leaf, other in zip(leaves, self.others, strict=True):
            if isinstance(leaf, str | torch.dtype | None) and leaf != other:
                raise ValueError(
                    f"the output of {name} holds {leaf!r} where the dry run had {other!r}; between pipeline stages "
                    "travel tensors and numbers, and other values must be the same for every batch: return a number "
                    "instead"
                )
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Zeros in place of no gradient would have optimizers decay what made them.
        return [leaf.detach() if number in self.unread else leaf for number, leaf in enumerate(found)]

    def build(self, tensors: Sequence[torch.Tensor], numbers: Sequence[bool | int | float]) -> Any:
        """The output again."""
        remaining = iter(watched(tensor) if number in self.unread else tensor for number, tensor in enumerate(tensors))
        values = iter(numbers)
        leaves = [
            next(remaining) if other is TENSOR else next(values) if isinstance(other, bool | int | float) else other
            for other in self.others
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def apart(self, output: Any) -> Any:
        """`output` with copies of the tensors that the model, or a layer, writes to: what travels is what was returned,
        since every stage does again what the model does between its layers. Tensors that have arrived are leaves,
        besides, which autograd lets nobody write to.
        """
        if not any(self.written):
            return output
        written = iter(self.written)
        return map_tensors(lambda tensor: tensor.clone() if next(written, False) else tensor, output)

    def told_of(self, output: Any, name: str) -> list[bool | int | float]:
        """The numbers in `output`, and behind them the sizes of its tensors: a model that is told the height and width
        of a map counts on tensors of that size, also where it reads nothing else of them.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors_of(output)]
        if list(map(len, shapes)) != list(map(len, self.shapes)):
            raise ValueError(
                f"{name} returns tensors of the shapes {shapes} where those of the dry run were {list(self.shapes)}, "
                "so the next pipeline stage could not rebuild them; pass a batch like the real ones as example_inputs"
            )
        return [*numbers_in(output), *(size for shape in shapes for size in shape)]

    def shapes_in(self, told: Sequence[bool | int | float]) -> list[list[int]]:
        """Those of the tensors, of what `told_of` has told."""
        sizes = iter(told[self.num_numbers :])
        return [[int(next(sizes)) for _ in shape] for shape in self.shapes]

    @property
    def numbers(self) -> list[bool | int | float]:
        """Those of the dry run."""
        return numbers_in(self.others)

    @property
    def told(self) -> list[bool | int | float]:
        """Of the dry run, what `told_of` tells of units that return numbers; of others nothing."""
        return [*self.numbers, *(size for shape in self.shapes for size in shape)] if self.numbers else []

    @property
    def num_tensors(self) -> int:
        return sum(other is TENSOR for other in self.others)

    @property
    def num_numbers(self) -> int:
        return len(self.numbers)


def _kind_of(leaf: Any) -> type:
    """What may stand for what: a tensor for a tensor, a number for a number."""
    if leaf is TENSOR or isinstance(leaf, torch.Tensor):
        return torch.Tensor
    return float if isinstance(leaf, bool | int | float) else object


class _Tensor:
    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = _Tensor()
