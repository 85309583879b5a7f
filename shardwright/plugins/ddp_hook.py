"""DistributedDataParallel whose gradients travel in 8 bits (see `comm.quantised_wire`).

Annotations are evaluated here: torch looks at those of the hook, and takes no text.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..comm.collectives import all_reduce_in_place
from ..comm.quantised_wire import quantised_group


def quantise_gradients(ddp: DistributedDataParallel) -> None:
    """Let DistributedDataParallel average its buckets in 8 bits. Collective over its ranks."""
    ddp.register_comm_hook(quantised_group(ddp.process_group), _average)


def _average(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over the ranks. It is there when this returns; on CUDA, for what follows on the stream."""
    gradients = bucket.buffer()
    all_reduce_in_place(gradients.div_(group.size()), group)
    devices: list[int | str | torch.device] | None = [gradients.device] if gradients.device.type == "cuda" else None
    result: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    result.set_result(gradients)
    return result
