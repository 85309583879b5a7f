"""What a tensor was made of, where autograd does not say: under `no_grad`, behind `detach`, in masks and indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...utils import pytree

# Of these the result depends on the shape, dtype and device of the first, or on those of the second argument alone.
_LIKE_FIRST = frozenset(
    [f"{what}_like" for what in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")]
    + [f"new_{what}" for what in ("zeros", "ones", "empty", "full", "tensor")]
)
_LIKE_SECOND = frozenset(["expand_as", "view_as", "reshape_as", "type_as", "to"])


class Flows(TorchFunctionMode):
    """While active, remembers the sources of results that autograd does not follow.

    A source is a node of autograd's graph, or a leaf that requires a gradient. For every result without a node

        sources(result) = union of sources(argument) over the arguments

    and for a node whose arguments had such sources besides, `beyond(node)` are these.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: Any = WeakTensorKeyDictionary()  # of tensors without a node
        self._beyond: dict[Any, set[Any]] = {}
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def sources(self, tensor: torch.Tensor) -> set[Any]:
        found = set(self._sources.get(tensor, ()))
        if tensor.grad_fn is not None:
            found.add(tensor.grad_fn)
        elif tensor.requires_grad:
            found.add(tensor)
        return found

    def beyond(self, node: Any) -> Iterable[Any]:
        return self._beyond.get(node, ())

    def begin_at(self, tensor: torch.Tensor, leaf: torch.Tensor) -> None:
        """`tensor`, which no gradient can flow to, is the leaf."""
        self._sources[tensor] = {leaf}

    def add(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """`tensor`, which no gradient can flow to, is made of the source besides."""
        self._sources[tensor] = {*self._sources.get(tensor, ()), source}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        made = _tensors(output) if not self._paused else []
        if name == "__setitem__" and not self._paused:
            made = [args[0]]
        if not made or name in _LIKE_FIRST:
            return output
        read = _tensors((args[:1], {}) if name in _LIKE_SECOND else (args, kwargs))
        followed = [tensor for tensor in made if tensor.grad_fn is not None]
        if len(followed) == len(made) and not any(tensor in self._sources for tensor in read):
            return output
        hidden: set[Any] = set().union(*(self._sources.get(tensor, ()) for tensor in read))
        everything: set[Any] = set().union(*(self.sources(tensor) for tensor in read))
        for tensor in made:
            if tensor.grad_fn is not None:
                if hidden:
                    self._beyond.setdefault(tensor.grad_fn, set()).update(hidden)
            elif everything and not (tensor.requires_grad and name == "requires_grad_"):
                for changed in (tensor, tensor._base):
                    if changed is not None:
                        self._sources[changed] = self._sources.get(changed, set()) | everything
        return output


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
