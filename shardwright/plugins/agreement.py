"""Whether all ranks run the same script: looked at once in `boost` and once in the first step, by one small exchange
each.

Each rank describes what it was given as a table of short texts ("optimizer.param_groups[0].lr": "0.001"). Ranks
exchange a digest of the table; only where digests differ do they exchange the tables and name what differs, on which
rank.

Weights are compared among the ranks of the first data-parallel replica: the other replicas take theirs from it. A few
elements of every parameter stand for all of it, since models from different seeds differ everywhere.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from .._version import __version__
from ..comm.handle import count_orphans, settle_orphans
from ..shardformer.same_weights import facts_of_weights, hash_of
from ..utils.device import host_device
from .data.dealing import length_of

_SHOWN = 4  # differences named in a message
_ENVIRONMENT = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
DIGEST = 16
Facts = dict[str, str]


def exchange(record: bytes) -> list[bytes]:
    """The records of all ranks, all of one length, by rank."""
    if not several():
        return [record]
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(host_device())
    records = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(records, mine)
    return [bytes(record.cpu().numpy()) for record in records]


def exchange_facts(facts: Facts) -> list[Facts]:
    """The tables of all ranks, by rank."""
    text = json.dumps(facts).encode()
    longest = max(int.from_bytes(length, "big") for length in exchange(len(text).to_bytes(8, "big")))
    return [json.loads(padded.rstrip(b" ")) for padded in exchange(text.ljust(longest))]


def digest(facts: Facts) -> bytes:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=DIGEST).digest()


def difference(tables: Mapping[int, Facts], places: Mapping[int, str]) -> str:
    """What differs between the tables of several ranks: the first few entries, each with two ranks that disagree."""
    (first, reference), *others = sorted(tables.items())
    names = dict.fromkeys(name for table in tables.values() for name in table)
    found = []
    for name in names:
        for rank, table in others:
            if table.get(name) != reference.get(name):
                mine, theirs = reference.get(name, "not there"), table.get(name, "not there")
                found.append(
                    f"{name} is {mine} on rank {first} ({places[first]}) and {theirs} on rank {rank} ({places[rank]})"
                )
                break
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def agree_on_boost(
    plugin: Any, model: nn.Module, optimizer: Any = None, dataloader: Any = None, lr_scheduler: Any = None
) -> None:
    """ValueError on all ranks where they were given different things. Collective over all ranks: after what each can
    check alone.
    """
    if not several():
        return
    facts = _facts_of_run() | _facts_of_job(plugin, model, optimizer, dataloader, lr_scheduler)
    weights = facts_of_weights(model)
    replica = plugin.data_parallel[1]
    orphans = count_orphans().to_bytes(4, "big")
    records = exchange(digest(facts) + digest(weights) + orphans + replica.to_bytes(4, "big"))
    if all(record[2 * DIGEST : -4] == orphans for record in records):
        settle_orphans()
    first = [rank for rank, record in enumerate(records) if int.from_bytes(record[-4:], "big") == 0]
    if len({record[:DIGEST] for record in records}) > 1:
        tables = exchange_facts({**facts, "place": place_of(plugin)})
        raise ValueError(
            f"ranks were given different things to boost: {named(tables, range(len(tables)))}. Every rank must run the "
            "same script with the same arguments in the same environment"
        )
    if len({records[rank][DIGEST : 2 * DIGEST] for rank in first}) > 1:
        tables = exchange_facts({**weights, "place": place_of(plugin)})
        raise ValueError(
            f"ranks that share one replica of the model have different weights: {named(tables, first)}. Each would "
            "keep its part of its own, which together are no model: seed all ranks alike before the model is built "
            "(launch_from_torch(seed=...) does, torch.manual_seed(seed + rank) does not), or load the same checkpoint "
            "on all of them"
        )


def agree_on_arguments(owner: str, arguments: Mapping[str, Any]) -> None:
    """ValueError on all ranks where plugins get different arguments, before process groups are made from them, which
    would hang.
    """
    if not several():
        return
    facts: Facts = {}
    for name, value in arguments.items():
        describe(name, value, facts)
    if len(set(exchange(digest(facts)))) > 1:
        tables = exchange_facts({**facts, "place": "global rank"})
        raise ValueError(
            f"{owner} has different arguments on different ranks: {named(tables, range(len(tables)))}; "
            "pass the same on all"
        )


def named(tables: Sequence[Facts], ranks: Sequence[int]) -> str:
    places = {rank: tables[rank].pop("place") for rank in ranks}
    return difference({rank: tables[rank] for rank in ranks}, places)


def place_of(plugin: Any) -> str:
    """Where this rank is, for messages: "dp 0, pp 1, tp 0"."""
    mesh = plugin.mesh
    if mesh is None:
        return f"dp {plugin.data_parallel[1]}"
    return ", ".join(
        f"{axis} {mesh.coordinate(axis)}" for axis in ("dp", "pp", "tp", "sp") if axis != "sp" or mesh.size("sp") > 1
    )


# The tables.


@cache
def _version(package: str) -> str:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _facts_of_run() -> Facts:
    facts = {f"version of {package}": _version(package) for package in ("torch", "transformers", "peft")}
    facts["version of shardwright"] = __version__
    facts["version of python"] = ".".join(platform.python_version_tuple()[:2])
    facts["torch.version.cuda"] = str(torch.version.cuda)
    facts["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    facts["torch.get_default_dtype()"] = str(torch.get_default_dtype())
    facts["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
    facts["torch.are_deterministic_algorithms_enabled()"] = str(torch.are_deterministic_algorithms_enabled())
    return facts | {f"environment variable {name}": os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def _facts_of_job(plugin: Any, model: nn.Module, optimizer: Any, dataloader: Any, lr_scheduler: Any) -> Facts:
    facts: Facts = {}
    describe("plugin", plugin, facts)
    facts["model"] = _name(model)
    facts["model.training"] = str(model.training)
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is not None:
        describe("model.config", to_dict(), facts)
    for name, param in model.named_parameters():
        trained = "trained" if param.requires_grad else "frozen"
        facts[f"parameter {name}"] = f"{tuple(param.shape)} {str(param.dtype).removeprefix('torch.')} {trained}"
    facts["optimizer"] = _name(optimizer)
    for number, group in enumerate(getattr(optimizer, "param_groups", [])):
        rest = {name: value for name, value in group.items() if name != "params"}
        describe(f"optimizer.param_groups[{number}]", {**rest, "number of parameters": len(group["params"])}, facts)
    facts["lr_scheduler"] = _name(lr_scheduler)
    if hasattr(lr_scheduler, "state_dict"):
        describe(
            "lr_scheduler",
            {**lr_scheduler.state_dict(), "lr_lambdas": getattr(lr_scheduler, "lr_lambdas", None)},
            facts,
        )
    facts["dataloader"] = _name(dataloader)
    if isinstance(dataloader, DataLoader):
        facts["dataloader.batch_size"] = str(dataloader.batch_size)
        facts["dataloader.drop_last"] = str(dataloader.drop_last)
        facts["dataloader.num_workers"] = str(dataloader.num_workers)
        facts["dataloader.sampler"] = _name(getattr(dataloader.sampler, "sampler", dataloader.sampler))
        facts["dataloader.dataset"] = _name(dataloader.dataset)
        facts["len(dataloader.dataset)"] = str(length_of(dataloader.dataset))
        facts["dataloader.generator"] = "given" if dataloader.generator is not None else "None"
    return facts


def describe(name: str, value: Any, facts: Facts) -> None:
    """Enter the plain data that `value` is made of; of other objects only the class, since they may be alike and yet
    print differently.
    """
    if value is None or isinstance(value, str | int | float | torch.dtype | torch.device):
        facts[name] = repr(value)
    elif isinstance(value, torch.Tensor):
        facts[name] = repr(value.tolist()) if value.numel() <= 4 else f"a tensor with digest {hash_of(value)}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _OF_THIS_MACHINE:
                describe(f"{name}.{key}", item, facts)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            describe(f"{name}[{number}]", item, facts)
    elif isinstance(value, partial):
        describe(name, {"function": value.func, **dict(enumerate(value.args)), **value.keywords}, facts)
    elif isinstance(value, set | frozenset):
        facts[name] = repr(sorted(map(str, value)))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            describe(f"{name}.{field.name}", getattr(value, field.name), facts)
    else:
        facts[name] = _name(value)
        if name in _WITH_ATTRIBUTES:
            for key, item in vars(value).items():
                if not key.startswith("_") and key not in _OF_THIS_RANK:
                    describe(f"{name}.{key}", item, facts)


_WITH_ATTRIBUTES = ("plugin", "mixed_precision")
# entries of configs: where they were read, and what wrote them
_OF_THIS_MACHINE = ("_name_or_path", "transformers_version")
_OF_THIS_RANK = ("mesh", "stage_manager", "layout")  # attributes of plugins that say where a rank is


def _name(value: Any) -> str:
    if value is None:
        return "None"
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
