"""What a user asks of shardformer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch.distributed as dist

from ..attention.choice import check_backend
from ..comm.quantised_wire import quantised_group
from ..models.example_inputs import check_example
from ..utils.argument_types import check_types
from ..utils.arguments import ExplainedArguments
from .layer.parallel_module import ParallelGroup, group_or_all


@dataclass(kw_only=True)
class ShardingOptions:
    """How layers are sharded and which of torch's fused kernels they use: what `ShardConfig` and
    `HybridParallelPlugin` have in common.

    enable_all_optimization             flash attention, fused norms, activations and rotary positions wherever the
                                        model can have them; the log says what that came to
    enable_flash_attention              attention through the best fused kernels that machine, model and packages allow
                                        (see `attention.choice`)
    attention_backend                   which attention, by name; None leaves it as it is, or to enable_flash_attention
    enable_fused_normalization          norms in one kernel: liger-kernel's where it is installed, else our Triton
                                        kernels, both on CUDA; RMS norms by torch's operator elsewhere
    enable_fused_activation             act(gate) * up of gated MLPs (SwiGLU, GeGLU) in one, and less kept for backward:
                                        by liger-kernel, our Triton kernels or torch's operators, as norms
    enable_fused_rotary                 rotary positions in one: our Triton kernel on CUDA, torch's operators elsewhere
    enable_jit_fused                    layers through torch.compile, those of one kind as one graph, in training; not
                                        among all optimizations, because it takes its time when training starts
    parallel_output                     leave logits sharded over the vocabulary (the loss is computed from the shards);
                                        with False every rank returns whole logits
    make_vocab_size_divisible_by        every rank's rows of the vocabulary are padded to a multiple of this
    example_inputs                      a batch like the real ones, of any size, for models whose inputs cannot be
                                        guessed when a plan is tried on a small copy, or stages are planned; None makes
                                        one up that fits the model's kind
    """

    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    attention_backend: str | None = None
    enable_jit_fused: bool = False
    enable_fused_activation: bool = False
    enable_fused_rotary: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    enable_sequence_overlap: bool = False
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    example_inputs: Any = None

    def __post_init__(self) -> None:
        check_example(self.example_inputs)
        check_backend(self.attention_backend, self.enable_flash_attention)
        multiple = self.make_vocab_size_divisible_by
        if multiple < 1:
            raise ValueError(
                f"make_vocab_size_divisible_by={multiple!r} must be at least 1, which pads only to the number of ranks "
                "(64 is usual)"
            )

    def shared(self) -> dict[str, Any]:
        """These options, by name."""
        return {field.name: getattr(self, field.name) for field in fields(ShardingOptions)}


@dataclass(kw_only=True)
class ShardConfig(ShardingOptions, metaclass=ExplainedArguments):
    """How a model is sharded by `ShardFormer`; see `ShardingOptions` for the other options.

    tensor_parallel_process_group       ranks that share every layer; None means all ranks
    sequence_parallel_process_group, pipeline_stage_manager, gradient_checkpoint_config
                                        refused: stages and sequences are cut, and layers recomputed, by
                                        `HybridParallelPlugin`
    enable_tensor_parallelism           shard over the group; without it every rank keeps the whole model
    fp8_communication                   activations and their gradients travel in 8 bits (docs/fp8_communication.md)
    extra_kwargs                        for policies of your own; nothing here reads it
    """

    tensor_parallel_process_group: dist.ProcessGroup | None = None
    sequence_parallel_process_group: dist.ProcessGroup | None = None
    pipeline_stage_manager: Any = None
    enable_tensor_parallelism: bool = True
    gradient_checkpoint_config: Any = None
    fp8_communication: bool = False
    inner_ring_size: int | None = None
    extra_kwargs: dict[str, Any] = field(default_factory=dict)

    argument_advice: ClassVar[dict[str, str]] = {
        "tensor_parallel_size": "give the group: tensor_parallel_process_group=, of as many ranks",
        "data_parallel_size": "ranks that are not in one tensor_parallel_process_group train on different data: "
        "HybridParallelPlugin",
        "pipeline_parallel_size": "use HybridParallelPlugin(pp_size=...)",
        "tensor_parallel_mode": "layers are sharded in one dimension; leave it out",
        "inference_only": "a sharded model trains and generates; leave it out and call model.eval()",
        "gather_output": "use parallel_output=False for whole logits",
        "use_flash_attention": "use enable_flash_attention=True",
        "attn_implementation": "use attention_backend=, such as attention_backend='sdpa'",
        "sp_axis": "sequences are cut by HybridParallelPlugin; leave it out",
        "pg_mesh": "the mesh belongs to HybridParallelPlugin; leave it out",
        "ep_group": "experts are sharded over tensor_parallel_process_group like all layers; leave it out",
        "moe_dp_group": "experts are sharded over tensor_parallel_process_group like all layers; leave it out",
    }

    def __post_init__(self) -> None:
        check_types(ShardConfig, vars(self))
        super().__post_init__()
        for name in ("tensor_parallel_process_group", "sequence_parallel_process_group"):
            if getattr(self, name) is not None:
                try:
                    group_or_all(getattr(self, name))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        if not isinstance(self.extra_kwargs, dict):
            raise ValueError(f"extra_kwargs={self.extra_kwargs!r} must be a dict, which policies of your own may read")
        if self.fp8_communication and not self.enable_tensor_parallelism:
            raise ValueError(
                "fp8_communication=True with enable_tensor_parallelism=False: layers that are whole send nothing; use "
                "True for both, or leave fp8_communication False"
            )
        if self.enable_all_optimization:
            self.enable_fused_normalization = self.enable_fused_activation = self.enable_fused_rotary = True
        for name in (
            "sequence_parallelism_mode",
            "sequence_parallel_process_group",
            "enable_sequence_overlap",
            "inner_ring_size",
        ):
            value = getattr(self, name)
            if value not in (None, False) and not self.enable_sequence_parallelism:
                raise ValueError(f"{name}={value!r} needs enable_sequence_parallelism=True; set both or neither")

    @property
    def parallel(self) -> ParallelGroup:
        """The tensor-parallel ranks."""
        group = group_or_all(self.tensor_parallel_process_group)
        return ParallelGroup(quantised_group(group) if self.fp8_communication else group)

    @property
    def tensor_parallel_size(self) -> int:
        return self.parallel.size if self.enable_tensor_parallelism else 1

    @property
    def sequence_parallel_size(self) -> int:
        return 1

    @property
    def expert_parallel_size(self) -> int:
        return 1


def require_config(config: Any) -> None:
    if isinstance(config, type) and issubclass(config, ShardConfig):
        raise ValueError("shard_config=ShardConfig is the class; pass an instance: ShardConfig()")
    if not isinstance(config, ShardConfig):
        raise ValueError(f"shard_config={config!r} must be a ShardConfig, such as ShardConfig()")
