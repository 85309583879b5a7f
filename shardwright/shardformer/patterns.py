"""Names of modules and parameters, and the patterns that rules are written in.

`*` stands for one component of a name, `name[Class]` for a component at which the module is of that class: layers of
one list may keep different mixers under one name.

    "model.layers.*.self_attn[MiniMaxLightningAttention].out_proj"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch.nn as nn

_CLASS = re.compile(r"\[(\w+)\]")


def shape_of_name(name: str) -> str:
    """The name with every number replaced by `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def starred(name: str, home: str) -> str:
    """The name with numbers replaced at or above `home`: what is below it keeps the numbers that tell its parts from
    one another (`net.0` and `net.2` of an `nn.Sequential`).
    """
    parts, above = name.split("."), len(home.split(".")) if home else 0
    return ".".join([*shape_of_name(".".join(parts[:above])).split(".")[: above or 0], *parts[above:]])


def home_of(names: Iterable[str]) -> str:
    """The smallest module around all of these."""
    parts = [name.split(".")[:-1] for name in names]
    alike = 0
    while all(len(part) > alike for part in parts) and len({part[alike] for part in parts}) == 1:
        alike += 1
    return ".".join(parts[0][:alike])


def any_of(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name is one that a pattern, without classes, stands for."""
    bare = {without_classes(pattern) for pattern in patterns}
    wild = [re.compile("[^.]+".join(map(re.escape, pattern.split("*")))) for pattern in bare if "*" in pattern]
    return lambda name: name in bare or any(expression.fullmatch(name) for expression in wild)


def without_classes(pattern: str) -> str:
    return _CLASS.sub("", pattern)


def patterns_of(model: nn.Module, name: str) -> set[str]:
    """What a rule for all that is named and made like this may be called: with no class, or with one."""
    parts = name.split(".") if name else []
    shape = shape_of_name(name).split(".")
    found = {".".join(shape)}
    for index in range(len(parts)):
        try:
            module = model.get_submodule(".".join(parts[: index + 1]))
        except AttributeError:  # a parameter
            break
        found.add(".".join([*shape[:index], f"{shape[index]}[{type(module).__name__}]", *shape[index + 1 :]]))
    return found


def modules_by_pattern(model: nn.Module) -> dict[str, nn.Module]:
    """The last module of those that a pattern stands for."""
    return {pattern: module for name, module in model.named_modules() for pattern in patterns_of(model, name)}


def of_class(pattern: str, model: nn.Module) -> Callable[[str], bool]:
    """Whether a name that a pattern without its classes matches has them too."""
    wanted = [(index, found[1]) for index, part in enumerate(pattern.split(".")) if (found := _CLASS.search(part))]

    def fits(name: str) -> bool:
        parts = name.split(".")
        return all(type(model.get_submodule(".".join(parts[: index + 1]))).__name__ == known for index, known in wanted)

    return fits


def with_class(pattern: str, around: str, bracketed: str) -> str:
    """`pattern`, in which `bracketed` stands in the place of `around` where it lies at or below that."""
    return bracketed + pattern[len(around) :] if f"{pattern}.".startswith(f"{around}.") else pattern


def classes_at(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Shape of a name -> names of the classes that modules there have, each with the first such module."""
    found: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        found.setdefault(shape_of_name(name), {}).setdefault(type(module).__name__, module)
    return found


def has_all(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether there are modules or parameters of these names below the module."""
    return all(part_of(module, name) is not None for name in names)


def part_of(module: nn.Module, name: str) -> nn.Module | nn.Parameter | None:
    owner_name, _, local = name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError:
        return None
    found = owner._parameters.get(local)
    return found if found is not None else owner._modules.get(local)
