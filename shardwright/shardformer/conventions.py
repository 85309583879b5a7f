"""Recognise attention, MLP and experts by the names and sizes of their parts, where no plan speaks of them.

Names of these parts follow a few conventions over hundreds of models. What is found here is a proposal: the generic
policy tries it on a small copy of the model before it believes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.nn as nn

from ..models.config import QUERY_HEADS, first_int
from .attention import LocalHeads, by_head, divides_width, takes
from .head_inputs import NarrowInput, WideColumn, reads_width
from .hf_plan import Proposal
from .layer.linear import input_size, is_linear, output_size
from .mixers import mixer_rules
from .patterns import shape_of_name
from .rules import Rules, latent_attention_rules
from .splits import Heads, Packed, PackedHeads
from .styles import Column, Row, ShardedParameter
from .torch_attention import TorchAttention, is_torch_attention

_ATTENTION = [
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("Wq", "Wk", "Wv"),
    ("project_q", "project_k", "project_v"),
]
_OUTPUT = (
    "o_proj",
    "out_proj",
    "dense",
    "c_proj",
    "proj",
    "wo",
    "w_o",
    "o",
    "out_lin",
    "output_proj",
    "projection",
    "Wo",
    "attention_out",
)
_FUSED = ("qkv_proj", "query_key_value", "qkv", "c_attn", "Wqkv", "att_proj", "in_proj")
_UP = (
    "gate_proj",
    "up_proj",
    "fc1",
    "fc_in",
    "c_fc",
    "dense_h_to_4h",
    "wi",
    "wi_0",
    "wi_1",
    "w1",
    "w3",
    "lin1",
    "linear1",
    "fc",
    "w_0",
    "gate",
    "up",
    "layer_1",
    "intermediate",
    "proj_up_gate",
    "proj_up",
)
_DOWN = (
    "down_proj",
    "fc2",
    "fc_out",
    "c_proj",
    "dense_4h_to_h",
    "wo",
    "w2",
    "lin2",
    "linear2",
    "proj",
    "out_proj",
    "w_1",
    "down",
    "Wo",
    "layer_2",
    "output",
    "output_linear",
    "proj_down",
)
_PACKED_UP = ("gate_up_proj", "fc1", "wi", "Wi", "input_linear", "w1", "gate_up", "w_in")
_GATES = ("g_proj", "gate_proj", "q_gate_proj")  # of what every head returns
_SIZES = ("split_size", "embed_dim", "all_head_size", "inner_dim", "hidden_size", "d_model", "attn_dim")


def conventional_regions(model: nn.Module, known: set[str]) -> list[Proposal]:
    """Regions of modules that none of the `known` regions covers."""
    found: dict[str, dict[str, list[Proposal]]] = {}  # by name, and by class
    for name, module in model.named_modules():
        shape, kind = shape_of_name(name), type(module).__name__
        covered = {shape, f"{shape}[{kind}]"} & known
        if not name or covered or any(shape.startswith(f"{other}.") for other in known):
            continue
        of_name = found.setdefault(shape, {})
        if not of_name.get(kind):
            of_name[kind] = list(_proposals(shape, module))
    regions: dict[str, Proposal] = {}
    for shape, kinds in found.items():
        recognised = {kind: proposals for kind, proposals in kinds.items() if proposals}
        for kind, proposals in recognised.items():
            bracketed = shape if len(recognised) == 1 and not _is_planned(shape, known) else f"{shape}[{kind}]"
            for region in proposals:
                named = region.of_class(shape, bracketed)
                named.kind = f"{kind}: {[[each.removeprefix(shape) for each in some] for some in region.alternatives]}"
                regions.setdefault(named.name, named)
    return list(regions.values())


def _is_planned(shape: str, known: set[str]) -> bool:
    """Whether there is a region for another class of modules of this name."""
    return any(other.startswith(f"{shape}[") for other in known)


def _proposals(name: str, module: nn.Module) -> Iterator[Proposal]:
    if is_torch_attention(module):
        yield Proposal(name, [{name: TorchAttention()}])
        return
    linears = {local: child for local, child in module.named_children() if is_linear(child)}
    if alternatives := _bert_attention(name, module):
        yield Proposal(name, alternatives)
    yield from _bert_mlps(name, module)
    for recognised in (
        mixer_rules(name, module),
        _latent_attention(name, module, linears),
        _attention(name, module, linears),
        _mlp(name, linears),
        _sequential_mlp(name, module),
        _nested_mlp(name, module, linears),
        _merging(name, module),
    ):
        if recognised:
            yield Proposal(name, recognised)
            break
    if alternatives := expert_alternatives(name, module):
        yield Proposal(name, alternatives)


def _attention(name: str, module: nn.Module, linears: dict[str, nn.Module]) -> list[Rules]:
    output = next((local for local in _OUTPUT if local in linears), None)
    parts = next((parts for parts in _ATTENTION if all(part in linears for part in parts)), None)
    fused = next((local for local in _FUSED if local in linears), None)
    if output is None or (parts is None and fused is None):
        return []
    out: Rules = {f"{name}.{output}": Row(Heads("q"))}
    if "sinks" in module._parameters:
        out[f"{name}.sinks"] = ShardedParameter(0, Heads("q"))
    found: list[Rules] = []
    styles = [LocalHeads(sizes=sizes) for sizes in _size_choices(module)]
    if divides_width(module):
        styles.insert(0, LocalHeads(of_width=True))
    if takes(module, "position_bias"):  # of all heads (MPT)
        styles.append(LocalHeads(arguments={"position_bias": by_head}))
    for local_heads in styles:
        around: Rules = {name: local_heads, **out}
        if parts is not None:
            q, k, v = parts
            found.append(
                {
                    **around,
                    f"{name}.{q}": Column(Heads("q")),
                    f"{name}.{k}": Column(Heads("kv")),
                    f"{name}.{v}": Column(Heads("kv")),
                }
            )
        else:
            found += [{**around, f"{name}.{fused}": Column(Heads(layout))} for layout in ("packed", "interleaved")]  # type: ignore[arg-type]
    if parts is None:  # in four blocks, each of queries, values and keys (CodeGen)
        rows, columns = Row(PackedHeads(4, 4)), Column(PackedHeads(12, 4))
        found.append({name: LocalHeads(), f"{name}.{fused}": columns, f"{name}.{output}": rows})
    else:
        q, k, v = parts
        if reads_width(module):
            wide = {f"{name}.{part}": WideColumn(Heads(kind)) for part, kind in ((q, "q"), (k, "kv"), (v, "kv"))}  # type: ignore[arg-type]
            found.append({name: NarrowInput(), **out, **wide})
        # Heads of one half with those of the other, which go together behind attention (DiffLlama)
        of_keys = Column(PackedHeads(2, 2, "kv"))
        halves: Rules = {f"{name}.{q}": Column(PackedHeads(2, 2)), f"{name}.{k}": of_keys, f"{name}.{v}": of_keys}
        found.append({name: LocalHeads(), **halves, f"{name}.{output}": Row(PackedHeads(1, 2))})
    return found


def _size_choices(module: nn.Module) -> list[tuple[str, ...]]:
    """No attribute, or one of those that hold the features of all heads in some models and of the whole layer in
    others.
    """
    return [(), *((size,) for size in _SIZES if isinstance(getattr(module, size, None), int))]


def _merging(name: str, module: nn.Module) -> list[Rules]:
    """Patches that are merged between stages (Swin): a linear beside a norm over all features."""
    reduction = getattr(module, "reduction", None)
    if not isinstance(reduction, nn.Module) or not is_linear(reduction) or not hasattr(module, "norm"):
        return []
    return [{f"{name}.reduction": "colwise_gathered"}]


def _latent_attention(name: str, module: nn.Module, linears: dict[str, nn.Module]) -> list[Rules]:
    """Multi-head latent attention, by DeepSeek's names; whatever else it has (an indexer) stays whole."""
    query = next((local for local in ("q_b_proj", "q_proj") if local in linears), None)
    if query is None or not {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= set(linears):
        return []
    heads = first_int(module, QUERY_HEADS) or first_int(getattr(module, "config", None), QUERY_HEADS)
    rotary = first_int(module, ("qk_rope_head_dim",)) or first_int(
        getattr(module, "config", None), ("qk_rope_head_dim",)
    )
    if heads is None or rotary is None:
        return []
    rules = latent_attention_rules(name, heads, rotary, None)
    rules[f"{name}.{query}"] = rules.pop(f"{name}.q_proj")
    rules |= {f"{name}.{gate}": rules[f"{name}.kv_b_proj"] for gate in _GATES if gate in linears}
    return [{pattern: style for pattern, style in rules.items() if style != "replicated"}]


def _bert_attention(name: str, module: nn.Module) -> list[Rules]:
    """BERT's shape: projections in `self` or `attention`, the output projection in `output`."""
    output = getattr(module, "output", None)
    if not isinstance(output, nn.Module) or not is_linear(getattr(output, "dense", nn.Identity())):
        return []
    for where in ("self", "attention"):
        inner = getattr(module, where, None)
        if not isinstance(inner, nn.Module):
            continue
        parts = next((parts for parts in _ATTENTION if _linears(inner, parts)), None)
        if parts is None:
            continue
        if first_int(inner, QUERY_HEADS) is None and first_int(getattr(inner, "config", None), QUERY_HEADS) is None:
            continue
        around: Rules = {f"{name}.{where}.{part}": Column(Heads("q")) for part in parts}
        around[f"{name}.output.dense"] = Row(Heads("q", beside=where))
        return [{f"{name}.{where}": LocalHeads(sizes=sizes), **around} for sizes in _size_choices(inner)]
    return []


def _linears(module: nn.Module, names: Iterable[str]) -> bool:
    return all(is_linear(getattr(module, name, nn.Identity())) for name in names)


def _bert_mlps(name: str, module: nn.Module) -> Iterator[Proposal]:
    """BERT's shape: `dense` in `intermediate` and in `output`; a layer may have others for some of its tokens, under
    names with the same ending.
    """
    for local, up in module.named_children():
        if not local.startswith("intermediate"):
            continue
        output = local.replace("intermediate", "output", 1)
        down = getattr(module, output, None)
        if not isinstance(down, nn.Module) or not _linears(up, ["dense"]) or not _linears(down, ["dense"]):
            continue
        if output_size(up.get_submodule("dense")) == input_size(down.get_submodule("dense")):
            yield Proposal(
                f"{name}.{local}", [{f"{name}.{local}.dense": "colwise", f"{name}.{output}.dense": "rowwise"}]
            )


def _mlp(name: str, linears: dict[str, nn.Module]) -> list[Rules]:
    down = next((local for local in _DOWN if local in linears), None)
    if down is None:
        return []
    features = input_size(linears[down])
    ups = [local for local in _UP if local in linears and local != down and output_size(linears[local]) == features]
    if ups:
        return [{**{f"{name}.{up}": "colwise" for up in ups}, f"{name}.{down}": "rowwise"}]
    packed = next(
        (local for local in _PACKED_UP if local in linears and output_size(linears[local]) == 2 * features), None
    )
    return [{f"{name}.{packed}": "packed_colwise", f"{name}.{down}": "rowwise"}] if packed else []


def _sequential_mlp(name: str, module: nn.Module) -> list[Rules]:
    """Linears in a row, with nothing between two of them that has parameters."""
    if not isinstance(module, nn.Sequential):
        return []
    parts = [(local, child) for local, child in module.named_children() if any(True for _ in child.parameters())]
    if len(parts) != 2 or not all(is_linear(child) for _, child in parts):
        return []
    (up, first), (down, last) = parts
    if output_size(first) != input_size(last):
        return []
    return [{f"{name}.{up}": "colwise", f"{name}.{down}": "rowwise"}]


def _nested_mlp(name: str, module: nn.Module, linears: dict[str, nn.Module]) -> list[Rules]:
    """One linear that reads what the linears of the module beside it make."""
    if len(linears) != 1:
        return []
    ((down, last),) = linears.items()
    for inner, child in module.named_children():
        ups = {local: up for local, up in child.named_children() if is_linear(up)}
        sizes = {(input_size(up), output_size(up)) for up in ups.values()}
        if sizes == {(output_size(last), input_size(last))}:
            return [{**{f"{name}.{inner}.{local}": "colwise" for local in ups}, f"{name}.{down}": "rowwise"}]
    return []


def expert_alternatives(name: str, module: nn.Module) -> list[Rules]:
    """Fused experts: [E, 2I, H] and [E, H, I], or the transposed [E, H, 2I] and [E, I, H]."""
    up = module._parameters.get("gate_up_proj")
    down = module._parameters.get("down_proj")
    if up is None or down is None or up.ndim != 3 or len(module._parameters) != 2:
        return []
    (_, rows, columns), (_, out, features) = up.shape, down.shape
    if rows == 2 * features and columns == out:
        rules: Rules = {
            f"{name}.gate_up_proj": ShardedParameter(1, Packed(2)),
            f"{name}.down_proj": ShardedParameter(2),
        }
    elif columns == 2 * out and rows == features:
        rules = {f"{name}.gate_up_proj": ShardedParameter(2, Packed(2)), f"{name}.down_proj": ShardedParameter(1)}
    else:
        return []
    return [{**rules, name: "partial_sum"}]
