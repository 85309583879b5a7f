"""The dict form of a configuration, as InternLM's users write it, turned into the plugin's keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...pipeline.checkpointing import PipelineGradientCheckpointConfig
from ...utils.errors import nearest
from ..without_effect import WithoutEffect

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TENSOR_MODES = ("1d", "mtp", "none")
SCHEDULES = {"1f1b": "1f1b", "zbh1": "zb", "zbv": "zbv", "interleaved": "interleaved", "gpipe": "gpipe"}
_SECTIONS = ("parallel", "hybrid_zero_optimizer", "model", "data", "grad_scaler")

Flat = dict[str, Any]
_UNUSED = "without_effect"  # where readers leave keys that mean nothing, beside the plugin's arguments


class Reading(NamedTuple):
    """Keyword arguments of the plugin, and the keys that mean nothing beside the others."""

    arguments: Flat
    without_effect: tuple[WithoutEffect, ...]


def read_config(config: Mapping[str, Any]) -> Reading:
    """Keyword arguments of `HybridParallelPlugin` for a configuration such as

        dict(parallel=dict(zero1=8, tensor=1, pipeline=dict(size=1, interleaved_overlap=True), sequence_parallel=False),
             hybrid_zero_optimizer=dict(overlap_sync_grad=True, overlap_sync_param=True, clip_grad_norm=1.0),
             model=dict(num_chunks=1))

    Of `parallel.data` the plugin checks that it is what the other sizes leave. Where `data` gives both, `micro_num`
    splits the batch and `micro_bsz` follows from it. Names in capitals are constants of a configuration file, not
    sections.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config={config!r} must be a dict with the sections {', '.join(_SECTIONS)}, not a {type(config).__name__}"
        )
    unknown = [key for key, value in config.items() if key not in _SECTIONS and not _is_constant(key, value)]
    if unknown:
        raise ValueError(
            f"config[{unknown[0]!r}] is not known here; the sections are "
            f"{', '.join(_SECTIONS)}{nearest(unknown[0], _SECTIONS)}"
        )
    flat: Flat = {}
    for section, readers in _READERS.items():
        given = config.get(section) or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"config[{section!r}]={given!r} must be a dict")
        _read(section, given, readers, flat)
    unused: list[WithoutEffect] = flat.pop(_UNUSED, [])
    return Reading(flat, (*unused, *_settle(flat)))


def _is_constant(key: Any, value: Any) -> bool:
    return isinstance(key, str) and key.isupper() and not isinstance(value, Mapping)


def _read(where: str, given: Mapping[str, Any], readers: Mapping[str, Callable[[Any, Flat], None]], flat: Flat) -> None:
    for key, value in given.items():
        reader = readers.get(key)
        if reader is None:
            raise ValueError(
                f"{where}.{key}={value!r} is not known here; {where} takes {', '.join(readers)}{nearest(key, readers)}"
            )
        reader(value, flat)


def _to(name: str) -> Callable[[Any, Flat], None]:
    def read(value: Any, flat: Flat) -> None:
        flat[name] = value

    return read


def _size(where: str, value: Any, flat: Flat) -> int:
    """`value` is the size, or a dict with the size and more."""
    if isinstance(value, Mapping):
        if "size" not in value:
            raise ValueError(f"{where}={dict(value)!r} needs a size, for example {where}=dict(size=2)")
        _read(where, {key: other for key, other in value.items() if key != "size"}, _INNER[where], flat)
        value = value["size"]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where}={value!r} must be a whole number or a dict with one as size")
    return value


def _zero1(value: Any, flat: Flat) -> None:
    size = _size("parallel.zero1", value, flat)
    if flat.get("zero_stage") == 3:
        flat["zero_group_size"] = size if size > 0 else None
    elif size == 1:
        flat["zero_stage"] = 0
    else:
        flat["zero_stage"], flat["zero_group_size"] = 1, size if size > 0 else None


def _fsdp(value: Any, flat: Flat) -> None:
    if value:
        flat["zero_stage"] = 3


def _tensor_mode(name: Any, _: Flat) -> None:
    if str(name).lower() not in TENSOR_MODES:
        raise ValueError(
            f"parallel.tensor.mode={name!r}: layers are sharded in one dimension here; use mode='1d' (or 'mtp')"
        )


def _tensor(value: Any, flat: Flat) -> None:
    flat["tp_size"] = _size("parallel.tensor", value, flat)


def _schedule(name: Any, flat: Flat) -> None:
    known = SCHEDULES.get(str(name).lower())
    if known is None:
        raise ValueError(
            f"parallel.pipeline.mode={name!r} is not one of "
            f"{', '.join(SCHEDULES)}{nearest(str(name).lower(), SCHEDULES)}"
        )
    flat["pp_style"] = known


