"""A model without its layers: what stands around and beside them, whose state decides what a forward does before it
reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from ...models.layer_chain import paths_to
from .model_state import buffer_versions, module_state, same_state

ModelState = tuple[list[Any], dict[int, int]]  # attributes, versions of buffers


class Surroundings:
    """layers  names of the modules that are layers

    defined  storages of buffers that the model fills whenever it reads them
    """

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.defined: set[int] = set()
        around = {path for layer in layers for path in ("", *paths_to(layer)[:-1])}
        self._around = [
            module for name, module in model.named_modules() if name in around and not isinstance(module, nn.ModuleList)
        ]
        inside = {module for layer in layers for module in model.get_submodule(layer).modules()} | set(self._around)
        # Modules of torch itself keep nothing from one call to the next.
        beside = [
            m
            for m in model.modules()
            if m not in inside and (type(m) is nn.Module or not type(m).__module__.startswith("torch.nn."))
        ]
        self.modules = [*self._around, *beside]
        self._outside = [module for module in model.modules() if module not in inside or module in set(self._around)]

    def state(self) -> ModelState:
        """What a script can turn between steps, and the model in a forward: attributes of modules outside the
        layers, and of configs.
        """
        configs = [module.config for module in self._around if hasattr(module, "config")]
        return module_state([*self.modules, *configs]), buffer_versions(self.modules)

    def unchanged_since(self, state: ModelState) -> bool:
        return self.is_same(state, self.state())

    def is_same(self, before: ModelState, after: ModelState) -> bool:
        same = all(
            before[1].get(storage) == version for storage, version in after[1].items() if storage not in self.defined
        )
        return same and same_state(before[0], after[0])

    @property
    def modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._around)

    def is_watched(self) -> bool:
        """Whether hooks of a script run in the model's forward outside of layers."""
        hooks = ((*module._forward_pre_hooks.values(), *module._forward_hooks.values()) for module in self._outside)
        return not all(_is_own(hook) or _asks_for_gradients(hook) for hook in chain.from_iterable(hooks))

    def is_hooked(self) -> bool:
        """Whether somebody wants to see the calls of the model itself."""
        return any(module._forward_pre_hooks or module._forward_hooks_always_called for module in self._around)


def _asks_for_gradients(hook: Any) -> bool:
    """What transformers and peft put on embeddings for activation checkpointing, which reads and computes nothing."""
    library = str(getattr(hook, "__module__", "")).partition(".")[0]
    return library in ("transformers", "peft") and getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def _is_own(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
