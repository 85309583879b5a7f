"""Stages that call their layers without the model around them: what comes before the layers is computed once for all
that get the same.

All stages run in this process, one copy of the model per rank, and are compared with the model in one piece.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from layer_call_models import ComputesOnPadding, Net, Shrinks, WritesToMask
from torch import nn

from shardwright.pipeline.batch.step_inputs import StepInputs
from shardwright.pipeline.cut.plan import plan_cut
from shardwright.pipeline.settings import PipelineSettings
from shardwright.pipeline.stage import StagedModel
from shardwright.testing import keep_float64, zoo
from shardwright.utils.pytree import TorchDispatchMode, tree_leaves

OLD_TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
Batch = dict[str, Any]
HOST_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Stages:
    """All stages of a model, each on the rank that holds it, with a count of how each F was run."""

    def __init__(self, model: nn.Module, ranks: int, chunks: int = 1, **settings: Any) -> None:
        style = "interleaved" if chunks > 1 else "1f1b"
        plan = plan_cut(model, PipelineSettings(style, chunks, num_microbatches=2, **settings), ranks)
        self.ranks = [plan.apply(copy.deepcopy(model), rank).staged for rank in range(ranks)]
        self.placement = plan.placement
        self.num_stages = len(plan.stages)
        self.hoisted: Counter[int] = Counter()
        self.steps = self.left = 0

    def of(self, stage: int) -> StagedModel:
        return self.ranks[self.placement.rank_of(stage)]

    def step(self, batches: Sequence[Batch], loss: Callable[[Any], torch.Tensor], training: bool = True) -> list[Any]:
        """Forward, and backward with `training`, of every microbatch; returns the outputs."""
        outputs = []
        inputs = [StepInputs(batches, lambda batch: batch) for _ in self.ranks]
        for staged in self.ranks:
            staged.model.train(training)
            self._count(staged)
        with torch.set_grad_enabled(training):
            for index in range(len(batches)):
                arrived: Any = None
                ends = []
                for stage in range(self.num_stages):
                    kept = inputs[self.placement.rank_of(stage)]
                    sent, output = self.of(stage).run_microbatch(stage, arrived, kept, index)
                    if sent is not None:
                        arrived = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent)
                        ends.append((sent, arrived))
                outputs.append(output)
                if training:
                    loss(output).backward()
                    for sent, received in reversed(ends):
                        pairs = [
                            (tensor, leaf.grad)
                            for tensor, leaf in zip(sent, received, strict=True)
                            if leaf.grad is not None
                        ]
                        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        self.left = sum(len(kept.calls) for kept in inputs)  # what was computed and has outlived its use
        return outputs

    def _count(self, staged: StagedModel) -> None:
        calls = staged._calls
        if calls is None or hasattr(calls, "counted"):
            return
        run = calls.run

        def counted(units: range, *args: Any) -> Any:
            result = run(units, *args)
            if result[1] is None:
                self.hoisted[staged.stages.index(units)] += 1
            return result

        calls.run = calls.counted = counted  # type: ignore[method-assign, attr-defined]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of every parameter, summed over the ranks that hold it."""
        found: dict[str, torch.Tensor] = {}
        for staged in self.ranks:
            for name, parameter in staged.model.named_parameters():
                if parameter.grad is not None:
                    found[name] = found[name] + parameter.grad if name in found else parameter.grad
        return found


def compare(
    model: nn.Module,
    stages: Stages,
    batches: Sequence[Batch],
    loss: Callable[[Any], torch.Tensor],
    training: bool = True,
    all_used: bool = True,
) -> None:
    """Outputs and gradients against the model in one piece. all_used: what traces found finds its use before the
    step ends.
    """
    model.train(training)
    expected = []
    for staged in (model, *(staged.model for staged in stages.ranks)):
        staged.zero_grad()
    with torch.set_grad_enabled(training):
        for batch in batches:
            expected.append(model(**batch))
            if training:
                loss(expected[-1]).backward()
    found = stages.step(batches, loss, training)
    assert (
        not stages.left or not all_used or (isinstance(model, Shrinks) and not stages.steps)
    )  # in the first step it is not known what arrives
    stages.steps += 1
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    if training:
        gradients = stages.gradients()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10, msg=name)


