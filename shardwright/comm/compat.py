"""Names that torch renamed between 2.11 and 2.13, under their newest name.

Checked on torch 2.11 (`all_gather_into_tensor`, `reduce_scatter_tensor`) and 2.13 (`all_gather_single`,
`reduce_scatter_single`; the old names still work there but warn at every call site).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

from ..cluster.groups import shared_group

_Collective = Callable[..., Any]


def _first_of(*names: str) -> _Collective:
    for name in names:
        found: _Collective | None = getattr(dist, name, None)
        if found is not None:
            return found
    raise ImportError(
        f"this torch has none of torch.distributed.{{{', '.join(names)}}}; shardwright needs torch >= 2.11"
    )


all_gather_single = _first_of("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _first_of("reduce_scatter_single", "reduce_scatter_tensor")
all_to_all_single: _Collective = dist.all_to_all_single
TENSOR_DATA: Any = torch.Tensor.data  # the descriptor behind `tensor.data`


def world_group_for_ddp() -> dist.ProcessGroup | None:
    """A group of all ranks that DistributedDataParallel can use; None where the default one will do. Collective.

    Under TORCH_DISTRIBUTED_DEBUG=DETAIL every group is wrapped by a checker, and torch 2.13's DDP constructor reads the
    backend of the wrapper and crashes the interpreter (seen on gloo, CPU). A group made at a lower debug level is not
    wrapped.
    """
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return None
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        return shared_group("DistributedDataParallel")
    finally:
        dist.set_debug_level(dist.DebugLevel.DETAIL)


def outputs_are_recorded(besides: int = 0) -> bool:
    """Whether a dispatch mode, as in torch's selective checkpointing, may be keeping outputs of ops, so that they must
    not change in place.

    besides   modes that are known not to mind

    Checked on torch 2.13: `torch._C._len_torch_dispatch_stack`.
    """
    return torch._C._len_torch_dispatch_stack() > besides


def running_node() -> Any:
    """The node of autograd whose backward runs on this thread.

    Checked on torch 2.11 and 2.13: `torch._C._current_autograd_node`, which torch's own logs of graphs use.
    """
    return torch._C._current_autograd_node()


def finished_work() -> Any:
    """What a collective returns to torch's dispatcher that has nothing left to wait for.

    Checked on torch 2.13: `torch._C._distributed_c10d.FakeWork`, which torch's own fake collectives use.
    """
    return torch._C._distributed_c10d.FakeWork().boxed()


def is_through(work: dist.Work) -> bool:
    """Whether nothing is left to wait for. A finished one of no backend does not say so of itself."""
    return isinstance(work, torch._C._distributed_c10d.FakeWork) or work.is_completed()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` inside of a dispatch mode, where a plain one would not see edits: the alias has the tensor's
    version.

    Checked on torch 2.13: `torch._C._SetExcludeDispatchKeyGuard`, as in torch.utils.checkpoint.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def saved_tensors_hooks_in_use() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Pack and unpack of the innermost `saved_tensors_hooks`.

    Checked on torch 2.13: `torch._C._autograd._top_saved_tensors_default_hooks`.
    """
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def schema_of(operator: Any) -> Any:
    """Arguments and results of an operator, and which of them alias; None for higher-order ones. Checked on torch
    2.13: `_schema`.
    """
    return getattr(operator, "_schema", None)


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What `register_post_accumulate_grad_hook` has put on `tensor`, in order. Torch has no public name for it (2.11
    to 2.13).
    """
    return list((tensor._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]


def graph_time(tensor: torch.Tensor) -> int:
    """When in its thread's history the operation that made `tensor` was recorded. Checked on torch 2.11 and 2.13:
    `Node._sequence_nr`.
    """
    assert tensor.grad_fn is not None
    number: int = tensor.grad_fn._sequence_nr()
    return number


def next_graph_time() -> int:
    """The `graph_time` of what is recorded next. Checked on torch 2.13: `torch.autograd._get_sequence_nr`."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def runs_backward() -> bool:
    """Whether this code runs as a part of a backward. Checked on torch 2.11 and 2.13: `_current_graph_task_id`."""
    return torch._C._current_graph_task_id() != -1


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """What `register_hook` has put on the gradient of `tensor`, in order. Torch has no public name for it (2.11 to
    2.13).
    """
    return list((tensor._backward_hooks or {}).values())


# What a `__torch_function__` is asked when somebody looks at the hooks of a tensor. Checked on torch 2.11 to 2.13.
_TENSOR: Any = torch.Tensor
HOOK_LISTS = (_TENSOR._post_accumulate_grad_hooks.__get__, _TENSOR._backward_hooks.__get__)


