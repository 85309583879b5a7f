"""What every rank of the demo does: build, boost, train, save."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import shardwright

from ...booster import Booster
from ...cluster import DistCoordinator
from ...pipeline.snapshots import Camera
from ...utils.device import get_current_device
from .console import Console
from .grammar import IDS, WORDS, Grammar, Step, entropy
from .layout import Layout
from .records import Evaluation, History, StepRecord
from .settings import DemoSettings

Batch = Mapping[str, torch.Tensor]
SNAPSHOTS = 9  # steps at the end whose timeline is recorded


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
    """A Llama of about 0.3 million parameters, built from its configuration; nothing is downloaded."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
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
    layout = Layout.for_world(settings.world_size, settings.batch_size, get_current_device().type)

    text = GrammarText("train", settings.steps * settings.batch_size, settings.sequence_length, settings.seed)
    held_out = GrammarText("held-out", settings.held_out_sequences, settings.sequence_length, settings.seed)
    model: Any = build_model(settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_then_cosine(settings.steps))
    plugin = layout.plugin()
    batch_size = settings.batch_size // layout.dp
    batches: Any = plugin.prepare_dataloader(
        text, batch_size=batch_size, shuffle=True, seed=settings.seed, drop_last=True
    )
    checks: Any = plugin.prepare_dataloader(held_out, batch_size=batch_size)
    booster = Booster(plugin=plugin)
    model, optimizer, _, batches, schedule = booster.boost(model, optimizer, None, batches, schedule)

    history = History(settings, layout, parameters, lowest_loss=held_out.lowest_loss())
    console.introduce(history)
    run = Run(booster, model, optimizer)
    camera = Camera(model.executor, SNAPSHOTS, skip=max(0, settings.steps - SNAPSHOTS))
    supply = iter(batches)
    with console.progress(settings.steps) as progress:
        started = time.perf_counter()
        history.evaluations.append(Evaluation(0, run.evaluate(checks)))
        for step in range(1, settings.steps + 1):
            step_started = time.perf_counter()
            with camera.watching():
                loss, norm = run.train_step(supply)
            rate = optimizer.param_groups[0]["lr"]
            schedule.step()
            now = time.perf_counter()
            history.steps.append(
                StepRecord(step, loss, norm, rate, settings.tokens_per_step / (now - step_started), now - started)
            )
            if step % max(1, settings.steps // 10) == 0 or step == settings.steps:
                history.evaluations.append(Evaluation(step, run.evaluate(checks)))
            progress.advance(history)
    history.seconds = time.perf_counter() - started
    history.timeline = camera.typical()

    booster.save_model(model, str(settings.output / "model"), shard=True)
    if coordinator.is_master():
        # Only now, so that every rank's start does not pay for what one rank needs at the end.
        from .results import save_tokenizer, write_results

        save_tokenizer(settings.output / "model")
        write_results(history)
        console.conclude(history)
    coordinator.block_all()


class Run:
    """A boosted model and how to take steps with it. The loss exists where the last stage is; every rank is told."""

    def __init__(self, booster: Booster, model: Any, optimizer: Any) -> None:
        self.booster, self.model, self.optimizer = booster, model, optimizer
        self.device = get_current_device()

    def train_step(self, batches: Iterator[Batch]) -> tuple[float, float]:
        """One optimizer step on the next batch; returns the loss of the whole batch and the gradient's norm before
        clipping.
        """
        result = self.booster.execute_pipeline(batches, self.model, model_loss, self.optimizer)
        self.optimizer.step()
        norm = self.optimizer.get_grad_norm()
        self.optimizer.zero_grad()
        return self._tell_all(result["loss"]), float(norm)

    @torch.no_grad()
    def evaluate(self, batches: Any) -> float:
        """Mean held-out loss; all batches have the same number of tokens."""
        self.model.eval()
        supply = iter(batches)
        losses = [self.booster.execute_pipeline(supply, self.model, model_loss)["loss"] for _ in range(len(batches))]
        self.model.train()
        return self._tell_all(None if losses[0] is None else torch.stack(losses).mean())

    def _tell_all(self, loss: torch.Tensor | None) -> float:
        """Ranks are laid out so that the last one has the last stage."""
        value = torch.zeros((), device=self.device) if loss is None else loss.detach().float()
        dist.broadcast(value, src=dist.get_world_size() - 1)
        return value.item()


def model_loss(outputs: Any, inputs: Batch) -> torch.Tensor:
    return outputs.loss


def _warm_up_then_cosine(steps: int) -> Any:
    """Factor on the learning rate: linear over the first 5 %, then half a cosine down to a twentieth."""
    warm_up = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    return factor
