"""What to use in place of the names of Colossal-AI that have no counterpart."""

from __future__ import annotations

from ..._moved import MODULES, NAMES
from .names import MODULES as OFFERED

_BOOSTER = "Booster(plugin=...) wraps model and optimizer: booster.boost(model, optimizer)"
_IO = "booster.save, booster.load, booster.save_model and booster.load_model read and write checkpoints"
_ADAM = "use HybridAdam, torch.optim.AdamW or any other torch.optim.Optimizer, of other packages too: boost takes it"
_GALORE = "use LoRA (booster.enable_lora) to train with few states, or LowLevelZeroPlugin(stage=2, cpu_offload=True)"
_TESTING = "pytest.mark.parametrize, and run_ranks of shardwright.testing, which starts ranks"
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
    "cluster.DeviceMeshManager": "torch.distributed.device_mesh.init_device_mesh",
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
    "nn.optimizer.NVMeOptimizer": "states are not offloaded to disk; cpu_offload=True of a plugin keeps them in host "
    "memory",
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
    "pipeline.schedule.OneForwardOneBackwardSchedule": 'pp_style="1f1b" of HybridParallelPlugin',
    "pipeline.schedule.InterleavedSchedule": 'pp_style="interleaved" of HybridParallelPlugin',
    "pipeline.schedule.ZeroBubbleVPipeScheduler": 'pp_style="zbv" of HybridParallelPlugin',
    "pipeline.OneForwardOneBackwardSchedule": 'pp_style="1f1b" of HybridParallelPlugin',
    "pipeline.InterleavedSchedule": 'pp_style="interleaved" of HybridParallelPlugin',
    "pipeline.ZeroBubbleVPipeScheduler": 'pp_style="zbv" of HybridParallelPlugin',
    "pipeline.weight_grad_store": 'pp_style="zbv" postpones weight gradients by itself',
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
    return None
