"""Stages that call their layers without the model around them, where more than the batch decides what layers get:
the model's own state.
"""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from layer_call_models import Layer, Net
from test_layer_calls import Batch, Stages, compare, head_loss, ragged, without_mask
from torch import nn

from shardwright.pipeline.batch.step_inputs import StepInputs
from shardwright.testing import keep_float64, zoo


class Stateful(Net):
    """Its forward changes what its next call gives. how: what it changes."""

    how = "buffer"
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.table = nn.Module()
        self.table.size = 0  # type: ignore[assignment]

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.how == "buffer":
            self.seen.add_(1)
        elif self.how == "attribute":
            self.count += 1
        elif self.how == "part":
            self.table.size = max(self.table.size, mask.shape[1])  # type: ignore[type-var, assignment]
        elif self.how == "batch":
            mask += 1
        elif self.how == "overwritten":
            self.seen.copy_(mask.sum() / 10)
        scale = 0.1 + self.seen * 0.1 + self.count * 0.1 + self.table.size * 0.1  # type: ignore[operator]
        for layer in self.layers:
            x = layer(x, mask * scale)
        return x


@pytest.mark.parametrize("how", ["buffer", "attribute", "part", "batch", "overwritten"])
def test_models_that_change_themselves(how: str) -> None:
    """A trace leaves no mark; and what it found counts as long as the model is what it was."""
    model = Stateful().double()
    model.how = how
    stages = Stages(model, 4)  # as many forwards per microbatch as in one piece
    with keep_float64():
        for step, lengths in enumerate([(5, 5, 5), (5, 6, 5), (7, 7, 6)]):
            ids = [torch.arange(2 * length).view(2, length) for length in lengths]
            batches: list[Batch] = [
                {"input_ids": each, "mask": torch.full(each.shape, 1.0, dtype=torch.float64)} for each in ids
            ]
            if how == "batch":  # each model writes to a copy of its own
                expected = [model(each["input_ids"], each["mask"].clone())["logits"] for each in batches]
                inputs = [
                    StepInputs([{k: v.clone() for k, v in each.items()} for each in batches], lambda each: each)
                    for _ in range(4)
                ]
                for index in range(3):
                    arrived, output = None, None
                    for stage in range(4):
                        arrived, output = stages.of(stage).run_microbatch(stage, arrived, inputs[stage], index)
                    torch.testing.assert_close(output["logits"], expected[index], rtol=1e-10, atol=1e-10)
            else:
                compare(model, stages, batches, head_loss, training=step != 1)
    if how == "overwritten":
        assert stages.hoisted[1] >= 6, stages.hoisted