def head_loss(output: Any) -> torch.Tensor:
    return output["logits"].square().mean()


def ragged(name: str, count: int, length: int = 9, seed: int = 0) -> list[Batch]:
    """Microbatches of two rows, of one shape, with padding that differs."""
    batches = []
    for index in range(count):
        batch = zoo.inputs(name, batch_size=2, seq_len=length, seed=seed + index)
        batch = {
            key: value
            for key, value in batch.items()
            if key in ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        }
        batches.append(batch)
    return batches


def without_mask(batches: Sequence[Batch]) -> list[Batch]:
    return [{key: value for key, value in batch.items() if key != "attention_mask"} for batch in batches]


def full(batches: Sequence[Batch]) -> list[Batch]:
    return [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]


@pytest.mark.parametrize(
    "name", [f"{name}-causal-lm" for name in ("llama", "mistral", "qwen3-moe", "gpt2", "bert", "opt", "bloom")]
)
def test_families(name: str) -> None:
    """Stages 1 and 2 lie between others; masks that are absent, alike and different, lengths that change, evaluation
    in between.
    """
    model = zoo.build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    stages = Stages(model, 2, 2)
    steps = 0
    with keep_float64():
        for length, training in ((9, True), (7, True), (9, False), (9, True)):
            steps += 1
            batches = ragged(name, 3, length, seed=10 * steps)
            for group in (without_mask(batches), full(batches), batches):
                compare(model, stages, group, head_loss, training)
    # For a mask of its own a microbatch has one F on this rank, and the model's forward is the shortest way. A gpt2
    # without a mask looks for padding in the token ids.
    alike = 1 if name == "gpt2-causal-lm" else 2
    if name == "opt-causal-lm" and OLD_TRANSFORMERS:  # draws a number per layer whenever it trains
        steps = 1
    assert stages.hoisted[1] >= steps * alike * 3, stages.hoisted
    assert stages.hoisted[2] >= steps * alike * 3, stages.hoisted


def test_a_stage_behind_embeddings_alone() -> None:
    """It gets the first layer's hidden states from the stage before; everything else is computed once, as for the
    stages behind it.
    """
    for name, cut in (("llama-causal-lm", [0, 2, 2, 0]), ("bert-causal-lm", [0, 1, 2, 1])):
        model = zoo.build(name)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        stages = Stages(model, 2, 2, num_layers_per_stage=cut)
        with keep_float64():
            for length, training in ((9, True), (7, True), (9, False)):
                batches = ragged(name, 3, length, seed=length)
                for group in (full(batches), batches):
                    compare(model, stages, group, head_loss, training)
        assert stages.ranks[1].held == (1, 3)
        assert stages.hoisted[1] >= 9, (name, stages.hoisted)


def test_masks_are_computed_once_for_the_chunks_of_a_rank() -> None:
    model = zoo.build("llama-causal-lm", num_hidden_layers=6)
    stages = Stages(model, 2, 3)  # ranks hold stages 0, 2, 4 and 1, 3, 5
    forwards: Counter[int] = Counter()
    for rank, staged in enumerate(stages.ranks):
        call = staged._call

        def counted(batch: Any, rank: int = rank, call: Callable[[Any], Any] = call) -> Any:
            forwards[rank] += 1
            return call(batch)

        staged._call = counted  # type: ignore[method-assign]
    with keep_float64():
        for repetition in range(3):
            batches = full(ragged("llama-causal-lm", 4, seed=10 * repetition))
            for index, batch in enumerate(batches):
                batch["attention_mask"][index % 2, 5 + index :] = 0
            forwards.clear()
            compare(model, stages, batches, head_loss)
    assert all(stages.hoisted[stage] == 12 for stage in (1, 2, 3, 4)), stages.hoisted
    # One whole forward per microbatch for the first or last stage, and one trace; of new answers (how many are padded)
    # one more.
    assert all(8 <= number <= 9 for number in forwards.values()), forwards


