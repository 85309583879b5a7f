"""Finding the repeated blocks of a model without knowing its family."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

_MARKER = "GradientCheckpointingLayer"
Is = Callable[[nn.Module], bool]


def declared_by(model: nn.Module) -> Is:
    """Whether a module is a layer by the model's own account: of a class that it names in `_no_split_modules`, or that
    transformers marks by a base class.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())

    def is_layer(module: nn.Module) -> bool:
        kind = type(module)
        return kind.__name__ in named or any(base.__name__ == _MARKER for base in kind.__mro__)

    return is_layer


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated layers of `model`, outermost only, in module order: the units of wrapping and checkpointing.

    A model that declares none has its blocks in the `ModuleList`s whose two or more children share a class.
    """
    blocks = list(_outermost(model, declared_by(model)))
    if blocks:
        return blocks
    repeated = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) >= 2 and len({type(child) for child in module}) == 1
        for child in module
        if any(True for _ in child.parameters())
    }
    return list(_outermost(model, lambda module: id(module) in repeated))


def separable_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that share no parameter with the rest of the model: those that can be gathered on their own.

    BERT's embeddings, for one, are a block by its own account but hold the weight that is tied to the head.
    """
    owners: dict[int, set[int]] = {}
    blocks = [block for _, block in find_blocks(model)]
    for block in blocks:
        for param in block.parameters():
            owners.setdefault(id(param), set()).add(id(block))
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for param in module.parameters(recurse=False):
                owners.setdefault(id(param), set()).add(id(model))
    return [block for block in blocks if all(len(owners[id(param)]) == 1 for param in block.parameters())]


def _outermost(model: nn.Module, wanted: Is, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        full = f"{prefix}{name}"
        if wanted(child):
            yield full, child
        else:
            yield from _outermost(child, wanted, f"{full}.")
