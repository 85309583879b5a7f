"""Fine-tune BERT (or ALBERT) on a task of GLUE, with one plugin or several that are compared.

    python examples/bert/finetune.py --plugin torch_ddp --tiny
    torchrun --nproc-per-node 4 examples/bert/finetune.py --plugin hybrid_parallel --tiny
    torchrun --nproc-per-node 4 examples/bert/finetune.py --plugin torch_ddp hybrid_parallel --tiny
    torchrun --nproc-per-node 8 examples/bert/finetune.py --plugin torch_ddp hybrid_parallel --target_f1 0.86

The last one is the recipe: bert-base-uncased on MRPC for three epochs, trained twice, with the same samples in every
step. Each must come to an F1 of 0.86, else the script fails. With --tiny a small model is built from its configuration
and the sentence pairs are made up, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from data import FIELDS, GlueDataBuilder
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
from shardwright.utils.options import count, pretrained, rate, refused_in_a_line, share

WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.1
HUB = {"bert": "google-bert/bert-base-uncased", "albert": "albert/albert-base-v2"}
PLUGINS = ("torch_ddp", "torch_ddp_fp16", "torch_fsdp", "low_level_zero", "hybrid_parallel")


def move_to_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(get_accelerator().get_current_device()) for name, tensor in batch.items()}


def make_plugin(name: str, args: argparse.Namespace) -> Plugin:
    match name:
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
                num_microbatches=2 * args.pp if args.pp > 1 else 1,
                pp_style="interleaved",
                num_model_chunks=2,
                enable_all_optimization=True,
                zero_stage=1,
                precision=args.precision,
                initial_scale=1,
            )
    raise ValueError(f"plugin={name!r} is not one of {', '.join(PLUGINS)}")


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
    use_pipeline = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1
    for batch in dataloader:
        batch = move_to_device(batch)
        if use_pipeline:
            outputs = booster.execute_pipeline(iter([batch]), model, criterion, return_loss=False, return_outputs=True)[
                "outputs"
            ]
        else:
            outputs = model(**batch)
        if outputs is not None:  # in a pipeline they are on the last stage
            add_up(outputs["logits"], batch, counts)
    # Data-parallel ranks saw different batches. Tensor-parallel ones saw the same, which cancels out in shares.
    dist.all_reduce(counts)
    right, everything, positive, either = counts.tolist()
    return right / everything, 2 * positive / max(either, 1)


def add_up(logits: torch.Tensor, batch: dict[str, torch.Tensor], counts: torch.Tensor) -> None:
    labels = batch["labels"]
    said, labels = logits.argmax(dim=-1)[labels >= 0], labels[labels >= 0]
    counts[0] += (said == labels).sum()
    counts[1] += len(labels)
    counts[2] += ((said == 1) & (labels == 1)).sum()
    counts[3] += (said == 1).sum() + (labels == 1).sum()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", choices=PLUGINS, nargs="+", default=["torch_ddp"], help="several are compared")
    parser.add_argument("--task", choices=list(FIELDS), default="mrpc", help="GLUE task")
    parser.add_argument("--model", type=pretrained, help="name on the hub, or directory; left out: the base size")
    parser.add_argument("--model_type", "--model-type", choices=list(HUB), default="bert")
    parser.add_argument("--tiny", action="store_true", help="a small new model and made-up pairs, for a CPU")
    parser.add_argument("--tp", type=count, default=2)
    parser.add_argument("--pp", type=count, default=2)
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="bf16", help="of hybrid_parallel")
    parser.add_argument("--epochs", type=count, default=3)
    parser.add_argument("--batch-size", type=count, default=32, help="of one rank; see compared_batch_size")
    parser.add_argument("--lr", type=rate, default=2.4e-5)
    parser.add_argument("--target-accuracy", type=share, help="fail below it")
    parser.add_argument("--target_f1", "--target-f1", type=share, help="fail below it")
    given = parser.parse_known_args(argv)[0]
    if given.tiny and given.model:
        parser.error(f"--model {given.model}: --tiny makes a small model of its own; leave out one of them")
    if given.tiny:
        # of all ranks together 8, so that three epochs of so few pairs are steps enough on any number of them
        parser.set_defaults(lr=2e-3, batch_size=max(8 // int(os.environ.get("WORLD_SIZE", "1")), 1))
    return parser.parse_args(argv)


def compared_batch_size(plugin: Plugin, args: argparse.Namespace) -> int:
    """Of one data-parallel rank. Plugins that are compared take the same samples in a step, however many data-parallel
    ranks each makes of the world.
    """
    if len(args.plugin) == 1:
        return args.batch_size
    replicas, _ = plugin.data_parallel
    return args.batch_size * dist.get_world_size() // replicas


def run(name: str, args: argparse.Namespace, coordinator: DistCoordinator) -> tuple[float, float]:
    """Accuracy and F1 of a model that was trained with the plugin of this name."""
    get_accelerator().manual_seed(42)
    with refused_in_a_line():
        plugin = make_plugin(name, args)
    booster = Booster(plugin=plugin, mixed_precision="fp16" if name == "torch_ddp_fp16" else None)
    pretrained = None if args.tiny else args.model or HUB[args.model_type]
    sizes = {"length": 24, "pairs": 128, "vocabulary": 60} if args.tiny else {}
    data = GlueDataBuilder(plugin, args.task, compared_batch_size(plugin, args), tokenizer=pretrained, **sizes)
    with refused_in_a_line():  # batches that are larger than the data
        train_dataloader, validation_dataloader = data.train_dataloader(), data.validation_dataloader()

    if pretrained is None:
        config = AutoConfig.for_model(
            args.model_type,
            vocab_size=data.vocabulary,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_labels=data.num_labels,
            hidden_dropout_prob=0.0,  # so that all layouts come to the same scores
            attention_probs_dropout_prob=0.0,
        )
        model: Any = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(pretrained, num_labels=data.num_labels)

    no_decay = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": WEIGHT_DECAY},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer: Any = HybridAdam(groups, lr=args.lr, eps=1e-8)
    total_steps = len(train_dataloader) * args.epochs
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, int(WARMUP_FRACTION * total_steps), total_steps)

    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        return outputs.loss

    model, optimizer, criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=criterion, lr_scheduler=lr_scheduler
    )
    for epoch in range(args.epochs):
        train_epoch(epoch, model, optimizer, criterion, lr_scheduler, train_dataloader, booster, coordinator)
    return evaluate(model, criterion, validation_dataloader, booster)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    shardwright.launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    scores = {}
    for name in args.plugin:
        scores[name] = run(name, args, coordinator)
        accuracy, f1 = scores[name]
        coordinator.print_on_master(f"{name}: accuracy {accuracy:.3f}, f1 {f1:.3f}")
    if len(scores) > 1:
        spread = [max(values) - min(values) for values in zip(*scores.values(), strict=True)]
        coordinator.print_on_master(f"apart by: accuracy {spread[0]:.3f}, f1 {spread[1]:.3f}")
    for name, (accuracy, f1) in scores.items():
        for what, found, target in (("accuracy", accuracy, args.target_accuracy), ("f1", f1, args.target_f1)):
            if target is not None and found < target:
                raise SystemExit(f"{name}: {what} {found:.3f} is below {target}")


if __name__ == "__main__":
    main()
