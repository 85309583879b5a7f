"""What FSDP2 sends, in 8 bits: its all-gathers and reduce-scatters in the format of `comm.quantised`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..comm.quantised import can_be_quantised
from ..comm.quantised_wire import gather_parts, scatter_sums


class _Memory:
    """FSDP2 asks the communication for the memory that it works on."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantisedAllGather(_Memory):
    """Every part as its owner rounded it, its own part too: all ranks compute with the same weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if not can_be_quantised(input_tensor.dtype):
            # parameters of several dtypes come as bytes
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return
        whole = gather_parts(input_tensor, group, 0, [input_tensor.numel()] * group.size()).wait()
        output_tensor.copy_(whole)


class QuantisedReduceScatter(_Memory):
    """Every part goes to its owner in 8 bits, and is added there in fp32."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"FSDP2 reduces by {op}"
        ranks = group.size()
        total = scatter_sums(input_tensor, group, 0, [output_tensor.numel()] * ranks).wait()
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


def send_in_8_bits(model: nn.Module) -> None:
    """For every module of `model` that is sharded on its own."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(QuantisedAllGather())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(QuantisedReduceScatter())  # type: ignore[arg-type]


def require_custom_communication() -> None:
    if not hasattr(FSDPModule, "set_custom_all_gather") or not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError(
            f"TorchFSDPPlugin(fp8_communication=True): FSDP2 of torch {torch.__version__} lets nobody else send for "
            "it; use a newer torch, or LowLevelZeroPlugin(stage=3, fp8_communication=True)"
        )
