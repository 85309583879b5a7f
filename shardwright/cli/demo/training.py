"""What every rank of the demo does: build, boost, train, save."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import shardwright

from ...booster import Booster
from ...cluster import DistCoordinator, launch
from ...lazy import LazyInitContext
from ...trainer.progress import JsonLines, Listener, Log
from ...trainer.trainer import Every, Trainer
from ...utils.device import get_current_device
from .console import Language, conclude
from .grammar import IDS, WORDS, Grammar, Step, entropy
from .layout import Layout
from .records import History
from .settings import COMPARED, DemoSettings

SNAPSHOTS = 9  # steps whose timeline is recorded


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


def train(settings: DemoSettings) -> int:
    """On the ranks that a launcher started; exit status."""
    disable_progress_bar()  # of transformers' loading and saving: there is one bar here, and it is ours
    shardwright.launch_from_torch(seed=settings.seed)
    coordinator = DistCoordinator()
    device, output = get_current_device().type, settings.output
    text = GrammarText("train", settings.steps * settings.batch_size, settings.sequence_length, settings.seed)
    held_out = GrammarText("held-out", settings.held_out_sequences, settings.sequence_length, settings.seed)
    layout = settings.layout(device)
    history = History(settings, layout, lowest_loss=held_out.lowest_loss())
    console = Console(highlight=False, soft_wrap=True)
    listeners = (
        Log(every=max(1, settings.steps // 10), console=console),
        Language(history, console),
        JsonLines(output / "metrics.jsonl"),
        history,
    )

    trainer = make_trainer(settings, layout, text, held_out, listeners)
    trainer.train({"model": "A Llama of random weights", "layout": str(layout)})
    if trainer.interrupted:
        return 143  # what a shell reports for a program that SIGTERM ended
    if trainer.timeline is not None:
        history.timelines[layout.pp_style] = trainer.timeline
    trainer.booster.save_model(trainer.model, str(output / "model"), shard=True)
    for style in settings.styles[1:]:
        _compare(history, settings.layout(device, style), text)

    if coordinator.is_master():
        # Only now, so that every rank's start does not pay for what one rank needs at the end.
        from .results import save_tokenizer, write_results

        save_tokenizer(output / "model")
        write_results(history)
        conclude(history, console)
    coordinator.block_all()
    return 0


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


def make_trainer(
    settings: DemoSettings,
    layout: Layout,
    text: GrammarText,
    held_out: GrammarText | None = None,
    listeners: Sequence[Listener] = (),
    steps: int | None = None,
) -> Trainer:
    """Of all steps, or of the first `steps`, from the same weights over the same batches at every layout."""
    model: Any = build_model(settings)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_then_cosine(settings.steps))
    plugin, batch_size = layout.plugin(), settings.batch_size // layout.dp
    batches = plugin.prepare_dataloader(text, batch_size, shuffle=True, seed=settings.seed, drop_last=True)
    booster = Booster(plugin=plugin)
    boosted: Any = booster.boost(model, optimizer, None, batches, schedule)
    model, optimizer, _, batches, schedule = boosted
    steps = steps or settings.steps
    return Trainer(
        booster,
        model,
        optimizer,
        batches,
        schedule,
        total_steps=steps,
        directory=settings.output,
        evaluation=held_out and plugin.prepare_dataloader(held_out, batch_size),
        evaluate=Every(steps=max(1, steps // 10)),
        evaluate_at_ends=held_out is not None,
        listeners=listeners,
        timeline_steps=min(SNAPSHOTS, steps) if layout.pp > 1 else 0,
    )


def _compare(history: History, layout: Layout, text: GrammarText) -> None:
    """Some steps of the same training under another schedule, whose losses must be the same."""
    settings = history.settings
    other = History(settings, layout, history.lowest_loss)
    trainer = make_trainer(settings, layout, text, listeners=[other], steps=min(COMPARED, settings.steps))
    trainer.train()
    if trainer.timeline is not None:
        history.timelines[layout.pp_style] = trainer.timeline
    apart = [abs(one["loss"] - two["loss"]) for one, two in zip(other.steps, history.steps, strict=False)]
    history.apart[layout.pp_style] = max(apart, default=0.0)  # which the first rank knows


def _warm_up_then_cosine(steps: int) -> Any:
    """Factor on the learning rate: linear over the first 5 %, then half a cosine down to a twentieth."""
    warm_up = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    return factor
