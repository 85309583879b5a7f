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
from ...cluster import DistCoordinator, launch
from ...lazy import LazyInitContext
from ...pipeline.snapshots import Camera
from ...trainer.progress import peak_memory
from ...utils.device import get_current_device
from .console import Console
from .grammar import IDS, WORDS, Grammar, Step, entropy
from .layout import Layout
from .records import Evaluation, History, StepRecord
from .settings import COMPARED, DemoSettings

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
        num_hidden_layers=settings.layers,
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
    device = get_current_device().type
    text = GrammarText("train", settings.steps * settings.batch_size, settings.sequence_length, settings.seed)
    held_out = GrammarText("held-out", settings.held_out_sequences, settings.sequence_length, settings.seed)

    run = Run(settings, settings.layout(device), text)
    batches_of_checks = run.loader(held_out)
    history = History(settings, run.layout, run.parameters, lowest_loss=held_out.lowest_loss())
    console.introduce(history)
    camera = Camera(run.model.executor, SNAPSHOTS, skip=max(0, settings.steps - SNAPSHOTS))
    with console.progress(settings.steps) as progress:
        started = time.perf_counter()
        history.evaluations.append(Evaluation(0, run.evaluate(batches_of_checks)))
        for step in range(1, settings.steps + 1):
            step_started = time.perf_counter()
            with camera.watching():
                loss, norm, rate = run.train_step()
            seconds, tokens = time.perf_counter() - step_started, settings.tokens_per_step
            memory = peak_memory() / 2**30
            history.steps.append(StepRecord(step, loss, norm, rate, tokens / seconds, seconds, step * tokens, memory))
            if step % max(1, settings.steps // 10) == 0 or step == settings.steps:
                history.evaluations.append(Evaluation(step, run.evaluate(batches_of_checks)))
            progress.advance(history)
    history.seconds = time.perf_counter() - started
    _note(history, run, camera)
    run.booster.save_model(run.model, str(settings.output / "model"), shard=True)
    for style in settings.styles[1:]:
        _compare(history, Run(settings, settings.layout(device, style), text))

    if coordinator.is_master():
        # Only now, so that every rank's start does not pay for what one rank needs at the end.
        from .results import save_tokenizer, write_results

        save_tokenizer(settings.output / "model")
        write_results(history)
        console.conclude(history)
    coordinator.block_all()


def check(settings: DemoSettings) -> None:
    """ValueError for a layout that cannot be, found out by one process before ranks start."""
    for style in settings.styles:
        launch(0, settings.world_size, None, None, backend="fake")
        try:
            layout = settings.layout("cpu", style)
            if len(settings.styles) > 1 and layout.pp == 1:
                raise ValueError(f"--pp-style {','.join(settings.styles)} needs a pipeline; say --pp 2")
            if settings.styles != DemoSettings.styles and layout.pp == 1:
                raise ValueError(f"--pp-style {style} needs a pipeline; say --pp 2")
            with LazyInitContext():
                model: Any = build_model(settings)
            optimizer = torch.optim.AdamW(model.parameters())
            layout.plugin().preflight(model, optimizer, settings.batch_size // layout.dp, settings.sequence_length)
        finally:
            dist.destroy_process_group()


def _compare(history: History, run: Run) -> None:
    """Some steps of the same training under another schedule, whose losses must be the same."""
    steps = min(COMPARED, history.settings.steps)
    camera = Camera(run.model.executor, SNAPSHOTS, skip=max(0, steps - SNAPSHOTS))
    losses = []
    for _ in range(steps):
        with camera.watching():
            losses.append(run.train_step()[0])
    apart = [abs(loss - record.loss) for loss, record in zip(losses, history.steps, strict=False)]
    history.apart[run.layout.pp_style] = max(apart)
    _note(history, run, camera)


def _note(history: History, run: Run, camera: Camera) -> None:
    timeline = camera.typical()
    if timeline is not None:
        history.timelines[run.layout.pp_style] = timeline


class Run:
    """A boosted model on its way, from the same weights over the same batches at every layout."""

    def __init__(self, settings: DemoSettings, layout: Layout, text: GrammarText) -> None:
        self.settings, self.layout, self.device = settings, layout, get_current_device()
        model: Any = build_model(settings)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.01)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_then_cosine(settings.steps))
        self.plugin = layout.plugin()
        self.booster = Booster(plugin=self.plugin)
        batches = self.loader(text, shuffle=True, seed=settings.seed, drop_last=True)
        boosted: Any = self.booster.boost(model, optimizer, None, batches, schedule)
        self.model, self.optimizer, _, batches, self.schedule = boosted
        self.batches: Iterator[Batch] = iter(batches)

    def loader(self, text: GrammarText, **options: Any) -> Any:
        return self.plugin.prepare_dataloader(text, batch_size=self.settings.batch_size // self.layout.dp, **options)

    def train_step(self) -> tuple[float, float, float]:
        """One optimizer step on the next batch; returns the loss of the whole batch, the gradient's norm before
        clipping and the learning rate.
        """
        result = self.booster.execute_pipeline(self.batches, self.model, model_loss, self.optimizer)
        self.optimizer.step()
        norm, rate = self.optimizer.get_grad_norm(), self.optimizer.param_groups[0]["lr"]
        self.optimizer.zero_grad()
        self.schedule.step()
        return self._tell_all(result["loss"]), float(norm), rate

    @torch.no_grad()
    def evaluate(self, batches: Any) -> float:
        """Mean held-out loss; all batches have the same number of tokens."""
        self.model.eval()
        supply = iter(batches)
        losses = [self.booster.execute_pipeline(supply, self.model, model_loss)["loss"] for _ in range(len(batches))]
        self.model.train()
        return self._tell_all(None if losses[0] is None else torch.stack(losses).mean())

    def _tell_all(self, loss: torch.Tensor | None) -> float:
        """It is known where the last stage is."""
        shared = torch.zeros(2, dtype=torch.float64, device=self.device)
        if loss is not None:
            shared[0], shared[1] = loss.detach().double(), 1.0
        dist.all_reduce(shared)
        return (shared[0] / shared[1]).item()


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
