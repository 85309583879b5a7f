"""Units: the parameters that stage 3 gathers and frees together.

    layer            a repeated block of the model, with everything inside
    large module     one outside of the blocks that holds much (embeddings, a head), with the modules that share its
                     weights
    the rest         what is left, small: gathered for as long as the model runs

Pure facts about a module tree: nothing is communicated or changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from ..models.blocks import separable_blocks

_LARGE = 1 / 8  # of the largest unit


class ParamUnit(NamedTuple):
    """`params` are needed while one of `modules` runs; the last unit of a model is the rest, whose module is the
    model itself.
    """

    modules: tuple[nn.Module, ...]
    params: tuple[nn.Parameter, ...]


def find_param_units(model: nn.Module, sections: Mapping[nn.Parameter, int] | None = None) -> list[ParamUnit]:
    """All parameters of `model`, each in one unit, in the model's order; empty units are left out.

    sections  parts of the model that are run apart (pipeline chunks): no unit reaches over two of them. Parameters that
              are not listed count as held by other ranks
    """
    found: list[ParamUnit] = []
    taken = (
        set[nn.Parameter]() if sections is None else {param for param in model.parameters() if param not in sections}
    )
    for block in separable_blocks(model):
        params = tuple(param for param in block.parameters() if param not in taken)
        taken.update(params)
        if params:
            found.append(ParamUnit((block,), params))
    others: dict[frozenset[nn.Parameter], ParamUnit] = {}
    for unit in _by_shared_weights(model, taken):
        others[frozenset(unit.params)] = unit
    largest = max((_numel(unit) for unit in (*found, *others.values())), default=0)
    rest: list[nn.Parameter] = []
    for unit in others.values():
        if model not in unit.modules and _numel(unit) >= _LARGE * largest:
            found.append(unit)
        else:
            rest += unit.params
    order = {param: place for place, param in enumerate(model.parameters())}
    found.sort(key=lambda unit: order[unit.params[0]])
    if rest:
        found.append(ParamUnit((model,), tuple(sorted(rest, key=order.__getitem__))))
    return found if sections is None else [part for unit in found for part in _split(unit, sections)]


def _by_shared_weights(model: nn.Module, taken: set[nn.Parameter]) -> list[ParamUnit]:
    """Modules that hold parameters of their own, outside of the blocks; those that share one are one unit."""
    groups: list[tuple[list[nn.Module], dict[nn.Parameter, None]]] = []
    for module in model.modules():
        own = dict.fromkeys(param for param in module.parameters(recurse=False) if param not in taken)
        if not own:
            continue
        joined = [group for group in groups if not own.keys().isdisjoint(group[1])]
        groups = [group for group in groups if group not in joined]
        modules = [each for group in joined for each in group[0]] + [module]
        params = dict.fromkeys(param for group in joined for param in group[1]) | own
        groups.append((modules, params))
    return [ParamUnit(tuple(modules), tuple(params)) for modules, params in groups]


def _split(unit: ParamUnit, sections: Mapping[nn.Parameter, int]) -> list[ParamUnit]:
    parts: dict[int, list[nn.Parameter]] = {}
    for param in unit.params:
        parts.setdefault(sections[param], []).append(param)
    return [ParamUnit(unit.modules, tuple(params)) for params in parts.values()]


def _numel(unit: ParamUnit) -> int:
    return sum(param.numel() for param in unit.params)