def _pipeline(value: Any, flat: Flat) -> None:
    flat["pp_size"] = _size("parallel.pipeline", value, flat)


def _sequence_parallel(value: Any, flat: Flat) -> None:
    if value:
        flat["enable_sequence_parallelism"] = True


def _idle(key: str) -> Callable[[Any, Flat], None]:
    def read(wanted: Any, flat: Flat) -> None:
        if wanted:
            why = "weight parallelism is off, and is not offered"
            flat.setdefault(_UNUSED, []).append(WithoutEffect(f"parallel.weight.{key}", wanted, why))

    return read


def _weight(value: Any, flat: Flat) -> None:
    if _size("parallel.weight", value, flat) > 1:
        raise ValueError(
            f"parallel.weight={value!r}: weight parallelism is not offered; use parallel.zero1=dict(size=..., "
            "fsdp=True) for ZeRO-3"
        )


def _dtype(value: Any, flat: Flat) -> None:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if dtype not in _DTYPES:
        raise ValueError(f"model.dtype={value!r} is not one of {', '.join(map(str, _DTYPES))}")
    flat["precision"] = _DTYPES[dtype]


def _checkpoint(value: Any, flat: Flat) -> None:
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise ValueError(f"model.checkpoint={value!r} must be True, False or the share of layers to recompute, 0 to 1")
    if value:
        flat["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=float(value))


def _bucket(value: Any, flat: Flat) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"hybrid_zero_optimizer.reduce_bucket_size={value!r} must be a number of elements of at least 1 "
            "(12_000_000 is usual)"
        )
    flat["zero_bucket_size_in_m"] = value / 1e6


def _fp16(value: Any, flat: Flat) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"grad_scaler.fp16={value!r} must be a dict, such as dict(initial_scale=2**16)")
    _read("grad_scaler.fp16", value, _INNER["grad_scaler.fp16"], flat)


def _settle(flat: Flat) -> Iterator[WithoutEffect]:
    """What the sections mean together; yields the keys that lose."""
    if flat.get("num_model_chunks", 1) > 1 and "pp_style" not in flat:
        flat["pp_style"] = "interleaved"  # chunks without a schedule of their own
    stage = flat.get("zero_stage", 0)
    if stage not in (1, 2) and flat.pop("overlap_allgather", False):
        why = f"zero_stage={stage} gathers no weights after a step"
        yield WithoutEffect("hybrid_zero_optimizer.overlap_sync_param", True, why)
    if "num_microbatches" in flat and "microbatch_size" in flat:
        size = flat.pop("microbatch_size")
        yield WithoutEffect("data.micro_bsz", size, "data.micro_num splits the batch")


_READERS: dict[str, dict[str, Callable[[Any, Flat], None]]] = {
    "parallel": {
        "data": _to("dp_size"),
        "zero1": _zero1,
        "tensor": _tensor,
        "pipeline": _pipeline,
        "sequence_parallel": _sequence_parallel,
        "weight": _weight,
    },
    "hybrid_zero_optimizer": {
        "overlap_sync_grad": _to("overlap_communication"),
        "overlap_sync_param": _to("overlap_allgather"),
        "reduce_bucket_size": _bucket,
        "clip_grad_norm": _to("max_norm"),
    },
    "model": {
        "num_chunks": _to("num_model_chunks"),
        "dtype": _dtype,
        "checkpoint": _checkpoint,
        "parallel_output": _to("parallel_output"),
    },
    "data": {"micro_num": _to("num_microbatches"), "micro_bsz": _to("microbatch_size")},
    "grad_scaler": {
        "fp16": _fp16,
        "growth_factor": _to("growth_factor"),
        "backoff_factor": _to("backoff_factor"),
        "max_scale": _to("max_scale"),
        "hysteresis": _to("hysteresis"),
    },
}
_INNER: dict[str, dict[str, Callable[[Any, Flat], None]]] = {
    "parallel.zero1": {"fsdp": _fsdp},
    "parallel.tensor": {"mode": _tensor_mode},
    "parallel.pipeline": {"interleaved_overlap": _to("overlap_p2p"), "mode": _schedule},
    "parallel.weight": {"overlap": _idle("overlap"), "memory_pool": _idle("memory_pool")},
    "grad_scaler.fp16": {name: _to(name) for name in ("initial_scale", "min_scale", "growth_interval")},
}
SECTIONS = {section: tuple(readers) for section, readers in _READERS.items()}  # and the keys that each takes
INNER = {
    where: tuple(readers) if where == "grad_scaler.fp16" else ("size", *readers) for where, readers in _INNER.items()
}  # those of keys that are dicts
