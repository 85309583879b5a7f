"""What is compiled of a layer that cannot be one graph: the modules that it calls, each for itself.

A layer can be none where the host must know numbers in its middle (how many tokens go to which experts), where hooks
look at modules inside of it, or where something is sent that is no operator of a graph. Its forward then runs as it is,
and attention, norms, routers and MLPs in it are graphs. A part that cannot be one either is taken apart in turn.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

IN_PARTS = "_shardwright_in_parts"  # in the state of a module whose own forward runs, beside graphs
_HOLDERS = (nn.ModuleList, nn.ModuleDict)  # which have no forward


def runs_in_parts(layer: nn.Module) -> bool:
    return IN_PARTS in vars(layer)


def parts_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Modules right below `layer` of which a graph may make something: single operators stay as they are."""
    for part in layer.children():
        if isinstance(part, _HOLDERS):
            yield from parts_of(part)
        elif not _is_operator(part):
            yield part


def _is_operator(module: nn.Module) -> bool:
    """Whether it is hardly more than one operator of torch: linears, dropouts, activations."""
    if any(True for _ in module.children()):
        return False
    if not any(True for _ in module.parameters()):  # an activation, also of experts, of which each is given other rows
        return True
    return any(
        cls is not nn.Module and (cls.__module__.startswith("torch.nn.modules") or cls.__name__ == "Conv1D")
        for cls in type(module).__mro__
    )
