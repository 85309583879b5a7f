"""The wrapper around a boosted model."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from .optimizer import OptimizerWrapper


class ModelWrapper(nn.Module):
    """Calls the module it wraps and gives it back on request.

    Parameter names, state-dict keys and attributes are those of the wrapped module, so that scripts written for the plain
    model (`model.config`, `model.generate`, `model.state_dict()`) keep working.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._optimizer: weakref.ref[OptimizerWrapper] | None = None

    def _trained_by(self, optimizer: OptimizerWrapper | None) -> None:
        """Note who lays out the parameters; not owned, since the optimizer knows the model."""
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def _running(self) -> AbstractContextManager[None]:
        """Context of everything that runs the model."""
        optimizer = None if self._optimizer is None else self._optimizer()
        return nullcontext() if optimizer is None else optimizer.plain_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `optimizer.zero_grad()`, where boost returned an optimizer that keeps gradients in buffers of its own."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            super().zero_grad(set_to_none)
        else:
            optimizer.zero_grad(set_to_none)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """The HuggingFace module: this rank's part of it where the plugin shards."""
        module = self.module
        return module.unwrap() if isinstance(module, ModelWrapper) else module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.unwrap(), name)
