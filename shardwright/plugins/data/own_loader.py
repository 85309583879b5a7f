"""Data loaders that were written for one process, given to `boost`: dealt to data-parallel ranks as Accelerate's
`prepare` does it.

what is given                                            what comes back
a loader of plugin.prepare_dataloader                    the same
one that deals to the right ranks by itself              the same (DistributedSampler, split_dataset_by_node,
Accelerate's)
one that deals to other ranks                            ValueError
any other DataLoader                                     one that gives this rank its share (see `plugins.data.dealing`)
an object that is no DataLoader                          the same on one replica, else ValueError
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader

from ...logging import get_dist_logger
from ...utils.device import host_device
from ...utils.errors import counted
from .dataloader import ShardedDataLoader
from .dealing import Dealer, DealtBatches, DealtSampler, DealtStream, Share, check_stream, is_stream, length_of
from .sample_order import SampleOrder, inside, with_generator

_COPIED = (
    *(
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
    ),
    *("persistent_workers", "pin_memory_device", "in_order"),
)
# Names under which samplers and datasets say to how many processes they deal, and to which of them.
_REPLICAS = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))


def shard_dataloader(dataloader: Any, ranks: int, rank: int) -> Any:
    """The loader of data-parallel rank `rank` of `ranks`. Collective over all processes where there are several."""
    if not check_dataloader(dataloader, ranks, rank):
        return dataloader
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    sharded = _dealt(dataloader, ranks, rank, None if alone else _agree_on_order(dataloader))
    if ranks > 1:
        get_dist_logger().info(_word(dataloader, ranks), ranks=[0])
    return sharded


def check_dataloader(dataloader: Any, ranks: int, rank: int) -> bool:
    """Whether the loader is one to deal out, or may stay as it is; ValueError where neither will do. Communicates
    nothing.
    """
    if isinstance(dataloader, ShardedDataLoader):
        return False
    if not isinstance(dataloader, DataLoader) or type(dataloader).__iter__ is not DataLoader.__iter__:
        if ranks > 1:
            raise ValueError(_no_share(dataloader, ranks))
        return False
    dealt = dealt_by(dataloader)
    if dealt is not None:
        _check_dealt(*dealt, ranks, rank)
        if ranks > 1 and is_stream(dataloader.dataset):
            get_dist_logger().warning(_UNEVEN.format(name=dealt[0]), ranks=[0])
        return False
    if length_of(dataloader.dataset) == 0:
        raise ValueError(
            f"dataloader: its dataset {type(dataloader.dataset).__name__} has no samples: there is nothing to train on"
        )
    _check_not_empty(dataloader, _dealt(dataloader, ranks, rank, None), ranks)
    return True


_UNEVEN = (
    "{name} gives each rank a stream of its own, and nobody knows whether they end at the same batch: a rank that ends "
    "early leaves the others waiting. Count the steps, or pass the stream undivided, which boost deals out evenly"
)


def dealt_by(dataloader: DataLoader) -> tuple[str, int, int] | None:
    """Who deals the samples of this loader to processes already: its name, the number of processes and which of them
    gets these.
    """
    # the latter: datasets' split_dataset_by_node
    parts = [dataloader.dataset, getattr(dataloader.dataset, "_distributed", None)]
    for sampler in (dataloader.batch_sampler, dataloader.sampler):
        parts += inside(sampler) + [getattr(part, "batch_sampler", None) for part in inside(sampler)]
    for part in parts:
        for replicas, rank in _REPLICAS:
            found = getattr(part, replicas, None), getattr(part, rank, None)
            if all(isinstance(number, int) and not isinstance(number, bool) for number in found):
                return type(part).__name__, *found  # type: ignore[return-value]
    return None


def _check_dealt(name: str, replicas: int, rank: int, ranks: int, mine: int) -> None:
    if (replicas, rank) != (ranks, mine):
        raise ValueError(
            f"dataloader: its {name} deals samples to {replicas} ranks and these are for number {rank} of them, but "
            f"this process is number {mine} of {ranks} data-parallel ranks (ranks that share a model replica need the "
            "same samples). Use num_replicas, rank = plugin.data_parallel, or plugin.prepare_dataloader(dataset, "
            "batch_size), or pass a plain DataLoader, which boost deals out"
        )


def _no_share(dataloader: Any, ranks: int) -> str:
    return (
        f"dataloader={type(dataloader).__name__} cannot be dealt out to {ranks} data-parallel ranks: only a torch "
        "DataLoader that does not iterate in a way of its own can. Use plugin.prepare_dataloader(dataset, batch_size) "
        "or a plain DataLoader; or, if it gives every rank its own samples by itself, do not pass it to boost, which "
        "does nothing else with it"
    )


def _word(dataloader: DataLoader, ranks: int) -> str:
    batches = (f"{ranks} of its batches") + (
        f" of {counted(dataloader.batch_size, 'sample')}" if dataloader.batch_size is not None else ""
    )
    return (
        f"boost deals the DataLoader out to {ranks} data-parallel ranks: a step takes {batches}, one on each rank. A "
        "loader that gives every rank its own samples by itself must not be passed to boost"
    )


def _dealt(dataloader: DataLoader, ranks: int, rank: int, seed: int | None) -> ShardedDataLoader:
    copied = {name: getattr(dataloader, name) for name in _COPIED if hasattr(dataloader, name)}
    if not copied["num_workers"]:
        copied["prefetch_factor"] = None
    size, dataset = dataloader.batch_size, dataloader.dataset
    dealer: Dealer
    if is_stream(dataset):
        check_stream(dataset, "dataloader.dataset")
        dealer = DealtStream(dataset, Share(ranks, rank, size or 1, dataloader.drop_last), dataloader.num_workers)
        return ShardedDataLoader(dealer, dealer=dealer, batch_size=size, drop_last=dataloader.drop_last, **copied)
    if size is not None and type(dataloader.batch_sampler) is BatchSampler:
        order = SampleOrder(dataloader.sampler, seed)
        dealer = DealtSampler(dataloader.sampler, Share(ranks, rank, size, dataloader.drop_last), order)
        return ShardedDataLoader(
            dataset, dealer=dealer, batch_size=size, drop_last=dataloader.drop_last, sampler=dealer, **copied
        )
    batches: Any = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
    share = Share(ranks, rank, 1, bool(getattr(batches, "drop_last", False)))
    dealer = DealtBatches(batches, share, SampleOrder(batches, seed))
    if dataloader.batch_sampler is None:
        return ShardedDataLoader(dataset, dealer=dealer, batch_size=None, sampler=dealer, **copied)
    return ShardedDataLoader(dataset, dealer=dealer, batch_sampler=dealer, **copied)


def _check_not_empty(dataloader: DataLoader, sharded: ShardedDataLoader, ranks: int) -> None:
    try:
        batches = len(sharded)
    except TypeError:
        return
    if batches == 0:
        size = (
            f"batch_size={dataloader.batch_size}"
            if dataloader.batch_size is not None
            else f"{type(dataloader.batch_sampler).__name__}"
        )
        samples = len(dataloader.dataset)  # type: ignore[arg-type]
        raise ValueError(
            f"dataloader: with {size} and drop_last=True its dataset of {counted(samples, 'sample')} gives no batch to "
            f"each of {ranks} data-parallel ranks; use a smaller batch_size or drop_last=False"
        )


def _agree_on_order(dataloader: DataLoader) -> int:
    """Let all ranks draw the same order: their common seed; a generator that the user gave takes its state from rank
    0.
    """
    sampler = with_generator(dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler)
    generators: list[torch.Generator] = []
    for found in (
        getattr(sampler, "generator", None),
        dataloader.generator,
        getattr(dataloader.dataset, "generator", None),
    ):
        if isinstance(found, torch.Generator) and all(found is not other for other in generators):
            generators.append(found)
    states = [generator.get_state() for generator in generators]
    mine = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states), digest_size=7).digest()
    device = host_device()
    record = torch.tensor([int.from_bytes(mine, "big"), torch.initial_seed() % 2**62], device=device)
    shared = record.clone()
    dist.broadcast(shared, src=0)
    differs = (shared[:1] != record[:1]).to(torch.int64)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if bool(differs):
        for generator, state in zip(generators, states, strict=True):
            moved = state.to(device)
            dist.broadcast(moved, src=0)
            generator.set_state(moved.cpu())
        get_dist_logger().warning(
            "the DataLoader's generator was in another state on some ranks, which would have drawn other orders: all "
            "take rank 0's",
            ranks=[0],
        )
    return int(shared[1])
