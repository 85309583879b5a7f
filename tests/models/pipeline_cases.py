"""Runs on rank processes: one model through a pipeline, against plain transformers on the same rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tied_gradients import sync_tied_gradients

from shardwright.interface import OptimizerWrapper
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.pipeline.cut.plan import cut_model
from shardwright.pipeline.cut.tied import create_tied_process_groups
from shardwright.pipeline.executor import PipelineExecutor
from shardwright.pipeline.settings import PipelineSettings
from shardwright.testing import adamw, keep_float64, loss_of, zoo

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """One model and one way to run it; `batches` are (samples, sequence length, training) of the steps."""

    name: str
    style: str = "1f1b"
    chunks: int = 1
    num_microbatches: int | None = 3
    microbatch_size: int | None = None
    layers: tuple[int, ...] | None = None
    checkpointing: float | None = None
    batches: tuple[tuple[int, int, bool], ...] = ((5, 13, True), (3, 9, False), (7, 11, True))


def mean_square(outputs: Any, inputs: Any) -> torch.Tensor:
    """A loss for models without one: a mean over samples."""
    tensor = outputs[0] if not isinstance(outputs, torch.Tensor) else outputs
    return (tensor.square() + tensor.sin()).mean()


def head_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return loss_of(outputs)


def check(expected: torch.Tensor, found: torch.Tensor, what: str) -> None:
    scale = max(1e-3, float(expected.abs().max()) if expected.numel() else 0.0)
    error = float((expected - found).abs().max()) / scale if expected.numel() else 0.0
    assert error < TOLERANCE, f"{what}: relative error {error:.1e}"


def build(name: str) -> torch.nn.Module:
    """Some heads have a dropout of their own that the config cannot switch off."""
    model = zoo.build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


_groups: dict[tuple[int, ...], Any] = {}  # one group per set of ranks, for all cases of a process


def group_of(ranks: list[int]) -> Any:
    key = tuple(ranks)
    if key not in _groups:
        whole = len(key) == dist.get_world_size()
        _groups[key] = dist.group.WORLD if whole else dist.new_group(list(key), use_local_synchronization=True)
    return _groups[key]


def run_case(rank: int, case: Case, pipe_ranks: list[int], dp_ranks: list[int]) -> set[str]:
    """Train and evaluate; compares loss, outputs, every gradient and every updated weight. Returns the names
    compared.
    """
    torch.manual_seed(0)
    groups: dict[tuple[int, ...], Any] = {}

    def group_of(ranks: list[int]) -> Any:
        key = tuple(ranks)
        if key not in groups:
            groups[key] = (
                dist.new_group(list(key), use_local_synchronization=True)
                if len(key) < dist.get_world_size()
                else dist.group.WORLD
            )
        return groups[key]

    reference, model = build(case.name), build(case.name)
    has_loss = zoo.entry(case.name).task not in ("base", "encoder", "seq2seq_base", "image_base")
    criterion = head_loss if has_loss else mean_square
    config = (
        PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=case.checkpointing)
        if case.checkpointing is not None
        else None
    )
    settings = PipelineSettings(
        case.style, case.chunks, case.num_microbatches, case.microbatch_size, case.layers, config
    )
    position = pipe_ranks.index(rank)
    cut = cut_model(model, settings, position, len(pipe_ranks))
    pipe_group = group_of(pipe_ranks)
    tied = create_tied_process_groups(
        cut.tied_groups, position, lambda stages: group_of([pipe_ranks[stage] for stage in stages])
    )
    loss_group = group_of(dp_ranks) if len(dp_ranks) > 1 else None
    executor = PipelineExecutor(cut, settings, pipe_group=pipe_group, loss_group=loss_group)
    names = dict(model.named_parameters())
    optimizer = OptimizerWrapper(adamw(model))
    reference_optimizer = adamw(reference)
    for step, (samples, length, training) in enumerate(case.batches):
        model.train(training)
        reference.train(training)
        total = samples * len(dp_ranks)
        whole = zoo.inputs(case.name, batch_size=total, seq_len=length, seed=step)
        share = dp_ranks.index(rank)
        mine = {key: value[share * samples : (share + 1) * samples] for key, value in whole.items()}
        where = f"{case}, step {step}"
        with keep_float64(), torch.set_grad_enabled(training):
            outputs = reference(**whole)
            loss = criterion(outputs, whole)
            if training:
                loss.backward()
            found = executor.execute(iter([mine]), criterion, optimizer if training else None, return_outputs=True)
        if cut.holds_last_stage:
            check(loss.detach(), found["loss"], f"loss of {where}")
            key = (
                "logits"
                if "logits" in outputs
                else next(k for k, v in outputs.items() if isinstance(v, torch.Tensor) and v.dim())
            )
            check(
                outputs[key].detach()[share * samples : (share + 1) * samples],
                found["outputs"][key],
                f"{key} of {where}",
            )
            if isinstance(outputs.get("loss"), torch.Tensor) and not isinstance(outputs.get("mc_loss"), torch.Tensor):
                check(outputs["loss"].detach(), found["outputs"]["loss"], f"outputs.loss of {where}")
        else:
            assert found == {"loss": None, "outputs": None}
        if not training:
            continue
        sync_tied_gradients(model, cut.tied_groups, position, tied)
        by_name = dict(reference.named_parameters(remove_duplicate=False))
        for name, parameter in names.items():
            if parameter.grad is not None and loss_group is not None:
                dist.all_reduce(parameter.grad, group=loss_group)
            expected = by_name[name].grad
            assert (expected is None) == (parameter.grad is None), (
                f"{name}: gradient {parameter.grad is not None}, {where}"
            )
            if expected is not None:
                check(expected, parameter.grad, f"gradient of {name}, {where}")
        reference_optimizer.step()
        optimizer.step()
        for name, parameter in names.items():
            check(by_name[name].detach(), parameter.detach(), f"weight {name}, {where}")
        reference_optimizer.zero_grad()
        optimizer.zero_grad()
    first = {name for name, _ in reference.named_parameters()}
    aliases = {id(p): n for n, p in reference.named_parameters()}
    everything = dict(reference.named_parameters(remove_duplicate=False))
    held = {aliases[id(everything[name])] for name in names}
    assert held <= first
    return held


def run_cases(rank: int, world_size: int, cases: list[Case], dp: int = 1) -> list[set[str]]:
    pipe = world_size // dp
    replica = rank // pipe
    pipe_ranks = list(range(replica * pipe, (replica + 1) * pipe))
    dp_ranks = list(range(rank % pipe, world_size, pipe))
    return [run_case(rank, case, pipe_ranks, dp_ranks) for case in cases]
