"""What a program asks of `torch.distributed`, seen by torch's dispatcher on the way to any backend."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import Tensor

from ..comm.compat import schema_of
from ..utils.pytree import TorchDispatchMode, tree_leaves

MESSAGES = ("send", "recv")
_READ_ONLY, _WRITTEN = ("send",), ("recv_",)
# of groups, by the names of torch 2.11 to 2.13
_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall", "alltoall_base", "all_to_all_single", "recv_anysource"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
)
_OWN_FILES = ("shardwright/testing/", "/torch/")


class Call(NamedTuple):
    """One call, as one rank makes it.

    kind     "allreduce", "allgather_base", "send", ...
    group    name of the group, the same on all of its ranks
    ranks    global ranks of the group, in its order
    sizes    elements of what is read and of what is written
    dtypes   of both together
    details  what all ranks must say alike: the root, whether parts have sizes of their own
    peer     of a message: the other's place in the group
    tag      of a message
    place    file and line that made the call
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, ...]
    details: tuple[Any, ...]
    peer: int | None
    tag: int
    place: str

    @property
    def is_message(self) -> bool:
        return self.kind in MESSAGES

    def __str__(self) -> str:
        what = f"{self.kind} of {list(self.sizes[0] or self.sizes[1])} {'/'.join(self.dtypes)}"
        towards = f" with rank {self.ranks[self.peer]}" if self.peer is not None else ""
        return f"{what}{towards} in group {self.group} of ranks {list(self.ranks)} ({self.place})"


class CallWatch:
    """While it is entered it is told of the calls that Python code makes, on all threads, and of the waits for them.

    `called` returns what `waited` is given when the program waits for that call.
    """

    def __init__(self) -> None:
        self._on_way: dict[int, tuple[dist.Work, Any]] = {}
        self._inside = ExitStack()
        self._waiting = threading.local()  # checkpoints are saved on threads of their own, which wait as well

    @property
    def waits_now(self) -> bool:
        """Whether this thread waits for a call: gloo copies there, which is no work of the program."""
        return getattr(self._waiting, "is_inside", False)

    def called(self, call: Call, reads: list[Tensor], writes: list[Tensor]) -> Any:
        """A call has been made."""

    def waited(self, token: Any) -> None:
        """The program waits for it."""

    def __enter__(self) -> Self:
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                self._inside.enter_context(replaced(dist.ProcessGroup, name, self._seen))
        self._inside.enter_context(replaced(dist.Work, "wait", self._awaited))
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.close()
        self._on_way.clear()

    def _seen(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with _Dispatched(self):
                return method(*args, **kwargs)

        return watched

    def _awaited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def watched(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            before, self._waiting.is_inside = self.waits_now, True
            try:
                result = wait(work, *args, **kwargs)
            finally:
                self._waiting.is_inside = before
            _, token = self._on_way.pop(id(work), (None, None))
            if token is not None:
                self.waited(token)
            return result

        return watched

    def dispatched(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        found = _parse(func, args, kwargs)
        if found is not None:
            token = self.called(*found)
            work = dist.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)  # type: ignore[attr-defined]
            self._on_way[id(work)] = work, token  # holds the object by which the program will wait


class _Dispatched(TorchDispatchMode):
    """Shows a call in the one form in which torch's dispatcher gets it, whatever method has made it."""

    def __init__(self, watch: CallWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._watch.dispatched(func, args, kwargs, result)
        return result


@contextmanager
def replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, attribute `name` of a module or class is what `by` makes of it."""
    own = name in vars(owner)
    before = vars(owner).get(name)  # what `getattr` gives of a class in C++ is no method any more
    setattr(owner, name, by(getattr(owner, name)))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _parse(func: Any, args: Any, kwargs: Any) -> tuple[Call, list[Tensor], list[Tensor]] | None:
    """The call, and the tensors that it reads and writes; None for what moves nothing."""
    schema = schema_of(func)
    name = schema.name.partition("::")[2]
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    boxed = given.pop("process_group", None)
    if boxed is None:
        return None
    group: Any = dist.ProcessGroup.unbox(boxed)  # type: ignore[attr-defined]
    reads, writes, details = list[Tensor](), list[Tensor](), list[Any]()
    peer, tag = None, 0
    for what, value in given.items():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if what in ("src", "dst"):
            peer = value
        elif what == "tag":
            tag = value
        elif what.startswith("root"):
            details.append(value)
        elif what in ("output_split_sizes", "input_split_sizes") and value:
            details.append(what)  # not the sizes, which differ from rank to rank
        elif what == "tensor":  # a barrier's
            pass
        elif what.startswith("output"):
            writes += tensors
        elif what.startswith("input"):
            reads += tensors
        elif what == "tensors":
            reads += tensors if name not in _WRITTEN else []
            writes += tensors if name not in _READ_ONLY else []
    sizes = tuple(each.numel() for each in reads), tuple(each.numel() for each in writes)
    dtypes = tuple(sorted({str(each.dtype).removeprefix("torch.") for each in (*reads, *writes)}))
    ranks = tuple(dist.get_process_group_ranks(group))
    call = Call(name.strip("_"), group.group_name, ranks, sizes, dtypes, tuple(details), peer, tag, place_of_call())
    return call, reads, writes


def place_of_call() -> str:
    """File and line of the code that is running, torch and this package's recorders left out."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _OWN_FILES):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
