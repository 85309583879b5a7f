"""Models whose layers alone are given parts of sequences, while all around them is whole: images, sounds, heads with
one answer for a sequence, layers that run several times; against one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequence_ranks import compare, sgd
from torch import nn

from shardwright import Booster
from shardwright.models.windows import why_no_sequence
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.layer_axis import ENCLOSED, LayerFacts, check_layers
from shardwright.plugins.hybrid.layer_plan import LayerPlan
from shardwright.plugins.hybrid.sequence import probe_mode
from shardwright.testing import compare_models, keep_float64, run_ranks
from shardwright.testing.matrix.axes import AXES, not_applicable
from shardwright.testing.matrix.subject import Built, Subject, build

ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
SPLIT = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather", "tp_size": 2}

# 17 patches; 16 frames and 8 words; ragged rows of 12; the same layer four times
CASES = [
    ("ViTForImageClassification", {**RING, "zero_stage": 2}, True),
    ("WhisperForConditionalGeneration", RING, True),
    ("BertForSequenceClassification", ULYSSES, False),
    ("AlbertForSequenceClassification", ULYSSES, True),
    ("BeitForImageClassification", SPLIT, True),
]
SWEPT = (
    *("Blip2ForConditionalGeneration", "CLIPModel", "Dinov2ForImageClassification", "Wav2Vec2ForCTC"),
    *("LlavaForConditionalGeneration", "T5EncoderModel", "LlamaForSequenceClassification"),
)
SWEEP = [(name, mode, True) for name in SWEPT for mode in (ULYSSES, RING)]


def built(name: str) -> Built:
    return build(Subject(name))


def compare_all(rank: int, world: int, cases: list[tuple[str, dict[str, Any], bool]]) -> None:
    for name, arguments, called in cases:
        subject = built(name)
        with keep_float64():
            try:
                if name == "ViTForImageClassification":
                    subject.model.gradient_checkpointing_enable()  # type: ignore[operator]
                if subject.own_loss:
                    compare(subject.model, subject.batch, arguments, called)
                else:
                    compare_own_loss(subject.model, subject.batch, arguments)
            except Exception as error:
                error.add_note(f"{name}, {arguments}")
                raise


def compare_own_loss(reference: nn.Module, batch: dict[str, Any], arguments: dict[str, Any]) -> None:
    """A loss that a script makes of what a model returns."""
    plugin = HybridParallelPlugin(precision="fp32", **arguments)
    booster = Booster(plugin=plugin)
    model: Any = type(reference)(reference.config)  # type: ignore[call-arg]
    model.load_state_dict(reference.state_dict())
    model, optimizer, *_ = booster.boost(model.double().train(), sgd(model))
    losses = []
    for each in (reference, model):
        state = each(**batch).last_hidden_state
        losses.append((state * torch.arange(state[0].numel()).cos().view(state.shape[1:])).square().mean())
    losses[0].backward()
    booster.backward(losses[1], optimizer)
    compare_models(
        reference,
        model,
        coordinate=plugin.mesh.coordinate,
        losses=(losses[0].detach(), losses[1].detach()),
        gradients=optimizer.gradients(),
        weights=False,
    )


def test_against_one_process() -> None:
    run_ranks(compare_all, 2, CASES)


@pytest.mark.sweep
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_every_case(case: Any) -> None:
    run_ranks(compare_all, 2, [case])


def test_towers_are_split_each_by_itself() -> None:
    """One is read between its layers, of which each is then gathered; attention of all is traded."""
    subject = built("LlavaForConditionalGeneration")
    with keep_float64():
        facts = probe_mode("ring_attn", subject.model)
    assert isinstance(facts, LayerFacts)
    assert facts.loss == ENCLOSED
    assert [stack.apart for stack in facts.plan.stacks] == [True, False]
    assert not facts.plan.whole


def test_windows_in_maps_have_no_sequences() -> None:
    swin = built("SwinForImageClassification")
    model = swin.model
    assert why_no_sequence(model).startswith("SwinLayer cuts windows out of a map")
    for axis in ("all_to_all", "ring_attn", "split_gather"):
        assert not_applicable(AXES[axis], swin) == why_no_sequence(model)
    assert not not_applicable(AXES["tp2"], swin)
    with pytest.raises(ValueError, match=r"SwinForImageClassification cannot .* \(SwinLayer cuts"):
        probe_mode("all_to_all", model)


def mistakes(rank: int, world: int) -> None:
    subject = built("ViTForImageClassification")
    model: Any = subject.model.float()
    batch = {key: value.float() if value.is_floating_point() else value for key, value in subject.batch.items()}
    model, *_ = Booster(plugin=HybridParallelPlugin(precision="fp32", **ULYSSES)).boost(model, sgd(model))
    with pytest.raises(ValueError, match=r"output_hidden_states=True .*return parts of sequences"):
        model(**batch, output_hidden_states=True)
    with pytest.raises(ValueError, match="call the model that boost returned"):
        model.unwrap()(**batch)


def test_mistakes() -> None:
    run_ranks(mistakes, 2)


def test_pipelines_are_refused() -> None:
    class Layout:
        pp_size, tp_size = 2, 1

    class Settings:
        sequence_mode, layout = "all_to_all", Layout()

    facts = LayerFacts(LayerPlan(), True, ENCLOSED, False, False)
    with pytest.raises(ValueError, match=r"pp_size=2 .*all around its layers is computed for whole .*use pp_size=1"):
        check_layers(Settings(), facts, "ViT")  # type: ignore[arg-type]
