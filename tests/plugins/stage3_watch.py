"""What gathers at ZeRO stage 3, and the Llama that tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.zero.sharded_bucket import ShardedBucket


def build(recompute: bool | None = None, tied: bool = False) -> nn.Module:
    """`recompute`: layers are computed again in backward, True: by reentrant checkpoints."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).double()
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    return model.train()


def usual(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Watch:
    """Bytes that are gathered, and in which order units come and go, by the name of their first parameter."""

    def __init__(self) -> None:
        self.bytes = self.most = 0
        self.events: list[tuple[str, str]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        start, free = ShardedBucket.start_gather, ShardedBucket.free

        def started(bucket: ShardedBucket, group: Any) -> None:
            self.bytes += bucket.plan.numel * bucket.dtype.itemsize
            self.most = max(self.most, self.bytes)
            self.events.append(("gather", bucket.plan.slots[0].entry.name))
            start(bucket, group)

        def freed(bucket: ShardedBucket) -> None:
            if bucket.filled:
                self.bytes -= bucket.plan.numel * bucket.dtype.itemsize
                self.events.append(("free", bucket.plan.slots[0].entry.name))
            free(bucket)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardedBucket, "start_gather", started)
            patch.setattr(ShardedBucket, "free", freed)
            yield