def put_hook_last(tensor: torch.Tensor, number: int) -> bool:
    """Let the post-accumulate hook whose handle has this id run after those that came later; whether there are
    others.
    """
    hooks = tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if len(hooks) == 1:
        return False
    if next(reversed(hooks)) != number:
        hooks[number] = hooks.pop(number)  # autograd follows the order of insertion
    return True


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a script has registered hooks on the gradient. Torch has no public name for it (2.11 to 2.13)."""
    return bool(gradient_hooks(tensor) or post_accumulate_hooks(tensor))


def default_store() -> dist.Store:
    """The store of the default process group, through which ranks can reach each other outside of collectives.

    Checked on torch 2.11 and 2.13: `torch.distributed.distributed_c10d._get_default_store`.
    """
    return torch.distributed.distributed_c10d._get_default_store()


# What `torch.nn.functional.grouped_mm` calls, and so what a function mode sees of it. Checked on torch 2.11 and 2.13.
grouped_mm: Callable[..., torch.Tensor] = torch._grouped_mm


def reshaped(fresh: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor that nobody else holds in another shape, and by autograd's account no view, so that what comes behind
    may write to it. Checked on torch 2.13: `torch.ops.aten._unsafe_view`.
    """
    return torch.ops.aten._unsafe_view(fresh, list(shape))  # type: ignore[no-any-return]


def scaled_mm(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor, **how: Any) -> torch.Tensor:
    """A product of 8-bit factors. Checked on torch 2.13: `torch._scaled_mm`, whose public name
    (`torch.nn.functional.scaled_mm`) is newer than 2.11's.
    """
    return torch._scaled_mm(a, b, of_a, of_b, **how)


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside, `__torch_function__` of tensor subclasses is not asked. Checked on torch 2.13:
    `torch._C.DisableTorchFunctionSubclass`.
    """
    return torch._C.DisableTorchFunctionSubclass()


def without_function_modes() -> AbstractContextManager[Any]:
    """Inside, neither subclasses nor modes are asked about functions. Checked on torch 2.13:
    `torch._C.DisableTorchFunction`.
    """
    return torch._C.DisableTorchFunction()


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors look at the memory of `tensor`, itself included. Checked on torch 2.13:
    `torch._C._storage_Use_Count`.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # the object that asks is one more user


def current_modes() -> tuple[list[Any], list[Any]]:
    """Function modes and dispatch modes of this thread, outermost first.

    Checked on torch 2.13: `torch._C._get_function_stack_at`, `torch._C._get_dispatch_stack_at` and the lengths of these
    stacks.
    """
    functions = [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]
    return functions, [torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack())]


@contextmanager
def with_modes(modes: tuple[list[Any], list[Any]]) -> Iterator[None]:
    """Inside, these modes of another thread are in force on this one too. They are not entered, which some of them
    count.
    """
    functions, dispatches = modes
    for mode in functions:
        torch._C._push_on_torch_function_stack(mode)
    for mode in dispatches:
        torch._C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        for _ in dispatches:
            torch._C._pop_torch_dispatch_stack(None)
        for _ in functions:
            torch._C._pop_torch_function_stack()


def tensor_without_memory(
    cls: type, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of the subclass `cls` that stands for one of this shape; its `__torch_dispatch__` is asked for all that
    is done with it. Checked on torch 2.11 and 2.13: `torch.Tensor._make_wrapper_subclass`.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)  # type: ignore[attr-defined]


def runs_in_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint drops what is saved now, to recompute it. Checked on torch 2.11 and 2.13:
    `_top_saved_tensors_default_hooks`, `_checkpoint_hook`.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook")


def differentiates_functions() -> bool:
    """Whether a transform of `torch.func` is active, or derivatives are taken forwards. Neither has a public name
    (2.11 to 2.13).
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


_AROUND_CALLS = ("forward_pre", "forward", "backward_pre", "backward")


def hooks_of_all_modules(kinds: Iterable[str] = _AROUND_CALLS) -> list[Callable[..., Any]]:
    """What `register_module_forward_hook` and its siblings have put around every module. Torch has no public name for
    it (2.11 to 2.13).
    """
    return [hook for kind in kinds for hook in getattr(modules, f"_global_{kind}_hooks").values()]


def has_backward_hooks(of: Iterable[nn.Module]) -> bool:
    """Whether a script has registered backward hooks on any of these modules, or on all. Torch has no public name for
    it (2.11 to 2.13).
    """
    everywhere = hooks_of_all_modules(("backward_pre", "backward"))
    return bool(everywhere) or any(module._backward_hooks or module._backward_pre_hooks for module in of)
