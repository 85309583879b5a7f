"""What stands between the user's batches and a boosted model: every batch is checked against the model's limits, the
first one against those of the other ranks, and an iterator that has run dry says so."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...interface import ModelWrapper
from ...pipeline.batch.ready import Microbatches
from .dataloader import Batches
from .first_step import FirstStep
from .input_limits import InputLimits


class InputGuard:
    """Of one boosted model. `limits` are taken from it before it is sharded, `names` are the arguments of its
    forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._limits = InputLimits(model)
        self._names = [
            name
            for name, parameter in inspect.signature(model.forward).parameters.items()
            if parameter.kind in _POSITIONAL
        ]
        self._first_step: FirstStep | None = None

    def attach(self, boosted: nn.Module, first_step: FirstStep | None) -> None:
        """Look at every call of `boosted`, the wrapper that users call, and of `execute_pipeline` with it."""
        self._first_step = first_step
        boosted.input_guard = self  # type: ignore[assignment]
        boosted.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    @property
    def compares(self) -> bool:
        """Whether the next training batch will be compared with those of other ranks."""
        return self._first_step is not None and not self._first_step.done

    def check(self, batch: Any, training: bool) -> None:
        if isinstance(batch, Microbatches):
            each = [self._named(part) for part in batch]
            for part in each:
                self._limits.check(part)
            keys = dict.fromkeys(key for part in each for key in part)
            entries: Mapping[str, Any] = {key: [part[key] for part in each if key in part] for key in keys}
        else:
            entries = self._named(batch)
            self._limits.check(entries)
        if training and self._first_step is not None:
            self._first_step.check(entries)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(value, Microbatches) for value in args):
            raise ValueError(
                "a model is called with one batch, not with the Microbatches of a step: "
                "booster.execute_pipeline(iter([microbatches]), model, criterion, optimizer) takes them, or call the "
                "model for each"
            )
        self.check((*args, kwargs) if args else kwargs, module.training and torch.is_grad_enabled())

    def _named(self, batch: Any) -> Mapping[str, Any]:
        if isinstance(batch, Mapping):
            return batch
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        keywords = values.pop() if values and isinstance(values[-1], dict) else {}
        names = [*self._names, *(f"argument {number}" for number in range(len(self._names), len(values)))]
        return {**dict(zip(names, values, strict=False)), **keywords}


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CheckedBatches:
    """`data_iter` as `execute_pipeline` reads it."""

    def __init__(self, data_iter: Any, model: Any, training: bool) -> None:
        if not hasattr(data_iter, "__next__"):
            raise ValueError(
                f"data_iter must be an iterator over batches, not a {type(data_iter).__name__}: call iter(dataloader) "
                "once per epoch and pass the result to every step"
            )
        self._data_iter = data_iter
        self._guard: InputGuard | None = model.input_guard if isinstance(model, ModelWrapper) else None
        self._model = model
        self._training = training

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._data_iter)
        except StopIteration:
            raise ValueError(self._exhausted()) from None
        if isinstance(self._data_iter, Batches):
            self._data_iter.batch_is_used(batch)
        if self._guard is not None:
            if self._training and self._guard.compares and isinstance(self._model, ModelWrapper):
                self._model.check_batch(batch)  # what this rank can find out alone comes before it meets the others
            self._guard.check(batch, self._training)
        return batch

    def _exhausted(self) -> str:
        known = f"all {len(self._data_iter)} batches" if hasattr(self._data_iter, "__len__") else "all of its batches"
        return (
            f"data_iter has given {known}: make a new iterator for the next epoch, `batches = iter(dataloader)`, and "
            "take as many steps as there are batches, `for step in range(len(dataloader))`"
        )
