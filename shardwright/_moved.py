"""Names and modules that scripts of other frameworks import and that are called otherwise here, or not offered.

Raised when such a name is imported, so that the import error of a script that was moved says what to write.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Module path under `shardwright` -> what to import instead. Modules below an entry end up at it, since their parents
# are imported first.
MODULES = {
    "booster.plugin": "the plugins are in shardwright.plugins: from shardwright.plugins import HybridParallelPlugin, "
    "Plugin",
    "checkpoint_io": "booster.save, booster.load, booster.save_model and booster.load_model read and write checkpoints",
    "amp": "the precision= of a plugin, or Booster(mixed_precision=...), sets the number format",
    "context": "the groups of a plugin (plugin.tp_group, plugin.dp_group, ...) replace the global context",
    "core": "the groups of a plugin (plugin.tp_group, plugin.dp_group, ...) replace the global context",
    "nn": "optimizers are in shardwright.optim (HybridAdam, CPUAdam, FusedAdam), lr schedulers in "
    "shardwright.optim.lr_scheduler "
    "(CosineAnnealingWarmupLR, LinearWarmupLR), layers in shardwright.shardformer.layer",
    "legacy": "Booster and the plugins replace it: from shardwright import Booster",
    "pipeline.schedule": 'pp_style="1f1b", "eager_1f1b", "interleaved", "zb", "zbv", "dualpipev", "gpipe" or "auto" of '
    'HybridParallelPlugin chooses the schedule, and "zbv" plans itself: leave PipelineGraph and scheduler_nodes out',
    "pipeline.stage_manager": "ask plugin.stage_manager of a HybridParallelPlugin",
    "tensor": "parameters are plain tensors with a note on their layout: see shardwright.spec",
    "inference": "generate works on boosted models without a pipeline; to serve a model, export it with "
    "booster.save_model",
    "moe": "HybridParallelPlugin trains mixtures of experts as they are",
    "kernel": "enable_all_optimization=True of HybridParallelPlugin chooses the kernels of attention, norms, gated "
    "activations and rotary positions",
    "shardformer.shard": "from shardwright.shardformer import ShardConfig, ShardFormer, ModelSharder",
    "quantization": 'quantised training is not offered; precision="fp8" is the smallest format',
}

# Name -> what to use instead.
NAMES = {
    "GeminiPlugin": "LowLevelZeroPlugin(stage=3), or HybridParallelPlugin(zero_stage=3) with tp_size, pp_size, "
    "cpu_offload",
    "MoeHybridParallelPlugin": "HybridParallelPlugin: it trains mixtures of experts as they are",
    "DPPluginBase": "Plugin, which prepares data loaders: from shardwright.plugins import Plugin",
    "PipelinePluginBase": "Plugin: from shardwright.plugins import Plugin",
    "FP16TorchMixedPrecision": "FP16MixedPrecision: from shardwright.booster import FP16MixedPrecision",
    "FP16NaiveMixedPrecision": "FP16MixedPrecision: from shardwright.booster import FP16MixedPrecision",
    "FP16ApexMixedPrecision": "FP16MixedPrecision: from shardwright.booster import FP16MixedPrecision",
    "FP8MixedPrecision": "BF16MixedPrecision: from shardwright.booster import BF16MixedPrecision",
    "ProcessGroupMesh": "ParallelMesh: from shardwright.cluster import ParallelMesh",
    "PipelineGraph": 'pp_style="zbv", which plans its schedule itself: leave PipelineGraph and scheduler_nodes out',
    "Shard": "Linear1D_Col, Linear1D_Row and the like of shardwright.shardformer.layer, as target_module of a policy",
    "shard_rowwise": "VocabParallelEmbedding1D or Linear1D_Row of shardwright.shardformer.layer, as target_module of a "
    "policy",
    "shard_colwise": "Linear1D_Col of shardwright.shardformer.layer, as target_module of a policy",
    "replace_model_class": "ModulePolicyDescription(method_replacement=...) of a policy's module_policy",
    "GradientCheckpointConfig": "PipelineGradientCheckpointConfig, or model.gradient_checkpointing_enable()",
    "PipelineStageManager": "plugin.stage_manager of HybridParallelPlugin(pp_size=...)",
    "ProcessGroupManager": "torch.distributed.new_group, or the groups of a plugin (plugin.tp_group, plugin.dp_group)",
    "PaddingEmbedding": "VocabParallelEmbedding1D, which pads; on one rank no padding is needed: leave it out",
    "PaddingLMHead": "VocabParallelLMHead1D, which pads; on one rank no padding is needed: leave it out",
    "FusedLinear": "nothing: a linear that is not sharded stays as it is",
    "GPT2FusedLinearConv": "nothing: a linear that is not sharded stays as it is",
    "LinearWithGradAccum": "nothing: a linear that is not sharded stays as it is",
    "dist_cross_entropy": "the model's own loss, which is exact on sharded logits, or cross_entropy_1d(logits, labels, "
    "process_group=...)",
    "dist_log_prob": "torch.log_softmax on logits of a model with parallel_output=False",
    "RingAttention": 'HybridParallelPlugin(enable_sequence_parallelism=True, sequence_parallelism_mode="ring_attn")',
    "ColoAttention": "enable_flash_attention=True, or model.set_attn_implementation of transformers",
    "print_rank_0": "DistCoordinator().print_on_master(msg): from shardwright.cluster import DistCoordinator",
    "spawn": "run_ranks(function, nprocs): from shardwright.testing import run_ranks",
    "accelerate": "Booster: booster.boost(model, optimizer, ...) does what prepare does",
    "Accelerator": "Booster: booster.boost(model, optimizer, ...) does what prepare does",
    "initialize": "Booster: model, optimizer, *_ = Booster(plugin=...).boost(model, optimizer)",
}


def missing_name(module: str, name: str) -> Exception:
    """What a module's `__getattr__` raises for `name`."""
    if name in NAMES:
        # An AttributeError would lose its words: `from module import name` replaces it by an ImportError of its own.
        return ImportError(
            f"cannot import name {name!r} from {module!r}: it is not offered under this name; use {NAMES[name]}",
            name=name,
        )
    return AttributeError(f"module {module!r} has no attribute {name!r}")


class _MovedModules(MetaPathFinder):
    """Asked last, when nobody has found a module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package == "shardwright" and rest in MODULES:
            raise ModuleNotFoundError(f"No module named {fullname!r}: {MODULES[rest]}", name=fullname)
        return None


def explain_moved_modules() -> None:
    """Once per process."""
    if not any(type(finder).__name__ == "_MovedModules" for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
