"""Tokens per second, TFLOP/s, MFU and memory of training a family of models at any layout, on random data.

    torchrun --nproc-per-node 2 benchmarks/families.py --family gpt2 --tiny --tp 2
    torchrun --nproc-per-node 8 benchmarks/families.py --family gpt2 --plugin hybrid --tp 2 --pp 2 --batch-size 16
    torchrun --nproc-per-node 8 benchmarks/families.py --family mixtral --ep 8 --zero 1 --length 4096 --checkpointing
    torchrun --nproc-per-node 8 benchmarks/families.py --family vit --plugin zero --stage 2
    python benchmarks/families.py --family all --tiny                 # each family in turn, on the ranks there are

Sizes are those of a published model, with random weights that are made lazily; `--set hidden_size=2048` changes a field
of its config. Any torchrun, any device; nothing is downloaded.

FLOP are counted, not estimated: one forward of the whole model without data, by torch's counter of products and
convolutions, times three. Recomputation does not count, attention does in full, and of experts those that a token
visits, so that MFU is the share of the GPU's promised bf16 speed that does the model's work. A token is one position
that layers compute: of encoder-decoders those of both, of images their patches. Steps that warm up are left out; the
time of a step is that of the slowest rank, the memory that of the fullest one (on a CPU the process's peak).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.flop_counter import FlopCounterMode

import shardwright
from shardwright import Booster
from shardwright.accelerator import get_accelerator
from shardwright.lazy import LazyInitContext
from shardwright.models.dry_run import without_data
from shardwright.optim import HybridAdam
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.utils import get_current_device

Batch = dict[str, torch.Tensor]
# Dense bf16 products per second that makers of GPUs promise, in TFLOP/s.
PROMISED = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0}


def words(config: Any, samples: int, length: int) -> tuple[Batch, int]:
    ids = torch.randint(4, config.get_text_config().vocab_size, (samples, length))
    return {"input_ids": ids, "labels": ids}, ids.numel()


def classified_words(config: Any, samples: int, length: int) -> tuple[Batch, int]:
    batch, tokens = words(config, samples, length)
    return {"input_ids": batch["input_ids"], "labels": torch.randint(config.num_labels, (samples,))}, tokens


def translated_words(config: Any, samples: int, length: int) -> tuple[Batch, int]:
    batch, tokens = words(config, samples, length)
    return {**batch, "labels": batch["labels"][:, : length // 2].contiguous()}, tokens + samples * (length // 2)


def images(config: Any, samples: int, length: int) -> tuple[Batch, int]:
    """Of the size that the config says; `length` has no say."""
    side, patches = config.image_size, (config.image_size // config.patch_size) ** 2 + 1
    pixels = torch.randn(samples, 3, side, side)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (samples,))}, samples * patches


def sounds(config: Any, samples: int, length: int) -> tuple[Batch, int]:
    frames, said = config.max_source_positions, min(length, config.max_target_positions)
    features = torch.randn(samples, config.num_mel_bins, 2 * frames)
    labels = torch.randint(4, config.vocab_size, (samples, said))
    return {"input_features": features, "labels": labels}, samples * (frames + said)


@dataclass(frozen=True)
class Family:
    """What is benchmarked under one name.

    model       class of transformers (of shardwright where transformers does not have it)
    kind        `model_type` of its config
    real, tiny  fields of the config: of a published size, and for a CPU
    batch       (config, samples, length) -> a batch and the tokens in it
    """

    model: str
    kind: str
    real: Mapping[str, Any]
    tiny: Mapping[str, Any]
    batch: Callable[[Any, int, int], tuple[Batch, int]] = words
    extra: Mapping[str, Any] = field(default_factory=dict)


_TINY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
_TINY_LM = {**_TINY, "intermediate_size": 128, "vocab_size": 512}
_LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_TINY_SPEECH = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}

FAMILIES = {
    "bert": Family("BertForSequenceClassification", "bert", {}, _TINY_LM, classified_words),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", {}, {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512}),
    "llama": Family("LlamaForCausalLM", "llama", {**_LLAMA_8B, "num_key_value_heads": 8}, _TINY_LM),
    "opt": Family(
        "OPTForCausalLM",
        "opt",
        {"hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192, "num_hidden_layers": 24},
        {**_TINY, "word_embed_proj_dim": 64, "ffn_dim": 128, "vocab_size": 512},
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "t5",
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512},
        translated_words,
        {"decoder_start_token_id": 0},
    ),
    "vit": Family(
        "ViTForImageClassification",
        "vit",
        {},
        {**_TINY, "intermediate_size": 128, "image_size": 32, "patch_size": 8},
        images,
        {"num_labels": 1000},
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "whisper",
        {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
        | {"encoder_attention_heads": 12, "decoder_attention_heads": 12},
        {**_TINY_SPEECH, "max_source_positions": 50, "max_target_positions": 32, "num_mel_bins": 20, "vocab_size": 512}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "decoder_start_token_id": 1},
        sounds,
    ),
    "mixtral": Family("MixtralForCausalLM", "mixtral", {}, {**_TINY_LM, "num_key_value_heads": 2}),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
        {**_TINY_LM, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "chatglm": Family(
        "ChatGLMForConditionalGeneration",
        "chatglm",
        {"multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True},
        {"hidden_size": 64, "num_layers": 4, "num_attention_heads": 4, "ffn_hidden_size": 128, "kv_channels": 16}
        | {"padded_vocab_size": 512, "multi_query_attention": True, "multi_query_group_num": 2},
    ),
}


def config_of(family: Family, options: argparse.Namespace) -> Any:
    fields = {**(family.tiny if options.tiny else family.real), **family.extra, **options.set}
    if family.kind == "chatglm":
        from shardwright.shardformer.modeling.chatglm2_6b.configuration_chatglm import ChatGLMConfig

        config: Any = ChatGLMConfig(**fields)
    else:
        config = transformers.AutoConfig.for_model(family.kind, **fields)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and options.length > longest:
        config.max_position_embeddings = options.length
    config.use_cache = False
    return config


def build(family: Family, config: Any) -> torch.nn.Module:
    home: Any = transformers
    if family.kind == "chatglm":
        from shardwright.shardformer.modeling.chatglm2_6b import modeling_chatglm as home
    return getattr(home, family.model)(config)


def flop_of_forward(family: Family, config: Any, batch: Batch) -> int:
    """Of the whole model on one rank's batch, without its weights."""
    with torch.device("meta"):
        model = build(family, config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the only one whose shapes do not depend on numbers
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), without_data(), counter:
        model(**{name: tensor.to("meta") for name, tensor in batch.items()})
    return counter.get_total_flops()


