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
STYLES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2))


class Case(NamedTuple):
    """A model of the zoo and a layout for it.

    recomputed  share of the layers
    """

    name: str
    options: dict[str, Any]
    recomputed: float = 0.0

    def plugin(self) -> HybridParallelPlugin:
        recompute = PipelineGradientCheckpointConfig(self.recomputed) if self.recomputed else None
        return HybridParallelPlugin(
            gradient_checkpoint_config=recompute, **{"zero_bucket_size_in_m": 0.02, **self.options}
        )

    def model(self) -> Any:
        return zoo.build(self.name, dtype=torch.float32, **MODELS[self.name])

    def lazy_model(self) -> Any:
        made = self.model()
        with LazyInitContext():
            return type(made)(made.config).train()

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=True)

    def batch(self) -> dict[str, Any]:
        return zoo.inputs(self.name, batch_size=SAMPLES, seq_len=LENGTH, dtype=torch.float32, **MODELS[self.name])


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
