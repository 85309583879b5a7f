"""Configurations that were read by hand, number by number, beside the documentation of their frameworks."""

from __future__ import annotations

from tests.compat.config_files import Case

ZERO_PP = """{"train_batch_size": 256, "gradient_accumulation_steps": 1, "bf16": {"enabled": true},
"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "zero_hpz_partition_size": 8,
  "zero_quantized_weights": true,
  "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4}},
"optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-4, "freeze_step": 100}},
"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10000, "warmup_num_steps": 500,
  "cos_min_ratio": 0.1, "warmup_min_ratio": 0.0}},
"wandb": {"enabled": true}, "flops_profiler": {"enabled": false}, "comms_logger": {"enabled": true}}"""
STATIC_SCALE = """{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 16, "gradient_clipping": 0,
"fp16": {"enabled": true, "loss_scale": 128}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8},
"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}}}"""
ONE_CYCLE = """{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "scheduler": {"type": "OneCycle"}}"""
BY_DEEPSPEED = """distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 2
num_processes: 16
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.7
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
"""
ND = """distributed_type: FSDP
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default, dynamo_use_dynamic: false, dynamo_use_fullgraph: true}
fp8_config: {backend: TE}
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_offload_params: false}
mixed_precision: fp8
num_machines: 1
num_processes: 16
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 2
gradient_accumulation_steps: 8
"""
RECOMPUTED = """distributed_type: MEGATRON_LM
megatron_lm_config: {megatron_lm_gradient_clipping: 0.5, megatron_lm_num_micro_batches: 2, megatron_lm_pp_degree: 2,
  megatron_lm_recompute_activations: true, megatron_lm_sequence_parallelism: false, megatron_lm_tp_degree: 2}
mixed_precision: bf16
num_processes: 8
"""
INTERNLM_7B = """JOB_NAME = "7b_train"
SEQ_LEN = 2048
CHECKPOINT_EVERY = 50
ckpt = dict(enable_save_ckpt=False, checkpoint_every=CHECKPOINT_EVERY, oss_snapshot_freq=int(CHECKPOINT_EVERY / 2))
data = dict(seq_len=SEQ_LEN, micro_num=4, micro_bsz=2, valid_micro_num=4, valid_every=0, pack_sample_into_one=False,
            total_steps=50000, skip_batches="", rampup_batch_size="", min_length=50, train_folder=None,
            empty_cache_and_diag_interval=200, diag_outlier_ratio=1.1)
grad_scaler = dict(fp16=dict(initial_scale=2**14, min_scale=1, growth_interval=1000), max_scale=2**24, hysteresis=2)
hybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=True, reduce_bucket_size=64 * 10**6,
                             clip_grad_norm=0.5)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=0.0, last_epoch=-1)
model = dict(checkpoint=0.5, dtype="torch.float16", num_chunks=2)
parallel = dict(zero1=dict(size=8), tensor=4, pipeline=dict(size=4, interleaved_overlap=True), sequence_parallel=True)
cudnn_deterministic = False
cudnn_benchmark = False
use_fp32_norm = False
"""
LOW_LEVEL = """from colossalai.booster.plugin import LowLevelZeroPlugin
plugin = LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=2**5, max_norm=1.0, reduce_bucket_size_in_m=24,
                            overlap_communication=False, communication_dtype=torch.float32)
optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
schedule = transformers.get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=2000)
"""
ADAMW = """from colossalai.booster.plugin import TorchDDPPlugin
plugin = TorchDDPPlugin()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
"""
TWO_MACHINES = """torchrun --nnodes 2 --nproc_per_node 8 --master_addr 10.0.0.1 pretrain.py --plugin gemini \\
    --config 13b --batch_size 4 --accumulation_steps 2 --lr 1e-4 --mixed_precision bf16 --grad_clip 0.5 --num_epochs 2
"""

