"""Configuration files as users of other frameworks have them, and what they come to here."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """name of the file, its text, whose it is; the layout, other keys of a recipe, and the keys that are noted."""

    file: str
    text: str
    source: str
    layout: dict[str, Any]
    recipe: dict[str, Any]
    noted: list[str]


DEEPSPEED = """{
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
  "gradient_clipping": 0.5, "steps_per_print": 20,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3},
  "bf16": {"enabled": false},
  "zero_optimization": {"stage": 2, "overlap_comm": false, "reduce_bucket_size": 5e7, "contiguous_gradients": true,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "none"}},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000,
    "warmup_type": "linear", "warmup_min_lr": 0}},
  "tensorboard": {"enabled": true}, "flops_profiler": {"enabled": true}
}"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""
MEGATRON = """distributed_type: MEGATRON_LM
mixed_precision: fp16
num_machines: 2
num_processes: 16
main_process_ip: 10.0.0.1
megatron_lm_config:
  megatron_lm_tp_degree: 4
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 8
  megatron_lm_sequence_parallelism: true
  megatron_lm_recompute_activations: false
  megatron_lm_use_distributed_optimizer: true
  megatron_lm_gradient_clipping: 1.0
"""
FSDP = """{"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE", "use_orig_params": true,
"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "xla": true}"""
INTERNLM = """import os
JOB_NAME = "7b_train"
SEQ_LEN = 2048
HIDDEN_SIZE = 4096
TRAIN_FOLDER = os.environ["DATA"]
model_type = "INTERNLM2"
ckpt = dict(enable_save_ckpt=False, save_ckpt_folder="local:llm_ckpts", checkpoint_every=50)
data = dict(seq_len=SEQ_LEN, micro_num=4, micro_bsz=2, valid_every=50, pack_sample_into_one=False, total_steps=20,
            skip_batches="", train_folder=None)
grad_scaler = dict(fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000), growth_factor=2,
                   backoff_factor=0.5, max_scale=2**24, hysteresis=2)
hybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=False,
                             reduce_bucket_size=512 * 1024 * 1024, clip_grad_norm=1.0)
loss = dict(label_smoothing=0.1)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=0.95, c=0, cur_iter=-1)
model = dict(checkpoint=False, num_chunks=1, num_attention_heads=32, hidden_size=HIDDEN_SIZE, dtype="torch.bfloat16")
parallel = dict(zero1=dict(size=-1), tensor=dict(size=2, mode="mtp"), pipeline=dict(size=2, interleaved_overlap=True),
                weight=dict(size=1, overlap=True))
"""
SCRIPT = """from colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
TP = 4
if True:
    plugin = HybridParallelPlugin(
        TP, pp_size=2, zero_stage=1, precision="bf16", pp_style="zbv", num_model_chunks=2, microbatch_size=args.mbs,
        scheduler_nodes=nodes, max_norm=1.0, enable_flash_attention=True, initial_scale=2**8)
else:
    plugin = TorchDDPPlugin()
"""
COMMAND = """#!/bin/bash
export OMP_NUM_THREADS=8
colossalai run --nproc_per_node 8 --hostfile hosts benchmark.py \\
    --plugin 3d --tp 2 --pp 2 --zero 1 --mbs 1 --batch_size 4 -c 7b --xformers --grad_checkpoint --max_length 4096
"""

CASES = [
    Case(
        "ds.json",
        DEEPSPEED,
        "deepspeed",
        {
            "growth_interval": 500,
            "hysteresis": 3,
            "initial_scale": 4096.0,
            "zero_stage": 2,
            "overlap_communication": False,
            "zero_bucket_size_in_m": 50.0,
            "cpu_offload": True,
        },
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
            "logging_steps": 20,
            "fp16": True,
            "optim": "adamw_torch",
            "learning_rate": 1e-3,
            "adam_beta1": 0.8,
            "adam_beta2": 0.99,
            "adam_epsilon": 1e-7,
            "weight_decay": 0.01,
            "lr_scheduler_type": "linear",
            "warmup_steps": 100,
            "max_steps": 1000,
            "report_to": ["tensorboard"],
        },
        ["zero_optimization.contiguous_gradients", "flops_profiler", "optimizer.params.lr"],
    ),
    Case(
        "accelerate.yaml",
        ACCELERATE,
        "accelerate",
        {
            "zero_stage": 2,
            "tp_size": 2,
            "sp_size": 2,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "ring_attn",
        },
        {"activation_checkpointing": True, "bf16": True, "nproc": 8},
        ["fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_state_dict_type", "rdzv_backend", "max_grad_norm"],
    ),
    Case(
        "megatron.yaml",
        MEGATRON,
        "accelerate",
        {
            "tp_size": 4,
            "pp_size": 2,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "split_gather",
            "zero_stage": 1,
        },
        {"fp16": True, "gradient_accumulation_steps": 8, "max_grad_norm": 1.0},
        ["num_machines", "main_process_ip"],
    ),
    Case(
        "fsdp.json",
        FSDP,
        "fsdp",
        {"zero_stage": 3},
        {},
        ["sharding_strategy", "backward_prefetch", "transformer_layer_cls_to_wrap", "xla"],
    ),
    Case(
        "internlm.py",
        INTERNLM,
        "internlm",
        {
            "zero_stage": 1,
            "tp_size": 2,
            "pp_size": 2,
            "overlap_p2p": True,
            "overlap_communication": True,
            "overlap_allgather": False,
            "zero_bucket_size_in_m": 536.870912,
            "num_model_chunks": 1,
            "num_microbatches": 4,
            "initial_scale": 65536,
            "min_scale": 1,
            "growth_interval": 1000,
            "growth_factor": 2,
            "backoff_factor": 0.5,
            "max_scale": 2**24,
            "hysteresis": 2,
        },
        {
            "run_name": "7b_train",
            "bf16": True,
            "max_grad_norm": 1.0,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "data": {"max_length": 2048, "packing": True},
            "lr_scheduler_type": "cosine",
            "max_steps": 20,
            "eval_strategy": "steps",
            "eval_steps": 50,
            "learning_rate": 1e-4,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.01,
            "warmup_steps": 0.01,
        },
        [
            *("TRAIN_FOLDER", "parallel.weight.overlap", "model_type", "ckpt"),
            *("loss.label_smoothing", "lr_scheduler.eta_min", "model"),
        ],
    ),
    Case(
        "train.py",
        SCRIPT,
        "colossalai",
        {
            "tp_size": 4,
            "pp_size": 2,
            "zero_stage": 1,
            "pp_style": "zbv",
            "num_model_chunks": 2,
            "enable_flash_attention": True,
            "initial_scale": 256,
        },
        {"bf16": True, "max_grad_norm": 1.0},
        ["TorchDDPPlugin", "microbatch_size", "scheduler_nodes"],
    ),
    Case(
        "run.sh",
        COMMAND,
        "colossalai",
        {"tp_size": 2, "pp_size": 2, "zero_stage": 1, "microbatch_size": 1, "enable_flash_attention": True},
        {
            "nproc": 8,
            "per_device_train_batch_size": 4,
            "activation_checkpointing": True,
            "data": {"max_length": 4096},
        },
        ["-c", "--mixed_precision", "--hostfile"],
    ),
]
