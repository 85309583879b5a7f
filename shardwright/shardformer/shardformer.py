"""The face of shardformer: shard a model, set up processes and data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..cluster.coordinator import DistCoordinator
from ..cluster.launch import launch_from_torch
from ..comm.quantised_wire import check_quantisable
from ..ops.layer_graphs import compile_layers, layers_of, require_compiler
from .attention_choice import require_same_attention
from .config import ShardConfig, require_config
from .gradients import follow_gradients
from .layer.parallel_module import native_class
from .model import ShardedModel
from .part import Part, PartOfModel
from .policies.base import Policy
from .same_weights import require_same_weights
from .sharder import ModelSharder


class ShardFormer:
    """Shard HuggingFace models, or your own.

    shardwright.launch_from_torch()
    model, shared_params = ShardFormer(ShardConfig()).optimize(BertForMaskedLM(config))
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()

    Gradients are those of the whole model, as far as this rank holds it. The ranks of the group must get the same
    batches.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        require_config(shard_config)
        self.shard_config = shard_config
        self.coordinator = DistCoordinator()

    def optimize(
        self, model: nn.Module, policy: Policy | None = None
    ) -> tuple[nn.Module, list[dict[int, torch.Tensor]]]:
        """Shard `model` in place over the ranks of the config's group.

        policy  None finds one (see `policies.auto`)

        Returns the model and the parameters that pipeline stages share.
        """
        if not isinstance(model, nn.Module):
            raise ValueError(f"ShardFormer.optimize: model={model!r} must be a model, such as BertForMaskedLM(config)")
        if any(isinstance(module, Part) for module in model.modules()):
            raise ValueError(
                f"ShardFormer.optimize: this {native_class(model).__name__} is already sharded; go on with it as it "
                "is, or give a new one"
            )
        if self.shard_config.enable_jit_fused:
            require_compiler()
            layers_of(model)
        if self.shard_config.fp8_communication:
            check_quantisable(model)
        sharder = ModelSharder(model, policy, self.shard_config)
        sharder.prepare()
        group = self.shard_config.parallel.group
        sharded = self.shard_config.enable_tensor_parallelism and group.size() > 1
        if sharded:
            require_same_weights(sharder.model, group)
            require_same_attention(sharder.attention, group)
        shared = sharder.shard()
        if sharded:
            follow_gradients(sharder.model, group)
            if hasattr(sharder.model, "save_pretrained"):
                PartOfModel.adopt(sharder.model, self.shard_config.parallel)
            else:
                Part.become(sharder.model)
        if self.shard_config.enable_jit_fused:
            compile_layers(sharder.model)
        if isinstance(sharder.model, ShardedModel):
            sharder.model.for_scripts = True
        return sharder.model, shared

    def shard_model(self, model: nn.Module, policy: Policy | None = None) -> nn.Module:
        """`optimize` without the shared parameters."""
        return self.optimize(model, policy)[0]

    @staticmethod
    def init_distributed(seed: int = 1024, backend: str | None = None) -> DistCoordinator:
        """Start the processes that torchrun launched, if that was not done yet."""
        launch_from_torch(seed=seed, backend=backend)
        return DistCoordinator()

    def shard_dataset(
        self, dataset: Dataset[Any], batch_size: int = 1, shuffle: bool = False, seed: int = 1024, **kwargs: Any
    ) -> DataLoader[Any]:
        """A loader that gives the ranks of one tensor-parallel group the same batches, and every group its own part
        of the data.
        """
        first = min(dist.get_process_group_ranks(self.shard_config.parallel.group))
        firsts: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(firsts, first)  # every group is known by its first rank
        groups = sorted(set(firsts))
        replicas, replica = len(groups), groups.index(first)
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=replicas, rank=replica, shuffle=shuffle, seed=seed
        )
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **kwargs)
