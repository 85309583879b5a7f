"""Which object of this package answers for each name of Colossal-AI."""

from __future__ import annotations

# Names of a module, each with `module:attribute` (a leading dot: in this folder); or one module that has them all.
Home = dict[str, str] | str

_PLUGINS = {
    "DPPluginBase": ".plugin_bases:DPPluginBase",
    "GeminiPlugin": ".gemini:GeminiPlugin",
    "HybridParallelPlugin": ".hybrid:HybridParallelPlugin",
    "LowLevelZeroPlugin": ".zero:LowLevelZeroPlugin",
    "MoeHybridParallelPlugin": ".hybrid:MoeHybridParallelPlugin",
    "PipelinePluginBase": ".plugin_bases:PipelinePluginBase",
    "Plugin": "shardwright.plugins:Plugin",
    "TorchDDPPlugin": ".ddp:TorchDDPPlugin",
    "TorchFSDPPlugin": ".fsdp:TorchFSDPPlugin",
}
_MIXED_PRECISION = {
    "FP16TorchMixedPrecision": ".mixed_precision:FP16TorchMixedPrecision",
    "MixedPrecision": "shardwright.booster:MixedPrecision",
    "mixed_precision_factory": ".mixed_precision:mixed_precision_factory",
}
_LAUNCH = {
    name: f".launch:{name}" for name in ("launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch")
}
_OPTIMIZERS = {
    "Adafactor": "transformers.optimization:Adafactor",
    "CPUAdam": "shardwright.optim:CPUAdam",
    "DistributedAdaFactor": "transformers.optimization:Adafactor",
    "FusedAdam": "shardwright.optim:FusedAdam",
    "FusedSGD": ".optimizers:FusedSGD",
    "HybridAdam": ".optimizers:HybridAdam",
}
_SCHEDULES = {
    "cosine": ("CosineAnnealingLR", "CosineAnnealingWarmupLR", "FlatAnnealingLR", "FlatAnnealingWarmupLR"),
    "linear": ("LinearWarmupLR",),
    "multistep": ("MultiStepLR", "MultiStepWarmupLR"),
    "onecycle": ("OneCycleLR",),
    "poly": ("PolynomialLR", "PolynomialWarmupLR"),
    "torch": ("ExponentialLR", "LambdaLR", "MultiplicativeLR", "StepLR"),
}
_LOGGERS = {
    "DistributedLogger": ".loggers:DistributedLogger",
    "disable_existing_loggers": ".loggers:disable_existing_loggers",
    "get_dist_logger": ".loggers:get_dist_logger",
}
_ACCELERATOR = {"get_accelerator": "shardwright.accelerator:get_accelerator"}
_INTERFACE = {
    "ModelWrapper": "shardwright.interface:ModelWrapper",
    "OptimizerWrapper": "shardwright.interface:OptimizerWrapper",
}
_SHARD = {
    "GradientCheckpointConfig": ".checkpointing:GradientCheckpointConfig",
    "ModelSharder": "shardwright.shardformer:ModelSharder",
    "PipelineGradientCheckpointConfig": "shardwright.shardformer:PipelineGradientCheckpointConfig",
    "ShardConfig": "shardwright.shardformer:ShardConfig",
    "ShardFormer": "shardwright.shardformer:ShardFormer",
}
_LAZY = {"LazyInitContext": ".lazy:LazyInitContext"}
_STAGES = {"PipelineStageManager": ".pipeline:PipelineStageManager"}
_GRAPH = {"PipelineGraph": ".pipeline:PipelineGraph"}
_POLICIES = "shardwright.shardformer.policies"
# Their module -> ours; `.policies` has those that are found from the model itself.
_POLICY_MODULES = {
    **{
        name: f"{_POLICIES}.{name}"
        for name in ("auto_policy", "base_policy", "bert", "bloom", "falcon", "gpt2", "llama", "opt", "t5")
    },
    **dict.fromkeys(("mistral", "qwen2", "qwen3"), f"{_POLICIES}.llama"),
    **dict.fromkeys(("deepseek", "mixtral"), f"{_POLICIES}.moe"),
    **dict.fromkeys(("blip2", "command", "deepseek_v3", "sam", "vit", "whisper"), ".policies"),
    "chatglm2": f"{_POLICIES}.chatglm",
    "gptj": f"{_POLICIES}.gpt_neox",
}
_CHATGLM = "shardformer.modeling.chatglm2_6b"
_LAYERS = "shardwright.shardformer.layer"
# Their module -> the layers in it that are offered.
_LAYER_MODULES = {
    "dropout": ("DropoutForParallelInput", "DropoutForReplicatedInput"),
    "embedding": ("Embedding1D", "VocabParallelEmbedding1D"),
    "linear": ("Linear1D_Col", "Linear1D_Row", "VocabParallelLMHead1D"),
    "loss": ("cross_entropy_1d",),
    "normalization": ("FusedLayerNorm", "FusedRMSNorm", "LayerNorm", "RMSNorm"),
    "parallel_module": ("ParallelModule",),
    "qkv_fused_linear": (
        *("FusedLinear1D_Col", "FusedLinear1D_Row", "GPT2FusedLinearConv1D_Col", "GPT2FusedLinearConv1D_Row"),
    ),
}

