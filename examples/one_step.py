"""One training step of a model that sees: BLIP-2, which describes images, or SAM, which cuts things out of them.

    python examples/one_step.py --tiny
    torchrun --nproc-per-node 2 examples/one_step.py --tiny --family sam --tp 2
    torchrun --nproc-per-node 4 examples/one_step.py --tiny --family blip2 --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/one_step.py --family blip2 --pp 4 --tp 2

Images and words are random: this shows that the towers of a model with several of them are sharded and cut into stages
like any other layers, and how a batch of it looks. SAM has no loss of its own, so its criterion stands here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _shared import hybrid_plugin, options
from transformers import (
    AutoConfig,
    Blip2Config,
    Blip2ForConditionalGeneration,
    SamConfig,
    SamModel,
)

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.lazy import LazyInitContext
from shardwright.optim import HybridAdam

HUB = {"blip2": "Salesforce/blip2-opt-2.7b", "sam": "facebook/sam-vit-base"}
TOWER = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SEEN = {**TOWER, "image_size": 32, "patch_size": 8}


def tiny_config(family: str) -> Any:
    if family == "sam":
        decoder = {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
        return SamConfig(
            vision_config={**SEEN, "mlp_dim": 128, "output_channels": 32, "num_pos_feats": 16, "window_size": 2},
            prompt_encoder_config={"hidden_size": 32, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
            mask_decoder_config=decoder,
        )
    words = {"vocab_size": 101, "word_embed_proj_dim": 64, "ffn_dim": 128, "dropout": 0.0}
    between = {"intermediate_size": 128, "encoder_hidden_size": 64, "vocab_size": 101}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Blip2Config(
        vision_config={**SEEN, "intermediate_size": 128},
        qformer_config={**TOWER, **between, **dropout},
        text_config={"model_type": "opt", **TOWER, **words},
        num_query_tokens=4,
        image_token_index=100,
    )


def blip2_batch(config: Any, samples: int) -> dict[str, torch.Tensor]:
    """An image, then a text about it. Places in the text stand for what the queries found in the image."""
    side, words = config.vision_config.image_size, config.text_config.vocab_size
    text = torch.randint(4, words - 1, (samples, 12))
    seen = torch.full((samples, config.num_query_tokens), config.image_token_index)
    ids = torch.cat([seen, text], dim=1)
    labels = torch.cat([torch.full_like(seen, -100), text], dim=1)
    mask = torch.ones_like(ids)
    return {
        "pixel_values": torch.randn(samples, 3, side, side),
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
    }


def sam_batch(config: Any, samples: int) -> dict[str, torch.Tensor]:
    """An image, a point in it, and the mask of what lies there."""
    side = config.vision_config.image_size
    point = torch.randint(side, (samples, 1, 1, 2)).float()
    small = 4 * side // config.vision_config.patch_size  # of the masks that the model draws
    rows, columns = torch.meshgrid(torch.arange(small), torch.arange(small), indexing="ij")
    x, y = (point[:, 0, 0] * small / side).unbind(-1)
    disc = (columns - x[:, None, None]) ** 2 + (rows - y[:, None, None]) ** 2 < (small / 4) ** 2
    return {"pixel_values": torch.randn(samples, 3, side, side), "input_points": point, "truth": disc.float()}


def mask_loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the first of the masks that SAM proposes [samples, points, proposals, height, width]."""
    return F.binary_cross_entropy_with_logits(outputs.pred_masks[:, 0, 0], batch["truth"])


def main(argv: Sequence[str] | None = None) -> None:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--family", choices=sorted(HUB), default="blip2")
    args = options(__doc__, argv, extra, steps=1, batch_size=4, lr=1e-4, tiny={"steps": 1})
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    name = args.model or HUB[args.family]
    config: Any = tiny_config(args.family) if args.tiny else AutoConfig.from_pretrained(name)
    kind: Any = {"blip2": Blip2ForConditionalGeneration, "sam": SamModel}[args.family]
    if args.tiny:
        model = kind(config)
        if args.family == "blip2":  # new queries are zeros, which norms turn into enormous gradients
            torch.nn.init.normal_(model.query_tokens, std=0.02)
    else:
        with LazyInitContext():
            model = kind.from_pretrained(name)
    made: Any = {"blip2": blip2_batch, "sam": sam_batch}[args.family]
    criterion = mask_loss if args.family == "sam" else None  # None: the loss is the model's own

    plugin = hybrid_plugin(args, example_inputs=made(config, args.batch_size))
    optimizer: Any = HybridAdam(model.parameters(), lr=args.lr)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    coordinator.print_on_master(plugin.layout)

    torch.manual_seed(42 + plugin.data_parallel[1])  # images and words of their own for each data-parallel rank
    batch = made(config, args.batch_size)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.step()
        norm = optimizer.get_grad_norm()
        optimizer.zero_grad()
        if coordinator.is_last_process():
            print(f"step {step}: loss {result['loss'].item():.4f}, gradient norm {float(norm):.4f}")


if __name__ == "__main__":
    main()