def test_in_place_edits_between_steps() -> None:
    """A loader that fills the same tensors again and again."""
    model = zoo.build("llama-causal-lm", num_hidden_layers=6)
    stages = Stages(model, 2, 3)
    batches = [
        {**batch, "position_ids": torch.arange(9)[None].repeat(2, 1)} for batch in full(ragged("llama-causal-lm", 2))
    ]
    with keep_float64():
        for edit in range(4):
            compare(model, stages, batches, head_loss)
            batches[edit % 2]["attention_mask"][0, 5 + edit :] = 0
            batches[edit % 2]["position_ids"] += edit + 1
            batches[edit % 2]["input_ids"].add_(1)
    assert stages.hoisted[1] == stages.hoisted[4] == 8, stages.hoisted


@pytest.mark.parametrize("kind", [Net, *Net.__subclasses__()], ids=lambda kind: kind.__name__)
def test_what_models_do_between_layers(kind: type[Net]) -> None:
    """Right for all; and without the model's forward for those whose layers get nothing but outputs of layers and
    constants.
    """
    with keep_float64():
        model = kind().double()
        stages = Stages(model, 2, 3, num_layers_per_stage=[2] * 6)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            batches: list[Batch] = [{"input_ids": torch.randint(64, (2, 6), generator=generator)} for _ in range(3)]
            for index, batch in enumerate(batches):
                batch["mask"] = torch.ones(2, 6)
                if step:
                    batch["mask"][0, 2 + index + step :] = 0
            before = sum(stages.hoisted.values())
            compare(model, stages, batches, head_loss, training=step != 2)
            found = sum(stages.hoisted.values()) - before
            if kind is ComputesOnPadding:
                assert found == (12 if step == 0 else 0), (step, found)
            elif kind is WritesToMask:
                assert found <= (0 if step in (1, 3) else 4), (step, found)  # once for training, once for evaluation
            elif kind is Shrinks:
                assert found <= 6, (step, found)  # stages whose last layer alone does
            else:
                assert found == kind.expected, (step, found, stages.hoisted)


class Draws(Net):
    """Random numbers before the layers. what: where they go."""

    what = "nowhere"

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5, self.training)
        for layer in self.layers:
            if self.what == "python" and self.training and random.random() < 0:
                continue
            if self.what == "skipping" and self.training and torch.rand([]) < 0:
                continue
            x = layer(x, torch.rand(mask.shape, dtype=x.dtype) if self.what == "argument" and self.training else mask)
        return x


@pytest.mark.parametrize("what", ["nowhere", "argument", "skipping", "python"])
def test_random_numbers(what: str) -> None:
    """Arguments that are drawn are drawn anew; what is drawn for other stages is not drawn at all, by whichever F of
    a step.
    """
    model = Draws().double()
    model.what = what
    stages = Stages(model, 2, 3, num_layers_per_stage=[2] * 6)
    batches: list[Batch] = [{"input_ids": torch.arange(12).view(2, 6)} for _ in range(3)]
    inputs = StepInputs(batches, lambda batch: batch)
    arrived = (torch.randn(2, 6, 8, dtype=torch.float64),)
    staged = stages.of(2)
    staged.model.train()
    stages._count(staged)
    states, sent = [torch.get_rng_state()], []
    for index in range(3):
        python_before = random.getstate()
        sent.append(staged.run_microbatch(2, arrived, inputs, index)[0])
        states.append(torch.get_rng_state())
        assert (random.getstate() == python_before) == (what != "python")
    assert stages.hoisted[2] == (3 if what == "nowhere" else 0)
    advanced = [not torch.equal(before, after) for before, after in itertools.pairwise(states)]
    assert advanced == [what != "nowhere"] * 3
    assert sent[0] is not None
    assert sent[1] is not None
    assert torch.equal(sent[0][0], sent[1][0]) == (what != "argument")
    staged.model.eval()
    with torch.no_grad():
        inputs = StepInputs(batches, lambda batch: batch)
        for index in range(3):
            staged.run_microbatch(2, arrived, inputs, index)
    assert stages.hoisted[2] == (6 if what == "nowhere" else 3)


