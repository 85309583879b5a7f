"""The chain of layers that a model is cut along, found without knowing its family.

A unit of the chain is one layer and the module at whose output the model can be cut behind it, its gate. The gate is
the layer itself, except for the last layer of an encoder: there the model is cut behind the whole encoder, so that the
encoder's final norm stays with its last layer and the decoder's stages receive the encoder's output.

    decoder or encoder   layers.0, layers.1, ...                     gates: the same
    encoder-decoder      encoder.0, ..., encoder.n, decoder.0, ...   gates: the same, but `encoder` for encoder.n

A layer that the model applies several times is a unit for each of its applications.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from .blocks import declared_by
from .config import LAYERS, config_of, first_int, is_encoder_decoder
from .shared_layers import compound_lists, repeated_applications


class Unit(NamedTuple):
    layer: str  # full module name
    gate: str
    call: int = 0  # which application of the layer in a forward


def applied(layers: Iterable[str]) -> list[Unit]:
    """Units of layers in the order in which they are applied, the same one perhaps several times."""
    counts: Counter[str] = Counter()
    units = []
    for layer in layers:
        units.append(Unit(layer, layer, counts[layer]))
        counts[layer] += 1
    return units


def numbers_by_module(names: Iterable[str]) -> dict[str, list[int]]:
    """For every name the numbers of the units that have it as their layer, or their gate: those of its calls, in
    order.
    """
    found: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        found.setdefault(name, []).append(number)
    return found


def are_shared(units: Iterable[Unit]) -> bool:
    """Whether some layer is applied more than once."""
    return any(unit.call for unit in units)


def find_units(model: nn.Module, lists: Sequence[str] | None = None) -> list[Unit]:
    """The units of `model` in the order in which they run.

    lists   names of the ModuleLists to cut along (a policy's word); without it they are found: the list of layers with
            most parameters, and in an encoder-decoder the encoder's followed by the decoder's.
    """
    if lists is not None:
        chosen = [(name, module_list(model, name)) for name in lists]
        if not chosen:
            raise ValueError("layer lists of a pipeline: at least one ModuleList must be named")
    elif layer_lists(model):
        chosen = _find_lists(model)
    elif (applications := repeated_applications(model)) is not None:
        return applied(applications)
    elif several := [(name, module_list(model, name)) for name, items in compound_lists(model) if len(items) > 1]:
        chosen = callable_lists(*max(several, key=_parameters))
    else:
        raise ValueError(
            f"{type(model).__name__} has no list of layers to cut into pipeline stages: no ModuleList of modules of a "
            "class named in _no_split_modules, derived from GradientCheckpointingLayer, or of config.num_hidden_layers "
            "equal children, and none of two or more modules that hold others. Use pp_size=1, or name the lists in "
            "layer_lists of a policy: custom_policy="
        )
    units = [Unit(f"{name}.{index}", f"{name}.{index}") for name, layers in chosen for index in range(len(layers))]
    if len(chosen) > 1 and not _are_in_a_list(model, chosen):
        end = len(chosen[0][1]) - 1
        units[end] = units[end]._replace(gate=_encoder_name(model, chosen[0][0]))
    return units


def module_list(model: nn.Module, name: str) -> nn.ModuleList:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if not isinstance(module, nn.ModuleList):
        known = [full for full, child in model.named_modules() if isinstance(child, nn.ModuleList)]
        raise ValueError(
            f"{type(model).__name__} has no ModuleList {name!r} to cut along; it has {', '.join(known) or 'none'}"
        )
    return module


def _find_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    candidates = layer_lists(model)
    if is_encoder_decoder(model):
        encoders = [item for item in candidates if _side(item[0]) == "encoder"]
        decoders = [item for item in candidates if _side(item[0]) == "decoder"]
        if encoders and decoders:
            return [max(encoders, key=_parameters), max(decoders, key=_parameters)]
    largest = max((_outer(model, candidates, item) for item in candidates), key=_parameters)
    owner = largest[0].rpartition(".")[0]
    outer = model.get_submodule(owner)
    if isinstance(outer, nn.ModuleList):
        beside = callable_lists(owner, outer)
        if {name for name, _ in beside} <= {name for name, _ in candidates}:
            return beside
    return [largest]


def callable_lists(name: str, layers: nn.ModuleList) -> list[tuple[str, nn.ModuleList]]:
    """This list of layers, or, of a list of lists, which cannot be called, those in it: stages without a module of
    their own (PVT, PoolFormer).
    """
    inner = [(f"{name}.{index}", child) for index, child in enumerate(layers) if isinstance(child, nn.ModuleList)]
    return inner if len(inner) == len(layers) > 0 else [(name, layers)]


def _are_in_a_list(model: nn.Module, lists: Sequence[tuple[str, nn.ModuleList]]) -> bool:
    """Whether these are `callable_lists` of one list."""
    owners = {name.rpartition(".")[0] for name, _ in lists}
    return len(owners) == 1 and isinstance(model.get_submodule(owners.pop()), nn.ModuleList)


def _side(name: str) -> str:
    """ "encoder" or "decoder", the outer one where a decoder's model has an encoder; "" for neither."""
    return next((part for part in name.split(".") if part in ("encoder", "decoder")), "")


def _outer(
    model: nn.Module, candidates: Sequence[tuple[str, nn.ModuleList]], item: tuple[str, nn.ModuleList]
) -> tuple[str, nn.ModuleList]:
    """The list of stages that each have such a list of layers, else the list itself."""
    for name in paths_to(item[0])[:-1]:
        outer = model.get_submodule(name)
        if isinstance(outer, nn.ModuleList) and not any(isinstance(stage, nn.ModuleList) for stage in outer):
            held = {
                other.removeprefix(f"{name}.").split(".")[0] for other, _ in candidates if other.startswith(f"{name}.")
            }
            if len(held) == len(outer) > 1:
                return name, outer
    return item


def layer_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """All outermost ModuleLists of transformer layers."""
    is_layer = declared_by(model)
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if (
            isinstance(module, nn.ModuleList)
            and len(module)
            and not inside
            and all(is_layer(child) for child in module)
        ):
            found.append((name, module))
    if found:
        return found
    depth = first_int(config_of(model), LAYERS)
    for name, module in model.named_modules():
        alike = (
            isinstance(module, nn.ModuleList) and len(module) == depth and len({type(child) for child in module}) == 1
        )
        if alike and any(True for _ in module[0].children()):
            found.append((name, module))
    return found


def paths_to(name: str) -> list[str]:
    """Names of the modules from the outermost that `name` lies in to itself: a.0.b -> a, a.0, a.0.b"""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _parameters(item: tuple[str, nn.ModuleList]) -> int:
    return sum(parameter.numel() for parameter in item[1].parameters())


def _encoder_name(model: nn.Module, list_name: str) -> str:
    """The module whose output the decoder reads: what `get_encoder()` returns, else the list's owner."""
    get_encoder = getattr(model, "get_encoder", None)
    encoder = get_encoder() if callable(get_encoder) else None
    for name, module in model.named_modules():
        if module is encoder and name and list_name.startswith(f"{name}."):
            return name
    owner = list_name.rpartition(".")[0]
    if not owner:
        raise ValueError(
            f"the encoder's layers {list_name!r} of {type(model).__name__} belong to no encoder module, so no cut "
            "behind it exists"
        )
    return owner
