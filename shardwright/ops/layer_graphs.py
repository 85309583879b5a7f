"""The layers of a model through torch.compile, layers of one kind as one graph (regional compilation).

What is compiled is the forward that a layer's class has. What stands around a layer stays outside of the graph and
needs nothing of it: hooks that gather its parameters, gates of pipeline stages, checkpointing, which runs the compiled
forward once more. Parameters are inputs of the graph, so that layers of one kind (the same classes inside, parameters
of the same shapes) share it whatever memory they lie in, and ZeRO may swap that.

A graph is traced for the first inputs. What another call does otherwise (another length) is traced once more, from then
on for any length, so that lengths that change cost two compilations and not one each.

Layers run as they are where a graph has no place: in eval mode, with a cache of keys and values, under a mode that
looks at every operator. Layers that cannot be one graph (`layer_parts`: with hooks inside of them, or experts whose
tokens are counted) run their own forward, and the modules that they call are compiled, each for itself.

[Note: what watches the first time] A layer is recomputed as it ran. Who records outputs (`hooks_inside`) does so in a
forward alone, and the layer remembers that it was watched.

[Note: the same way twice]
A checkpoint runs a layer once more in the backward, and what it saves must be what it saved before. So what has been
compiled stays in use when a later call cannot be: dynamo is told to look for graphs that are there and to make no more
(`eager_on_recompile`).

What has no public name (dynamo's errors, backends, modes in effect) was checked on torch 2.11 and 2.13. Dynamo and
inductor take seconds to import, which who compiles nothing does not wait for.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from ..comm.compat import runs_backward
from ..kernels.backends import cpp_compiler, has_triton
from ..models.caches import is_past, without_cache
from ..models.layer_chain import layer_lists
from ..models.shared_layers import compound_lists
from ..utils.device import get_current_device
from ..utils.pytree import current_dispatch_mode
from .compiled import keep_order, share_copies
from .compiled_numbers import draw_in_order, put_back_after_errors, spare_switches
from .compiled_products import join_linears
from .compiled_sequence import read_by_shards, share_gathers, traced
from .hooks_inside import hooks_inside
from .late_products import LateProducts
from .layer_parts import IN_PARTS, parts_of

_LOGGER = logging.getLogger(__name__)
backend: str | Callable[..., Any] = "inductor"  # what tests that need no fast code replace
MOST_GRAPHS = 32  # of one kind of layers
_WATCHED = "_shardwright_watched"
_GRAPH = "_shardwright_graph"
_TELLS = "_shardwright_tells"
Lengths = tuple[int | None, int | None]
_numbers = itertools.count()


def require_compiler() -> None:
    """ValueError where `torch.compile` misses what it needs on the device of this process."""
    if backend != "inductor":
        return
    if get_current_device().type == "cuda":
        if not has_triton():
            raise ValueError(
                "enable_jit_fused=True: torch.compile needs Triton on a CUDA device, and it is not installed; pip "
                "install triton, or leave enable_jit_fused out"
            )
        return
    compiler, is_there = cpp_compiler()
    if not is_there:
        raise ValueError(
            f"enable_jit_fused=True: torch.compile needs a C++ compiler on a CPU, and there is no {compiler}; install "
            "one (apt-get install g++) or name another in CXX, or leave enable_jit_fused out"
        )


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that are compiled, by name; ValueError where a model has none."""
    found = [
        (f"{name}.{child}", layer) for name, layers in layer_lists(model) for child, layer in layers.named_children()
    ]
    if not found:  # a layer that is applied again and again, such as ALBERT's, is a list of its own
        found = [(name, model.get_submodule(name)) for _, names in compound_lists(model) for name in names]
    if not found:
        raise ValueError(
            f"enable_jit_fused=True compiles the layers of a model, and {type(model).__name__} has no list of layers "
            "(a ModuleList of modules of a class named in _no_split_modules, or of children with modules of their "
            "own); leave it out, and compile modules of your choice by module.compile()"
        )
    return found


