"""Models that bring dtypes of their own to a run in bf16, against one process."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    XGLMConfig,
    XGLMForCausalLM,
)

from shardwright import Booster
from shardwright.plugins import LowLevelZeroPlugin
from shardwright.testing import run_ranks


def models() -> list[nn.Module]:
    """Sinusoidal tables that are no weights and are added to embeddings; routers that cast theirs to fp32."""
    torch.manual_seed(0)
    small = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    small |= {
        f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("ffn_dim", 48), ("layerdrop", 0))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return [
        M2M100ForConditionalGeneration(M2M100Config(**small, **heads, dropout=0)),
        XGLMForCausalLM(XGLMConfig(vocab_size=64, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, dropout=0)),
        NllbMoeForConditionalGeneration(
            NllbMoeConfig(
                **small,
                **heads,
                num_experts=4,
                encoder_sparse_step=2,
                decoder_sparse_step=2,
                dropout=0,
                moe_token_dropout=0,
            )
        ),
        SwitchTransformersForConditionalGeneration(
            SwitchTransformersConfig(
                vocab_size=64,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                num_experts=2,
                num_sparse_encoder_layers=1,
                num_sparse_decoder_layers=1,
                decoder_start_token_id=0,
                dropout_rate=0,
                router_jitter_noise=0,
            )
        ),
    ]


def train(rank: int, world: int) -> None:
    for stage in (1, 3):
        for plain, model in zip(models(), models(), strict=True):
            plain = plain.to(torch.bfloat16)
            theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
            booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="bf16"))
            boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.05))
            for step in range(3):
                ids = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(step))
                shares = ids.chunk(world)
                wanted = [plain(input_ids=share, labels=share).loss for share in shares]
                loss = boosted(input_ids=shares[rank], labels=shares[rank]).loss
                assert abs(float(loss) - float(wanted[rank])) < 0.05, (type(model).__name__, stage, step)
                booster.backward(loss, optimizer)
                torch.stack(wanted).mean().backward()
                for each in (optimizer, theirs):
                    each.step()
                    each.zero_grad()


def test_tables_and_routers_of_models_train_in_bf16() -> None:
    run_ranks(train, 2, timeout=100)
