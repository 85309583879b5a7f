"""The launch functions, with the arguments of Colossal-AI's in their order."""

from __future__ import annotations

from ... import cluster as native
from ...utils.arguments import explained

_ADVICE = {
    "config": "sizes are arguments of the plugin: HybridParallelPlugin(tp_size=..., pp_size=...); leave it out",
    "gpc": "there is no global context; ask the plugin for its groups",
}


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


@explained(_ADVICE)
def launch_from_torch(backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    native.launch_from_torch(seed, _backend(backend), verbose)


@explained(_ADVICE)
def launch_from_slurm(host: str, port: int, backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    native.launch_from_slurm(host, port, _backend(backend), seed, verbose)


@explained(_ADVICE)
def launch_from_openmpi(host: str, port: int, backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    native.launch_from_openmpi(host, port, _backend(backend), seed, verbose)


def _backend(name: str) -> str | None:
    return None if name == "nccl" else name
