"""What to use in place of the names of Colossal-AI that have no counterpart."""

from __future__ import annotations

import re

from ..._moved import MODULES, NAMES
from .names import MODULES as OFFERED

_BOOSTER = "Booster(plugin=...) wraps model and optimizer: booster.boost(model, optimizer)"
_IO = "booster.save, booster.load, booster.save_model and booster.load_model read and write checkpoints"
_ADAM = "use HybridAdam, torch.optim.AdamW or any other torch.optim.Optimizer, of other packages too: boost takes it"
_GALORE = "use LoRA (booster.enable_lora) to train with few states, or LowLevelZeroPlugin(stage=2, cpu_offload=True)"
_TESTING = "pytest.mark.parametrize, and run_ranks of shardwright.testing, which starts ranks"
_OPTIMIZER = (
    "booster.boost returns the optimizer that the plugin needs; to recognise one: isinstance(optimizer, "
    "OptimizerWrapper), from colossalai.interface import OptimizerWrapper"
)
_MODEL = (
    "booster.boost returns the model that the plugin needs; to recognise one: isinstance(model, ModelWrapper), from "
    "colossalai.interface import ModelWrapper; model.unwrap() is the module inside"
)
_FP16 = "FP16TorchMixedPrecision, or precision= of a plugin"
_LAYER = (
    "the layers of colossalai.shardformer.layer (Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D, ...) "
    "communicate by themselves"
)
_RANDOM = "random numbers of ranks are kept apart by the plugin: leave the call out"
_SLICES = "HybridParallelPlugin(sequence_parallelism_mode=...) cuts batches along the sequence: leave the call out"
_WEIGHTS = 'pp_style="zbv" postpones weight gradients by itself'
_UNSHARDED_LOSS = (
    "colossalai.shardformer.layer.cross_entropy_1d, or the model's own loss, which is exact on sharded logits"
)
_HELD = "booster.boost lets the optimizer hold the parameters as they are laid out: leave the call out"
_GROUPS = "ask the plugin: plugin.tp_group, plugin.dp_group, plugin.pp_group; or torch.distributed.new_group"

# By the beginning of the dotted name: the longest that fits is said.
_WORDS = {
    "accelerator.set_accelerator": "the device follows from what torch sees; CUDA_VISIBLE_DEVICES= hides GPUs",
    "accelerator.auto_set_accelerator": "the device follows from what torch sees; leave the call out",
    "accelerator.CudaAccelerator": "get_accelerator() answers for CUDA and for the CPU",
    "accelerator.CpuAccelerator": "get_accelerator() answers for CUDA and for the CPU",
    "accelerator.NpuAccelerator": "NPUs are not served; CUDA devices and CPUs are",
    "checkpoint_io": _IO,
    "cluster.ProcessGroupMesh": "HybridParallelPlugin makes one, plugin.pg_mesh; alone: "
    "shardwright.cluster.ParallelMesh(pp=2, tp=2)",
    "cluster.ProcessGroupManager": _GROUPS,
    "cluster.process_group_mesh": "HybridParallelPlugin makes one, plugin.pg_mesh; alone: "
    "shardwright.cluster.ParallelMesh(pp=2, tp=2)",
    "cluster.process_group_manager": _GROUPS,
    "cluster.device_mesh_manager": "torch.distributed.device_mesh.init_device_mesh",
    "cluster.DeviceMeshManager": "torch.distributed.device_mesh.init_device_mesh",
    "booster.mixed_precision.bf16": 'precision="bf16" of a plugin, or Booster(mixed_precision="bf16")',
    "booster.mixed_precision.fp8": 'precision="fp8" of HybridParallelPlugin',
    "booster.mixed_precision.fp16_apex": _FP16,
    "booster.mixed_precision.fp16_naive": _FP16,
    "device": "torch.distributed.device_mesh.init_device_mesh",
    "interface.DistributedOptim": _ADAM,
    "lazy.LazyTensor": "LazyInitContext keeps parameters on the meta device; there is no tensor class of its own",
    "moe": "MoeHybridParallelPlugin(tp_size=..., pp_size=..., ep_size=...) trains mixtures of experts as they are",
    "nn.optimizer.Lamb": _ADAM,
    "nn.optimizer.FusedLAMB": _ADAM,
    "nn.optimizer.DistributedLamb": _ADAM,
    "nn.optimizer.Lars": _ADAM,
    "nn.optimizer.CAME": _ADAM,
    "nn.optimizer.DistributedCAME": _ADAM,
    **{
        f"nn.optimizer.{module}": _ADAM
        for module in ("came", "distributed_came", "distributed_lamb", "fused_lamb", "lamb", "lars")
    },
    **dict.fromkeys(
        ("nn.optimizer.NVMeOptimizer", "nn.optimizer.nvme_optimizer"),
        "states are not offloaded to disk; cpu_offload=True of a plugin keeps them in host memory",
    ),
    "nn.optimizer.galore": _GALORE,
    "nn.optimizer.distributed_galore": _GALORE,
    "nn.optimizer.GaLoreAdamW8bit": _GALORE,
    "nn.optimizer.GaLoreAdamW": _GALORE,
    "nn.optimizer.GaLoreAdafactor": _GALORE,
    "nn.optimizer.DistGaloreAwamW": _GALORE,
    "nn.optimizer.get_galore_param_groups": _GALORE,
    "nn.optimizer.cast_to_distributed": "leave it out: boost gives every optimizer the parts of parameters that it can "
    "step on",
    "nn.init": "torch.nn.init",
    "nn.loss": "torch.nn.functional.cross_entropy, and cross_entropy_1d of shardwright.shardformer.layer on sharded "
    "logits",
    "nn.layer": "colossalai.shardformer.layer",
    "nn.lr_scheduler.delayed": "torch.optim.lr_scheduler.SequentialLR puts schedules behind each other",
    "pipeline.p2p": "booster.execute_pipeline sends what stages exchange",
    "pipeline.schedule.base": MODULES["pipeline.schedule"],
    "pipeline.schedule.generate": MODULES["inference"],
    "pipeline.schedule.interleaved_pp": 'pp_style="interleaved" of HybridParallelPlugin',
    "pipeline.schedule.one_f_one_b": 'pp_style="1f1b" of HybridParallelPlugin',
    "pipeline.schedule.zero_bubble_pp": 'pp_style="zbv" of HybridParallelPlugin',
    "pipeline.schedule.OneForwardOneBackwardSchedule": 'pp_style="1f1b" of HybridParallelPlugin',
    "pipeline.schedule.InterleavedSchedule": 'pp_style="interleaved" of HybridParallelPlugin',
    "pipeline.schedule.ZeroBubbleVPipeScheduler": 'pp_style="zbv" of HybridParallelPlugin',
    "pipeline.OneForwardOneBackwardSchedule": 'pp_style="1f1b" of HybridParallelPlugin',
    "pipeline.InterleavedSchedule": 'pp_style="interleaved" of HybridParallelPlugin',
    "pipeline.ZeroBubbleVPipeScheduler": 'pp_style="zbv" of HybridParallelPlugin',
    "pipeline.weight_grad_store": _WEIGHTS,
    "shardformer.layer._operation": _LAYER,
    "shardformer.layer.attn": "enable_flash_attention=True and sequence_parallelism_mode= of HybridParallelPlugin "
    "choose how models attend",
    "shardformer.layer.utils": _LAYER,
    "shardformer.modeling": "forwards of models are not copied here: the model of transformers runs as it is",
    "testing": _TESTING,
    "testing.spawn": "run_ranks(function, nprocs): from shardwright.testing import run_ranks",
    "utils.Timer": "time.perf_counter, and torch.cuda.synchronize() before it on GPUs",
    "utils.timer": "time.perf_counter, and torch.cuda.synchronize() before it on GPUs",
    "utils.MultiTimer": "time.perf_counter, and torch.cuda.synchronize() before it on GPUs",
    "utils.sync_tensor": "torch.distributed.broadcast",
    "zero": _BOOSTER + " with LowLevelZeroPlugin(stage=1, 2 or 3), or GeminiPlugin",
    "zero.ColoInitContext": "LazyInitContext: from colossalai.lazy import LazyInitContext",
    "auto_parallel": "shardwright plan --search finds a layout, and layout: auto of a recipe takes a sensible one",
    "autochunk": "num_sequence_slices= and offload_activations= of shardwright's HybridParallelPlugin save activations",
    "cli": "start ranks with torchrun; shardwright doctor looks at the installation",
    "fx": "torch.fx",
}