@functools.cache
def _inductor_options() -> dict[str, Any]:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.fx_passes import post_grad

    class KeepOrder(CustomGraphPass):
        """`compiled.keep_order` where inductor asks for edits, of forward and backward graphs alike."""

        def __call__(self, graph: fx.Graph) -> None:
            share_gathers(graph)
            keep_order(graph)

        def uuid(self) -> Any:
            files = (keep_order.__code__.co_filename, share_gathers.__code__.co_filename)
            return get_hash_for_files((__file__, *files))

    class DrawInOrder(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            draw_in_order(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, draw_in_order.__code__.co_filename))

    # The numbers that dropout draws are those that it draws without compiling.
    options = {"post_grad_custom_pre_pass": KeepOrder(), "fallback_random": True}
    if not hasattr(post_grad, "_chain_random_ops_for_ordering"):
        options["post_grad_custom_post_pass"] = DrawInOrder()
    return options


def compile_graph(graph: fx.GraphModule, inputs: list[Any], late: LateProducts | None = None) -> Callable[..., Any]:
    """What `torch.compile` makes of a graph, with collectives in it.

    late    weight gradients that its backward is to leave to a `WeightGradStore`
    """
    from torch._functorch import config

    share_copies(graph.graph)
    spare_switches(graph.graph)
    read_by_shards(graph.graph)
    if not torch.is_autocast_enabled(get_current_device().type):  # of which operators of ours know nothing
        join_linears(graph.graph)
    graph.recompile()
    compiled: Any
    # A backward that cannot be compiled is found out here, where there is another way.
    with config.patch(force_non_lazy_backward_lowering=True):
        if late is not None:
            compiled = _compile_apart(graph, inputs, late)
        elif backend == "inductor":
            from torch._inductor import compile as compile_by_inductor

            compiled = compile_by_inductor(graph, inputs, options=_inductor_options())
        else:
            from torch._dynamo import lookup_backend

            compiled = lookup_backend(backend)(graph, inputs)
    return compiled  # type: ignore[no-any-return]


