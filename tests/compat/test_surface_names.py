"""Public names of Colossal-AI 0.5, imported from where they are defined: there, or the error says what to use."""

from __future__ import annotations

import importlib

import pytest

import shardwright.compat.colossalai  # noqa: F401 - for the imports below

# A module below `colossalai`, and what is defined in it.
NAMES = {
    "initialize": "launch launch_from_slurm launch_from_openmpi launch_from_torch",
    "booster.booster": "Booster",
    "booster.plugin.plugin_base": "Plugin",
    "booster.plugin.dp_plugin_base": "DPPluginBase",
    "booster.plugin.pp_plugin_base": "PipelinePluginBase",
    "booster.plugin.torch_ddp_plugin": "TorchDDPCheckpointIO TorchDDPModel TorchDDPPlugin",
    "booster.plugin.torch_fsdp_plugin": "TorchFSDPCheckpointIO TorchFSDPModel FSDPOptimizerWrapper TorchFSDPPlugin",
    "booster.plugin.low_level_zero_plugin": (
        "OptimizerParamCheckState LowLevelZeroModel LowLevelZeroCheckpointIO LowLevelZeroPlugin"
    ),
    "booster.plugin.gemini_plugin": "get_param_info GeminiCheckpointIO GeminiPlugin",
    "booster.plugin.hybrid_parallel_plugin": (
        "HybridParallelModule get_param_info reinitialize_optimizer HybridParallelNaiveOptimizer "
        "HybridParallelAMPOptimizer HybridParallelZeroOptimizer HybridParallelPlugin"
    ),
    "booster.plugin.moe_hybrid_parallel_plugin": "MoeHybridParallelZeroOptimizer MoeHybridParallelPlugin",
    "booster.mixed_precision.fp16_torch": "TorchAMPOptimizer TorchAMPModule FP16TorchMixedPrecision",
    "booster.mixed_precision.fp16_apex": "FP16ApexMixedPrecision",
    "booster.mixed_precision.fp16_naive": "FP16NaiveMixedPrecision",
    "interface.model": "extract_lora_layers PeftUnwrapMixin ModelWrapper AMPModelMixin",
    "interface.optimizer": "OptimizerWrapper DistributedOptim",
    "cluster.dist_coordinator": "DistCoordinator",
    "cluster.process_group_mesh": "prod ProcessGroupMesh",
    "cluster.process_group_manager": "ProcessGroupManager",
    "cluster.device_mesh_manager": "DeviceMeshInfo initialize_device_mesh DeviceMeshManager",
    "lazy.lazy_init": "_MyTensor LazyTensor LazyInitContext",
    "logging": "get_dist_logger disable_existing_loggers",
    "logging.logger": "DistributedLogger",
    "pipeline.stage_manager": "PipelineStageManager",
    "pipeline.p2p": "check_for_nccl_backend create_send_metadata PipelineP2PCommunication",
    "pipeline.weight_grad_store": "WeightGradStore",
    "pipeline.schedule.base": "PipelineSchedule",
    "pipeline.schedule.one_f_one_b": "OneForwardOneBackwardSchedule",
    "pipeline.schedule.interleaved_pp": "InterleavedSchedule",
    "pipeline.schedule.zero_bubble_pp": "ZeroBubbleVPipeScheduler",
    "pipeline.schedule.v_schedule": "ScheduledNode PipelineGraph",
    "pipeline.schedule.generate": "ActionIntervalBuffer GenerateSchedule",
    "checkpoint_io.checkpoint_io_base": "CheckpointIO",
    "checkpoint_io.hybrid_parallel_checkpoint_io": "HybridParallelCheckpointIO",
    "checkpoint_io.index_file": "CheckpointIndexFile",
    "amp.naive_amp.mixed_precision_optimizer": "NaiveFP16MixedPrecisionMixin MixedPrecisionOptimizer",
    "amp.naive_amp.grad_scaler.dynamic_grad_scaler": "DynamicGradScaler",
    "zero.wrapper": "zero_model_wrapper zero_optim_wrapper",
    "zero.low_level.low_level_optim": "LowLevelZeroFP16MixedPrecisionMixin LowLevelZeroOptimizer",
    "zero.gemini.gemini_ddp": "GeminiDDP",
    "zero.gemini.gemini_optimizer": "GeminiFP16MixedPrecisionMixin GeminiOptimizer GeminiAdamOptimizer",
    "shardformer.shard.shard_config": "ShardConfig",
    "shardformer.shard.grad_ckpt_config": "GradientCheckpointConfig PipelineGradientCheckpointConfig",
    "shardformer.shard.shardformer": "ShardFormer",
    "shardformer.shard.sharder": "ModelSharder",
    "shardformer.policies.base_policy": "SubModuleReplacementDescription ModulePolicyDescription Policy",
    "shardformer.layer.linear": "LinearWithGradAccum Linear1D_Col Linear1D_Row PaddingLMHead VocabParallelLMHead1D",
    "shardformer.layer.qkv_fused_linear": (
        "split_fused_qkv_in_gpt2_style gather_fused_qkv_in_gpt2_style "
        "_SplitForwardGatherBackwardFusedQKV split_forward_gather_backward_fused_qkv "
        "_GatherForwardSplitBackwardFusedQKV gather_forward_split_backward_fused_qkv "
        "GPT2FusedLinearConv1D_Col GPT2FusedLinearConv1D_Row GPT2FusedLinearConv FusedLinear1D_Col "
        "FusedLinear1D_Row FusedLinear"
    ),
    "shardformer.layer.embedding": "Embedding1D PaddingEmbedding VocabParallelEmbedding1D",
    "shardformer.layer.dropout": "DropoutForParallelInput DropoutForReplicatedInput",
    "shardformer.layer.normalization": (
        "NPUFusedRMSNormWithHook FastLayerNormWithHook BaseLayerNorm RMSNorm LayerNorm FusedLayerNorm FusedRMSNorm"
    ),
    "shardformer.layer.parallel_module": "ParallelModule PaddingParallelModule",
    "shardformer.layer.loss": (
        "DistCrossEntropy DistLogProb cross_entropy_1d dist_log_prob_1d dist_cross_entropy dist_log_prob"
    ),
    "shardformer.layer.attn": "AttnMaskType invert_mask get_pad_info ColoAttention RingAttention",
    "shardformer.layer.utils": (
        "execute_conv1d_w_pass_grad_accum execute_conv1d_w_pass execute_w_pass_grad_accum execute_w_pass "
        "SeqParallelUtils Randomizer create_randomizer_with_offset split_batch_zigzag "
        "split_varlen_zigzag is_share_sp_tp RingComm get_half_index"
    ),
    "nn.optimizer.adafactor": "Adafactor",
    "nn.optimizer.came": "CAME",
    "nn.optimizer.cpu_adam": "CPUAdam",
    "nn.optimizer.hybrid_adam": "HybridAdam",
    "nn.optimizer.fused_adam": "FusedAdam",
    "nn.optimizer.fused_lamb": "FusedLAMB",
    "nn.optimizer.fused_sgd": "FusedSGD",
    "nn.optimizer.lamb": "Lamb",
    "nn.optimizer.lars": "Lars",
    "nn.optimizer.galore": "get_galore_param_groups make_low_rank_buffer GaLoreProjector GaLoreAdamW8bit",
    "nn.optimizer.distributed_adafactor": "DistributedAdaFactor",
    "nn.optimizer.distributed_came": "DistributedCAME",
    "nn.optimizer.distributed_galore": "DistGaloreAwamW",
    "nn.optimizer.distributed_lamb": "DistributedLamb",
    "nn.optimizer.nvme_optimizer": "NVMeOptimizer",
    "nn.lr_scheduler.cosine": "CosineAnnealingLR CosineAnnealingWarmupLR FlatAnnealingLR FlatAnnealingWarmupLR",
    "nn.lr_scheduler.linear": "LinearWarmupLR",
    "nn.lr_scheduler.multistep": "MultiStepLR MultiStepWarmupLR",
    "nn.lr_scheduler.onecycle": "OneCycleLR",
    "nn.lr_scheduler.poly": "PolynomialLR PolynomialWarmupLR",
    "nn.lr_scheduler.torch": "LambdaLR MultiplicativeLR StepLR ExponentialLR",
    "nn.lr_scheduler.delayed": (
        "_enable_get_lr_call TwoStageScheduler DelayerScheduler WarmupScheduler WarmupDelayerScheduler"
    ),
    "testing.utils": (
        "parameterize rerun_on_exception rerun_if_address_is_in_use skip_if_not_enough_gpus free_port "
        "spawn clear_cache_before_run DummyDataloader"
    ),
    "testing.comparison": (
        "assert_equal assert_not_equal assert_close_loose assert_equal_in_group check_state_dict_equal "
        "check_state_dict_equal_pytree assert_hf_output_close"
    ),
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_there_or_says_what_to_use(module: str) -> None:
    for name in NAMES[module].split():
        try:
            imported = importlib.import_module(f"colossalai.{module}")
            found = getattr(imported, name, None)
            if found is not None:
                continue
            exec(f"from colossalai.{module} import {name}")
        except ImportError as error:
            said = str(error)
            assert "is not offered by shardwright.compat.colossalai: " in said
            # where nothing is known of a name, the error lists what the module has
            assert " has " not in said.partition("shardwright.compat.colossalai: ")[2], said
        else:
            pytest.fail(f"colossalai.{module}.{name} was imported, and getattr does not find it")


def test_layers_are_those_of_the_package() -> None:
    """`from colossalai.shardformer.layer.linear import Linear1D_Col`, as policies of users have it."""
    whole = importlib.import_module("colossalai.shardformer.layer")
    for module, name in (
        ("linear", "Linear1D_Col"),
        ("normalization", "RMSNorm"),
        ("loss", "cross_entropy_1d"),
        ("qkv_fused_linear", "GPT2FusedLinearConv1D_Row"),
        ("parallel_module", "ParallelModule"),
    ):
        assert getattr(importlib.import_module(f"colossalai.shardformer.layer.{module}"), name) is getattr(whole, name)


@pytest.mark.parametrize("name", ["GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin", "TorchDDPPlugin"])
def test_attributes_of_plugins_that_are_not_offered_say_what_to_use(name: str) -> None:
    plugin = getattr(importlib.import_module("colossalai.booster.plugin"), name)
    made = object.__new__(plugin)  # whatever its arguments are
    with pytest.raises(AttributeError, match=r"has no 'get_checkpoint_io' here: booster\.save"):
        made.get_checkpoint_io()
    with pytest.raises(AttributeError, match="object has no attribute 'get_checkpoint'"):
        made.get_checkpoint()
