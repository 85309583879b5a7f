"""Which units each stage gets.

Cost of a forward, in parameters that a token meets (2 floating point operations for each; a backward takes 4, and the
forward again where layers are recomputed):

    cost(unit)   = parameters of the layer, experts by the share that one token visits (top_k / num_experts)
                 + attention, where the length of the sequences is known: 2 * keys * heads * head_dim for the two
                 products with
                   the keys that a token sees, half the sequence on average under a causal mask, at most its window
    cost(first)  = those before the first layer;  cost(last) = those behind the last layer (norm, head)
    embedding tables that are only looked up count EMBEDDING_SHARE of their size: no matrix product, but gradient and
    update a tied head counts in full where it multiplies
    cheap(unit)  = what a layer's forward takes besides its products, for those that recompute it alone: CHEAP_BYTES for
                 each feature of a
                   token, read or written by norms, rotary embeddings, activations and additions one after the other,
                   each byte the time of BYTE parameters (2 operations for each at 400 TFLOP/s beside 3 TB/s); at most
                   the whole forward

or what the user has measured. `balance` cuts by these costs so that the dearest rank is as cheap as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from ...models.config import (
    HIDDEN,
    LAYERS,
    QUERY_HEADS,
    config_of,
    first_int,
    hidden_size,
    layer_configs,
    text_config,
    visited_share,
)
from ..checkpointing import PipelineGradientCheckpointConfig
from ..planning.placement import Placement
from .balance import ChainCosts, MemoryBound, balance
from .survey import Survey

EMBEDDING_SHARE = 0.05
_RETURN = "between stages travels what layers return: let them return it"
CHEAP_BYTES = 80.0
BYTE = 67.0


def chain_costs(
    model: nn.Module,
    survey: Survey,
    placement: Placement,
    *,
    measured: Sequence[float] | None = None,
    config: PipelineGradientCheckpointConfig | None = None,
    length: int | None = None,
) -> ChainCosts:
    """Costs of the units for `balance`.

    measured  time of every layer, forward and backward together, recomputation included, and last of what lies behind
              them, or that in the last layer; first of what lies before them, or that in the first layer; None:
              estimated
    config    which layers are recomputed
    length    of the sequences, for attention; None: not counted
    """
    if measured is not None:
        _check_measured(measured, survey)
        times = [cost / 3 for cost in measured] + [0.0] * (survey.num_units + 1 - len(measured))
        head = times.pop(0) if len(times) > survey.num_units + 1 else 0.0
        return ChainCosts([times[0] + head, *times[1:]], head)
    layers, head, tail = _estimated(model, survey)
    attention = chain_attention(model, survey, length)
    forward = [layer + extra for layer, extra in zip(layers, attention, strict=True)]
    forward[0] += head
    passing = CHEAP_BYTES * BYTE * (hidden_size(model) or 0)
    cheap = [min(passing, layer + extra) for layer, extra in zip(layers, attention, strict=True)]
    if config is None:
        return ChainCosts([*forward, tail], head)
    units = survey.num_units
    whole = _chosen(config.gradient_checkpointing_ratio, config.num_ckpt_layers_per_stage, placement, units)
    in_part = _chosen(config.selective_ratio, config.num_selective_layers_per_stage, placement, units)
    return ChainCosts([*forward, tail], head, whole, in_part, cheap)


def _chosen(ratio: float | None, numbers: Sequence[int] | None, placement: Placement, units: int) -> float | list[int]:
    if numbers is None:
        return float(ratio or 0.0)
    if len(numbers) == placement.num_ranks:  # over a rank's chunks in order: the first ones, unless it is short
        return [
            numbers[placement.rank_of(stage)] * (placement.chunk_of(stage) == 0)
            for stage in range(placement.num_stages)
        ]
    # of another cut: as many in all
    return list(numbers) if len(numbers) == placement.num_stages else min(1.0, sum(numbers) / units)


def _check_measured(measured: Sequence[float], survey: Survey) -> None:
    units = survey.num_units
    layers = measured[1:-1] if len(measured) == units + 2 else measured  # what is around them may take no time
    usable = all(0 < cost < float("inf") for cost in layers) and all(0 <= cost < float("inf") for cost in measured)
    if not usable or len(measured) - units not in (0, 1, 2):
        raise ValueError(
            f"layer_costs={list(measured)} must hold a positive number for each of the model's {units} layers "
            f"({survey.units[0].layer} to {survey.units[-1].layer}): its time forward and backward, in any unit, and "
            "may hold one more for what lies behind them, or two more, for what lies before them and behind them; "
            f"{[1.0] * units} stands for equal ones"
        )


def unit_costs(model: nn.Module, survey: Survey) -> list[float]:
    """Estimated cost of each unit without attention, that of the embeddings added to the first and that of the head
    to the last.
    """
    costs, head, tail = _estimated(model, survey)
    costs[0] += head
    costs[-1] += tail
    return costs


def layer_costs(model: nn.Module, survey: Survey) -> list[float]:
    """Estimated cost of each layer by itself, without attention."""
    return _estimated(model, survey)[0]


def _estimated(model: nn.Module, survey: Survey) -> tuple[list[float], float, float]:
    """Of every unit by itself, of what lies before the first, and of what lies behind the last."""
    tables = lookup_tables(model)
    sizes = {name: float(parameter.numel()) for name, parameter in model.named_parameters(remove_duplicate=False)}
    visited = visited_share(model)
    three_dims = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.dim() == 3 and ".experts" in name
    }

    def cost(name: str, last: bool) -> float:
        aliases = survey.names[name]
        multiplies = last and any(alias not in tables for alias in aliases)
        share = 1.0 if multiplies or aliases[0] not in tables else EMBEDDING_SHARE
        expert = any(alias in three_dims or ".experts." in alias for alias in aliases)
        return sizes[name] * share * (visited if expert else 1.0)

    costs = [sum(cost(name, False) for name in survey.parts[unit].parameters) for unit in range(survey.num_units)]
    first = survey.units[0].layer
    head = sum(cost(name, False) for name in survey.parts[0].parameters if not name.startswith(f"{first}."))
    costs[0] -= head
    return costs, head, sum(cost(name, True) for name in survey.parts[-1].parameters)


def chain_attention(model: nn.Module, survey: Survey, length: int | None) -> list[float]:
    """`attention_costs` of a chain, zeros for towers beside the text."""
    own = survey.num_units if text_config(model) is config_of(model) else survey.lists.count(survey.lists[-1])
    return [0.0] * (survey.num_units - own) + attention_costs(model, own, length)


def attention_costs(model: nn.Module, num_units: int, length: int | None) -> list[float]:
    """Of every unit's products with keys and values, in the unit of the parameters; zeros where the config says too
    little.
    """
    config = text_config(model)
    is_a_part = config is not config_of(model)  # then the layers may be those of another one, of images for one
    if length is None or (is_a_part and first_int(config, LAYERS) != num_units):
        return [0.0] * num_units
    kinds = getattr(config, "layer_types", None)
    kinds = kinds if isinstance(kinds, list) and len(kinds) == num_units else ["full_attention"] * num_units

    def cost(kind: str, layer: Any) -> float:
        heads, hidden = first_int(layer, QUERY_HEADS), first_int(layer, HIDDEN)
        if heads is None or hidden is None or "linear" in kind:
            return 0.0
        window = getattr(layer, "sliding_window", None)
        if kind != "sliding_attention" and (
            "sliding_attention" in kinds or not getattr(layer, "use_sliding_window", True)
        ):
            window = None
        width = min(window, length) if isinstance(window, int) else length
        keys = width * (1 - width / (2 * length))  # that a token meets on average
        return 2 * keys * heads * (getattr(layer, "head_dim", None) or hidden // heads)

    return [cost(kind, layer) for kind, layer in zip(kinds, layer_configs(config, num_units), strict=True)]


def sequence_length(batch: Any) -> int | None:
    """Tokens of a sample of a batch: dim 1 of its token ids, else of the first tensor of whole numbers."""
    if isinstance(batch, torch.Tensor):
        tensors = [batch]
    elif isinstance(batch, dict):
        named = [batch[name] for name in ("input_ids", "decoder_input_ids") if name in batch]
        tensors = [value for value in [*named, *batch.values()] if isinstance(value, torch.Tensor)]
    else:
        tensors = [value for value in batch or () if isinstance(value, torch.Tensor)]
    return next((tensor.shape[1] for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()), None)


def lookup_tables(model: nn.Module) -> set[str]:
    """Names of the parameters of embeddings: looked up, not multiplied."""
    return {
        f"{name}.{parameter}" if name else parameter
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for parameter, _ in module.named_parameters(recurse=False)
    }


def partition_units(
    survey: Survey, costs: ChainCosts, placement: Placement, bound: MemoryBound | None = None
) -> list[range]:
    """Consecutive units of each stage, at least one each, cut where the survey allows. `NoCutError` where none keeps
    `bound`.
    """
    _check_count(survey, placement.num_stages)
    # What is before and behind the layers can be parted from them where its cost is known.
    first, last = int(not costs.head), survey.num_units + (costs.forward[-1] > 0)
    return balance(costs, [position for position in range(first, last) if survey.can_cut(position)], placement, bound)


def given_units(survey: Survey, num_layers_per_stage: Sequence[int], num_stages: int) -> list[range]:
    """Units of each stage from the user's numbers, checked against the model."""
    units = survey.num_units
    numbers = list(num_layers_per_stage)
    _check_count(survey, num_stages, ends=True)
    if len(numbers) != num_stages:
        raise ValueError(
            f"num_layers_per_stage={numbers} has {len(numbers)} entries, but there are {num_stages} stages (pp_size x "
            f"num_model_chunks, in the order in which a microbatch passes them); {_nearest(units, num_stages)} would "
            "work"
        )
    least = [0] + [1] * (num_stages - 2) + [0] if num_stages > 1 else [1]
    wrong = any(
        not isinstance(number, int) or isinstance(number, bool) or number < low
        for number, low in zip(numbers, least, strict=True)
    )
    if wrong or sum(numbers) != units:
        raise ValueError(
            f"num_layers_per_stage={numbers} must hold whole numbers of at least 1 that sum to the model's {units} "
            "layers (the first may be 0, for a stage of what comes before the layers, and the last, for what comes "
            f"behind them); {_nearest(units, num_stages)} would work"
        )
    bounds = [0, *accumulate(numbers)]
    for position in bounds[1:-1]:
        if position == 0 and not survey.can_cut(0):
            raise ValueError(
                f"num_layers_per_stage={numbers} parts what comes before the layers from the first one, "
                f"{survey.units[0].layer}, but what this receives was not found among its arguments: no tensor there "
                "was computed from parameters in the dry run, or later layers use it too; give the first stage a "
                f"layer, as {_nearest(units, num_stages)}"
            )
        if not survey.can_cut(position):
            allowed = [cut for cut in range(1, units) if survey.can_cut(cut)]
            what = (
                (f"layer {position} ({survey.units[position].layer})")
                if position < units
                else "what lies behind the layers"
            )
            raise ValueError(
                f"num_layers_per_stage={numbers} cuts before {what}, but that uses inner values of layers before it "
                f"({survey.why_joined(position)}; {_RETURN}); cuts that work: before {allowed or 'none, use pp_size=1'}"
            )
    return [range(low, high) for low, high in pairwise(bounds)]


