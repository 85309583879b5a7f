"""The launch functions, with the arguments of Colossal-AI's in their order."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ... import cluster as native
from ...utils.arguments import explained

_ADVICE = {
    "config": "sizes are arguments of the plugin: HybridParallelPlugin(tp_size=..., pp_size=...); leave it out",
    "gpc": "there is no global context; ask the plugin for its groups",
}


R = TypeVar("R")


def _takes_empty_config(function: Callable[..., R]) -> Callable[..., R]:
    """Older scripts pass `config={}`, which asks for nothing; one that says something is refused."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:
        if "config" in kwargs and not kwargs["config"]:
            del kwargs["config"]
        return function(*args, **kwargs)

    return call


@_takes_empty_config
@explained(_ADVICE)
def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """`shardwright.launch`. "nccl", the default, means what the machine has: nccl with CUDA devices, gloo without."""
    native.launch(rank, world_size, host, port, _backend(backend), seed, local_rank, verbose=verbose)


@_takes_empty_config
@explained(_ADVICE)
def launch_from_torch(backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    native.launch_from_torch(seed, _backend(backend), verbose)


@_takes_empty_config
@explained(_ADVICE)
def launch_from_slurm(host: str, port: int, backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    native.launch_from_slurm(host, port, _backend(backend), seed, verbose)


@_takes_empty_config
@explained(_ADVICE)
def launch_from_openmpi(host: str, port: int, backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    native.launch_from_openmpi(host, port, _backend(backend), seed, verbose)


def _backend(name: str) -> str | None:
    return None if name == "nccl" else name
