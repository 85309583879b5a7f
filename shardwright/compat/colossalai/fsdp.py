"""`TorchFSDPPlugin` with the arguments of Colossal-AI's, which are those of torch's first FSDP, on its second."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from ...plugins import TorchFSDPPlugin as NativePlugin
from ...plugins.without_effect import warn_once
from .plugin_bases import DPPluginBase

# torch's ShardingStrategy, by name -> reshard_after_forward, and whether nodes are replicas
_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True),
}


class TorchFSDPPlugin(NativePlugin, DPPluginBase):
    """Weights of rank 0 are always shared, as sync_module_states=True does it."""

    argument_advice: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Callable[..., Any] | None = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        if process_group is not None:
            raise ValueError(
                "process_group=...: all ranks share; leave it out, or use shard_size= of shardwright's TorchFSDPPlugin"
            )
        if ignored_modules is not None:
            raise ValueError("ignored_modules=...: leave it out, and freeze what is not to be trained before boost")
        if backward_prefetch is not None:
            warn_once(f"without effect here: backward_prefetch={backward_prefetch} (FSDP2 prefetches by itself)")
        reshard, by_node = _strategy(sharding_strategy)
        super().__init__(
            mixed_precision=mixed_precision,
            reshard_after_forward=reshard,
            shard_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if by_node else None,
            cpu_offload=False if cpu_offload is None else cpu_offload,
            auto_wrap_policy=None if auto_wrap_policy is None else _blocks_by(auto_wrap_policy),
            param_init_fn=param_init_fn,
            fp8_communication=fp8_communication,
        )


def _strategy(sharding_strategy: Any) -> tuple[bool, bool]:
    name = "FULL_SHARD" if sharding_strategy is None else getattr(sharding_strategy, "name", sharding_strategy)
    if name not in _STRATEGIES:
        raise ValueError(
            f"sharding_strategy={sharding_strategy}: use {', '.join(_STRATEGIES)}, or TorchDDPPlugin, which shards "
            "nothing"
        )
    return _STRATEGIES[name]


def _blocks_by(policy: Callable[..., Any]) -> Callable[[nn.Module], list[nn.Module]]:
    """The modules that a policy of the first FSDP wraps: it is asked about each, with its number of elements."""

    def blocks(model: nn.Module) -> list[nn.Module]:
        return [
            module
            for module in model.modules()
            if module is not model
            and policy(module=module, recurse=False, nonwrapped_numel=sum(p.numel() for p in module.parameters()))
        ]

    return blocks