def make_plugin(options: argparse.Namespace) -> Plugin:
    match options.plugin:
        case "hybrid":
            whole = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
            return HybridParallelPlugin(
                tp_size=options.tp,
                pp_size=options.pp,
                ep_size=options.ep,
                pp_style=options.pp_style,
                num_model_chunks=options.chunks,
                num_microbatches=options.microbatches or (2 * options.pp if options.pp > 1 else 1),
                zero_stage=options.zero,
                precision=options.precision,
                enable_all_optimization=options.optimized,
                gradient_checkpoint_config=whole if options.checkpointing else None,
            )
        case "zero":
            return LowLevelZeroPlugin(stage=options.zero or 1, precision=options.precision)
        case "fsdp":
            return TorchFSDPPlugin()
        case "ddp":
            return TorchDDPPlugin()
    raise ValueError(f"--plugin {options.plugin}")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a step of one family takes. All ranks call it."""
    family, accelerator, device = FAMILIES[name], get_accelerator(), get_current_device()
    accelerator.manual_seed(0)
    config, plugin = config_of(family, options), make_plugin(options)
    replicas, replica = plugin.data_parallel
    torch.manual_seed(replica)
    batch, tokens = family.batch(config, options.batch_size, options.length)
    flop = 3 * flop_of_forward(family, config, batch) * replicas
    torch.manual_seed(0)
    hybrid = isinstance(plugin, HybridParallelPlugin)
    if hybrid:
        with LazyInitContext():
            model: Any = build(family, config)
    else:
        model = build(family, config)
        if options.checkpointing:
            model.gradient_checkpointing_enable()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    own = options.plugin in ("hybrid", "zero") or options.precision == "fp32"
    booster = Booster(plugin=plugin, mixed_precision=None if own else options.precision)
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-4))
    model.train()
    accelerator.reset_peak_memory_stats()

    seconds = torch.zeros(options.steps, dtype=torch.float64, device=device)
    for step in range(-options.warmup, options.steps):
        accelerator.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        if hybrid:
            booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        else:
            booster.backward(model(**{key: value.to(device) for key, value in batch.items()}).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.synchronize()
        if step >= 0:
            seconds[step] = time.perf_counter() - begun
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    memory = torch.tensor(accelerator.max_memory_allocated(), dtype=torch.float64, device=device)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)

    ranks, step_time = dist.get_world_size(), seconds.median().item()
    tflops = flop / step_time / ranks / 1e12
    promised = options.peak_tflops
    return {
        "family": name,
        "model": family.model,
        "parameters": parameters,
        "plugin": options.plugin,
        "mesh": {axis: getattr(options, axis) for axis in ("tp", "pp", "ep")} | {"dp": replicas},
        "step_seconds": step_time,
        "tokens_per_second": tokens * replicas / step_time,
        "tokens_per_second_per_rank": tokens * replicas / step_time / ranks,
        "tflops_per_rank": tflops,
        "peak_tflops": promised,
        "mfu": None if promised is None else tflops / promised,
        "peak_memory_gib": memory.item() / 2**30,
    }


def promised_tflops() -> float | None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((tflops for part, tflops in PROMISED.items() if part in name), None)


def line(found: Mapping[str, Any]) -> str:
    used = "" if found["mfu"] is None else f", MFU {found['mfu']:.1%} of {found['peak_tflops']:g} TFLOP/s"
    return (
        f"{found['family']}: {found['parameters'] / 1e6:,.1f} million parameters, "
        f"{1000 * found['step_seconds']:,.1f} ms, {found['tokens_per_second']:,.0f} tokens/s, "
        f"{found['tokens_per_second_per_rank']:,.0f} per rank, "
        f"{found['tflops_per_rank']:.4f} TFLOP/s per rank{used}, {found['peak_memory_gib']:.2f} GiB"
    )


def assignment(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="llama")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--set", type=assignment, nargs="*", default=[], metavar="FIELD=VALUE", help="of the config")
    parser.add_argument("--plugin", choices=("hybrid", "zero", "fsdp", "ddp"), default="hybrid")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of one data-parallel rank")
    parser.add_argument("--length", type=int, help="tokens of a sample; left out: 512, with --tiny 32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not counted")
    for axis in ("tp", "pp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--pp-style", default="1f1b")
    parser.add_argument("--chunks", type=int, default=1, help="stages of a rank")
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--zero", "--stage", type=int, default=0)
    parser.add_argument("--precision", help="left out: bf16, with --tiny fp32")
    parser.add_argument("--optimized", action=argparse.BooleanOptionalAction, default=False, help="fused operators")
    parser.add_argument("--checkpointing", action="store_true", help="recompute every layer in backward")
    parser.add_argument("--peak-tflops", type=float, default=promised_tflops(), help="of one GPU, for MFU")
    parser.add_argument("--json", action="store_true", help="an object per family")
    options = parser.parse_args(argv)
    options.set = dict(options.set)
    options.length = options.length or (32 if options.tiny else 512)
    options.precision = options.precision or ("fp32" if options.tiny else "bf16")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_args(argv)
    shardwright.launch_from_torch(seed=0)
    transformers.utils.logging.set_verbosity_error()
    for name in FAMILIES if options.family == "all" else [options.family]:
        found = measure(name, options)
        if dist.get_rank() == 0:
            print(json.dumps(found) if options.json else line(found), flush=True)


if __name__ == "__main__":
    main()
