"""Read transformers' own tensor-parallel plan, and make of it what it could be.

`model.tp_plan` names linears and experts, but it gathers where its authors had no packed split (fused gate and up,
Phi-3's q/k/v), gathers logits, says nothing of heads that do not divide, and differs between versions in names and
coverage. Here its rules become regions: the rules of one attention or MLP, with alternatives from best to plainest.
Rules that match nothing are left out (some plans carry such), and so are regions with a style that is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn

from ..models.config import text_part
from .attention import LocalHeads
from .mixers import mixer_rules
from .patterns import classes_at, has_all, shape_of_name, with_class
from .rules import Rules
from .splits import Heads, Packed
from .styles import Column, LatentKeyValue, Row, ShardedParameter, Style

_QUERY = ("q_proj", "q_b_proj", "query", "q_gate_proj", "g_proj", "gate_proj", "kv_b_proj", "sinks")
_KEY_VALUE = ("k_proj", "v_proj", "key", "value")
_FUSED = ("qkv_proj", "query_key_value", "qkv", "c_attn", "Wqkv")
# styles of modules whose parameters have rules too
_OF_WHOLE_MODULES = ("moe_tp_experts", "local_params", "all_reduce")


@dataclass
class Proposal:
    """The rules of one attention, MLP or set of experts, wherever it occurs in the model.

    name            pattern of the module around the sharded ones
    alternatives    rules to try, best first
    kind            of what it is about: proposals of one kind hold, or do not, for the same reasons; "" where it is the
                    only one
    """

    name: str
    alternatives: list[Rules] = field(default_factory=list)
    kind: str = ""

    def of_class(self, around: str, bracketed: str) -> Proposal:
        """The same for those of the modules `around` that are of a class; `bracketed` is their pattern."""
        alternatives = [
            {with_class(pattern, around, bracketed): style for pattern, style in rules.items()}
            for rules in self.alternatives
        ]
        return Proposal(with_class(self.name, around, bracketed), alternatives)


def plan_regions(model: Any) -> list[Proposal]:
    """Regions from `model.tp_plan`; without the vocabulary, which policies treat alike for all models."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    modules = {shape_of_name(name): module for name, module in model.named_modules()}
    params = {shape_of_name(name): param for name, param in model.named_parameters()}
    outputs = {
        id(module)
        for module in (_call(model, "get_output_embeddings"), _call(model, "get_input_embeddings"))
        if module is not None
    }
    classes = classes_at(model)
    groups: dict[str, dict[str, str]] = {}
    for pattern, style in plan.items():
        if (pattern in modules or pattern in params) and id(modules.get(pattern)) not in outputs:
            region = pattern if style in _OF_WHOLE_MODULES else pattern.rpartition(".")[0]
            groups.setdefault(region, {})[pattern] = style
    regions = []
    for name, styles in groups.items():
        translated = {
            pattern: _translate(style, params.get(pattern), modules.get(pattern), model.config)
            for pattern, style in styles.items()
        }
        if None in translated.values():
            continue
        plain: Rules = {pattern: style for pattern, style in translated.items() if style is not None}
        alternatives = [rules for upgrade in (_heads, _fused_heads, _packed) for rules in upgrade(name, styles, plain)]
        regions.append(_with_mixers(Proposal(name, [*alternatives, plain]), styles, classes.get(name, {})))
    return regions


def _with_mixers(region: Proposal, styles: Iterable[str], classes: dict[str, nn.Module]) -> Proposal:
    """The region with what is known about mixers of its kind, which a plan may gather; under its class where modules
    of other classes go by the same name and the plan is not about them.
    """
    named = _children(region.name, styles)
    meant = {kind: module for kind, module in classes.items() if has_all(module, named)}
    if len(meant) != 1:
        return region
    ((kind, module),) = meant.items()
    region.alternatives = [*mixer_rules(region.name, module), *region.alternatives]
    return region.of_class(region.name, f"{region.name}[{kind}]") if len(classes) > 1 else region


