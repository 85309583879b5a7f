"""Fine-tune a vision transformer to classify images, and count how many it gets right.

    python examples/vit_classify.py --tiny
    torchrun --nproc-per-node 4 examples/vit_classify.py --tiny --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/vit_classify.py --steps 500 --output trained

Evaluation goes through the pipeline, too: `execute_pipeline` without an optimizer, with outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from _shared import endless, hybrid_plugin, options
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.optim.lr_scheduler import CosineAnnealingWarmupLR
from shardwright.utils import get_current_device

SIDE = 32  # of made-up images


def made_up_images(count: int, seed: int) -> list[dict[str, Any]]:
    """Noise that is a little red, green, blue, or none of them; the class is which."""
    generator = torch.Generator().manual_seed(seed)
    images, classes = torch.randn(count, 3, SIDE, SIDE, generator=generator), torch.arange(count) % 4
    tints = torch.eye(4)[:, :3, None, None]
    return [
        {"pixel_values": image + tints[label], "labels": label} for image, label in zip(images, classes, strict=True)
    ]


def beans(name: str, split: str) -> list[dict[str, Any]]:
    """Leaves of bean plants, healthy or with one of two diseases, from the hub."""
    import datasets

    processor = AutoImageProcessor.from_pretrained(name)
    rows = datasets.load_dataset("AI-Lab-Makerere/beans", split=split)
    return [
        {
            "pixel_values": processor(row["image"].convert("RGB"), return_tensors="pt")["pixel_values"][0],
            "labels": torch.tensor(row["labels"]),
        }
        for row in rows
    ]


@torch.no_grad()
def accuracy(booster: Booster, model: Any, dataloader: Any) -> float:
    """Share of the samples that are classified right, on every rank."""
    model.eval()
    counts = torch.zeros(2, device=get_current_device())  # right, all
    for batch in dataloader:
        result = booster.execute_pipeline(iter([batch]), model, return_outputs=True)
        if result["outputs"] is not None:  # on the last stage
            said = result["outputs"].logits.argmax(-1)
            counts += torch.stack([(said == batch["labels"].to(said.device)).sum(), torch.tensor(len(said))]).to(counts)
    dist.all_reduce(counts)  # tensor-parallel ranks count the same samples, which cancels out in the share
    return (counts[0] / counts[1]).item()


def main(argv: Sequence[str] | None = None) -> None:
    args = options(
        __doc__,
        argv,
        model="google/vit-base-patch16-224-in21k",
        batch_size=32,
        tiny={"steps": 20, "batch_size": 16, "lr": 1e-3},
    )
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    if args.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        model: Any = ViTForImageClassification(ViTConfig(image_size=SIDE, patch_size=8, num_labels=4, **sizes))
        train, validation = made_up_images(256, seed=0), made_up_images(64, seed=1)
    else:
        model = AutoModelForImageClassification.from_pretrained(args.model, num_labels=3)
        train, validation = beans(args.model, "train"), beans(args.model, "validation")

    optimizer = HybridAdam(model.parameters(), lr=args.lr, weight_decay=0.01)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)
    plugin = hybrid_plugin(args)
    train_loader = plugin.prepare_dataloader(train, batch_size=args.batch_size, shuffle=True, drop_last=True)
    validation_loader = plugin.prepare_dataloader(validation, batch_size=args.batch_size)
    booster = Booster(plugin=plugin)
    model, optimizer, _, train_loader, lr_scheduler = booster.boost(
        model, optimizer, dataloader=train_loader, lr_scheduler=lr_scheduler
    )

    model.train()
    batches = endless(train_loader)
    for step in range(1, args.steps + 1):
        result = booster.execute_pipeline(batches, model, optimizer=optimizer)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        if coordinator.is_last_process():
            print(f"step {step}: loss {result['loss'].item():.4f}")
    right = accuracy(booster, model, validation_loader)
    coordinator.print_on_master(f"accuracy {right:.3f}")
    if args.output:
        booster.save_model(model, args.output, shard=True)


if __name__ == "__main__":
    main()
