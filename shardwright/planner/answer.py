"""What a search found as text, as plain data, and as arguments of the plugin."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..pipeline.checkpointing import PipelineGradientCheckpointConfig
from ..plugins.hybrid.resolved import size, table
from ..utils.errors import counted
from .devices import device_of
from .estimate import Estimate
from .machines import Machine
from .remade import remade
from .search import Found, Question, check_precision, describe, search

_SHOWN = 8
_MODES = {"1f1b": "1f1b", "zb": "zbh1", "zbv": "zbv", "interleaved": "interleaved"}


def how_sure(machine: Machine) -> str:
    return (
        f"an estimate: times follow from {machine.source}, and may be off by a third; layouts within 5 % of one "
        "another are as good as equal. Memory follows from a replay of few layers, with 5 % and 2 GiB kept free; "
        "shardwright plan --peak replays the one that you choose"
    )


def plugin_arguments(found: Estimate, precision: str, along: bool) -> dict[str, Any]:
    """Of `HybridParallelPlugin`, but for recomputation (`recompute_of`)."""
    layout = found.layout
    given: dict[str, Any] = {"precision": precision, "zero_stage": layout.zero, "microbatch_size": layout.samples}
    if layout.tp > 1:
        given["tp_size"] = layout.tp
        if along:
            given |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    if layout.sp > 1:
        given |= {"sp_size": layout.sp, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
    if layout.pp > 1:
        given |= {"pp_size": layout.pp, "pp_style": layout.style, "num_model_chunks": layout.chunks}
    return given


def recompute_of(found: Estimate) -> dict[str, Any]:
    """Arguments of `PipelineGradientCheckpointConfig`; empty where nothing is recomputed."""
    layout = found.layout
    given = {"gradient_checkpointing_ratio": layout.whole, "selective_ratio": layout.selective}
    return {name: share for name, share in given.items() if share}


def search_arguments(
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], Any],
    *,
    world_size: int,
    global_batch_size: int,
    sequence_length: int,
    gpu: str | None = None,
    gpu_memory: float | None = None,
    gpus_per_node: int | None = None,
    inside_bandwidth: float | None = None,
    between_bandwidth: float | None = None,
    precision: str = "bf16",
    calibration: str | Path | None = None,
) -> dict[str, Any]:
    """Arguments of `HybridParallelPlugin` for the best layout, the same in every process that asks. Call it before
    `launch`: the search plays ranks of jobs of its own.

    model       makes the model, in a `LazyInitContext`
    optimizer   makes the optimizer for a model
    gpu         kind of device; None: that of the calibration, or "h100"
    gpu_memory and the others: GiB, devices, GB/s; None: what is published of `gpu`
    calibration file of `shardwright calibrate`, in place of what is published
    """
    if dist.is_initialized():
        raise ValueError("search_arguments() comes before launch(): this process is in a process group already")
    check_precision(precision)
    device = device_of(
        calibration,
        gpu if calibration is not None else gpu or "h100",
        precision,
        world_size,
        memory=gpu_memory,
        per_node=gpus_per_node,
        inside=inside_bandwidth,
        between=between_bandwidth,
    )
    found = search(
        Question(remade(model), optimizer, device, world_size, global_batch_size, sequence_length, precision)
    )
    given, again = plugin_arguments(found.best, precision, found.along), recompute_of(found.best)
    return given | ({"gradient_checkpoint_config": PipelineGradientCheckpointConfig(**again)} if again else {})


def flags(found: Estimate, question: Question, along: bool) -> str:
    """Of `shardwright plan`, but for the model."""
    layout = found.layout
    words = [f"--world-size {layout.tp * layout.pp * layout.sp * layout.dp}"]
    words.append(f"--batch-size {layout.samples * layout.count} --seq-len {question.length}")
    words += [f"--optimizer {question.optimizer_name}"] if question.optimizer_name != "adamw" else []
    words += [f"--device {question.machine.device}"] if question.machine.device != "cuda" else []
    for name, value in plugin_arguments(found, question.precision, along).items():
        option = "--" + name.replace("_", "-")
        words.append(option if value is True else f"{option} {value}")
    words += [f"--recompute {layout.whole:g}"] if layout.whole else []
    words += [f"--selective {layout.selective:g}"] if layout.selective else []
    return " ".join(words)


def config_of(found: Estimate, precision: str, along: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration in dict form, and arguments beside it for what that cannot say."""
    layout = found.layout
    given = plugin_arguments(found, precision, along)
    parallel: dict[str, Any] = {"zero1": {"size": -1, "fsdp": layout.zero == 3}, "tensor": {"size": layout.tp}}
    model: dict[str, Any] = {
        "dtype": {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(precision, "torch.float32")
    }
    if layout.zero == 0:
        parallel["zero1"] = {"size": 1}
    if layout.pp > 1:
        parallel["pipeline"] = {"size": layout.pp, "mode": _MODES[layout.style]}
        model["num_chunks"] = layout.chunks
    if layout.whole:
        model["checkpoint"] = layout.whole
    said = {"precision", "microbatch_size", "tp_size", "pp_size", "pp_style", "num_model_chunks"}
    besides = {name: value for name, value in given.items() if name not in said and name != "zero_stage"}
    if layout.zero == 2:
        besides["zero_stage"] = 2
    return {"parallel": parallel, "model": model, "data": {"micro_bsz": layout.samples}}, besides


def as_text(found: Found, question: Question) -> str:
    best, device = found.best, question.machine
    lines = [
        f"{question.world_size} x {device.name} ({device.memory / 2**30:g} GiB, {device.per_node} in a node, "
        f"{device.inside / 1e9:g} GB/s inside, {device.between / 1e9:g} GB/s between), {question.global_batch} "
        f"samples of {question.length} tokens a step, {question.precision}: {counted(found.tried, 'layout')} tried",
        "",
        f"best: {describe(best.layout)}",
        f"  {best.seconds:.3g} s a step, {tokens(best, question):,.0f} tokens/s, {best.mfu:.1%} of the peak (MFU); "
        f"{size(round(best.memory))} on the fullest rank of {size(round(found.limit))} that it may take",
        "  of a step: " + ", ".join(f"{what} {_percent(part, best.seconds)}" for what, part in best.parts.items()),
        "",
        f"shardwright plan --model {shlex.quote(question.model_name)} {flags(best, question, found.along)}",
        from_config_words(best, question, found.along),
        "",
    ]
    rows = [
        (
            describe(one.layout),
            f"{one.seconds:.3g} s",
            f"{one.seconds / best.seconds - 1:+.1%}",
            size(round(one.memory)),
        )
        for one in found.estimates[:_SHOWN]
    ]
    lines += [*table(("fastest of each kind", "step", "longer", "memory"), rows), ""]
    others = [(what, why(one, found)) for what, one in found.neighbours]
    lines += [*table(("instead", "it is not the best because"), others), "", f"how sure this is: {how_sure(device)}"]
    return "\n".join(lines)


def from_config_words(best: Estimate, question: Question, along: bool) -> str:
    form, besides = config_of(best, question.precision, along)
    words = [repr(form), *(f"{name}={value!r}" for name, value in besides.items())]
    if best.layout.selective:
        words.append(
            f"gradient_checkpoint_config=PipelineGradientCheckpointConfig(selective_ratio={best.layout.selective:g})"
        )
    return f"HybridParallelPlugin.from_config({', '.join(words)})"


def why(one: Estimate, found: Found) -> str:
    """A layout that is like the best but for one thing is not the best."""
    longer = one.seconds / found.best.seconds - 1
    if one.memory > found.limit:
        return f"it does not fit: {size(round(one.memory))} ({longer:+.1%} of the time)"
    if longer < 0:
        return f"it would be as good: {longer:+.1%} of the time, {size(round(one.memory))}"
    most = max(one.parts, key=lambda part: one.parts[part] - found.best.parts.get(part, 0.0))
    return f"{longer:+.1%} of the time, most of it {most}; {size(round(one.memory))}"


def tokens(one: Estimate, question: Question) -> float:
    return question.global_batch * question.length / one.seconds


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"


def as_data(found: Found, question: Question) -> dict[str, Any]:
    def plain(one: Estimate) -> Mapping[str, Any]:
        form, besides = config_of(one, question.precision, found.along)
        return {
            "layout": vars(one.layout),
            "memory": round(one.memory),
            "seconds": one.seconds,
            "tokens_per_second": tokens(one, question),
            "mfu": one.mfu,
            "parts": one.parts,
            "flags": flags(one, question, found.along),
            "from_config": form,
            "arguments": besides,
            "recompute": recompute_of(one),
        }

    return {
        "machine": question.machine.plain(),
        "world_size": question.world_size,
        "global_batch": question.global_batch,
        "length": question.length,
        "tried": found.tried,
        "limit": found.limit,
        "layouts": [plain(one) for one in found.estimates],
        "neighbours": [{"instead": what, "why": why(one, found), **plain(one)} for what, one in found.neighbours],
        "how_sure": how_sure(question.machine),
    }
