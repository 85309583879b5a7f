"""Payloads between pipeline stages: a nested structure of tensors taken apart, described and put together again.

A payload is built from dicts, lists and tuples (sub-classes arrive as plain dict, list and tuple), tensors, None, bool,
int, float and str. Its header says everything but the data; it travels as JSON, once per kind of message, and both
sides keep it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Structure of a payload, hashable and comparable:
#   ("tensor",)  ("constant", value)  ("dict", keys, nodes)  ("list", nodes)  ("tuple", nodes)
Node = tuple[Any, ...]
_TENSOR: Node = ("tensor",)


class TensorMeta(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Header(NamedTuple):
    """What a receiver must know before the data arrives; tensors are listed in the order in which they are sent."""

    structure: Node
    tensors: tuple[TensorMeta, ...]

    def to_bytes(self) -> bytes:
        tensors = [(meta.shape, str(meta.dtype).removeprefix("torch."), meta.requires_grad) for meta in self.tensors]
        return json.dumps([self.structure, tensors]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Header:
        """ValueError for what `to_bytes` cannot have written."""
        try:
            structure, tensors = json.loads(data)
            header = Header(_node_from_json(structure), tuple(_meta(*each) for each in tensors))
            count = _count(header.structure)
        except (TypeError, KeyError, IndexError, RecursionError, ValueError) as error:
            raise ValueError(
                f"a message between stages has a header that is none ({error!r}): all ranks must run the same version; "
                "where they do, suspect the network or the memory of a device"
            ) from None
        if count != len(header.tensors):
            raise ValueError(f"a message between stages has {len(header.tensors)} tensors for {count} places")
        return header

    def __str__(self) -> str:
        tensors = ", ".join(f"{list(m.shape)} {m.dtype}{' with grad' if m.requires_grad else ''}" for m in self.tensors)
        return f"{_show(self.structure)} of {len(self.tensors)} tensors: {tensors}"


def take_apart(payload: Any) -> tuple[Header, list[Tensor]]:
    """Header and tensors of `payload`; ValueError names what cannot be sent."""
    if type(payload) is Tensor:  # the most frequent payload by far
        return Header(_TENSOR, (TensorMeta(tuple(payload.shape), payload.dtype, payload.requires_grad),)), [payload]
    tensors: list[Tensor] = []
    structure = _describe(payload, tensors, "payload")
    return Header(structure, tuple(TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)), tensors


def put_together(header: Header, tensors: list[Tensor]) -> Any:
    """The payload described by `header`; inverse of `take_apart`."""
    if header.structure == _TENSOR:
        return tensors[0]
    return _build(header.structure, iter(tensors))


def _describe(tree: Any, tensors: list[Tensor], path: str) -> Node:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _TENSOR
    if tree is None or isinstance(tree, bool | int | float | str):
        return ("constant", tree)
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, str | int):
                raise ValueError(f"{path} has the key {key!r}: keys of what a stage sends must be str or int")
        return (
            "dict",
            tuple(tree),
            tuple(_describe(value, tensors, f"{path}[{key!r}]") for key, value in tree.items()),
        )
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return (kind, tuple(_describe(value, tensors, f"{path}[{i}]") for i, value in enumerate(tree)))
    raise ValueError(
        f"{path} is a {type(tree).__name__}: stages can send tensors, None, bool, int, float, str and dicts, lists and "
        "tuples of them"
    )


def _build(node: Node, tensors: Iterator[Tensor]) -> Any:
    match node[0]:
        case "tensor":
            return next(tensors)
        case "constant":
            return node[1]
        case "dict":
            return {key: _build(child, tensors) for key, child in zip(node[1], node[2], strict=True)}
        case "list":
            return [_build(child, tensors) for child in node[1]]
        case "tuple":
            return tuple(_build(child, tensors) for child in node[1])
        case kind:
            raise AssertionError(f"unknown kind of node {kind!r}")


def _node_from_json(node: list[Any]) -> Node:
    match node[0]:
        case "tensor" | "constant":
            return tuple(node)
        case "dict":
            return ("dict", tuple(node[1]), tuple(_node_from_json(child) for child in node[2]))
        case kind:
            return (kind, tuple(_node_from_json(child) for child in node[1]))


def _meta(shape: list[int], dtype: str, requires_grad: bool) -> TensorMeta:
    found = getattr(torch, dtype, None)
    plain = all(type(size) is int and 0 <= size < 2**62 for size in shape)
    if not (isinstance(found, torch.dtype) and plain and isinstance(requires_grad, bool)):
        raise ValueError(f"a message between stages describes no tensor: {shape!r} {dtype!r} {requires_grad!r}")
    return TensorMeta(tuple(shape), found, requires_grad)


def _count(node: Node) -> int:
    """Tensors in a structure; ValueError where it is none."""
    match node:
        case ("tensor",):
            return 1
        case ("constant", None | bool() | int() | float() | str()):
            return 0
        case ("dict", keys, nodes) if len(keys) == len(nodes) and all(isinstance(key, str | int) for key in keys):
            return sum(map(_count, nodes))
        case ("list" | "tuple", nodes):
            return sum(map(_count, nodes))
    raise ValueError(f"a message between stages has a structure that is none: {str(node)[:100]}")


def _show(node: Node) -> str:
    match node[0]:
        case "tensor":
            return "T"
        case "constant":
            return repr(node[1])
        case "dict":
            return (
                "{" + ", ".join(f"{key!r}: {_show(child)}" for key, child in zip(node[1], node[2], strict=True)) + "}"
            )
        case "list":
            return "[" + ", ".join(map(_show, node[1])) + "]"
        case _:
            return "(" + ", ".join(map(_show, node[1])) + ")"
