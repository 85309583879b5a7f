"""Keep double precision where models ask for single precision.

transformers casts to float32 in norms, softmax and losses, whatever the model's dtype. A float64 model then computes its loss
in float32, and a comparison to 1e-10 sees the order of float32 sums (microbatches, vocabulary shards) instead of errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def keep_float64() -> Iterator[None]:
    """Inside, a float64 tensor stays float64 when it is cast to float32 (`.float()`, `.to(torch.float32)`, `softmax(dtype=torch.float32)`).

    Use it around forward, backward and step, on the reference and on the parallel side alike:

        with keep_float64():
            loss = model(**inputs).loss
            loss.backward()
    """
    with _KeepFloat64():
        yield


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
