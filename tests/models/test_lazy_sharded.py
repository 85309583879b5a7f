"""A lazily built model that goes through ShardFormer: every shard is the slice of the whole model's weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from shardwright.lazy import LazyInitContext
from shardwright.lazy.weights import LazyWeights
from shardwright.shardformer.config import ShardConfig
from shardwright.shardformer.sharder import ModelSharder
from shardwright.shardformer.shardformer import ShardFormer
from shardwright.spec import get_spec
from shardwright.testing import run_ranks

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 77}
MODELS: list[tuple[Any, Any]] = [
    (LlamaForCausalLM, LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)),
    (GPT2LMHeadModel, GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=77, bos_token_id=0, eos_token_id=0)),
    (BertForMaskedLM, BertConfig(**SMALL)),
    (
        T5ForConditionalGeneration,
        T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=40, vocab_size=77, decoder_start_token_id=0),
    ),
]


def _shards_are_slices(rank: int, world: int) -> None:
    for cls, config in MODELS:
        with LazyInitContext(seed=3):
            whole = cls(config)
        LazyInitContext.materialize(whole)
        with LazyInitContext(seed=3):
            model = cls(config)
        weights = LazyWeights.of(model)
        config_of_group = ShardConfig(tensor_parallel_process_group=dist.group.WORLD)
        sharder = ModelSharder(model, None, config_of_group)
        sharder.shard(materialize=False)
        model = sharder.model
        assert all(param.is_meta for param in model.parameters())
        weights.materialize(model, {"tp": rank})
        with LazyInitContext(seed=3):
            at_once = cls(config)
        at_once = ShardFormer(config_of_group).shard_model(at_once)
        for one, other in zip(model.parameters(), at_once.parameters(), strict=True):
            assert torch.equal(one, other)
        full = dict(whole.named_parameters())
        for name, param in model.named_parameters():
            spec = get_spec(param)
            assert torch.equal(param, spec.shard(full[spec.name].detach(), rank)), name
        ids = torch.randint(0, 77, (2, 8), generator=torch.Generator().manual_seed(1))
        want = whole.eval()(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(model.eval()(input_ids=ids, labels=ids).loss, want, rtol=1e-5, atol=1e-5)


def test_shards_are_slices_of_the_whole_model() -> None:
    run_ranks(_shards_are_slices, 2)
