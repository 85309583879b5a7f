"""Sizes of Llamas, and the options and plugins that the scripts of this folder share."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwright.accelerator import get_accelerator
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.utils.options import count, number, refused_in_a_line

PLUGINS = ("3d", "zero", "fsdp", "ddp")
_OF_3D = {
    *("tp", "pp", "sp", "sp_mode", "pp_style", "n_chunks", "num_layers_per_stage", "num_ckpt_layers_per_stage"),
    *("xformers", "no_cache", "overlap_allgather"),
}


def _sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None = None, words: int = 32000
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "vocab_size": words,
    }


CONFIGS = {
    "tiny": _sizes(64, 128, 4, 4, 2, words=512),
    "100m": _sizes(768, 2048, 12, 12),
    "1b": _sizes(2048, 8192, 16, 32, 8, words=128256),
    "7b": _sizes(4096, 11008, 32, 32),
    "8b": _sizes(4096, 14336, 32, 32, 8, words=128256),
    "13b": _sizes(5120, 13824, 40, 40),
    "30b": _sizes(6656, 17920, 60, 52),
    "65b": _sizes(8192, 22016, 80, 64),
    "70b": _sizes(8192, 28672, 80, 64, 8),
}


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--plugin", choices=PLUGINS, default="3d")
    parser.add_argument("-g", "--grad-checkpoint", action="store_true", help="recompute every layer in backward")
    parser.add_argument("-x", "--xformers", action="store_true", help="fused attention kernels")
    parser.add_argument("--tp", type=count, default=1)
    parser.add_argument("--pp", type=count, default=1)
    parser.add_argument("--sp", type=count, default=1)
    parser.add_argument("--sp_mode", "--sp-mode", help="all_to_all, ring_attn, split_gather or ring")
    parser.add_argument("--mbs", type=count, default=1, help="samples of a microbatch")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0)
    parser.add_argument("--pp_style", "--pp-style", default="1f1b")
    parser.add_argument("--n_chunks", "--n-chunks", type=count, default=1, help="stages of a rank")
    parser.add_argument("--num_layers_per_stage", "--num-layers-per-stage", type=number, nargs="+")
    parser.add_argument("--num_ckpt_layers_per_stage", "--num-ckpt-layers-per-stage", type=number, nargs="+")
    parser.add_argument("--precision", default="bf16", help="of 3d and zero: fp32, fp16, bf16 or fp8")
    parser.add_argument("--max-norm", type=float, default=0.0)
    parser.add_argument("--cpu_offload", "--cpu-offload", action="store_true")
    parser.add_argument("--no_cache", "--no-cache", action="store_true")
    parser.add_argument("--overlap_allgather", "--overlap-allgather", action="store_true")
    parser.add_argument("--overlap_p2p", "--overlap-p2p", action=argparse.BooleanOptionalAction, default=True)


def make_plugin(args: argparse.Namespace) -> Plugin:
    """The plugin with the name and the settings that were asked for."""
    with refused_in_a_line():
        return _plugin_of(args)


def check_layout(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Options that the plugin would not heed are refused."""
    given = [name for name in vars(args) if name in _OF_3D and getattr(args, name) != parser.get_default(name)]
    if args.plugin != "3d" and given:
        option = "--" + given[0].replace("_", "-")
        parser.error(f"{option} is an option of --plugin 3d, which --plugin {args.plugin} does not heed; leave it out")


def _plugin_of(args: argparse.Namespace) -> Plugin:
    match args.plugin:
        case "3d":
            checkpointing = None
            if args.num_ckpt_layers_per_stage:
                checkpointing = PipelineGradientCheckpointConfig(
                    num_ckpt_layers_per_stage=args.num_ckpt_layers_per_stage
                )
            elif args.grad_checkpoint:
                checkpointing = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
            return HybridParallelPlugin(
                tp_size=args.tp,
                pp_size=args.pp,
                pp_style=args.pp_style,
                num_model_chunks=args.n_chunks,
                zero_stage=args.zero,
                sp_size=args.sp,
                sequence_parallelism_mode=args.sp_mode,
                enable_sequence_parallelism=args.sp > 1 or args.sp_mode is not None,
                enable_fused_normalization=get_accelerator().is_available(),
                enable_flash_attention=args.xformers,
                microbatch_size=args.mbs,
                precision=args.precision,
                max_norm=args.max_norm,
                enable_metadata_cache=not args.no_cache,
                overlap_allgather=args.overlap_allgather,
                cpu_offload=args.cpu_offload,
                overlap_p2p=args.overlap_p2p,
                gradient_checkpoint_config=checkpointing,
                num_layers_per_stage=args.num_layers_per_stage,
            )
        case "zero":
            return LowLevelZeroPlugin(
                stage=args.zero or 1, precision=args.precision, cpu_offload=args.cpu_offload, max_norm=args.max_norm
            )
        case "fsdp":
            formats = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            return TorchFSDPPlugin(mixed_precision=formats, cpu_offload=args.cpu_offload)
        case "ddp":
            return TorchDDPPlugin()
    raise ValueError(f"plugin={args.plugin!r} is not one of {', '.join(PLUGINS)}")


# Dense bf16 products per second that makers of GPUs promise, in TFLOP/s.
_PROMISED = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0}


def promised_tflops() -> float | None:
    """Of this rank's GPU; None where it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((promised for part, promised in _PROMISED.items() if part in name), None)


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
