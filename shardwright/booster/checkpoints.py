"""What `Booster.save` and its relatives do: they find out where this rank stands and hand over to
`shardwright.checkpoint`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.agreement import Agreement
from ..checkpoint.background import Background
from ..checkpoint.hf_export import ExportOptions, check_request, save_model
from ..checkpoint.hf_import import LoadReport, load_model, load_state
from ..checkpoint.load import find, load, load_lr_scheduler
from ..checkpoint.position import Position
from ..checkpoint.roll_call import roll_call
from ..checkpoint.save import Contents, collect, save
from ..cluster import job
from ..interface import ModelWrapper, OptimizerWrapper
from ..logging import get_dist_logger
from ..plugins.base import Plugin
from .mixed_precision import AutocastModel

StrPath = str | os.PathLike[str]
_MB = 1024 * 1024
SAVED_AMID_STEP = (
    "booster.save to {} in the middle of a step: gradients of calls since the last optimizer.step() are not in a "
    "checkpoint, and a run that goes on from this one takes that step without them. Save behind optimizer.step()"
)
LOADED_AMID_STEP = (
    "booster.load of {} in the middle of a step: gradients of calls since the last optimizer.step() are dropped, as "
    "those of other weights, and the step is taken without them. Load before the first call of a step"
)


class Checkpoints:
    """The checkpoints of one booster; knows which optimizer trains which model."""

    def __init__(self, plugin: Plugin | None) -> None:
        self._plugin = plugin
        self._background = Background()
        self._said_precision = False
        self._has_said_amid_step: set[str] = set()  # booster.save, booster.load
        # References on both sides: a dictionary that holds a value forever would hold the key that the value knows.
        self._models: weakref.WeakKeyDictionary[Any, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def note(self, model: nn.Module, optimizer: Any) -> None:
        """Remember that boost returned these together."""
        if optimizer is not None:
            self._models[optimizer] = weakref.ref(model)
            self._optimizers[model] = weakref.ref(optimizer)
            optimizer.boosted_with = model  # an optimizer alone can be saved, and needs the names

    def _model_of(self, optimizer: Any) -> nn.Module | None:
        found = None if optimizer is None else self._models.get(optimizer)
        return None if found is None else found()

    def _optimizer_of(self, model: nn.Module) -> Any:
        found = self._optimizers.get(model)
        return None if found is None else found()

    def trains(self, optimizer: Any, model: nn.Module) -> bool:
        """Whether boost returned these together."""
        return self._optimizer_of(model) is optimizer

    def wait(self) -> None:
        self._background.wait()

    def _position(self, model: nn.Module | None) -> Position:
        if self._plugin is None:
            return Position()
        return self._plugin.position(model.module if isinstance(model, AutocastModel) else model)

    def _setting(self, model: nn.Module | None, what: str) -> tuple[Position, Agreement]:
        """`what` is the call that all ranks have to be in, with the same words: where it saves is among them."""
        position = self._position(model)
        if position.world_size > 1:
            roll_call(what)
        return position, Agreement(position.world_size)

    def save(
        self,
        path: StrPath,
        model: nn.Module | None,
        optimizer: Any,
        lr_scheduler: Any,
        dataloader: Any,
        step: SupportsIndex | None,
        extra: Any,
        use_async: bool,
        keep_last: int | None,
    ) -> None:
        if optimizer is not None:
            _require_optimizer(optimizer)
        owner = self._model_of(optimizer)
        position, agreement = self._setting(model if model is not None else owner, f"booster.save to {path}")

        self._say_if_amid_step(optimizer, position, SAVED_AMID_STEP.format(path))

        def gather() -> Contents:
            return collect(
                position,
                model=_unwrapped(model),
                optimizer=optimizer,
                owner=_unwrapped(owner),
                lr_scheduler=lr_scheduler,
                dataloader=dataloader,
                step=step,
                extra=extra,
            )

        save(_path(path), gather, position, agreement, self._background, use_async=use_async, keep_last=keep_last)

    def _say_if_amid_step(self, optimizer: Any, position: Position, words: str) -> None:
        """Each once, by the first rank of each stage: of a pipeline the last one alone has a loss."""
        guard = optimizer.loss_guard if isinstance(optimizer, OptimizerWrapper) else None
        is_first = position.coordinate("dp_sp") == position.coordinate("tp") == 0
        kind = words.partition(" ")[0]
        if guard is None or not guard.is_amid_step or not is_first or kind in self._has_said_amid_step:
            return
        self._has_said_amid_step.add(kind)
        get_dist_logger().warning(words)

    def load(
        self, path: StrPath, model: nn.Module | None, optimizer: Any, lr_scheduler: Any, dataloader: Any, check: bool
    ) -> dict[str, Any]:
        self.wait()
        if optimizer is not None:
            _require_optimizer(optimizer)
        owner = self._model_of(optimizer)
        position, agreement = self._setting(model if model is not None else owner, "booster.load")
        if model is not None and optimizer is None:
            trained_by = self._optimizer_of(model)
            if trained_by is not None:
                raise ValueError(
                    "load(model=...) of a model with an optimizer: pass optimizer= too, or use load_model "
                    "for weights alone"
                )
        found = load(
            _path(path),
            position,
            agreement,
            model=_unwrapped(model),
            optimizer=optimizer,
            owner=_unwrapped(owner),
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            check=check,
        )
        if optimizer is not None:
            self._say_if_amid_step(optimizer, position, LOADED_AMID_STEP.format(path))
            optimizer.zero_grad()
            if optimizer.loss_guard is not None and found["step"] is not None:
                optimizer.loss_guard.go_on_behind(found["step"])
        return found

    @job.heeds_failures_alone
    def save_model(
        self,
        model: nn.Module,
        path: StrPath,
        shard: bool,
        prefix: str | None,
        size_per_shard: float,
        use_safetensors: bool,
        use_async: bool,
        masters: bool = False,
        what: str = "booster.save_model",
    ) -> None:
        if not use_safetensors:
            raise ValueError(
                "use_safetensors=False would write pickle files, which run code when they are read; leave it True"
            )
        options = ExportOptions(shard, prefix, _bytes(size_per_shard))
        check_request(_path(path), _module(model), options)
        optimizer = self._optimizer_of(model) if masters else None
        if masters and optimizer is None:
            raise ValueError(
                "save_model(masters=True) of a model that was boosted without an optimizer: it has no masters; leave "
                "masters out"
            )
        if not masters:
            self._say_precision(model)
        position, agreement = self._setting(model, f"{what} to {path}")
        save_model(_path(path), _module(model), position, agreement, self._background, options, use_async, optimizer)

    def _say_precision(self, model: nn.Module) -> None:
        """Once: half-precision files are not what the optimizer steps on."""
        half = {param.dtype for param in model.parameters()} & {torch.bfloat16, torch.float16}
        if half and self._optimizer_of(model) is not None and not self._said_precision:
            self._said_precision = True
            get_dist_logger().info(
                f"the weights are saved as the model computes with them, in {half.pop()}; the optimizer's fp32 masters "
                "are written by save_model(masters=True), and kept by booster.save(path, model=model, "
                "optimizer=optimizer)",
                ranks=[0],
            )

    @job.heeds_failures_alone
    def load_state_dict(self, model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> LoadReport:
        """The whole model's state dict, which every rank has."""
        self.wait()
        position, agreement = self._setting(model, "model.load_state_dict")
        return load_state(state_dict, _module(model), self._optimizer_of(model), position, agreement, strict)

    def load_model(self, model: nn.Module, path: StrPath, strict: bool) -> LoadReport:
        self.wait()
        position, agreement = self._setting(model, "booster.load_model")
        return load_model(_path(path), _module(model), self._optimizer_of(model), position, agreement, strict)

    def save_optimizer(
        self, optimizer: Any, path: StrPath, shard: bool, size_per_shard: float, use_async: bool
    ) -> None:
        _require_optimizer(optimizer)
        owner = self._model_of(optimizer)
        position, agreement = self._setting(owner, f"booster.save_optimizer to {path}")
        size = _bytes(size_per_shard) if shard else None

        def gather() -> Contents:
            return collect(position, optimizer=optimizer, owner=_unwrapped(owner), with_rng=False)

        save(_path(path), gather, position, agreement, self._background, use_async=use_async, size_per_file=size)

    def load_optimizer(self, optimizer: Any, path: StrPath) -> None:
        self.wait()
        _require_optimizer(optimizer)
        owner = self._model_of(optimizer)
        position, agreement = self._setting(owner, "booster.load_optimizer")
        load(_path(path), position, agreement, optimizer=optimizer, owner=_unwrapped(owner), with_rng=False)

    def save_lr_scheduler(self, lr_scheduler: Any, path: StrPath) -> None:
        if lr_scheduler is None:
            raise ValueError(
                "save_lr_scheduler(lr_scheduler=None): there is nothing to save; boost returns the scheduler that it "
                "was given"
            )
        position, agreement = self._setting(None, f"booster.save_lr_scheduler to {path}")

        def gather() -> Contents:
            return collect(position, lr_scheduler=lr_scheduler, with_rng=False)

        save(_path(path), gather, position, agreement, self._background)

    def load_lr_scheduler(self, lr_scheduler: Any, path: StrPath) -> None:
        self.wait()
        position, agreement = self._setting(None, "booster.load_lr_scheduler")
        opened, _ = find(_path(path), agreement, position.rank)
        load_lr_scheduler(lr_scheduler, opened.state["lr_scheduler"], opened.directory)


def _require_optimizer(optimizer: Any) -> None:
    """The tensors of the one that boost was given are laid out otherwise since."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer={type(optimizer).__name__} is no optimizer: what is saved or loaded comes first, "
            "save_optimizer(optimizer, path)"
        )
    if not isinstance(optimizer, OptimizerWrapper):
        raise ValueError(
            f"checkpoints need the optimizer that boost returned, not a bare {type(optimizer).__name__}: model, "
            "optimizer, *_ = booster.boost(model, optimizer)"
        )


def _module(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def _unwrapped(model: nn.Module | None) -> nn.Module | None:
    return None if model is None else _module(model)


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"path={type(path).__name__} is no path: what is saved or loaded comes first in save_model(model, path) "
            "and its relatives, and the path in save(path, model=model, optimizer=optimizer) and load"
        )
    return Path(os.path.abspath(path))


def _bytes(size_per_shard: float) -> int:
    if size_per_shard <= 0:
        raise ValueError(f"size_per_shard={size_per_shard} must be a positive number of megabytes (1024 is usual)")
    return int(size_per_shard * _MB)
