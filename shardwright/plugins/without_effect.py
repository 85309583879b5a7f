"""Options that a layout has no use for, so that none of them is ignored without a word.

An option that asks for what cannot be had is refused. One that merely finds nothing to act on (a schedule without a
pipeline, a loss scale in bf16) is accepted, because one configuration often serves many layouts, and is named: in the
plugin's `without_effect`, in the layout report, and once in the log of rank 0. Only values that differ from the default
count: a default asks for nothing.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch.distributed as dist

_LOGGER = logging.getLogger(__name__)

SCALER = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "max_scale")


class WithoutEffect(NamedTuple):
    """One option of the user's, and why this layout has no use for it."""

    name: str
    value: Any
    why: str

    def __str__(self) -> str:
        shown = repr(self.value)
        return f"{self.name}={shown if len(shown) <= 60 else '...'} ({self.why})"


class Facts(NamedTuple):
    """What decides whether an option has anything to act on. Sizes are numbers of ranks: `dp` of those that see
    different samples, `sp` of those that share sequences (both exchange gradients), `sharing` of a ZeRO sub-group.
    `postpones` says whether a pipeline computes weight gradients apart, `sharding_policy` which custom policy does
    nothing but shard, `splits_sequences` whether sequence parallelism is on.
    """

    precision: str
    stage: int
    dp: int
    pp: int = 1
    tp: int = 1
    sharing: int = 1
    postpones: bool = False
    pp_style: str = "1f1b"
    sharding_policy: str = ""
    splits_sequences: bool = False
    sp: int = 1

    @property
    def alone(self) -> bool:
        return self.dp * self.sp == 1


class Rule(NamedTuple):
    """`options` have no effect where `holds`."""

    options: Sequence[str]
    holds: Callable[[Facts], bool]
    why: str


_ALONE = "there is one data-parallel rank, so no gradients are exchanged"
_SCALE = "only precision='fp16' scales the loss"

HYBRID: Sequence[Rule] = (
    Rule(SCALER, lambda facts: facts.precision != "fp16", _SCALE),
    Rule(
        ("pp_style", "num_model_chunks", "overlap_p2p", "enable_metadata_cache", "layer_costs", "cut_memory"),
        lambda facts: facts.pp == 1,
        "pp_size=1 has no pipeline",
    ),
    Rule(
        ("example_inputs",),
        lambda facts: facts.pp == 1 and facts.tp == 1,
        "there are neither stages nor layers to share out",
    ),
    Rule(("deferred_bytes",), lambda facts: facts.pp == 1, "pp_size=1 has no pipeline"),
    Rule(
        ("deferred_bytes",),
        lambda facts: not facts.postpones,
        "only pp_style='zb', 'zbv' and 'dualpipev' postpone weight gradients",
    ),
    Rule(("auto_memory",), lambda facts: facts.pp == 1 or facts.pp_style != "auto", "only pp_style='auto' searches"),
    Rule(
        ("dp_outside",),
        lambda facts: facts.pp == 1 or facts.dp == 1,
        "only pipeline and data-parallel ranks can change places",
    ),
    Rule(("make_vocab_size_divisible_by",), lambda facts: facts.tp == 1, "tp_size=1 keeps the vocabulary whole"),
    Rule(("parallel_output",), lambda facts: facts.tp == 1, "logits are whole with tp_size=1"),
    Rule(("sequence_parallelism_mode",), lambda facts: not facts.splits_sequences, "enable_sequence_parallelism=False"),
    Rule(
        ("ddp_bucket_cap_mb",),
        lambda facts: facts.stage > 0,
        "zero_stage=0 alone uses it; from stage 1 on zero_bucket_size_in_m counts",
    ),
    Rule(("zero_bucket_size_in_m",), lambda facts: facts.stage == 0, "zero_stage=0 takes ddp_bucket_cap_mb"),
    Rule(("zero_bucket_size_in_m",), lambda facts: facts.stage == 3, "buckets follow the layers at zero_stage=3"),
    Rule(("broadcast_buffers",), lambda facts: facts.dp == 1, "there is one data-parallel rank"),
    Rule(("communication_dtype", "overlap_communication"), lambda facts: facts.alone, _ALONE),
    Rule(("fp8_communication",), lambda facts: facts.alone and facts.pp * facts.tp == 1, "a single rank sends nothing"),
    Rule(
        ("overlap_allgather",),
        lambda facts: facts.sharing == 1,
        "no other rank shares the optimizer, so nothing is gathered",
    ),
    Rule(("gather_ahead",), lambda facts: facts.stage < 3, "only zero_stage=3 gathers weights before they are used"),
    Rule(("gather_ahead",), lambda facts: facts.sharing == 1, "no other rank shares the weights"),
    Rule(("find_unused_parameters",), lambda facts: True, "parameters without a gradient are always found"),
    Rule(("gradient_as_bucket_view",), lambda facts: True, "gradients always are views of buckets"),
    Rule(("static_graph",), lambda facts: True, "nothing here is faster for a graph that never changes"),
)

LOW_LEVEL_ZERO: Sequence[Rule] = (
    Rule(SCALER, lambda facts: facts.precision != "fp16", _SCALE),
    Rule(("master_weights",), lambda facts: facts.precision == "fp32", "parameters in fp32 are their own masters"),
    Rule(("cast_inputs",), lambda facts: facts.precision == "fp32", "precision='fp32' casts no inputs"),
    Rule(("gather_ahead",), lambda facts: facts.stage < 3, "only stage=3 gathers weights before they are used"),
    Rule(("gather_ahead",), lambda facts: facts.sharing == 1, "no other rank shares the weights"),
    Rule(("reduce_bucket_size_in_m",), lambda facts: facts.stage == 3, "buckets follow the layers at stage=3"),
    Rule(("communication_dtype", "fp8_communication", "overlap_communication"), lambda facts: facts.alone, _ALONE),
    Rule(
        ("overlap_allgather",),
        lambda facts: facts.sharing == 1,
        "no other rank shares the optimizer, so nothing is gathered",
    ),
)


def find_without_effect(
    constructor: Callable[..., Any], given: Mapping[str, Any], rules: Iterable[Rule], facts: Facts
) -> tuple[WithoutEffect, ...]:
    """The arguments in `given` that differ from the defaults of `constructor` and that a rule says nothing looks at;
    each once.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(constructor).parameters.items()}
    found: dict[str, WithoutEffect] = {}
    for options, holds, why in rules:
        if holds(facts):
            for name in options:
                if not _is_default(given[name], defaults[name]):
                    found.setdefault(name, WithoutEffect(name, given[name], why))
    if facts.tp == 1 and facts.sharding_policy:
        why = "its rules shard over tp_size=1 ranks, and it changes nothing else"
        found["custom_policy"] = WithoutEffect("custom_policy", facts.sharding_policy, why)
    return tuple(found.values())


def _is_default(value: Any, default: Any) -> bool:
    return value is default if default is None else bool(value == default)


def tell(found: Sequence[WithoutEffect]) -> None:
    """Name the options once in the log of rank 0."""
    if found and dist.get_rank() == 0:
        warn_once("without effect in this layout: " + "; ".join(map(str, found)))


@cache
def warn_once(text: str) -> None:
    """A warning that a process gives once however many plugins it makes."""
    _LOGGER.warning(text)