REALISTIC = [
    Case(
        "zero_pp.json",
        ZERO_PP,
        "deepspeed",
        {"zero_stage": 3},
        {
            "gradient_accumulation_steps": 1,
            "bf16": True,
            "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine",
            "max_steps": 10000,
            "warmup_steps": 500,
            "report_to": ["wandb"],
            "max_grad_norm": 0.0,
        },
        [
            *("train_batch_size", "zero_optimization.zero_hpz_partition_size", "optimizer.type", "comms_logger"),
            *("zero_optimization.zero_quantized_weights", "zero_optimization.offload_optimizer.device"),
            *("zero_optimization.offload_optimizer.buffer_count", "optimizer.params.freeze_step"),
            *("scheduler.params.cos_min_ratio", "scheduler.params.warmup_type"),
        ],
    ),
    Case(
        "static_scale.json",
        STATIC_SCALE,
        "deepspeed",
        {"zero_stage": 2, "zero_bucket_size_in_m": 200.0},
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 16,
            "max_grad_norm": 0,
            "fp16": True,
            "optim": "adamw_torch",
            "learning_rate": 1e-4,
            "adam_beta1": 0.9,
            "adam_beta2": 0.98,
            "adam_epsilon": 1e-6,
            "weight_decay": 0.1,
        },
        ["fp16.loss_scale", "scheduler"],
    ),
    Case(
        "one_cycle.json",
        ONE_CYCLE,
        "deepspeed",
        {},
        {"per_device_train_batch_size": 1, "max_grad_norm": 1.0},
        ["scheduler.type"],
    ),
    Case(
        "by_deepspeed.yaml",
        BY_DEEPSPEED,
        "accelerate",
        {"zero_stage": 3, "cpu_offload": True},
        {"bf16": True, "gradient_accumulation_steps": 4, "max_grad_norm": 0.7},
        ["num_machines"],
    ),
    Case(
        "nd.yaml",
        ND,
        "accelerate",
        {
            "enable_jit_fused": True,
            "zero_stage": 3,
            "use_fp8": True,
            "zero_group_size": 2,
            "tp_size": 2,
            "sp_size": 2,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "ring_attn",
        },
        {"bf16": True, "nproc": 16, "gradient_accumulation_steps": 8},
        ["dynamo_config.dynamo_use_fullgraph", "fp8_config", "max_grad_norm"],
    ),
    Case(
        "recomputed.yaml",
        RECOMPUTED,
        "accelerate",
        {"pp_size": 2, "tp_size": 2},
        {
            "max_grad_norm": 0.5,
            "gradient_accumulation_steps": 2,
            "activation_checkpointing": True,
            "bf16": True,
            "nproc": 8,
        },
        ["megatron_lm_config.megatron_lm_recompute_activations"],
    ),
    Case(
        "internlm_7b.py",
        INTERNLM_7B,
        "internlm",
        {
            "zero_stage": 1,
            "zero_group_size": 8,
            "tp_size": 4,
            "pp_size": 4,
            "pp_style": "interleaved",
            "num_model_chunks": 2,
            "overlap_p2p": True,
            "enable_sequence_parallelism": True,
            "overlap_communication": True,
            "overlap_allgather": True,
            "zero_bucket_size_in_m": 64.0,
            "gradient_checkpoint_config": {"gradient_checkpointing_ratio": 0.5},
            "num_microbatches": 4,
            "initial_scale": 2**14,
            "min_scale": 1,
            "growth_interval": 1000,
            "max_scale": 2**24,
            "hysteresis": 2,
        },
        {
            "run_name": "7b_train",
            "fp16": True,
            "max_grad_norm": 0.5,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "data": {"max_length": 2048, "packing": True},
            "lr_scheduler_type": "cosine",
            "max_steps": 50000,
            "learning_rate": 1e-4,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.01,
            "warmup_steps": 0.01,
        },
        ["ckpt", "data.valid_micro_num", "data.min_length"],
    ),
    Case(
        "low_level.py",
        LOW_LEVEL,
        "colossalai",
        {
            "zero_stage": 2,
            "initial_scale": 32,
            "zero_bucket_size_in_m": 24,
            "overlap_communication": False,
        },
        {
            "fp16": True,
            "max_grad_norm": 1.0,
            "optim": "sgd",
            "learning_rate": 0.1,
            "weight_decay": 1e-4,
            "lr_scheduler_type": "linear",
            "warmup_steps": 100,
            "max_steps": 2000,
        },
        ["LowLevelZeroPlugin.communication_dtype", "SGD.momentum"],
    ),
    Case(
        "adamw.py",
        ADAMW,
        "colossalai",
        {},
        {"optim": "adamw_torch", "learning_rate": 2e-5, "weight_decay": 0.01, "lr_scheduler_type": "constant"},
        ["max_grad_norm"],
    ),
    Case(
        "two_machines.sh",
        TWO_MACHINES,
        "colossalai",
        {"zero_stage": 3},
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-4,
            "bf16": True,
            "max_grad_norm": 0.5,
            "num_train_epochs": 2.0,
        },
        ["--nnodes", "--config"],
    ),
]
