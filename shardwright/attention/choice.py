"""Which attention a model computes with: one pure function over a table of what each implementation can.

`choose` goes through the implementations in the order of the device and takes the first that can do what is needed. It
says why, and of those that come earlier in the order why not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..utils.errors import one_of
from .extra_terms import padded_width
from .installed import FLASH_2, FLASH_3, FLASH_4, INSTALL, TRITON, VARLEN, VARLEN_WINDOWS, XFORMERS, Installed
from .needs import BLOCK, CAUSAL, CPU, CUDA, MASKS, PADDING, ROCM, WINDOW, Needs

_HALF = frozenset({torch.float16, torch.bfloat16})
_SINGLE = _HALF | {torch.float32}
_ALL_DTYPES = _SINGLE | {torch.float64}
_EVERY_MASK = frozenset(MASKS)
_NAMED_MASKS = frozenset({CAUSAL, PADDING, WINDOW})  # those that need no tensor of [S, S]
_ANYWHERE = (0, 0)
_LAST = (99, 0)
_OLDEST_FLASH_2 = (2, 3, 3)  # that transformers knows
_SOFT_CAPS_OF_FLASH_2 = (2, 6, 0)
_WIDE_HEADS_OF_FLASH_2 = (2, 5, 5)  # in training, on GPUs with little shared memory


@dataclass(frozen=True)
class Backend:
    """What an implementation can.

    name        what users call it
    what        in a few words
    takes       what a model must take to be given it: a name of transformers, or "own" for functions of ours
    devices     types of devices; empty for all
    least       capability that it begins with, on CUDA, and the first that it no longer knows
    head_dim    the largest; None for any
    narrowest   the smallest
    aligned     its kernels read heads in pieces of 16 bytes, and pad none
    equal_dims  values must have the head_dim of queries
    crossed     padding of keys says nothing about queries
    any_row     finds packed documents in every row of a batch
    package     what must be installed
    """

    name: str
    what: str
    takes: str
    devices: frozenset[str] = frozenset()
    least: tuple[int, int] = _ANYWHERE
    below: tuple[int, int] = _LAST
    dtypes: frozenset[torch.dtype] = _ALL_DTYPES
    head_dim: int | None = None
    narrowest: int = 1
    aligned: bool = False
    equal_dims: bool = False
    masks: frozenset[str] = _EVERY_MASK
    crossed: bool = True
    any_row: bool = True
    soft_cap: bool = False
    sinks: bool = False
    position_bias: bool = True
    dropout: bool = True
    package: str = ""


def _gpu(name: str, what: str, takes: str = "own", least: tuple[int, int] = (8, 0), **can: object) -> Backend:
    return Backend(name, what, takes, frozenset({CUDA}), least, **can)  # type: ignore[arg-type]


def _flash(generation: int, package: str, least: tuple[int, int], below: tuple[int, int], **can: object) -> Backend:
    name = f"flash_attention_{generation}"
    numbers = {"below": below, "dtypes": _HALF, "package": package}
    return _gpu(name, f"{package}, through transformers", name, least, **numbers, **_THROUGH_TRANSFORMERS, **can)


# transformers takes padding of keys for that of queries, looks for packed documents where a batch has one row, makes no
# masks but the named ones, and drops a position bias.
_THROUGH_TRANSFORMERS: dict[str, Any] = {
    "masks": _NAMED_MASKS,
    "crossed": False,
    "any_row": False,
    "position_bias": False,
}
# An implementation that differs by device has several rows, of which the first that knows the device counts.
TABLE: tuple[Backend, ...] = (
    # No gradients of sinks and soft caps, no dropout; attention on SM100 with 192/128 features is left to others.
    _flash(4, FLASH_4, (9, 0), (12, 0), head_dim=128, aligned=True, dropout=False),
    _flash(3, FLASH_3, (9, 0), (10, 0), head_dim=256, aligned=True, soft_cap=True, dropout=False),
    _flash(2, FLASH_2, (8, 0), _LAST, head_dim=256, soft_cap=True),
    Backend(
        "flash_attention_2",
        "flash-attn for ROCm, through transformers",
        "flash_attention_2",
        frozenset({ROCM}),
        dtypes=_HALF,
        head_dim=256,
        package=FLASH_2,
        **_THROUGH_TRANSFORMERS,
    ),
    _gpu(
        "xformers",
        "xformers' memory-efficient attention",
        least=(5, 0),
        below=(10, 0),  # of its kernels that take masks
        dtypes=_SINGLE,
        aligned=True,
        package=XFORMERS,
    ),
    _gpu(
        "cudnn",
        "torch's SDPA with cuDNN's kernels",
        dtypes=_HALF,
        head_dim=128,
        aligned=True,
        sinks=True,
        position_bias=False,
    ),
    _gpu(
        "flash",
        "torch's SDPA with its flash kernels",
        dtypes=_HALF,
        head_dim=256,
        equal_dims=True,
        masks=frozenset({CAUSAL, PADDING}),  # a batch that is padded after all is refused when it comes
        any_row=False,
        position_bias=False,
    ),
    Backend(
        "flash",
        "torch's SDPA with its flash kernels for CPUs",
        "own",
        frozenset({CPU}),
        equal_dims=True,
        sinks=True,
        position_bias=False,
        dropout=False,
    ),
    _gpu(
        "efficient",
        "torch's SDPA with its memory-efficient kernels",
        least=(5, 0),
        dtypes=_SINGLE,
        aligned=True,
        sinks=True,
    ),
    Backend("math", "torch's SDPA without a fused kernel", "own", sinks=True),
    Backend("sdpa", "torch's SDPA, which picks one of its kernels for every call", "sdpa", sinks=True),
    _gpu(
        "varlen",
        "torch's attention over documents of varying length",
        "own unpadded",
        dtypes=_HALF,
        head_dim=256,
        aligned=True,
        equal_dims=True,
        masks=_NAMED_MASKS,
        crossed=False,
        position_bias=False,
        dropout=False,
        package=VARLEN,
    ),
    _gpu(
        "flex",
        "torch's FlexAttention, compiled",
        "flex_attention",
        dtypes=_SINGLE,
        head_dim=256,
        narrowest=16,
        masks=_NAMED_MASKS | {BLOCK},
        soft_cap=True,
        sinks=True,
        dropout=False,
        package=TRITON,
    ),
    Backend("eager", "transformers' own products and softmax, not fused", "eager", soft_cap=True, sinks=True),
)
BACKENDS: tuple[str, ...] = tuple(dict.fromkeys(backend.name for backend in TABLE))

_FLASH_4, _FLASH_3, _FLASH_2 = "flash_attention_4", "flash_attention_3", "flash_attention_2"
# Capability that an order begins with -> the order. xformers computes with kernels that torch has as well, and cuDNN
# plans anew for every length, so both come where they are needed or asked for.
_ORDERS: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = (
    ((12, 0), (_FLASH_2, "sdpa", "flex")),
    ((10, 0), (_FLASH_4, "cudnn", _FLASH_2, "sdpa", "flex")),
    ((9, 0), (_FLASH_3, _FLASH_2, _FLASH_4, "sdpa", "flex")),
    ((8, 0), (_FLASH_2, "sdpa", "flex")),
    (_ANYWHERE, ("efficient", "xformers", "sdpa")),
)


@dataclass(frozen=True)
class Choice:
    """backend     one of BACKENDS
    reason      why this one, and of better ones why not
    asked       whether it was asked for by name: then torch may fall back on no other kernel
    """

    backend: str
    reason: str
    asked: bool = False

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def order(needs: Needs) -> tuple[str, ...]:
    """Implementations from the best to the last, for this device."""
    if needs.device == ROCM:
        return (_FLASH_2, "sdpa", "eager")
    if needs.device != CUDA or needs.capability is None:
        return ("sdpa", "eager")
    names = next(names for least, names in _ORDERS if needs.capability >= least)
    if needs.position_bias:  # cuDNN has no gradients of it, and without a fused kernel torch computes in fp32
        names = ("efficient", *(name for name in names if name != "efficient"))
    if needs.packed:  # where masks of [S, S] are what costs
        flash = tuple(name for name in names if name.startswith("flash_attention"))
        names = (*flash, "varlen", "flex", *(name for name in names if name not in flash and name != "flex"))
    return (*names, "eager")


def choose(needs: Needs, installed: Installed, asked: str | None = None) -> Choice:
    """The implementation for `needs`: the one `asked` for, or the best. ValueError where that one cannot."""
    if asked is not None:
        check_backend(asked, fused=False)
        why_not = refusal(asked, needs, installed)
        if why_not is not None:
            best = choose(needs, installed).backend
            raise ValueError(
                f"attention_backend={asked!r} cannot be had for {needs} on {needs.where}: {why_not}. "
                f"attention_backend={best!r} works here, and so does None, which chooses by itself"
            )
        return Choice(asked, f"asked for ({_row(asked, needs).what})", asked=True)
    passed: dict[str, list[str]] = {}  # why not -> the names
    for name in order(needs):
        why_not = refusal(name, needs, installed)
        if why_not is None:
            return Choice(name, _reason(name, needs, passed))
        passed.setdefault(why_not, []).append(name)
    raise ValueError(f"there is no attention for {needs} on {needs.where} ({_not(passed)})")


def _reason(name: str, needs: Needs, passed: dict[str, list[str]]) -> str:
    what = _row(name, needs).what
    if not passed:
        return f"{what}, the first choice on {needs.where} for {needs}"
    return f"{what}, the best that {needs.where} has for {needs} ({_not(passed)})"


def _not(passed: dict[str, list[str]]) -> str:
    return "; ".join(f"not {', '.join(names)}: {why}" for why, names in passed.items())


def check_backend(name: str | None, fused: bool) -> None:
    """ValueError for an attention_backend that does not exist, or that contradicts `fused`."""
    if name is not None and name not in BACKENDS:
        raise one_of("attention_backend", name, BACKENDS)
    if name == "eager" and fused:
        raise ValueError(
            "attention_backend='eager' with enable_flash_attention=True: eager attention is not fused; leave one of "
            "them out"
        )


def _row(name: str, needs: Needs) -> Backend:
    rows = [backend for backend in TABLE if backend.name == name]
    return next((row for row in rows if not row.devices or needs.device in row.devices), rows[0])


def refusal(name: str, needs: Needs, installed: Installed) -> str | None:
    """Why an implementation cannot do what is needed; None where it can."""
    row = _row(name, needs)
    for check in (_device, _model, _numbers, _features, _documents):
        why_not = check(row, needs)
        if why_not is not None:
            return why_not
    if row.package:
        return installed.missing(row.package) or _of_package(row, needs, installed)
    return None


def _device(row: Backend, needs: Needs) -> str | None:
    if row.devices and needs.device not in row.devices:
        return f"it runs on {' and '.join(sorted(row.devices))} only"
    if needs.device != CUDA or needs.capability is None:
        return None
    if needs.capability < row.least:
        return f"it begins with SM{row.least[0]}{row.least[1]}"
    return f"it knows no GPU from SM{row.below[0]}{row.below[1]} on" if needs.capability >= row.below else None


def _model(row: Backend, needs: Needs) -> str | None:
    if needs.takes is None or row.takes in needs.takes:
        return None
    if "sdpa" not in needs.takes and row.takes in ("sdpa", "own") and needs.soft_cap:
        return "torch's SDPA has no soft caps"
    return "the model's class does not take it"


def _numbers(row: Backend, needs: Needs) -> str | None:
    if needs.dtype not in row.dtypes:
        return f"it has no {needs.dtype_name}"
    old = needs.device == CUDA and needs.capability is not None and needs.capability < (8, 0)
    if needs.dtype == torch.bfloat16 and old and row.devices:
        return "it has bf16 from SM80 on"
    return _widths(row, needs)


def _widths(row: Backend, needs: Needs) -> str | None:
    widths = {needs.head_dim, needs.value_dim or needs.head_dim}
    if needs.sinks and row.takes in ("own", "sdpa"):  # features more (see `extra_terms`)
        widths = {padded_width(max(needs.head_dim + 2, needs.value_dim or 0))}
    if row.head_dim is not None and max(widths) > row.head_dim:
        more = ", and sinks take a few more" if needs.head_dim <= row.head_dim else ""
        return f"its heads have at most {row.head_dim} features{more}"
    if min(widths) < row.narrowest:
        return f"its heads have at least {row.narrowest} features"
    modern = needs.capability is None or needs.capability >= (8, 0)
    step = 16 // needs.dtype.itemsize
    if row.aligned and (modern or needs.dtype in _HALF) and any(width % step for width in widths):
        return f"the features of its heads come in multiples of {step}"
    if row.equal_dims and len(widths) > 1:
        return "its values have as many features as its queries"
    if row.takes.startswith("flash_attention") and (needs.value_dim or 0) > needs.head_dim:
        return "its values have at most as many features as its queries"
    return None


def _has_little_shared_memory(needs: Needs) -> bool:
    """GPUs on which flash kernels have no gradients of the widest heads."""
    if needs.device != CUDA or needs.capability is None:
        return False
    return (8, 0) < needs.capability < (9, 0) or needs.capability >= (12, 0)


def _features(row: Backend, needs: Needs) -> str | None:
    if needs.soft_cap and not row.soft_cap:
        return "it has no soft caps"
    if needs.sinks and not row.sinks:
        return "it has no sinks" + (", or no gradients of them" if needs.training else "")
    if needs.position_bias and not row.position_bias:
        return "it has no position bias, or no gradients of it"
    if needs.training and (why_not := _in_training(row, needs)) is not None:
        return why_not
    missing = [kind for kind in MASKS if kind in needs.masks - row.masks]
    return f"it takes no {missing[0]} masks" if missing else None


def _in_training(row: Backend, needs: Needs) -> str | None:
    if needs.dropout > 0:
        if not row.dropout:
            return f"it has no dropout, and the model's is {needs.dropout:g}"
        if needs.soft_cap and row.takes == _FLASH_2:
            return "it has no dropout together with soft caps"
        if row.name == "cudnn" and needs.dropout * 16 % 1:
            return f"its dropout comes in multiples of 1/16, and the model's is {needs.dropout:g}"
    is_flash = row.name in (_FLASH_2, "flash", "varlen")
    if is_flash and _has_little_shared_memory(needs) and (192 < needs.head_dim <= 224 or _is_wide_with_dropout(needs)):
        return f"it has no gradients of heads with {needs.head_dim} features on this GPU"
    return None


def _is_wide_with_dropout(needs: Needs) -> bool:
    return needs.head_dim > 192 and needs.dropout > 0


def _documents(row: Backend, needs: Needs) -> str | None:
    if needs.crossed and not row.crossed:
        return "with cross attention it takes the padding of keys for that of queries"
    if not needs.packed or row.any_row:
        return None
    if row.name == "flash":
        return "packed documents need a mask, and it takes none"
    return None if needs.in_one_row else "it finds packed documents in batches of one row that begin alike only"


def _of_package(row: Backend, needs: Needs, installed: Installed) -> str | None:
    if row.package == FLASH_2:
        return _of_flash_2(needs, installed)
    lacks_windows = row.package == VARLEN and VARLEN_WINDOWS not in installed.versions
    return "this torch's has no windows" if lacks_windows and WINDOW in needs.masks else None


def _of_flash_2(needs: Needs, installed: Installed) -> str | None:
    least = _OLDEST_FLASH_2
    if needs.soft_cap:
        least = max(least, _SOFT_CAPS_OF_FLASH_2)
    if needs.training and needs.head_dim > 192 and _has_little_shared_memory(needs):
        least = max(least, _WIDE_HEADS_OF_FLASH_2)
    if installed.has(FLASH_2, least):
        return None
    needed = ".".join(map(str, least))
    return f"{FLASH_2} is {installed.versions[FLASH_2]}, and {needed} is needed: {INSTALL[FLASH_2]}"