def _call(model: nn.Module, method: str) -> Any:
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _translate(style: str, param: nn.Parameter | None, module: nn.Module | None, config: Any) -> Style | str | None:
    """The style of this package, or None when there is none."""
    if param is not None:
        last, rows = param.ndim - 1, max(param.ndim - 2, 0)
        styles: dict[str, Style | str] = {
            "colwise": ShardedParameter(rows),
            "rowwise": ShardedParameter(last) if param.ndim > 1 else "replicated",
            "packed_colwise": ShardedParameter(rows, Packed(2)),
            "packed_rowwise": ShardedParameter(last, Packed(2)),
            "replicated_with_grad_allreduce": "partial_gradient",
            "replicate": "replicated",
        }
        return styles.get(style)
    if style == "mla_kv_a_proj":
        return LatentKeyValue(text_part(config).qk_rope_head_dim)
    named: dict[str, Style | str] = {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "colwise_gather_output": "colwise_gathered",
        "colwise_rep": "colwise_gathered",
        "rowwise_split_input": "rowwise_split",
        "rowwise_rep": "rowwise_split",
        "packed_colwise": "packed_colwise",
        "embedding_rowwise": "vocab_embedding",
        "replicated_with_grad_allreduce": "partial_gradient",
        "moe_tp_experts": "partial_sum",
        "all_reduce": "partial_sum",
        "local_params": LocalHeads(),
        "replicate": "replicated",
    }
    return named.get(style)


def _children(region: str, patterns: Iterable[str]) -> dict[str, str]:
    """Local name -> pattern, for direct children."""
    return {pattern[len(region) + 1 :]: pattern for pattern in patterns if pattern.rpartition(".")[0] == region}


def _heads(region: str, styles: dict[str, str], plain: Rules) -> list[Rules]:
    """Split q, k, v and output projections by heads, so that counts that do not divide work too."""
    named = _children(region, styles)
    queries = [name for name in named if name.split(".")[0] in _QUERY]
    outputs = [name for name, pattern in named.items() if styles[pattern] == "rowwise"]
    if not queries or len(outputs) != 1 or not {"q_proj", "q_b_proj", "query"} & set(named):
        return []
    if any(styles[named[name]] != "colwise" for name in queries):
        return []
    rules = dict(plain)
    for name, pattern in named.items():
        if styles[pattern] == "colwise" and name in _QUERY + _KEY_VALUE:
            split = Heads("q" if name in _QUERY else "kv")
            rules[pattern] = (
                ShardedParameter(0, split) if isinstance(plain[pattern], ShardedParameter) else Column(split)
            )
    rules[named[outputs[0]]] = Row(Heads("q"))
    rules[region] = LocalHeads()
    return [rules]


def _fused_heads(region: str, styles: dict[str, str], plain: Rules) -> list[Rules]:
    """Fused q/k/v by heads, whether the plan gathers it or splits it as it is stored."""
    named = _children(region, styles)
    fused = [name for name in named if name in _FUSED]
    outputs = [
        name for name, pattern in named.items() if styles[pattern] in ("rowwise", "rowwise_split_input", "rowwise_rep")
    ]
    if len(fused) != 1 or len(outputs) != 1:
        return []
    gathered = styles[named[fused[0]]] != "colwise"
    return [
        {**plain, region: LocalHeads(), named[fused[0]]: Column(Heads(layout)), named[outputs[0]]: Row(Heads("q"))}
        for layout in (("packed", "interleaved") if gathered else ("interleaved", "packed"))
    ]


def _packed(region: str, styles: dict[str, str], plain: Rules) -> list[Rules]:
    """A fused gate and up projection that the plan gathers."""
    named = _children(region, styles)
    up, down = named.get("gate_up_proj"), named.get("down_proj")
    if up is None or down is None or styles[down] not in ("rowwise_split_input", "rowwise_rep"):
        return []
    return [{**plain, up: "packed_colwise", down: "rowwise"}]
