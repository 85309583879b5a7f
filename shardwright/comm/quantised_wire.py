"""Process groups whose floating-point tensors travel in 8 bits, and the collectives in them.

Whether a group quantises is a property of the group: `quantised_group` makes one of the same ranks beside the exact
one, and who is handed it sends in the format of `comm.quantised` without knowing. Collectives that call torch
themselves, and tensors that the format has no room for (64 bits, integers), are exact in it too.

    all-gather       every part as it was quantised by its owner, its own part too: all ranks hold the same
    reduce-scatter   every part is sent to its owner, who adds the parts in fp32, its own as it is
    all-reduce       that, then an all-gather of the sums
    all-to-all       every part but a rank's own

Nothing is ever added in 8 bits. With r ranks and E(x) the bound of one rounding (see `comm.quantised`), a sum y of
x_1 .. x_r differs by at most E(x_1) + .. + E(x_r), and behind an all-reduce by E of that result more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cluster.groups import shared_group
from . import compat
from .handle import Handle
from .quantised import can_be_quantised, dequantise, quantise, wire_bytes

_exact: dict[str, dist.ProcessGroup] = {}  # by the name of a group that quantises: the one beside it


def quantised_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that quantises. Collective over them; the same each time."""
    if group.size() == 1 or is_quantised(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    found = shared_group(("quantised", tuple(ranks)), ranks, use_local_synchronization=True)
    _exact[str(found.group_name)] = group
    return found


def check_quantisable(model: nn.Module) -> None:
    """Who works in 64 bits has no use for 8: such a model would send everything as it is, without a word."""
    for name, param in model.named_parameters():
        if param.dtype == torch.float64:
            raise ValueError(
                f"fp8_communication=True: {name} is in {param.dtype}, and what models in 64 bits send is not rounded "
                "to 8; leave fp8_communication False, or use model.float()"
            )


def is_quantised(group: dist.ProcessGroup) -> bool:
    return bool(_exact) and str(group.group_name) in _exact


def exact_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group for what must not be rounded: logits, losses, what scripts read."""
    return _exact.get(str(group.group_name), group) if _exact else group


def travels_quantised(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """The same on all ranks, whatever their sizes. Tensors without data travel nowhere."""
    return bool(_exact) and can_be_quantised(tensor.dtype) and not tensor.is_meta and is_quantised(group)


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Handle[Tensor]:
    """Start summing `tensor` over the ranks in place. All ranks must `wait()` between the same launches, because
    the second half is launched there.
    """
    if not tensor.numel():
        return Handle("all_reduce", [], lambda: tensor)
    ranks, rank = group.size(), group.rank()
    flat = tensor.detach().reshape(-1)
    share = -(-flat.numel() // ranks)
    if share * ranks != flat.numel():
        rows = torch.nn.functional.pad(flat, (0, share * ranks - flat.numel())).view(ranks, share)
    else:
        rows = flat.view(ranks, share)
    payload = quantise(rows)
    arrived = torch.empty_like(payload)
    work = compat.all_to_all_single(arrived.view(-1), payload.view(-1), group=group, async_op=True)
    own = rows[rank].float()

    def finish() -> Tensor:
        # in the tensor's dtype first: what is too large for it must be infinite, so that overflows are seen
        mine = quantise(_sum(dequantise(arrived, share), own, rank).to(tensor.dtype))
        everyone = mine.new_empty(ranks * mine.numel())
        compat.all_gather_single(everyone, mine, group=group)
        sums = dequantise(everyone.view(ranks, -1), share, tensor.dtype).view(-1)[: tensor.numel()]
        with torch.no_grad():
            tensor.copy_(sums.view(tensor.shape))
        return tensor

    return Handle("all_reduce", [work], finish, keep=(payload, arrived))


def gather_parts(tensor: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]) -> Handle[Tensor]:
    """Start joining every rank's part along `dim`; parts are sent at the size of the longest."""
    ranks = group.size()
    shapes = [_with_size(tensor, dim, size) for size in sizes]
    mine = quantise(tensor.detach().reshape(-1))
    longest = wire_bytes(max(shape.numel() for shape in shapes))
    if mine.numel() < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - mine.numel())])
    everyone = mine.new_empty(ranks * longest)
    work = compat.all_gather_single(everyone, mine, group=group, async_op=True)

    def finish() -> Tensor:
        parts = []
        for payload, shape in zip(everyone.view(ranks, longest), shapes, strict=True):
            numel = shape.numel()
            parts.append(dequantise(payload[: wire_bytes(numel)], numel, tensor.dtype).view(shape))
        return torch.cat(parts, dim)

    return Handle("all_gather", [work], finish, keep=mine)


def scatter_sums(tensor: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]) -> Handle[Tensor]:
    """Start summing over the ranks and dealing the sum out along `dim`."""
    rank = group.rank()
    parts = [part.detach().reshape(-1) for part in tensor.split(list(sizes), dim)]
    received = _exchange(parts, [parts[rank].numel()] * group.size(), group)
    shape, own, dtype = _with_size(tensor, dim, sizes[rank]), parts[rank].float(), tensor.dtype

    def finish() -> Tensor:
        terms = [dequantise(payload, own.numel()) for payload in received.wait()]
        return _sum(torch.stack(terms), own, rank).to(dtype).view(shape)

    return Handle("reduce_scatter", [], finish)


def trade_parts(
    parts: Sequence[Tensor], counts: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup
) -> Handle[list[Tensor]]:
    """Start sending flat part r to rank r; `wait()` returns the flat parts, of `counts` elements, that came. A rank's
    own part is not rounded.
    """
    rank = group.rank()
    received = _exchange(parts, counts, group)

    def finish() -> list[Tensor]:
        found = [dequantise(load, count, dtype) for load, count in zip(received.wait(), counts, strict=True)]
        found[rank] = parts[rank].detach()
        return found

    return Handle("all_to_all", [], finish)


def _exchange(parts: Sequence[Tensor], counts: Sequence[int], group: dist.ProcessGroup) -> Handle[Sequence[Tensor]]:
    """Start sending flat part r to rank r; `wait()` returns the payloads that came, of so many elements."""
    sent = [quantise(part) for part in parts]
    lengths = [wire_bytes(count) for count in counts]
    payload = torch.cat(sent)
    arrived = payload.new_empty(sum(lengths))
    work = compat.all_to_all_single(
        arrived, payload, lengths, [part.numel() for part in sent], group=group, async_op=True
    )
    return Handle("all_to_all", [work], lambda: arrived.split(lengths), keep=payload)


def _sum(terms: Tensor, own: Tensor, rank: int) -> Tensor:
    """[ranks, n] added up, with this rank's own term as it was before it was rounded."""
    terms[rank] = own
    return terms.sum(0)


def _with_size(tensor: Tensor, dim: int, size: int) -> torch.Size:
    shape = list(tensor.shape)
    shape[dim] = size
    return torch.Size(shape)
