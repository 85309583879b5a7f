"""Experts that are spread over ranks: each rank holds E/n of the E experts of a layer, and tokens travel to them.

    spread = find_experts(model)           modules with fused experts, or a ValueError that says why there are none
    let_tokens_travel(spread, group)       before layers are sharded over tp
    cut_experts(model, ...)                behind it: parameters keep this rank's experts

What counts as experts is a module that transformers' experts interface computes, whatever family it is of: parameters
[E, ...], and a forward (hidden_states [T, H], index [T, K], weights [T, K]) -> [T, H] that adds up

    y_t = sum over k of weights[t, k] * expert_{index[t, k]}(x_t)

A token travels once to each rank that holds any of its experts, with their numbers and weights. There the module's own
forward computes one row for each choice, with a weight of one; what it makes is weighted, summed and sent back, and the
token's own rank adds up what comes from several. So the kernel is the one that the model was given (eager, batched,
grouped), and biases, gates and norms of experts need no word here. Gradients of weights travel back with those of
tokens, to the rank whose router chose.

[Note: ranks without tokens] All ranks must launch the same collectives in forward and backward. A rank that receives no
token computes a row of zeros for its first expert, whose output is thrown away: so its backward runs and the gradients
of its experts are there, and zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.expert_exchange import add_rows, find_routes, return_sums, send_tokens
from ..spec import ParamSpec, Piece, even_pieces, get_spec, set_spec
from ..utils.errors import divisors
from .layer.parallel_module import ParallelGroup, combined_class, native_class

_MARKS = ("has_gate", "is_transposed")  # what transformers' experts interface leaves on a module


class _Travelling(nn.Module):
    """Experts of which every rank of `spread_over` holds a part.

    num_experts, all_experts    on this rank, and in the model
    """

    spread_over: ParallelGroup
    all_experts: int
    num_experts: int

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights, *_ = (*args, *kwargs.values())
        if hidden.is_meta:  # asked for its shape
            return hidden.clone()
        assert weights.shape == index.shape, (weights.shape, index.shape)
        index, weights = (choice.reshape(-1, index.shape[-1]) for choice in (index, weights))
        routes = find_routes(index, self.all_experts, self.spread_over.group)
        came = send_tokens(hidden.reshape(-1, hidden.shape[-1]), index, weights, routes)
        made = self._compute(came.x[came.rows], came.experts) * came.weights[:, None]
        sums = add_rows(made, came.rows, len(came.x)).to(hidden.dtype)
        return return_sums(sums, routes, len(index)).to(hidden.dtype).view(hidden.shape)

    def _compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        """What the experts [R] make of the rows [R, H]; see [Note: ranks without tokens]."""
        count = len(rows)
        if not count:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])
            experts = experts.new_zeros(1)
        return super().forward(rows, experts[:, None], rows.new_ones(len(rows), 1))[:count]  # type: ignore[no-any-return,misc]


def is_routed(module: nn.Module) -> bool:
    """Whether the module holds fused experts that this file can spread."""
    experts = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    return (
        isinstance(experts, int)
        and all(mark in vars(module) for mark in _MARKS)
        and any(param.ndim == 3 for param in own)
        and all(param.ndim > 1 and param.shape[0] == experts for param in own)
        and len(inspect.signature(native_class(module).forward).parameters) == 4
    )


def find_experts(model: nn.Module, ranks: int) -> dict[str, nn.Module]:
    """Modules with fused experts by name. ValueError where there are none, or their numbers do not divide."""
    found = {name: module for name, module in model.named_modules() if is_routed(module)}
    if adapted := [name for name in found if name.rpartition(".")[2] == "base_layer"]:
        raise ValueError(
            f"ep_size={ranks}: {adapted[0].removesuffix('.base_layer')} carries adapters of its own, which are not "
            "spread over ranks; use ep_size=1, or adapters on other layers"
        )
    others = [
        (name, module)
        for name, module in model.named_modules()
        if name not in found
        and (name.rpartition(".")[2] == "experts" or (not found and "Experts" in native_class(module).__name__))
    ]
    if others:
        name, module = others[0]
        raise ValueError(
            f"ep_size={ranks}: the experts of {type(model).__name__} ({name}, {native_class(module).__name__}) are not "
            "computed by transformers' experts interface, and cannot be spread over ranks; use ep_size=1, and "
            "zero_stage=3 or tp_size=... to divide their memory"
        )
    if not found:
        raise ValueError(f"ep_size={ranks}: {type(model).__name__} has no experts to spread over ranks; use ep_size=1")
    for name, module in found.items():
        experts: Any = module.num_experts
        if experts % ranks:
            raise ValueError(
                f"ep_size={ranks} does not divide the {experts} experts of {name}; values that do: "
                f"{', '.join(map(str, divisors(experts)))}"
            )
    return found


def let_tokens_travel(spread: Mapping[str, nn.Module], group: ParallelGroup) -> None:
    """Change the forwards of experts, not yet their parameters."""
    for module in spread.values():
        module.__class__ = combined_class(_Travelling, type(module))
        assert isinstance(module, _Travelling)
        module.spread_over, module.all_experts = group, module.num_experts
        module.num_experts //= group.size


def expert_specs(
    model: nn.Module, spread: Mapping[str, nn.Module], known: Mapping[int, ParamSpec], ep: int, tp: int
) -> dict[int, ParamSpec]:
    """How the parameters of experts will be laid out, by `id`; `known` says it for tensor parallelism."""
    owners = {id(param): None for module in spread.values() for param in module.parameters(recurse=False)}
    return {
        id(param): _spread_spec(known.get(id(param)) or ParamSpec(name, tuple(param.shape)), ep, tp)
        for name, param in model.named_parameters()
        if id(param) in owners
    }


def _spread_spec(spec: ParamSpec, ep: int, tp: int) -> ParamSpec:
    pieces = even_pieces(spec.full_shape[0], ep)
    if tp == 1:
        return replace(spec, dim=0, pieces=pieces, axis="ep")
    if spec.dim and not spec.shared_runs and spec.axis == "tp":
        return replace(spec, axis="ep_tp", blocks=ep)
    if spec.dim is None and spec.partial == ("tp",):  # every tp rank has a part of the sum, as of rows that they share
        shared: tuple[tuple[Piece, ...], ...] = tuple(piece for piece in pieces for _ in range(tp))
        return replace(spec, dim=0, pieces=shared, axis="ep_tp", partial=())
    place = "held whole by every rank" if spec.dim is None else f"cut along dim {spec.dim}"
    raise ValueError(
        f"ep_size={ep}: {spec.name} is {place} over tp, but experts that are spread over ranks too must be cut inside "
        "of each expert; use ep_size=1 or tp_size=1"
    )


def cut_experts(model: nn.Module, ep: ParallelGroup, tp: int) -> None:
    """Let the parameters of experts, already this rank's part of tp, keep its experts alone."""
    spread = {name: module for name, module in model.named_modules() if isinstance(module, _Travelling)}
    params: Sequence[nn.Parameter] = [p for module in spread.values() for p in module.parameters(recurse=False)]
    known = {id(param): spec for param in params if (spec := get_spec(param)) is not None}
    specs = expert_specs(model, spread, known, ep.size, tp)
    for param in params:
        length = param.shape[0] // ep.size
        set_spec(param, specs[id(param)])
        param.data = param.data.narrow(0, ep.rank * length, length).clone()
        param.grad = None
