"""GPT-2's kind of linear, whose weight is [in, out], column- and row-parallel: for models that are built from these
layers. Those of transformers are sharded as the linears that they are.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from .linear import ColumnParallel, FusedLinear1D_Col, Linear1D_Row, RowParallel
from .parallel_module import Groups, ParallelGroup, constructor


class Conv1D(nn.Module):
    """y = x W + b; x [..., nx], W [nx, nf], b [nf]."""

    def __init__(
        self,
        nx: int,
        nf: int,
        bias: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight = nn.Parameter(torch.empty(nx, nf, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(nf, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class GPT2FusedLinearConv1D_Col(ColumnParallel, Conv1D):  # type: ignore[misc]
    """A `Conv1D` whose output is several parts one after the other (q, k, v), each sharded for itself: weight
    [in, out/n], bias [out/n].

    split_sizes     the size of every part
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        split_sizes: list[int],
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        gather_output: bool = False,
    ) -> None:
        Conv1D.__init__(self, in_features, out_features, bias, dtype, device)
        type(self).from_native_module(self, process_group, split_sizes=split_sizes, gather_output=gather_output)

    @classmethod
    def _from_native(
        cls, module: nn.Module, parallel: ParallelGroup, *, split_sizes: list[int], gather_output: bool = False
    ) -> nn.Module:
        return FusedLinear1D_Col._from_native(module, parallel, split_sizes=split_sizes, gather_output=gather_output)


class GPT2FusedLinearConv1D_Row(RowParallel, Conv1D):  # type: ignore[misc]
    """A `Conv1D` whose input features are sharded: weight [in/n, out], the whole bias.

    parallel_input  whether the input already is this rank's slice; if not, it is split first
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: Groups | None = None,
        *,
        parallel_input: bool = True,
    ) -> None:
        Conv1D.__init__(self, in_features, out_features, bias, dtype, device)
        type(self).from_native_module(self, process_group, parallel_input=parallel_input)

    @classmethod
    def _from_native(cls, module: nn.Module, parallel: ParallelGroup, *, parallel_input: bool = True) -> nn.Module:
        return Linear1D_Row._from_native(module, parallel, parallel_input=parallel_input)
