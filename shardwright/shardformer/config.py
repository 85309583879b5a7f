"""What a user asks of shardformer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwright.shardformer.layer.parallel_module import ParallelGroup, group_or_all
from shardwright.utils.argument_types import check_types
from shardwright.utils.arguments import ExplainedArguments


@dataclass(kw_only=True)
class ShardConfig(metaclass=ExplainedArguments):
    """How a model is sharded.

    tensor_parallel_process_group       ranks that share every layer; None means all ranks
    sequence_parallel_process_group, pipeline_stage_manager, gradient_checkpoint_config
                                        refused: stages and sequences are cut, and layers recomputed, by `HybridParallelPlugin`
    enable_tensor_parallelism           shard over the group; without it every rank keeps the whole model
    enable_all_optimization             flash attention and fused norms wherever the model can have them
    enable_flash_attention              attention through torch's fused kernels (sdpa)
    enable_fused_normalization          RMS norms through torch's fused kernel
    parallel_output                     leave logits sharded over the vocabulary (the loss is computed from the shards); with False
                                        every rank returns whole logits
    make_vocab_size_divisible_by        every rank's rows of the vocabulary are padded to a multiple of this
    extra_kwargs                        for policies of your own; nothing here reads it
    """

    tensor_parallel_process_group: dist.ProcessGroup | None = None
    sequence_parallel_process_group: dist.ProcessGroup | None = None
    pipeline_stage_manager: Any = None
    enable_tensor_parallelism: bool = True
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    enable_sequence_overlap: bool = False
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    gradient_checkpoint_config: Any = None
    fp8_communication: bool = False
    inner_ring_size: int | None = None
    extra_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(ShardConfig, vars(self))
        multiple = self.make_vocab_size_divisible_by
        if multiple < 1:
            raise ValueError(f"make_vocab_size_divisible_by={multiple!r} must be a positive integer; 1 pads only to the number of ranks")
        for name in ("sequence_parallelism_mode", "sequence_parallel_process_group", "enable_sequence_overlap", "inner_ring_size"):
            value = getattr(self, name)
            if value not in (None, False) and not self.enable_sequence_parallelism:
                raise ValueError(f"{name}={value!r} needs enable_sequence_parallelism=True; set both or neither")

    @property
    def parallel(self) -> ParallelGroup:
        """The tensor-parallel ranks."""
        return ParallelGroup(group_or_all(self.tensor_parallel_process_group))

    @property
    def tensor_parallel_size(self) -> int:
        return self.parallel.size if self.enable_tensor_parallelism else 1