def _compile_apart(graph: fx.GraphModule, inputs: list[Any], late: LateProducts) -> Callable[..., Any]:
    """Compiled, without the products in its backward that may come later. Torch keeps what it compiles, for the next
    process, by graphs that do not tell of this.
    """
    from torch._functorch import config

    def compile_one(graph: fx.GraphModule, inputs: Any, *, by: Callable[..., Any], **how: Any) -> Any:
        if not how.pop("splits", how.get("is_backward", False)):
            return by(graph, inputs, **how)
        late.take_out(graph.graph)
        graph.recompile()
        return late.around(by(graph, inputs, **how))

    with config.patch(enable_autograd_cache=False):
        if backend == "inductor":
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            inner = functools.partial(compile_one, by=compile_fx_inner)
            return compile_fx(graph, inputs, inner_compile=inner, config_patches=_inductor_options())  # type: ignore
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        return aot_autograd(  # type: ignore
            fw_compiler=boxed_nop,
            bw_compiler=functools.partial(compile_one, by=boxed_nop, splits=True),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(graph, inputs)


def _refusals() -> tuple[type[Exception], ...]:
    """What torch.compile raises before it has run anything."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # as it is, of `if rows.numel():`

    return TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode


class LayerGraph:
    """The forward of layers of one kind.

    native        the forward that their class had, or the method that it names `compiled_method`: what is compiled
    layer_class   the class that they get

    Inputs that dynamo cannot take are known by their form (`_form`) afterwards. A kind has MOST_GRAPHS graphs at most:
    layers that each compute with a number of their own would be compiled one by one.
    """

    def __init__(self, layer: nn.Module, kinds: Kinds, is_part: bool = False) -> None:
        cls = type(layer)
        method = getattr(cls, "compiled_method", "forward")
        self.native: Callable[..., Any] = getattr(cls, method)
        self._kinds, self._is_part = kinds, is_part
        self._but = ", but for modules inside of them" if any(True for _ in parts_of(layer)) else ""
        self._refused: set[Any] = set()
        self._num_graphs = 0
        self._is_full = False
        self._said: set[str] = set()
        self._name = cls.__name__
        self.layer_class = _class_with(cls, self, method)
        native = self.native

        def run(layer: nn.Module, lengths: Lengths, hooks: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
            traced.length, traced.keys = lengths
            try:
                return native(layer, *args, **kwargs)
            finally:
                traced.length = traced.keys = None

        # Dynamo keeps what it has compiled, and which sizes have changed, by code object and name.
        code = run.__code__.replace(co_name=f"{cls.__name__}_forward_{next(_numbers)}")
        function = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
        self._compiled = torch.compile(function, backend=self._compile, fullgraph=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGraph:
        return self

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not layer.training or torch.compiler.is_compiling():
            return self.native(layer, *args, **kwargs)
        given, named, has_cache = without_cache(args, kwargs, layer.training)
        values = (*given, *named.values())
        if has_cache or any(map(is_past, values)) or current_dispatch_mode() is not None or _on_meta(values):
            return self.native(layer, *args, **kwargs)
        inside = hooks_inside(layer)
        state = vars(layer)
        watched = state.get(_WATCHED, inside.watched) if runs_backward() else inside.watched
        state[_WATCHED] = watched  # see [Note: what watches the first time]
        if watched:
            self._say("hooks on modules inside of them see what no graph shows")
            return self._in_parts(layer, given, named)
        for module, hook in inside.ahead:
            hook(module, ())
        form = _form(given, named)
        if not (self._is_full or form in self._refused):
            try:
                return self._run(layer, inside.in_graph, given, named)
            except _refusals() as error:
                if _is_limit(error):
                    self._is_full = True
                    self._say(f"they have {self._num_graphs} graphs already, for different inputs or numbers of theirs")
                else:
                    self._refused.add(form)
                    self._say(_first_words(error))
        if not self._num_graphs:
            return self._in_parts(layer, given, named)
        with torch.compiler.set_stance("eager_on_recompile"):  # see [Note: the same way twice]
            return self._call_graph(layer, inside.in_graph, given, named)

    def _call_graph(
        self, layer: nn.Module, hooks: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with put_back_after_errors():
            return self._compiled(self._twin(layer), _lengths(layer), hooks, *args, **kwargs)

    def _in_parts(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = vars(layer)
        if IN_PARTS not in state:
            state[IN_PARTS] = True
            for part in parts_of(layer):
                self._kinds.compile(part, is_part=True)
        return self.native(layer, *args, **kwargs)

    def _run(self, layer: nn.Module, hooks: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._dynamo import config

        may_be_last = self._num_graphs + 1 >= min(config.recompile_limit, MOST_GRAPHS)
        with config.patch(recompile_limit=MOST_GRAPHS) if may_be_last else nullcontext():
            try:
                return self._call_graph(layer, hooks, args, kwargs)
            except _refusals():
                others = _with_gradients_of_other_dtypes(layer)
                if not others:
                    raise
            # Dynamo refuses parameters whose gradients have another dtype, of which a forward reads nothing.
            gradients = [param.grad for param in others]
            for param in others:
                param.grad = None
            try:
                return self._call_graph(layer, hooks, args, kwargs)
            finally:
                for param, gradient in zip(others, gradients, strict=True):
                    param.grad = gradient

    def _compile(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        _LOGGER.info(f"enable_jit_fused=True: compiling layers of class {self._name}, graph {self._num_graphs + 1}")
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        late = LateProducts(inputs, functools.partial(self._say_at_once, names)) if self._kinds.apart else None
        compiled = compile_graph(graph, inputs, late)
        self._num_graphs += 1
        return compiled

    def _say_at_once(self, names: Sequence[str], places: Sequence[int]) -> None:
        """Of matrices, by the names that dynamo gives them: l_layer_modules_mlp_modules_up_proj_parameters_weight_."""
        given = [names[place].rstrip("_") for place in places]
        paths = [".".join(re.split("_(?:modules|parameters)_", name)[1:]) or name for name in given]
        _LOGGER.warning(
            f"enable_jit_fused=True: in layers of class {self._name} the gradients of {', '.join(paths)} are computed "
            "with those of the inputs, and fill no bubble: they are no single products"
        )

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            what = "modules inside of layers" if self._is_part else "layers"
            some = " where graphs do not fit" if self._num_graphs else ""
            _LOGGER.warning(
                f"enable_jit_fused=True: {what} of class {self._name} are not compiled{some} and run as they "
                f"are{self._but}: {reason}"
            )

    def _twin(self, layer: nn.Module) -> nn.Module:
        """The layer, all that it has included, as an object of the class that all layers of its kind share: a gate of
        a pipeline has given each of them one of its own, and a graph is traced for one class.
        """
        twin = self.layer_class.__new__(self.layer_class)
        object.__setattr__(twin, "__dict__", layer.__dict__)
        return twin


def compile_layers(model: nn.Module, apart: bool = False) -> dict[str, LayerGraph]:
    """Let the layers of `model` run compiled, from their next call on; the graph of each by its name.

    apart   whether weight gradients can wait for a schedule that splits the backward

    Layers keep their identity, names and parameters; their class becomes a subclass of what it was.
    """
    require_compiler()
    kinds = Kinds(apart)
    return {name: kinds.compile(layer) for name, layer in layers_of(model)}


class Kinds:
    """The graphs of a model's layers, and of modules inside of layers, those of one kind sharing theirs."""

    def __init__(self, apart: bool = False) -> None:
        self.apart = apart
        self._graphs: dict[Any, LayerGraph] = {}

    def compile(self, layer: nn.Module, is_part: bool = False) -> LayerGraph:
        if isinstance(known := getattr(type(layer), _GRAPH, None), LayerGraph):  # of two layers that share a module
            return known
        kind = _kind(layer)
        if kind not in self._graphs:
            self._graphs[kind] = LayerGraph(layer, self, is_part)
        graph = self._graphs[kind]
        layer.__class__ = graph.layer_class
        return graph


def _class_with(base: type[nn.Module], graph: LayerGraph, method: str) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return graph(self, args, kwargs)

    return type(
        base.__name__,
        (base,),
        {method: forward, _GRAPH: graph, "__module__": base.__module__, "__doc__": base.__doc__},
    )


def _kind(layer: nn.Module) -> Any:
    """What layers that share a graph have in common."""
    return tuple(
        (path, type(module), *((name, tensor.shape, tensor.dtype) for name, tensor in _tensors(module)))
        for path, module in layer.named_modules()
    )


def _lengths(layer: nn.Module) -> Lengths:
    """How long the sequences are of which the layer is given parts; and those that it, an attention, makes keys of."""
    state = vars(layer)
    if _TELLS not in state:  # the module in it that knows
        state[_TELLS] = next((path for path, each in layer.named_modules() if hasattr(each, "split_length")), None)
    if state[_TELLS] is None:
        return None, None
    told: Any = layer.get_submodule(state[_TELLS])
    of_keys = getattr(told, "key_length", None)
    return told.split_length(), of_keys(layer) if state[_TELLS] == "" and of_keys is not None else None


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What dynamo can take or not, whatever the sizes and the values are."""

    def of(value: Any) -> Any:
        return (value.dtype, value.dim(), value.requires_grad) if isinstance(value, torch.Tensor) else type(value)

    return torch.is_grad_enabled(), *map(of, args), *((name, of(value)) for name, value in kwargs.items())


def _with_gradients_of_other_dtypes(layer: nn.Module) -> list[nn.Parameter]:
    return [
        param
        for param in layer.parameters()
        if param.is_leaf and param.grad is not None and param.grad.dtype != param.dtype
    ]


def _is_limit(error: Exception) -> bool:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))


def _on_meta(values: Iterable[Any]) -> bool:
    """A module that is asked for the shapes of its output computes nothing."""
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in values)


def _first_words(error: Exception) -> str:
    """The first paragraph of what dynamo says, on one line."""
    words = " ".join(str(error).strip().split("\n\n")[0].split())
    return words if len(words) <= 300 else f"{words[:297]}..."