def test_rotary_frequencies_that_follow_the_longest_batch() -> None:
    """The second microbatch of 20 tokens gets those of 30, which ran in between."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = zoo.build("llama-causal-lm", num_hidden_layers=6, max_position_embeddings=16, rope_parameters=rope)
    with keep_float64():
        for ranks, chunks in ((3, 1), (2, 3)):
            plain = copy.deepcopy(model)
            stages = Stages(plain, ranks, chunks)
            for lengths in ((20, 20, 30, 20), (9, 9, 30, 20, 9)):
                batches = [
                    batch
                    for index, length in enumerate(lengths)
                    for batch in ragged("llama-causal-lm", 1, length, seed=index)
                ]
                compare(plain, stages, without_mask(batches), head_loss, all_used=False)


class Asks(Net):
    """What it does between or before its layers follows from something else than the batch's tensors. what: from
    which.
    """

    what = "zeros"  # when it is surveyed

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(
        self, input_ids: torch.Tensor, mask: Any = None, unused: Any = None, options: Any = None
    ) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        mask = torch.ones(input_ids.shape) if mask is None else mask
        scale = self.scale.item() if self.what == "buffer" else 1.0
        for index, layer in enumerate(self.layers):
            x = layer(x, mask[..., None] * scale)
            if index == 4 and options is not None and options["factor"] > 1:
                x = x * options["factor"]
            if index == 4 and self.what == "zeros":
                x[mask == 0] = 0
        return {"logits": self.head(x)}


@pytest.mark.parametrize("what", ["buffer", "options", "storage", "zeros"])
def test_what_is_not_seen_in_the_contents_of_a_batch(what: str) -> None:
    """Buffers that a script writes to, options that it edits, entries that share one storage, writes to what a layer
    returned.
    """
    model = Asks().double()
    stages = Stages(model, 2, 3, num_layers_per_stage=[2] * 6)
    for one in (model, *(staged.model for staged in stages.ranks)):
        one.what = what  # type: ignore[assignment]
    options = {"factor": 0.5}
    with keep_float64():
        for step in range(3):
            batches: list[Batch] = []
            for index in range(3):
                both = torch.ones(2, 2, 6)
                both[0, 0, 3 + index :] = 0
                mask, unused = (both[0], both[1]) if what == "storage" else (both[0].clone(), both[1].clone())
                ids = torch.arange(12).view(2, 6) + step + index
                batches.append(
                    {"input_ids": ids, "mask": mask, "unused": unused}
                    | ({"options": options} if what == "options" else {})
                )
                if what == "zeros":
                    mask.copy_(batches[0]["mask"])
            compare(model, stages, batches, head_loss, training=step == 2)
            for one in (model, *(staged.model for staged in stages.ranks)):
                one.scale.add_(0.25)  # type: ignore[operator, union-attr]
            options["factor"] += 0.75


class Deeper(Net):
    """State that no attribute of a module shows by itself, or that the model's own code turns. how: which."""

    how = "list"
    turned: ClassVar[dict[str, bool]] = {"after": False}

    def __init__(self) -> None:
        super().__init__()
        self.count = [0]
        self.random = random.Random(0)
        self.numpy = numpy.random.default_rng(0)
        self.generator = torch.Generator().manual_seed(0)

    def layer(self, index: int) -> nn.Module:
        class Contextual(Layer):
            def forward(self, x: torch.Tensor, mask: Any = None, skip: Any = None) -> torch.Tensor:
                return super().forward(x, self.shared.mask if mask is None else mask)  # type: ignore[union-attr]

        Contextual.__name__ = "Layer"
        layer = Contextual()
        self.shared = self.shared if hasattr(self, "shared") else SimpleNamespace(mask=None)
        layer.shared = self.shared  # type: ignore[assignment]
        layer.is_loud = False  # type: ignore[assignment]
        return layer

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.how == "list":
            self.count[0] += 1
        scale = {
            "list": lambda: 0.1 * self.count[0],
            "python": self.random.random,
            "numpy": lambda: float(self.numpy.random()),
            "torch": lambda: torch.rand((), generator=self.generator),
        }.get(self.how, lambda: 1.0)()
        self.shared.mask = mask
        for layer in self.layers:
            if self.how == "catches":
                try:
                    scale = 0.9 if x.sum() > 0 else 0.7
                except Exception:
                    scale = 1.0
            x = layer(x) if self.how == "context" else layer(x, mask * scale)
            if (self.how == "global" and self.turned["after"]) or (self.how == "layer" and layer.is_loud):
                x = x * 0.9
        return x


@pytest.mark.parametrize("how", ["list", "python", "numpy", "torch", "context", "catches", "global", "layer"])
def test_state_that_lies_deeper(how: str) -> None:
    """In objects that modules hold, and what a model does otherwise without a gradient to tell. Stages run one after
    the other.
    """
    model = Deeper().double()
    model.how = how
    # else as many forwards per microbatch as in one piece
    chunks = 3 if how in ("context", "global", "layer", "catches") else 1
    stages = Stages(model, 6 // chunks, chunks, num_layers_per_stage=[2] * 6)
    with keep_float64(), torch.no_grad():
        for step in range(3):
            for one in (model, *(staged.model for staged in stages.ranks)):
                one.layers[5].is_loud = step == 1  # type: ignore[index, union-attr]
            Deeper.turned["after"] = step == 1
            batches: list[Batch] = [
                {"input_ids": torch.arange(12).view(2, 6) + step + i, "mask": torch.ones(2, 6)} for i in range(3)
            ]
            if how == "context":
                for index, batch in enumerate(batches):
                    batch["mask"][0, 2 + index :] = 0
            expected = [model(**batch)["logits"] for batch in batches]
            inputs = [StepInputs(batches, lambda batch: batch) for _ in stages.ranks]
            arrived: list[Any] = [None] * 3
            for stage in range(6):
                kept = inputs[stages.placement.rank_of(stage)]
                for index in range(3):
                    sent, output = stages.of(stage).run_microbatch(stage, arrived[index], kept, index)
                    arrived[index] = output["logits"] if sent is None else sent
            for found, wanted in zip(arrived, expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
