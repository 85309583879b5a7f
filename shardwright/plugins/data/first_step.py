"""A look at the first batch of a run: ranks of one model replica need the same one, those of different replicas
different ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...cluster import job
from ...logging import get_dist_logger
from ...shardformer.rng import uses_dropout
from ...shardformer.same_weights import hash_of
from ...utils import pytree
from ..agreement import DIGEST, Facts, describe, digest, exchange, exchange_facts, named, place_of, several
from .dataloader import ShardedDataLoader

_NUMBER = 4  # bytes


class _Record(NamedTuple):
    """What a rank tells the others: digests, and where it stands. Zeros stand for what it has not."""

    settings: bytes
    batch: bytes
    keys: bytes
    order: bytes  # of the samples, before they were dealt out
    random: bytes  # torch's random state, where tensor-parallel ranks draw common dropout masks from it
    replica: int
    tp_group: int  # its first rank

    def pack(self) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part.to_bytes(_NUMBER, "big") for part in self)

    @staticmethod
    def unpack(data: bytes) -> _Record:
        parts: list[Any] = [data[start : start + DIGEST] for start in range(0, 5 * DIGEST, DIGEST)]
        replica, tp_group = data[5 * DIGEST :][:_NUMBER], data[5 * DIGEST :][_NUMBER:]
        return _Record._make([*parts, int.from_bytes(replica, "big"), int.from_bytes(tp_group, "big")])


class FirstStep:
    """Compares the ranks' first training batch, once, and the `settings` of their boosters.

    model, dataloader   what boost returned
    """

    def __init__(self, plugin: Any, model: nn.Module, dataloader: Any, settings: Mapping[str, Any]) -> None:
        self._settings: Facts = {}
        for name, value in settings.items():
            describe(name, value, self._settings)
        self._plugin = plugin
        self._model: nn.Module | None = model
        self._dataloader = dataloader if isinstance(dataloader, ShardedDataLoader) else None
        self.done = not several()

    def check(self, batch: Mapping[str, Any]) -> None:
        """Collective over all ranks at its first call, nothing later."""
        if self.done:
            return
        self.done = True
        self.compare(batch)

    @job.heeds_failures_alone
    def compare(self, batch: Mapping[str, Any]) -> None:
        facts = {f"batch[{key!r}]": _content(value) for key, value in batch.items()}
        records = [_Record.unpack(data) for data in exchange(self._record(facts).pack())]
        self._model = self._dataloader = None
        peers = [
            [rank for rank, record in enumerate(records) if record.replica == replica]
            for replica in range(self._plugin.data_parallel[0])
        ]
        self._compare_settings(records)
        self._compare_peers(records, peers, facts)
        _compare_orders(records)
        _compare_random(records)
        _compare_replicas(records, peers, facts)

    def _record(self, facts: Facts) -> _Record:
        mesh = self._plugin.mesh
        tp = mesh is not None and mesh.size("tp") > 1
        random = bytes(DIGEST)
        if tp and self._model is not None and self._model.training and uses_dropout(self._model):
            random = digest({"state": hash_of(torch.get_rng_state())})
        order = self._dataloader.dealer.order_digest if self._dataloader is not None else None
        keys = digest(dict.fromkeys(facts, ""))
        first = mesh.ranks("tp")[0] if mesh is not None and tp else 0
        return _Record(
            digest(self._settings),
            digest(facts),
            keys,
            order or bytes(DIGEST),
            random,
            self._plugin.data_parallel[1],
            first,
        )

    def _compare_settings(self, records: list[_Record]) -> None:
        if len({record.settings for record in records}) > 1:
            tables = exchange_facts({**self._settings, "place": place_of(self._plugin)})
            raise ValueError(
                f"Booster(...) was given different settings on different ranks: {named(tables, range(len(tables)))}"
            )

    def _compare_peers(self, records: list[_Record], peers: list[list[int]], facts: Facts) -> None:
        different = [ranks for ranks in peers if len({records[rank].batch for rank in ranks}) > 1]
        if different:
            tables = exchange_facts({**facts, "place": place_of(self._plugin)})
            raise ValueError(
                "ranks of one model replica were given different batches in the first step: "
                f"{named(tables, different[0])}. Ranks that differ in tp, pp or sp only must see the same samples in "
                "the same order: use plugin.prepare_dataloader or give boost the DataLoader, and seed what is done to "
                "samples by plugin.data_parallel[1] instead of the global rank"
            )


def _compare_orders(records: list[_Record]) -> None:
    if len({record.order for record in records}) > 1:
        raise ValueError(
            "ranks deal the samples of the DataLoader in different orders, so that some samples go to several "
            "data-parallel ranks and others to none: give its sampler a generator=torch.Generator().manual_seed(...), "
            "or seed what it draws from alike on all ranks"
        )


def _compare_random(records: list[_Record]) -> None:
    states: dict[int, set[bytes]] = {}
    for record in records:
        states.setdefault(record.tp_group, set()).add(record.random)
    if any(len(group) > 1 for group in states.values()):
        raise ValueError(
            "torch's random state differs over the ranks of a tensor-parallel group, so that dropout would mask one "
            "activation in several ways: after boost, seed by the data-parallel rank (torch.manual_seed(seed + "
            "plugin.data_parallel[1])) or not at all"
        )


def _compare_replicas(records: list[_Record], peers: list[list[int]], facts: Facts) -> None:
    firsts = [ranks[0] for ranks in peers]
    log = get_dist_logger()
    if len({records[rank].keys for rank in firsts}) > 1:
        log.warning(
            f"data-parallel ranks have batches with different entries in the first step; rank 0 has {', '.join(facts)}",
            ranks=[0],
        )
    seen: dict[bytes, int] = {}
    for replica, rank in enumerate(firsts):
        same = seen.setdefault(records[rank].batch, replica)
        if same != replica:
            log.warning(
                f"data-parallel ranks {same} and {replica} (global ranks {firsts[same]} and {rank}) were given the "
                "same batch in the first step: unless the dataset repeats itself, every sample counts several times "
                "and others are never seen. Use plugin.prepare_dataloader, or pass your DataLoader to boost, which "
                "deals it out",
                ranks=[0],
            )
            return


def _content(value: Any) -> str:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor | str | int | float | bool)]
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)} with digest {hash_of(leaf)}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
    )