MODULES: dict[str, Home] = {
    "colossalai": {**_LAUNCH, "get_default_parser": "shardwright.cluster:get_default_parser"},
    "colossalai.initialize": _LAUNCH,
    "colossalai.booster": {
        "Booster": ".booster:Booster",
        "MixedPrecision": "shardwright.booster:MixedPrecision",
        "Plugin": "shardwright.plugins:Plugin",
    },
    "colossalai.booster.booster": {"Booster": ".booster:Booster"},
    "colossalai.booster.plugin": _PLUGINS,
    "colossalai.booster.plugin.plugin_base": {"Plugin": _PLUGINS["Plugin"]},
    "colossalai.booster.plugin.dp_plugin_base": {"DPPluginBase": _PLUGINS["DPPluginBase"]},
    "colossalai.booster.plugin.pp_plugin_base": {"PipelinePluginBase": _PLUGINS["PipelinePluginBase"]},
    "colossalai.booster.plugin.gemini_plugin": {"GeminiPlugin": _PLUGINS["GeminiPlugin"]},
    "colossalai.booster.plugin.hybrid_parallel_plugin": {
        "HybridParallelModule": "shardwright.plugins.hybrid.model:HybridModel",
        "HybridParallelPlugin": _PLUGINS["HybridParallelPlugin"],
    },
    "colossalai.booster.plugin.low_level_zero_plugin": {
        "LowLevelZeroModel": "shardwright.plugins.low_level_zero:LowLevelZeroModel",
        "LowLevelZeroPlugin": _PLUGINS["LowLevelZeroPlugin"],
    },
    "colossalai.booster.plugin.moe_hybrid_parallel_plugin": {
        "MoeHybridParallelPlugin": _PLUGINS["MoeHybridParallelPlugin"]
    },
    "colossalai.booster.plugin.torch_ddp_plugin": {
        "TorchDDPModel": "shardwright.plugins.torch_ddp:TorchDDPModel",
        "TorchDDPPlugin": _PLUGINS["TorchDDPPlugin"],
    },
    "colossalai.booster.plugin.torch_fsdp_plugin": {
        "TorchFSDPModel": "shardwright.plugins.torch_fsdp:TorchFSDPModel",
        "TorchFSDPPlugin": _PLUGINS["TorchFSDPPlugin"],
    },
    "colossalai.booster.mixed_precision": _MIXED_PRECISION,
    "colossalai.booster.mixed_precision.fp16_torch": {
        "FP16TorchMixedPrecision": _MIXED_PRECISION["FP16TorchMixedPrecision"]
    },
    "colossalai.booster.mixed_precision.mixed_precision_base": {"MixedPrecision": _MIXED_PRECISION["MixedPrecision"]},
    "colossalai.cluster": {"DistCoordinator": "shardwright.cluster:DistCoordinator"},
    "colossalai.cluster.dist_coordinator": {"DistCoordinator": "shardwright.cluster:DistCoordinator"},
    "colossalai.accelerator": _ACCELERATOR,
    "colossalai.accelerator.api": _ACCELERATOR,
    "colossalai.interface": _INTERFACE,
    "colossalai.interface.model": {"ModelWrapper": _INTERFACE["ModelWrapper"]},
    "colossalai.interface.optimizer": {"OptimizerWrapper": _INTERFACE["OptimizerWrapper"]},
    "colossalai.lazy": _LAZY,
    "colossalai.lazy.lazy_init": _LAZY,
    "colossalai.logging": _LOGGERS,
    "colossalai.logging.logger": {"DistributedLogger": _LOGGERS["DistributedLogger"]},
    "colossalai.nn": {},
    "colossalai.nn.optimizer": _OPTIMIZERS,
    **{
        f"colossalai.nn.optimizer.{module}": {name: _OPTIMIZERS[name]}
        for module, name in (
            ("adafactor", "Adafactor"),
            ("cpu_adam", "CPUAdam"),
            ("distributed_adafactor", "DistributedAdaFactor"),
            ("fused_adam", "FusedAdam"),
            ("fused_sgd", "FusedSGD"),
            ("hybrid_adam", "HybridAdam"),
        )
    },
    "colossalai.nn.lr_scheduler": {name: f".lr_schedulers:{name}" for names in _SCHEDULES.values() for name in names},
    **{
        f"colossalai.nn.lr_scheduler.{module}": {name: f".lr_schedulers:{name}" for name in names}
        for module, names in _SCHEDULES.items()
    },
    "colossalai.pipeline": _STAGES,
    "colossalai.pipeline.stage_manager": _STAGES,
    "colossalai.pipeline.schedule": _GRAPH,
    "colossalai.pipeline.schedule.v_schedule": _GRAPH,
    "colossalai.shardformer": _SHARD,
    "colossalai.shardformer.shard": _SHARD,
    "colossalai.shardformer.shard.grad_ckpt_config": {
        name: _SHARD[name] for name in ("GradientCheckpointConfig", "PipelineGradientCheckpointConfig")
    },
    "colossalai.shardformer.shard.shard_config": {"ShardConfig": _SHARD["ShardConfig"]},
    "colossalai.shardformer.shard.sharder": {"ModelSharder": _SHARD["ModelSharder"]},
    "colossalai.shardformer.shard.shardformer": {"ShardFormer": _SHARD["ShardFormer"]},
    "colossalai.shardformer.layer": _LAYERS,
    **{
        f"colossalai.shardformer.layer.{module}": {name: f"{_LAYERS}:{name}" for name in names}
        for module, names in _LAYER_MODULES.items()
    },
    "colossalai.shardformer.policies": {},
    **{f"colossalai.shardformer.policies.{theirs}": ours for theirs, ours in _POLICY_MODULES.items()},
    "colossalai.shardformer.modeling": {},
    f"colossalai.{_CHATGLM}": {},
    **{
        f"colossalai.{_CHATGLM}.{name}": f"shardwright.{_CHATGLM}.{name}"
        for name in ("configuration_chatglm", "modeling_chatglm")
    },
    "colossalai.utils": {
        "get_current_device": "shardwright.utils:get_current_device",
        "set_seed": "shardwright.utils:set_seed",
    },
    "colossalai.zero": {},
    "colossalai.checkpoint_io": {},
}