def test_a_script_may_turn_the_model_between_steps() -> None:
    """What was proven for one state of the model does not count for another; hooks on the model see its calls."""

    class Turned(Net):
        noisy = False

        def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, mask)
                if self.noisy:
                    x = x * 0.9
            return x

    with keep_float64():
        model = Turned().double()
        stages = Stages(model, 2, 3, num_layers_per_stage=[2] * 6)
        batches: list[Batch] = [{"input_ids": torch.arange(12).view(2, 6)} for _ in range(2)]
        compare(model, stages, batches, head_loss)
        assert sum(stages.hoisted.values()) == 8
        for one in (model, *(staged.model for staged in stages.ranks)):
            one.noisy = True  # type: ignore[assignment]
        compare(model, stages, batches, head_loss)
        assert sum(stages.hoisted.values()) == 8
        for one in (model, *(staged.model for staged in stages.ranks)):
            one.noisy = False  # type: ignore[assignment]
        seen = []
        stages.ranks[0].model.register_forward_pre_hook(lambda *_: seen.append(1))
        compare(model, stages, batches, head_loss)
        assert len(seen) == 2 * 3


class Reads(TorchDispatchMode):
    """Counts operators whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if by_mask or (func is not torch.ops.aten.index.Tensor and any(tag in func.tags for tag in HOST_READS)):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_the_host_waits_for_nothing_in_a_forward(masked: bool) -> None:
    """Of a middle stage: masks ask their questions in the first F of the first step, and never again for contents
    that have been seen.
    """
    model = zoo.build("llama-causal-lm", num_hidden_layers=6)
    stages = Stages(model, 2, 3)
    arrived = (torch.randn(2, 9, model.config.hidden_size, dtype=torch.float64),)  # type: ignore[union-attr]
    for step in range(3):
        batches = ragged("llama-causal-lm", 3, seed=step)
        inputs = StepInputs(full(batches) if masked else without_mask(batches), lambda batch: batch)
        for index in range(3):
            for stage in (1, 3):
                with Reads() as reads:
                    stages.of(stage).run_microbatch(stage, arrived, inputs, index)
                assert len(reads.found) == (1 if (step, index, stage) == (0, 0, 1) else 0), (
                    step,
                    index,
                    stage,
                    reads.found,
                )


def test_entries_that_are_cast_make_groups_too() -> None:
    """In mixed precision a model gets a new copy of every float entry, whose contents count all the same."""
    model = zoo.build("llama-causal-lm", num_hidden_layers=6)
    generator = torch.Generator().manual_seed(0)
    masks = [torch.randn(2, 1, 8, 8, generator=generator) for _ in range(4)]
    batches = [
        {"input_ids": torch.full((2, 8), 3 + number), "attention_mask": each} for number, each in enumerate(masks)
    ]

    def cast(batch: Batch) -> Batch:
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}

    stages = Stages(model, 3)
    arrived = (torch.randn(2, 8, model.config.hidden_size, dtype=torch.float64),)  # type: ignore[union-attr]
    inputs = StepInputs(batches, cast)
    for index, batch in enumerate(batches):
        [found], _ = stages.of(1).run_microbatch(1, arrived, inputs, index)
        [wanted], _ = stages.of(1).run(1, arrived, cast(batch))
        assert torch.equal(found, wanted), index
