"""What every rank of the demo does: build, boost, train, save."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import shardwright
from shardwright.booster import Booster
from shardwright.cli.demo.console import Console
from shardwright.cli.demo.grammar import IDS, WORDS, Grammar, Step, entropy
from shardwright.cli.demo.layout import Layout
from shardwright.cli.demo.records import Evaluation, History, StepRecord
from shardwright.cli.demo.settings import DemoSettings
from shardwright.cluster import DistCoordinator
from shardwright.utils.device import get_current_device

Batch = Mapping[str, torch.Tensor]


class GrammarText(Dataset[dict[str, torch.Tensor]]):
    """Sequence `index` of the text, written when it is asked for; `split` keeps training and held-out text apart."""

    def __init__(self, split: str, sequences: int, length: int, seed: int) -> None:
        self.split, self.sequences, self.length, self.seed = split, sequences, length, seed

    def __len__(self) -> int:
        return self.sequences

    def steps(self, index: int) -> list[Step]:
        return Grammar(random.Random(f"{self.split}-{self.seed}-{index}")).text(self.length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([IDS[step.word] for step in self.steps(index)])
        return {"input_ids": ids, "labels": ids.clone()}

    def lowest_loss(self) -> float:
        return sum(entropy(self.steps(index)) for index in range(self.sequences)) / self.sequences


def build_model(settings: DemoSettings) -> LlamaForCausalLM:
    """A Llama of about 0.7 million parameters, built from its configuration; nothing is downloaded."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * settings.sequence_length,
        bos_token_id=IDS["."],
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(config)


def train(settings: DemoSettings) -> None:
    disable_progress_bar()  # of transformers' loading and saving: there is one bar here, and it is ours
    shardwright.launch_from_torch(seed=settings.seed)
    coordinator = DistCoordinator()
    console = Console(enabled=coordinator.is_master())
    device = get_current_device()
    layout = Layout.for_world(settings.world_size, settings.batch_size, device.type)

    text = GrammarText("train", settings.steps * settings.batch_size, settings.sequence_length, settings.seed)
    held_out = GrammarText("held-out", settings.held_out_sequences, settings.sequence_length, settings.seed)
    model: Any = build_model(settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_then_cosine(settings.steps))
    plugin = layout.plugin()
    batches: Any = plugin.prepare_dataloader(
        text, batch_size=settings.batch_size // layout.dp, shuffle=True, seed=settings.seed, drop_last=True
    )
    checks: Any = plugin.prepare_dataloader(held_out, batch_size=settings.batch_size // layout.dp)
    booster = Booster(plugin=plugin)
    model, optimizer, _, batches, schedule = booster.boost(model, optimizer, None, batches, schedule)

    history = History(settings, layout, parameters, lowest_loss=held_out.lowest_loss())
    console.introduce(history)
    with console.progress(settings.steps) as progress:
        started = time.perf_counter()
        history.evaluations.append(Evaluation(0, evaluate(model, checks, device)))
        for step, batch in enumerate(batches, start=1):
            step_started = time.perf_counter()
            loss, norm = train_step(booster, model, optimizer, _to(device, batch))
            rate = optimizer.param_groups[0]["lr"]
            schedule.step()
            now = time.perf_counter()
            history.steps.append(StepRecord(step, loss, norm, rate, settings.tokens_per_step / (now - step_started), now - started))
            if step % max(1, settings.steps // 10) == 0 or step == settings.steps:
                history.evaluations.append(Evaluation(step, evaluate(model, checks, device)))
            progress.advance(history)
    history.seconds = time.perf_counter() - started

    if coordinator.is_master():
        # Only now, so that every rank's start does not pay for what one rank needs at the end.
        from shardwright.cli.demo.results import save_tokenizer, write_results

        directory = settings.output / "model"
        model.unwrap().save_pretrained(directory)
        save_tokenizer(directory)
        write_results(history)
        console.conclude(history)
    coordinator.block_all()


def train_step(booster: Booster, model: Any, optimizer: Any, batch: Batch) -> tuple[float, float]:
    """One optimizer step on this rank's part of the batch; returns the loss of the whole batch and the gradient's norm."""
    loss = model(**batch, use_cache=False).loss
    booster.backward(loss, optimizer)
    norm = optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return _mean_over_ranks(loss.detach()), float(norm)


@torch.no_grad()
def evaluate(model: Any, batches: Any, device: torch.device) -> float:
    """Mean held-out loss. All sequences have the same length and all ranks the same number of them, so means can be averaged."""
    model.eval()
    losses = [model(**_to(device, batch), use_cache=False).loss for batch in batches]
    model.train()
    return _mean_over_ranks(torch.stack(losses).mean())


def _mean_over_ranks(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def _to(device: torch.device, batch: Batch) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _warm_up_then_cosine(steps: int) -> Any:
    """Factor on the learning rate: linear over the first 5 %, then half a cosine down to a twentieth."""
    warm_up = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    return factor
