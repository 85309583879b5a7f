"""The layers of a model through torch.compile, layers of one kind as one graph (regional compilation).

What is compiled is the forward that a layer's class has. What stands around a layer stays outside of the graph and
needs nothing of it: hooks that gather its parameters, gates of pipeline stages, checkpointing, which runs the compiled
forward once more. Parameters are inputs of the graph, so that layers of one kind (the same classes inside, parameters
of the same shapes) share it whatever memory they lie in, and ZeRO may swap that.

A graph is traced for the first inputs. What another call does otherwise (another length) is traced once more, from then
on for any length, so that lengths that change cost two compilations and not one each.

Layers run as they are where a graph has no place: in eval mode, with a cache of keys and values, under a mode that
looks at every operator. And layers that cannot be one graph always do, with a warning that names them and the reason.

What has no public name (dynamo's errors, backends, modes in effect) was checked on torch 2.11 and 2.13. Dynamo and
inductor take seconds to import, which who compiles nothing does not wait for.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..models.caches import is_past, without_cache
from ..models.layer_chain import layer_lists
from ..utils.device import get_current_device
from .compiled import keep_order, share_copies

_LOGGER = logging.getLogger(__name__)
backend = "inductor"  # what tests that need no fast code replace
_numbers = itertools.count()


def require_compiler() -> None:
    """ValueError where `torch.compile` misses what it needs on the device of this process."""
    if backend != "inductor":
        return
    if get_current_device().type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ValueError(
                "enable_jit_fused=True: torch.compile needs Triton on a CUDA device, and it is not installed; pip "
                "install triton, or leave enable_jit_fused out"
            )
        return
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise ValueError(
            f"enable_jit_fused=True: torch.compile needs a C++ compiler on a CPU, and there is no {compiler}; install "
            "one (apt-get install g++) or name another in CXX, or leave enable_jit_fused out"
        )


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that are compiled, by name; ValueError where a model has none."""
    found = [
        (f"{name}.{child}", layer) for name, layers in layer_lists(model) for child, layer in layers.named_children()
    ]
    if not found:
        raise ValueError(
            f"enable_jit_fused=True compiles the layers of a model, and {type(model).__name__} has no list of layers "
            "(a ModuleList of modules of a class named in _no_split_modules, or of config.num_hidden_layers equal "
            "children); leave it out, and compile modules of your choice by module.compile()"
        )
    return found


@functools.cache
def _inductor_options() -> dict[str, Any]:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class KeepOrder(CustomGraphPass):
        """`compiled.keep_order` where inductor asks for edits, of forward and backward graphs alike."""

        def __call__(self, graph: fx.Graph) -> None:
            keep_order(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, keep_order.__code__.co_filename))

    # The numbers that dropout draws are those that it draws without compiling.
    return {"post_grad_custom_pre_pass": KeepOrder(), "fallback_random": True}


def _compile(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What `torch.compile` makes of a graph, with collectives in it."""
    share_copies(graph.graph)
    graph.recompile()
    compiled: Any
    if backend == "inductor":
        from torch._inductor import compile as compile_by_inductor

        compiled = compile_by_inductor(graph, inputs, options=_inductor_options())
    else:
        from torch._dynamo import lookup_backend

        compiled = lookup_backend(backend)(graph, inputs)
    return compiled  # type: ignore[no-any-return]


def _refusals() -> tuple[type[Exception], ...]:
    """What torch.compile raises before it has run anything."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


class LayerGraph:
    """The forward of layers of one kind.

    native    the forward that their class had
    reason    why they run it as it is from now on; None: they do not
    layer_class
              the class that they get
    """

    def __init__(self, cls: type[nn.Module]) -> None:
        self.native: Callable[..., Any] = cls.forward
        self.reason: str | None = None
        self._name = cls.__name__
        self.layer_class = _class_with(cls, self)
        native = self.native

        def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return native(layer, *args, **kwargs)

        # Dynamo keeps what it has compiled, and which sizes have changed, by code object and name.
        code = run.__code__.replace(co_name=f"{cls.__name__}_forward_{next(_numbers)}")
        function = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
        self._compiled = torch.compile(function, backend=_compile, fullgraph=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGraph:
        return self

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.reason is not None or not layer.training or torch.compiler.is_compiling():
            return self.native(layer, *args, **kwargs)
        given, named, has_cache = without_cache(args, kwargs, layer.training)
        values = (*given, *named.values())
        if has_cache or any(map(is_past, values)) or _get_current_dispatch_mode() is not None or _on_meta(values):
            return self.native(layer, *args, **kwargs)
        try:
            return self._compiled(self._twin(layer), *given, **named)
        except _refusals() as error:
            self.reason = _first_words(error)
            _LOGGER.warning(
                f"enable_jit_fused=True: layers of class {self._name} are not compiled and run as they are: "
                f"{self.reason}"
            )
        return self.native(layer, *given, **named)

    def _twin(self, layer: nn.Module) -> nn.Module:
        """The layer, all that it has included, as an object of the class that all layers of its kind share: a gate of
        a pipeline has given each of them one of its own, and a graph is traced for one class.
        """
        twin = self.layer_class.__new__(self.layer_class)
        object.__setattr__(twin, "__dict__", layer.__dict__)
        return twin


def compile_layers(model: nn.Module) -> dict[str, LayerGraph]:
    """Let the layers of `model` run compiled, from their next call on; the graph of each by its name.

    Layers keep their identity, names and parameters; their class becomes a subclass of what it was.
    """
    require_compiler()
    kinds: dict[Any, LayerGraph] = {}
    found = {}
    for name, layer in layers_of(model):
        kind = _kind(layer)
        if kind not in kinds:
            kinds[kind] = LayerGraph(type(layer))
        found[name] = kinds[kind]
        layer.__class__ = kinds[kind].layer_class
    return found


def _class_with(base: type[nn.Module], graph: LayerGraph) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return graph(self, args, kwargs)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__})


def _kind(layer: nn.Module) -> Any:
    """What layers that share a graph have in common."""
    return tuple(
        (path, type(module), *((name, tensor.shape, tensor.dtype) for name, tensor in _tensors(module)))
        for path, module in layer.named_modules()
    )


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))


def _on_meta(values: Iterable[Any]) -> bool:
    """A module that is asked for the shapes of its output computes nothing."""
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in values)


def _first_words(error: Exception) -> str:
    """The first paragraph of what dynamo says, on one line."""
    words = " ".join(str(error).strip().split("\n\n")[0].split())
    return words if len(words) <= 300 else f"{words[:297]}..."
