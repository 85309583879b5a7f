"""Fine-tune a BERT (or ALBERT, for the plugins without tensor parallelism and pipelines) to classify sentence pairs.

    python examples/bert/finetune.py --plugin torch_ddp --tiny
    torchrun --nproc-per-node 4 examples/bert/finetune.py --plugin hybrid_parallel --tiny
    torchrun --nproc-per-node 8 examples/bert/finetune.py --plugin hybrid_parallel --model bert-base-uncased --task mrpc

Without --model a small model is built from its configuration and the sentence pairs are made up, so that nothing is
downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from data import GlueDataBuilder
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, get_linear_schedule_with_warmup

import shardwright
from shardwright.accelerator import get_accelerator
from shardwright.booster import Booster
from shardwright.cluster import DistCoordinator
from shardwright.optim import HybridAdam
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin

WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.1
PLUGINS = ("torch_ddp", "torch_ddp_fp16", "torch_fsdp", "low_level_zero", "hybrid_parallel")


def move_to_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(get_accelerator().get_current_device()) for name, tensor in batch.items()}


def make_plugin(args: argparse.Namespace) -> Plugin:
    match args.plugin:
        case "torch_ddp" | "torch_ddp_fp16":
            return TorchDDPPlugin()
        case "torch_fsdp":
            return TorchFSDPPlugin(
                mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            )
        case "low_level_zero":
            return LowLevelZeroPlugin(initial_scale=2**5)
        case "hybrid_parallel":
            return HybridParallelPlugin(
                tp_size=args.tp,
                pp_size=args.pp,
                num_microbatches=None,
                pp_style="interleaved",
                num_model_chunks=2,
                microbatch_size=args.batch_size // 2,
                enable_all_optimization=True,
                zero_stage=1,
                precision=args.precision,
                initial_scale=1,
            )
    raise ValueError(f"plugin={args.plugin!r} is not one of {', '.join(PLUGINS)}")


def train_epoch(
    epoch: int,
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[[Any, Any], torch.Tensor],
    lr_scheduler: Any,
    dataloader: DataLoader,
    booster: Booster,
    coordinator: DistCoordinator,
) -> float | None:
    """Returns the last loss, on the ranks that compute it."""
    use_pipeline = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1
    shows = coordinator.is_master()
    if use_pipeline:
        shows = coordinator.is_last_process() and booster.plugin.stage_manager.is_last_stage(ignore_chunk=True)
    model.train()
    batches: Iterator[Any] = iter(dataloader)
    last = None
    with tqdm(range(len(dataloader)), desc=f"Epoch [{epoch + 1}]", disable=not shows) as bar:
        for _ in bar:
            if use_pipeline:
                outputs = booster.execute_pipeline(batches, model, criterion, optimizer, return_loss=True)
                if booster.plugin.stage_manager.is_last_stage(ignore_chunk=True):
                    last = outputs["loss"].item()
            else:
                batch = move_to_device(next(batches))
                loss = criterion(model(**batch), batch)
                booster.backward(loss, optimizer)
                last = loss.item()
            if last is not None:
                bar.set_postfix({"loss": last})
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
    return last


@torch.no_grad()
def evaluate(
    model: nn.Module, criterion: Callable[[Any, Any], torch.Tensor], dataloader: DataLoader, booster: Booster
) -> tuple[float, float]:
    """Accuracy and F1 of class 1 over the validation data of all ranks, on every rank."""
    model.eval()
    # right, all, right about class 1, said or is class 1
    counts = torch.zeros(4, device=get_accelerator().get_current_device())
    plugin = booster.plugin
    batches: Iterator[Any] = iter(dataloader)
    for _ in range(len(dataloader)):
        batch = move_to_device(next(batches))
        if isinstance(plugin, HybridParallelPlugin) and plugin.pp_size > 1:
            outputs = booster.execute_pipeline(iter([batch]), model, criterion, return_loss=True, return_outputs=True)[
                "outputs"
            ]
            if plugin.stage_manager.is_last_stage(ignore_chunk=True):
                count(outputs["logits"], batch, counts)
        else:
            count(model(**batch).logits, batch, counts)
    if isinstance(plugin, HybridParallelPlugin):
        # Tensor parallel ranks saw the same batches, data parallel ranks different ones; stages before the last counted
        # nothing.
        dist.all_reduce(counts, group=plugin.dp_group)
        dist.broadcast(counts, src=plugin.pg_mesh.get_ranks_in_group(plugin.pp_group)[-1], group=plugin.pp_group)
    else:
        dist.all_reduce(counts)
    right, everything, positive, either = counts.tolist()
    return right / everything, 2 * positive / max(either, 1)


def count(logits: torch.Tensor, batch: dict[str, torch.Tensor], counts: torch.Tensor) -> None:
    said, labels = logits.argmax(dim=-1), batch["labels"]
    counts[0] += (said == labels).sum()
    counts[1] += len(labels)
    counts[2] += ((said == 1) & (labels == 1)).sum()
    counts[3] += (said == 1).sum() + (labels == 1).sum()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", choices=PLUGINS, default="torch_ddp")
    parser.add_argument("--task", default="mrpc", help="GLUE task")
    parser.add_argument("--model", help="name or directory of a pretrained model; without it a small one is built")
    parser.add_argument("--tiny", action="store_true", help="a model and a data set for trying things out on a CPU")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--precision", default="bf16", help="of hybrid_parallel: fp32, fp16 or bf16")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of one data-parallel rank")
    parser.add_argument("--lr", type=float, default=2.4e-5)
    parser.add_argument(
        "--model_type", "--model-type", choices=["bert", "albert"], default="bert", help="of a model that is built"
    )
    parser.add_argument("--target-accuracy", type=float, help="fail below it")
    parser.add_argument("--target_f1", "--target-f1", type=float, help="fail below it")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()

    plugin = make_plugin(args)
    booster = Booster(plugin=plugin, mixed_precision="fp16" if args.plugin == "torch_ddp_fp16" else None)
    sizes = {"length": 24, "pairs": 128, "vocabulary": 60} if args.tiny else {}
    data = GlueDataBuilder(plugin, args.task, args.batch_size, tokenizer=args.model, **sizes)
    train_dataloader, validation_dataloader = data.train_dataloader(), data.validation_dataloader()

    if args.model:
        config = AutoConfig.from_pretrained(args.model, num_labels=data.num_labels)
        model = AutoModelForSequenceClassification.from_pretrained(args.model, config=config)
    else:
        hidden, layers = (64, 4) if args.tiny else (256, 8)
        config = AutoConfig.for_model(
            args.model_type,
            vocab_size=data.vocabulary,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_labels=data.num_labels,
        )
        model = AutoModelForSequenceClassification.from_config(config)

    no_decay = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": WEIGHT_DECAY},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = HybridAdam(groups, lr=args.lr, eps=1e-8)
    total_steps = len(train_dataloader) * args.epochs
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, int(WARMUP_FRACTION * total_steps), total_steps)

    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        return outputs.loss

    model, optimizer, criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=criterion, lr_scheduler=lr_scheduler
    )
    for epoch in range(args.epochs):
        train_epoch(epoch, model, optimizer, criterion, lr_scheduler, train_dataloader, booster, coordinator)
    accuracy, f1 = evaluate(model, criterion, validation_dataloader, booster)
    coordinator.print_on_master(f"accuracy {accuracy:.3f}, f1 {f1:.3f}")
    for name, found, target in (("accuracy", accuracy, args.target_accuracy), ("f1", f1, args.target_f1)):
        if target is not None and found < target:
            raise SystemExit(f"{name} {found:.3f} is below {target}")


if __name__ == "__main__":
    main()
