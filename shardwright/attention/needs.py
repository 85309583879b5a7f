"""What attention is asked to compute."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

CPU, CUDA, ROCM = "cpu", "cuda", "rocm"
# What may hide keys from a query. Of blocks are masks that a model's own functions make, such as images that see
# themselves whole in a causal text; an arbitrary mask is one that the batch brings, [B, heads or 1, S, S].
CAUSAL, PADDING, WINDOW, BLOCK, ARBITRARY = "causal", "padding", "window", "block", "arbitrary"
MASKS = (CAUSAL, PADDING, WINDOW, BLOCK, ARBITRARY)
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Needs:
    """What is computed, on what.

    device          "cpu", "cuda", "rocm" for AMD's GPUs, or another type of torch's
    capability      (9, 0) for SM90; None where the device has none
    head_dim        of queries and keys; `value_dim` of values, None for the same
    masks           which of MASKS batches may meet
    packed          several documents in a row, told apart by their positions
    in_one_row      packed documents are those of one row, and all begin with the same position
    crossed         keys are of another sequence than queries too, with padding of its own
    soft_cap        scores are squeezed by tanh before the softmax
    sinks           a learned score per head joins the softmax and has no value
    position_bias   a trained term per query, key and head joins the scores
    dropout         probability, of the attention's own dropout
    training        gradients are computed, of sinks too
    takes           implementations that the model's class can be given (see `attention.model_needs`); None for all
    """

    device: str
    capability: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    value_dim: int | None = None
    masks: frozenset[str] = field(default_factory=lambda: frozenset({CAUSAL, PADDING}))
    packed: bool = False
    in_one_row: bool = True
    crossed: bool = False
    soft_cap: bool = False
    sinks: bool = False
    position_bias: bool = False
    dropout: float = 0.0
    training: bool = True
    takes: frozenset[str] | None = None

    @property
    def where(self) -> str:
        """ "SM90", "CPU"."""
        if self.device == CUDA and self.capability is not None:
            return f"SM{self.capability[0]}{self.capability[1]}"
        return self.device.upper() if self.device in (CPU, CUDA) else self.device

    @property
    def dtype_name(self) -> str:
        return _DTYPES.get(self.dtype, str(self.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        """ "bf16, head_dim 128, causal and padding masks, dropout, training"."""
        masks = " and ".join(kind for kind in MASKS if kind in self.masks)
        dims = f"{self.head_dim}" if self.value_dim in (None, self.head_dim) else f"{self.head_dim}/{self.value_dim}"
        words = [self.dtype_name, f"head_dim {dims}", f"{masks} masks" if masks else "no masks"]
        named = {
            "packed documents": self.packed,
            "cross attention": self.crossed,
            "soft caps": self.soft_cap,
            "sinks": self.sinks,
            "position bias": self.position_bias,
            "dropout": self.dropout > 0 and self.training,
            "training": self.training,
        }
        return ", ".join([*words, *(name for name, there in named.items() if there)])


def needs_on(device: torch.device) -> Needs:
    """A causal model in bf16 with heads of 128 features, in training on this device."""
    if device.type != "cuda":
        return Needs(device.type)
    if torch.version.hip is not None:
        return Needs(ROCM)
    return Needs(CUDA, torch.cuda.get_device_capability(device))
