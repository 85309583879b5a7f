"""Plain data in JSON and back: what lr schedulers, param groups and users put beside the tensors.

JSON alone would turn tuples into lists and number keys into strings, so these are tagged. Nothing but data comes back:
no classes are looked up by name and no code runs.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy
import torch

from ..files.errors import UnsafeCheckpoint
from ..files.tensor_file import dtype_name, dtype_of

_TAG = "__shardwright__"


def encode(value: Any, where: str) -> Any:
    """JSON data for `value`; ValueError naming the place of anything that is not plain data."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        # subclasses (enumerations) would come back as their base class
        if type(value) not in (type(None), bool, int, float, str):
            raise _refused(value, where)
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [encode(item, f"{where}[{number}]") for number, item in enumerate(value)]}
    if (
        isinstance(value, torch.Tensor)
        and value.numel() <= 1024
        and type(value) is torch.Tensor
        and not value.is_complex()
    ):
        host = value.detach().cpu()
        numbers = (host.double() if host.is_floating_point() else host).flatten().tolist()
        return {_TAG: "tensor", "dtype": dtype_name(value.dtype), "shape": list(value.shape), "items": numbers}
    if type(value) in (dict, Counter):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        items = [[encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "dict", "items": items}
    raise _refused(value, where)


def _refused(value: Any, where: str) -> ValueError:
    return ValueError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: use None, bool, int, float, str, lists, "
        "tuples and dicts of them (small tensors too), and rebuild other objects from those after loading"
    )


def decode(data: Any) -> Any:
    """The value that `encode` was given; UnsafeCheckpoint for anything that it cannot have written."""
    try:
        return _decode(data)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:  # RecursionError among them
        raise UnsafeCheckpoint(f"plain data of a checkpoint is not as described ({error!r})") from None


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data.get(_TAG)
    if kind is None:
        return {key: _decode(item) for key, item in data.items()}
    items = data["items"]
    if kind == "tuple":
        return tuple(_decode(item) for item in items)
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in items}
    if kind == "tensor" and math.prod(data["shape"]) == len(items):
        return (
            torch.tensor(items, dtype=torch.float64 if any(isinstance(i, float) for i in items) else None)
            .to(dtype_of(data["dtype"], "a small tensor"))
            .view(data["shape"])
        )
    raise ValueError(f"unknown kind of data {kind!r}")


def as_before(current: Any, loaded: Any) -> Any:
    """`loaded` as the type that it replaces where plain data does not keep the difference (a Counter, a tensor's
    device).
    """
    if isinstance(current, Counter) and isinstance(loaded, dict):
        return Counter(loaded)
    if isinstance(current, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded.to(current.device)
    return loaded