# By the name alone, wherever it is imported from: the first that fits the whole of it.
_PATTERNS = (
    (r"\w*CheckpointIO", _IO),
    (r"get_param_info|reinitialize_optimizer|OptimizerParamCheckState", _HELD),
    (r"\w*Optimizer|DistributedOptim|FSDPOptimizerWrapper", _OPTIMIZER),
    (r"TorchAMPModule|AMPModelMixin|PeftUnwrapMixin", _MODEL),
    (r"extract_lora_layers", "booster.save_lora_as_pretrained(model, path) writes adapters alone"),
    (
        r"_MyTensor|LazyTensor",
        "LazyInitContext keeps parameters on the meta device; there is no tensor class of its own",
    ),
    (r"ScheduledNode", MODULES["pipeline.schedule"]),
    (r"(DistCrossEntropy|DistLogProb|dist_log_prob_1d)", _UNSHARDED_LOSS),
    (r"\w*fused_qkv\w*|_\w*FusedQKV", "FusedLinear1D_Col and GPT2FusedLinearConv1D_Col split and gather by themselves"),
    (r"PaddingParallelModule", "ParallelModule; VocabParallelEmbedding1D and VocabParallelLMHead1D pad by themselves"),
    (
        r"NPUFusedRMSNormWithHook|FastLayerNormWithHook|BaseLayerNorm",
        "FusedRMSNorm, FusedLayerNorm, RMSNorm or LayerNorm",
    ),
    (r"(create_r|R)andomizer\w*", _RANDOM),
    (r"split_(batch|varlen)_zigzag|is_share_sp_tp|get_half_index|RingComm", _SLICES),
    (r"execute_(conv1d_)?w_pass\w*|WeightGradStore", _WEIGHTS),
)


def words_for(name: str) -> str | None:
    """What is said of a dotted name, or of the module that it is in; None where nothing is known."""
    parts = name.split(".")[1:]
    if parts and ".".join(parts) not in _WORDS and parts[-1] in NAMES:
        return f"use {NAMES[parts[-1]]}"
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        offered = f"colossalai.{path}" in OFFERED
        said = _WORDS.get(path) or (None if offered else MODULES.get(path))
        if said is not None:
            return said
    return next((said for pattern, said in _PATTERNS if parts and re.fullmatch(pattern, parts[-1])), None)
