"""Encoder-decoders other than T5: every parameter sharded, the gradients of one process, the bias [1, V] behind
BART's head counted in.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer import ModelSharder, ShardConfig
from shardwright.spec import get_spec
from shardwright.testing import compare_models, keep_float64, run_ranks
from tests.models import tiny_text_models as tiny

MODELS = {
    "bart": ("bart", {}),
    "mbart": ("mbart", {}),
    "marian": ("marian", {}),
    "pegasus": ("pegasus", {}),
    "mt5": ("mt5", {}),
    # the head is tied to the decoder's embedding, which is not that of `get_input_embeddings`
    "marian of two languages": ("marian", {"share_encoder_decoder_embeddings": False}),
    "t5 with a head of its own": ("t5", {"tie_word_embeddings": False}),
}


def build(name: str) -> nn.Module:
    model = tiny.build(MODELS[name][0], **MODELS[name][1])
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(
            torch.randn(model.final_logits_bias.shape, generator=torch.Generator().manual_seed(5))
        )
    return model.eval()


def verify(rank: int, world_size: int) -> dict[str, float]:
    shares = {}
    for name in MODELS:
        reference, model = build(name), build(name)
        with keep_float64():
            sharder = ModelSharder(model, None, ShardConfig(make_vocab_size_divisible_by=8))
            sharder.shard()
            batch = tiny.inputs(reference)
            expected, actual = reference(**batch).loss, sharder.model(**batch).loss
            for loss in (expected, actual):
                loss.backward()
        sync_shared_gradients(sharder.model.parameters(), dist.group.WORLD)
        compare_models(reference, sharder.model, coordinate=rank, losses=(expected.detach(), actual.detach()))
        specs = [spec for param in sharder.model.parameters() if (spec := get_spec(param)) is not None]
        sizes = [(torch.Size(spec.full_shape).numel(), spec.is_sharded) for spec in specs]
        shares[name] = sum(size for size, is_sharded in sizes if is_sharded) / sum(size for size, _ in sizes)
    return shares


def test_two_ranks_have_the_gradients_of_one_process() -> None:
    for shares in run_ranks(verify, 2, timeout=110):
        assert min(shares.values()) > 0.9, shares
