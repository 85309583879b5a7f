"""Which units each stage gets.

Cost of a stage, in parameters that a token meets (a forward takes 2 floating point operations for each, a backward 4):

    cost(unit)   = parameters of the layer, experts by the share that one token visits (top_k / num_experts)
    cost(first)  = those before the first layer;  cost(last) = those behind the last layer (norm, head)
    embedding tables that are only looked up count EMBEDDING_SHARE of their size: no matrix product, but gradient and update
    a tied head counts in full where it multiplies

The partition minimises the cost of the dearest stage, then the sum of squares, over all cuts that the survey allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from .survey import Survey

EMBEDDING_SHARE = 0.05


def unit_costs(model: nn.Module, survey: Survey) -> list[float]:
    """Cost of each unit, that of the embeddings added to the first and that of the head to the last."""
    tables = lookup_tables(model)
    sizes = {name: float(parameter.numel()) for name, parameter in model.named_parameters(remove_duplicate=False)}
    visited = visited_share(model)
    three_dims = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.dim() == 3 and ".experts" in name}

    def cost(name: str, last: bool) -> float:
        aliases = survey.names[name]
        multiplies = last and any(alias not in tables for alias in aliases)
        share = 1.0 if multiplies or aliases[0] not in tables else EMBEDDING_SHARE
        expert = any(alias in three_dims or ".experts." in alias for alias in aliases)
        return sizes[name] * share * (visited if expert else 1.0)

    costs = [sum(cost(name, False) for name in survey.parts[unit].parameters) for unit in range(survey.num_units)]
    costs[-1] += sum(cost(name, True) for name in survey.parts[-1].parameters)
    return costs


def lookup_tables(model: nn.Module) -> set[str]:
    """Names of the parameters of embeddings: looked up, not multiplied."""
    return {
        f"{name}.{parameter}" if name else parameter
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for parameter, _ in module.named_parameters(recurse=False)
    }


def visited_share(model: nn.Module) -> float:
    """Share of the experts that one token visits; 1 for models without experts."""
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    config = get_text_config() if callable(get_text_config) else config
    experts = next((n for key in ("num_local_experts", "n_routed_experts", "num_experts") if (n := getattr(config, key, None))), None)
    chosen = next((n for key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk") if (n := getattr(config, key, None))), None)
    return min(1.0, chosen / experts) if isinstance(experts, int) and isinstance(chosen, int) else 1.0


def partition_units(survey: Survey, costs: Sequence[float], num_stages: int) -> list[range]:
    """Consecutive units of each of `num_stages` stages, at least one each, by dynamic programming over the cuts."""
    units = len(costs)
    _check_count(survey, num_stages)
    total = [0.0, *accumulate(costs)]
    allowed = [position for position in range(1, units) if survey.can_cut(position)]
    # best[position] = (dearest stage, sum of squares, start of the last stage) for the units before `position` in so many stages
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        ends = [units] if stage == num_stages - 1 else allowed
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in ends:
            options = []
            for start, (dearest, squares, starts) in best.items():
                if start < end:
                    cost = total[end] - total[start]
                    options.append((max(dearest, cost), squares + cost * cost, (*starts, start)))
            if options:
                following[end] = min(options)
        best = following
    starts = (*best[units][2], units)
    return [range(low, high) for low, high in pairwise(starts)]


def given_units(survey: Survey, num_layers_per_stage: Sequence[int], num_stages: int) -> list[range]:
    """Units of each stage from the user's numbers, checked against the model."""
    units = survey.num_units
    numbers = list(num_layers_per_stage)
    _check_count(survey, num_stages)
    if len(numbers) != num_stages:
        raise ValueError(
            f"num_layers_per_stage={numbers} has {len(numbers)} entries, but there are {num_stages} stages (pp_size x num_model_chunks, "
            f"in the order in which a microbatch passes them); {_nearest(units, num_stages)} would work"
        )
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 1 for number in numbers) or sum(numbers) != units:
        raise ValueError(
            f"num_layers_per_stage={numbers} must hold whole numbers of at least 1 that sum to the model's {units} layers; "
            f"{_nearest(units, num_stages)} would work"
        )
    bounds = [0, *accumulate(numbers)]
    for position in bounds[1:-1]:
        if not survey.can_cut(position):
            allowed = [cut for cut in range(1, units) if survey.can_cut(cut)]
            raise ValueError(
                f"num_layers_per_stage={numbers} cuts before layer {position} ({survey.units[position].layer}), but that layer uses inner "
                f"values of layers before it; cuts that work: before {allowed or 'none, use pp_size=1'}"
            )
    return [range(low, high) for low, high in pairwise(bounds)]


def _check_count(survey: Survey, num_stages: int) -> None:
    cuts = sum(survey.can_cut(position) for position in range(1, survey.num_units))
    if num_stages > survey.num_units:
        raise ValueError(
            f"pp_size x num_model_chunks = {num_stages} pipeline stages are more than the model's {survey.num_units} layers "
            f"({survey.units[0].layer} to {survey.units[-1].layer}); at most {survey.num_units} stages work"
        )
    if num_stages > cuts + 1:
        raise ValueError(
            f"pp_size x num_model_chunks = {num_stages} pipeline stages need {num_stages - 1} cuts, but the model can be cut at {cuts} "
            f"places only: other layers use inner values of one another (pairs {list(survey.joined)}); at most {cuts + 1} stages work"
        )


def _nearest(units: int, num_stages: int) -> list[int]:
    share, larger = divmod(units, num_stages)
    return [share + (stage < larger) for stage in range(num_stages)]
