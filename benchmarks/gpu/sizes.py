"""Models that are measured, and what a step of them must at least do.

A floor is the larger part of two times: floating-point operations over the rate of the units that do them, and bytes
over the bandwidth of memory, each read or written once. Nothing runs much faster, and a prediction is the floor over
what good kernels reach of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.models.dry_run import without_data

Batch = dict[str, Tensor]
# Dense products per second in bf16, and bytes per second, that makers promise.
PROMISED = {"B200": (2250e12, 8.0e12), "H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}
OF_PRODUCTS, OF_ATTENTION, OF_MEMORY = 0.72, 0.55, 0.85  # shares of the promised rates that good kernels reach


@dataclass(frozen=True)
class Shape:
    """
    kind, model     `model_type` and class of transformers
    real, tiny      fields of the config: for a GPU, and for a rehearsal
    batch           (config, samples, length) -> a batch
    samples, length of a batch on a GPU
    causal          half of the attention is computed for nothing where nobody skips it
    """

    kind: str
    model: str
    real: Mapping[str, Any]
    tiny: Mapping[str, Any]
    batch: Callable[[Any, int, int], Batch]
    samples: int
    length: int
    causal: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def config(self, is_tiny: bool, **changes: Any) -> Any:
        fields = {**(self.tiny if is_tiny else self.real), **self.extra, **changes}
        config = transformers.AutoConfig.for_model(self.kind, **fields)
        config.use_cache = False
        return config

    def build(self, config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        with device:
            model: nn.Module = getattr(transformers, self.model)(config)
        return model.to(dtype).train()

    def batch_of(self, config: Any, is_tiny: bool, length: int | None = None, samples: int | None = None) -> Batch:
        torch.manual_seed(1)
        if is_tiny:
            return self.batch(config, 2, 16)
        return self.batch(config, samples or self.samples, length or self.length)


def words(config: Any, samples: int, length: int) -> Batch:
    ids = torch.randint(4, config.vocab_size, (samples, length))
    return {"input_ids": ids, "labels": ids.clone()}


def masked_words(config: Any, samples: int, length: int) -> Batch:
    """A seventh of the tokens are to be found."""
    batch = words(config, samples, length)
    batch["labels"][torch.rand(samples, length) > 1 / 7] = -100
    return batch


def translated(config: Any, samples: int, length: int) -> Batch:
    batch = words(config, samples, length)
    return {**batch, "labels": batch["labels"][:, : length // 4].contiguous()}


def images(config: Any, samples: int, length: int) -> Batch:
    side = config.image_size
    labels = torch.randint(config.num_labels, (samples,))
    return {"pixel_values": torch.randn(samples, 3, side, side), "labels": labels}


_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_TINY_LM = {**_TINY, "vocab_size": 211, "num_key_value_heads": 2}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
SHAPES = {
    "llama": Shape("llama", "LlamaForCausalLM", LLAMA_8B, _TINY_LM, words, 1, 8192, True),
    "moe": Shape(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
        | {"vocab_size": 151936, "max_position_embeddings": 8192, "norm_topk_prob": True},
        {**_TINY_LM, "moe_intermediate_size": 32, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2},
        words,
        2,
        4096,
        True,
    ),
    "bert": Shape(
        "bert",
        "BertForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        {**_TINY, "vocab_size": 211},
        masked_words,
        32,
        512,
    ),
    "vit": Shape(
        "vit",
        "ViTForImageClassification",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        {**_TINY, "image_size": 32, "patch_size": 8},
        images,
        64,
        197,
        extra={"num_labels": 1000},
    ),
    "t5": Shape(
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16, "vocab_size": 32128}
        | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 211}
        | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        translated,
        16,
        512,
        extra={"decoder_start_token_id": 0},
    ),
}


@dataclass(frozen=True)
class Work:
    """Of one step, forward and backward: floating-point operations of all products, of these in attention where all of
    its matrix is computed, and what a causal mask makes of them; bytes that the optimizer moves.
    """

    full: float
    attention: float
    half: float
    optimizer_bytes: float

    def floor(self, name: str) -> float | None:
        """Seconds on the device of this name; None where nobody has promised anything."""
        rates = promised(name)
        return None if rates is None else self.half / rates[0] + self.optimizer_bytes / rates[1]

    def predicted(self, name: str) -> float | None:
        rates = promised(name)
        if rates is None:
            return None
        attention = self.attention - (self.full - self.half)
        products = (self.full - self.attention) / (OF_PRODUCTS * rates[0]) + attention / (OF_ATTENTION * rates[0])
        return products + self.optimizer_bytes / (OF_MEMORY * rates[1])


def promised(name: str) -> tuple[float, float] | None:
    return next((rates for part, rates in PROMISED.items() if part in name), None)


def bytes_of_step(parameters: float) -> float:
    """Norm reads the gradient (4 bytes); the step reads gradient, master and moments, writes the last three and the
    bf16 weight.
    """
    return parameters * (4 + 16 + 12 + 2)


def work_of(shape: Shape, config: Any, batch: Batch) -> Work:
    with torch.device("meta"):
        model: Any = getattr(transformers, shape.model)(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # whose shapes do not depend on numbers
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), without_data(), counter:
        model(**{name: tensor.to("meta") for name, tensor in batch.items()})
    full, attention = 3.0 * counter.get_total_flops(), 0.0
    if shape.causal:
        samples, length = batch["input_ids"].shape
        width = config.num_attention_heads * getattr(
            config, "head_dim", config.hidden_size // config.num_attention_heads
        )
        attention = 12.0 * samples * length**2 * width * config.num_hidden_layers
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Work(full, attention, full - attention / 2, bytes_of_step(parameters))
