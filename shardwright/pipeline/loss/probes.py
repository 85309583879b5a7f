"""Microbatches on which a loss is tried without data, and what such runs have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...utils import pytree
from ..batch.microbatch import OTHER_ROWS, batch_size, find_batch_dim, items_of, like


def resized(microbatch: Any, samples: int, factor: int, shared: frozenset[Any]) -> Any:
    """The microbatch on the meta device, with `factor` times the samples."""
    entries = {}
    for key, value in items_of(microbatch):
        if isinstance(value, torch.Tensor):
            dim = None if key in shared else find_batch_dim(key, value, samples)
            shape = list(value.shape)
            if dim is not None and dim != OTHER_ROWS:
                shape[dim] *= factor
            value = torch.empty(shape, dtype=value.dtype, device="meta")
        entries[key] = value
    return like(microbatch, entries)


def without_images(inputs: Any) -> Any:
    """Images go into the model's first layers, and how large they are is not known without data."""
    if not isinstance(inputs, Mapping):
        return inputs
    samples = batch_size(inputs)
    return {key: value for key, value in inputs.items() if find_batch_dim(key, value, samples) != OTHER_ROWS}


def shapes_of(tree: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def sample_dims(once: Sequence[torch.Size], twice: Sequence[torch.Size]) -> tuple[int, ...]:
    """Of each tensor the dim that counts samples, found from its shapes for n and for 2 n of them: the one that has
    doubled, as dim 1 of [T, B, C]. () where that is dim 0 of all, or not known of some.
    """
    found = []
    for one, two in zip(once, twice, strict=False):
        grown = [dim for dim, (size, other) in enumerate(zip(one, two, strict=False)) if other != size]
        if len(one) != len(two) or len(grown) > 1 or any(two[dim] != 2 * one[dim] for dim in grown):
            return ()
        found.append(grown[0] if grown else 0)
    return tuple(found) if len(once) == len(twice) and any(found) else ()


def not_rows(once: Sequence[tuple[str, torch.Size]], twice: Sequence[tuple[str, torch.Size]]) -> frozenset[str]:
    """Of functions, and shapes of what they made of n and of 2 n samples: those that did not make rows, of which there
    are twice as many in tensors that are else alike. [n, n] becomes [2 n, 2 n].
    """
    first, second = _by_name(once), _by_name(twice)
    return frozenset(
        name
        for name in first.keys() | second.keys()
        if [(2 * one[0], *one[1:]) for one in first.get(name, [])] != [tuple(two) for two in second.get(name, [])]
    )


def _by_name(shapes: Sequence[tuple[str, torch.Size]]) -> dict[str, list[torch.Size]]:
    found: dict[str, list[torch.Size]] = {}
    for name, shape in shapes:
        found.setdefault(name, []).append(shape)
    return found


def difference(
    first: list[tuple[str, float, int | None]], second: list[tuple[str, float, int | None]]
) -> tuple[str | None, frozenset[int]]:
    """(the function that took a number in one run that it did not take in the other, places of numbers that len()
    returned)
    """
    if len(first) != len(second):
        known, others = {pair[:2] for pair in first}, {pair[:2] for pair in second}
        return next((pair[0] for pair in (*second, *first) if pair[:2] not in known & others), None), frozenset()
    lengths = set()
    for (name, value, place), (_, other, there) in zip(first, second, strict=True):
        if value != other and not (math.isnan(value) and math.isnan(other)):
            if place is None or place != there:
                return name, frozenset()
            lengths.add(place)
    return None, frozenset(lengths)


def steered(first: Mapping[tuple[str, float], bool], second: Mapping[tuple[str, float], bool]) -> str | None:
    """A function that a number, other than a size, tells to do something in one run alone."""
    for one, other in ((first, second), (second, first)):
        for (name, value), is_size in one.items():
            if not is_size and (name, value) not in other:
                return name
    return None