def _check_count(survey: Survey, num_stages: int, ends: bool = False) -> None:
    """ends: whether what is around the layers can be stages by itself."""
    units = survey.num_units
    places = range(units + 1) if ends else range(1, units)
    cuts = sum(survey.can_cut(position) for position in places)
    if num_stages > len(places) + 1:
        besides = (
            ""
            if ends
            else (f"; {units + 2} with num_layers_per_stage={[0] + [1] * units + [0]}")
            if survey.can_cut(0)
            else ""
        )
        raise ValueError(
            f"pp_size x num_model_chunks = {num_stages} pipeline stages are more than the model's {units} layers "
            f"({survey.units[0].layer} to {survey.units[-1].layer}); at most {cuts + 1} stages work{besides}"
        )
    if num_stages > cuts + 1:
        raise ValueError(
            f"pp_size x num_model_chunks = {num_stages} pipeline stages need {num_stages - 1} cuts, but the model can "
            f"be cut at {cuts} places only: other layers use inner values of one another ({survey.why_joined()}; "
            f"{_RETURN}); at most {cuts + 1} stages work"
        )


def _nearest(units: int, num_stages: int) -> list[int]:
    """An even cut; with more stages than layers the last one, and then the first one, has none."""
    behind, before = int(num_stages > units), int(num_stages > units + 1)
    share, larger = divmod(units, num_stages - behind - before)
    return [0] * before + [share + (stage < larger) for stage in range(num_stages - behind - before)] + [0] * behind
