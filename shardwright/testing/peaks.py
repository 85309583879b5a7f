"""Peaks of memory of small real steps beside those that the planner replays.

cases = draw(seed=0, count=20, world=2)    or every("zbv"), with world=4
for case, rank, measured, replayed in compare(cases, world=2): ...
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from ..booster import Booster
from ..lazy import LazyInitContext
from ..models.example_inputs import loss_of
from ..pipeline.checkpointing import PipelineGradientCheckpointConfig
from ..planner.live_bytes import LiveBytes
from ..planner.peaks import peaks
from ..planner.replay import LOOKED_AT, Job, replay
from ..plugins import HybridParallelPlugin
from . import zoo
from .ranks import run_ranks

SAMPLES, LENGTH = 8, 32
WIDE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama-causal-lm": WIDE,
    "gpt2-causal-lm": {"n_embd": 64, "n_layer": 4},
    "bert-masked-lm": WIDE,
    "t5-conditional-generation": {},
    "qwen3-moe-causal-lm": {"experts_implementation": "grouped_mm"},
    "vit-image-classification": WIDE,
}
DEPTHS = {"gpt2-causal-lm": ("n_layer",), "t5-conditional-generation": ("num_layers", "num_decoder_layers")}
STYLES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2))


class Case(NamedTuple):
    """A model of the zoo and a layout for it.

    recomputed  share of the layers
    layers      how many, of each of its parts; None: as `MODELS` says
    """

    name: str
    options: dict[str, Any]
    recomputed: float = 0.0
    layers: int | None = None

    def plugin(self, **changes: Any) -> HybridParallelPlugin:
        recompute = PipelineGradientCheckpointConfig(self.recomputed) if self.recomputed else None
        options = {"gradient_checkpoint_config": recompute, "zero_bucket_size_in_m": 0.02, **self.options, **changes}
        return HybridParallelPlugin(**options)

    def model(self) -> Any:
        return zoo.build(self.name, dtype=torch.float32, **self.sizes)

    def lazy_model(self) -> Any:
        made = self.model()
        with LazyInitContext():
            return type(made)(made.config).train()

    @property
    def sizes(self) -> dict[str, Any]:
        names = DEPTHS.get(self.name, ("num_hidden_layers",))
        return {**MODELS[self.name], **({} if self.layers is None else dict.fromkeys(names, self.layers))}

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=True)

    def batch(self) -> dict[str, Any]:
        return zoo.inputs(self.name, batch_size=SAMPLES, seq_len=LENGTH, dtype=torch.float32, **self.sizes)


class Compared(NamedTuple):
    """Bytes of one pipeline rank."""

    case: Case
    rank: int
    measured: int
    replayed: int

    @property
    def off(self) -> float:
        return self.replayed / self.measured - 1


def draw(seed: int, count: int, world: int) -> list[Case]:
    """Layouts on `world` ranks: every model, ZeRO stage, schedule and share of recomputed layers in turn."""
    rng, names, found = random.Random(seed), list(MODELS), []
    for number in range(count):
        pipeline = world > 1 and rng.random() < 0.6
        options: dict[str, Any] = {"precision": rng.choice(["fp32", "bf16", "fp16"])}
        if pipeline:
            style, chunks = STYLES[number % len(STYLES)]
            options |= {"pp_size": 2, "pp_style": style, "num_model_chunks": chunks, "num_microbatches": 4}
        else:
            options |= {"num_microbatches": rng.choice([1, 2]), "zero_stage": number % 4}
            if world > 1 and rng.random() < 0.3:
                options |= {"tp_size": 2}
        if pipeline and world > 2:
            options |= {"zero_stage": number % 4}
        found.append(Case(names[number % len(names)], options, rng.choice([0.0, 0.0, 0.5, 1.0])))
    return found


def every(style: str) -> list[Case]:
    """All ZeRO stages, with and without recomputation and whole logits, in a schedule on four ranks; "" is none."""
    chunks = 2 if style in ("interleaved", "zbv", "dualpipev") else 1
    pipeline = {"pp_size": 2, "pp_style": style, "num_model_chunks": chunks} if style else {}
    return [
        Case(
            "llama-causal-lm",
            {
                "precision": "bf16" if stage % 2 else "fp32",
                **pipeline,
                "num_microbatches": 4,
                "zero_stage": stage,
                "enable_fused_cross_entropy": fused,
            },
            recomputed,
        )
        for stage, recomputed, fused in product(range(4), (0.0, 1.0), (True, False))
    ]


def compare(cases: Sequence[Case], world: int, timeout: float = 400) -> Iterator[Compared]:
    """One by one, for every pipeline rank."""
    by_rank = run_ranks(_measure, world, list(cases), timeout=timeout)
    for number, case in enumerate(cases):
        measured: dict[int, int] = {}
        for rank in by_rank:
            place, most = rank[number]
            measured[place] = max(most, measured.get(place, 0))
        job = Job(case.plugin, case.lazy_model, case.optimizer, case.batch())
        for peak in replay(job, world):
            yield Compared(case, peak.rank, measured[peak.rank], peak.most)


def draw_deep(seed: int, count: int) -> Iterator[tuple[Case, int]]:
    """Layouts, and their ranks, of models with more layers and microbatches than a shorter layout has."""
    rng, names = random.Random(seed), list(MODELS)
    for number in range(count):
        # a bucket for every parameter, as those of large models have
        options: dict[str, Any] = {"precision": rng.choice(["fp32", "bf16"]), "zero_bucket_size_in_m": 0.001}
        layers, recomputed = 4, rng.choice([0.0, 0.0, 1.0])
        if (number + number // len(names)) % 2:
            style, chunks = STYLES[rng.randrange(len(STYLES))]
            options |= {"pp_size": 2, "pp_style": style, "num_model_chunks": chunks, "zero_stage": rng.choice([0, 1])}
            layers = 6 * chunks
            options["num_microbatches"] = 8 if style in ("zb", "zbv") else 4
        else:
            options |= {"zero_stage": number % 4, "num_microbatches": 4}
            if "moe" not in names[number % len(names)]:  # experts of a few features are too narrow to be split
                options["tp_size"] = rng.choice([1, 2])
        yield Case(names[number % len(names)], options, recomputed, layers), 4


def compare_shorter(case: Case, world: int) -> Iterator[tuple[Compared, str]]:
    """What is found by replaying a shorter layout beside what the whole one gives; and a word on how it was found."""
    job = Job(case.plugin, case.lazy_model, case.optimizer, case.batch())
    found = peaks(job, world)
    for exact, fast in zip(replay(job, world), found.peaks, strict=True):
        yield Compared(case, exact.rank, exact.most, fast.most), found.note


def _measure(rank: int, world: int, cases: Sequence[Case]) -> list[tuple[int, int]]:
    """Place in the pipeline and most bytes of a step, by case."""
    return [_measure_one(case) for case in cases]


def _measure_one(case: Case) -> tuple[int, int]:
    plugin = case.plugin()
    booster = Booster(plugin=plugin)
    with LiveBytes(LOOKED_AT) as live:
        bare = case.model()
        model: Any
        optimizer: Any
        model, optimizer, *_ = booster.boost(bare, case.optimizer(bare))
        del bare
        batch = case.batch()

        def step() -> None:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: loss_of(outputs), optimizer)
            optimizer.step()
            optimizer.zero_grad()

        _, most = live.of_steps(step)
    return plugin.mesh.coordinate("pp"), most
