"""The ways to train (or to use) a model that a cell can try, and where one makes no sense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...models.windows import why_no_sequence
from ...utils.errors import nearest
from ...utils.versions import is_installed

if TYPE_CHECKING:
    from .subject import Built

_TP: dict[str, Any] = {"tp_size": 2}
_PP: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}
_SPLIT: dict[str, Any] = {**_TP, "enable_sequence_parallelism": True}


def _along(mode: str) -> dict[str, Any]:
    return {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}


@dataclass(frozen=True)
class Axis:
    """One column of the matrix.

    plugin      arguments of HybridParallelPlugin
    kind        what is done under it: see `cell.KINDS`
    group       columns that a page shows in one table
    """

    name: str
    title: str
    plugin: Mapping[str, Any] = field(default_factory=lambda: _TP)
    world: int = 2
    kind: str = "train"
    dtype: str = "float64"
    group: str = "layouts"


_ALL = (
    Axis("tp2", "tensor parallel"),
    Axis("pp2", "1F1B", _PP),
    Axis("interleaved", "interleaved", {**_PP, "pp_style": "interleaved", "num_model_chunks": 2}),
    Axis("zbv", "ZBV", {**_PP, "pp_style": "zbv", "num_model_chunks": 2}),
    Axis("tp2_pp2", "tp2 x pp2", {**_TP, **_PP}, world=4),
    Axis("ep2", "experts", {"ep_size": 2}),
    Axis("tp2_ep2", "tp2 x experts", {**_TP, "ep_size": 2}, world=4),
    Axis("fp32", "fp32", dtype="float32"),
    Axis("split_gather", "split_gather", _SPLIT, group="sequences"),
    Axis("ring", "ring", {**_SPLIT, "sequence_parallelism_mode": "ring"}, group="sequences"),
    Axis("overlap", "sequence overlap", {**_SPLIT, "enable_sequence_overlap": True}, group="sequences"),
    Axis("all_to_all", "Ulysses", _along("all_to_all"), group="sequences"),
    Axis("ring_attn", "ring attention", _along("ring_attn"), group="sequences"),
    Axis("tp2_sp2", "tp2 x Ulysses", {**_TP, **_along("all_to_all")}, world=4, group="sequences"),
    Axis("flash", "flash attention", {**_TP, "enable_flash_attention": True}, group="uses"),
    Axis("xformers", "xformers", {**_TP, "attention_backend": "xformers"}, kind="xformers", group="uses"),
    Axis("jit", "fused by JIT", {**_TP, "enable_jit_fused": True}, group="uses"),
    Axis("fused_norm", "fused norm", {**_TP, "enable_fused_normalization": True}, group="uses"),
    Axis("lazy", "lazy", kind="lazy", group="uses"),
    Axis("lora", "LoRA", kind="lora", group="uses"),
    Axis("round_trip", "HF round trip", kind="round_trip", group="uses"),
    Axis("generate", "generate", kind="generate", group="uses"),
)
_TIMES = Axis("times", "step times", {}, kind="times", group="")  # no column: a table of its own
AXES: dict[str, Axis] = {axis.name: axis for axis in (*_ALL, _TIMES)}
GROUPS = {"layouts": "Layouts", "sequences": "Split sequences", "uses": "Options and uses, at tp2"}
# What users say for short.
_SHORT: dict[str, tuple[str, ...]] = {
    "tp": ("tp2",),
    "pp": ("pp2",),
    "sp": ("split_gather", "all_to_all"),
    "all": tuple(axis.name for axis in _ALL),
}


def pick_axes(names: Iterable[str]) -> list[Axis]:
    """By name; `tp`, `pp`, `sp` and `all` stand for the usual ones."""
    found: dict[str, Axis] = {}
    for name in names:
        if name not in _SHORT and name not in AXES:
            known = [*_SHORT, *AXES]
            raise ValueError(f"axis {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
        found |= {each: AXES[each] for each in _SHORT.get(name, (name,))}
    return list(found.values())


def not_applicable(axis: Axis, built: Built) -> str:
    """Why this cell makes no sense for the model in one process; "" where it does. All such reasons stand here."""
    model: Any = built.model
    if axis.kind == "generate" and not (hasattr(model, "can_generate") and model.can_generate()):
        return "the class does not generate"
    if axis.kind in ("lazy", "round_trip") and not hasattr(model, "save_pretrained"):
        return "the class has no files of transformers"
    if axis.kind == "lora" and not is_installed("peft"):
        return "peft is not installed"
    if axis.group == "sequences":
        return why_no_sequence(model)
    if axis.plugin.get("ep_size", 1) == 1:
        return ""
    if not any("Expert" in type(module).__name__ for module in model.modules()):
        return "the class has no experts"
    return "" if built.rows % 2 == 0 and built.rows else "its batch cannot be dealt out by samples"
