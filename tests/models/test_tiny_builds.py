"""Classes whose tiny configs and batches need sizes that agree: images and their places, towers and their heads."""

from __future__ import annotations

import pytest

from shardwright.models.dry_run import call_model, meta_copy, without_data
from shardwright.models.example_inputs import example_batches, loss_of
from shardwright.testing.matrix import Subject
from shardwright.testing.matrix.sizes import _as_declared
from shardwright.testing.matrix.subject import build

QUICK = ("GlmOcrForConditionalGeneration", "VisionEncoderDecoderModel", "VJEPA2ForVideoClassification")
OTHERS = (
    *("AyaVisionForConditionalGeneration", "Mistral3ForConditionalGeneration", "LightOnOcrForConditionalGeneration"),
    *("Idefics3ForConditionalGeneration", "EfficientNetForImageClassification", "HubertForCTC"),
    *("VipLlavaForConditionalGeneration", "PaliGemmaForConditionalGeneration", "HunYuanVLForConditionalGeneration"),
    *("Step3p7ForConditionalGeneration", "GraniteDoclingForConditionalGeneration", "JanusForConditionalGeneration"),
    *("Florence2ForConditionalGeneration", "Emu3ForConditionalGeneration", "PaddleOCRVLForConditionalGeneration"),
)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHERS)])
def test_a_tiny_model_is_built_with_a_batch_that_it_computes_a_loss_of(name: str) -> None:
    built = build(Subject(name))
    assert built.own_loss
    assert built.rows or "image_grid_thw" in built.batch
    assert sum(param.numel() for param in built.model.parameters()) < 1_000_000


# What a batch has to hold for the towers to be reached.
SEEN_AND_HEARD = {
    "Qwen2AudioForConditionalGeneration": {"input_features", "feature_attention_mask"},
    "LlavaNextForConditionalGeneration": {"pixel_values", "image_sizes"},
    "Gemma4UnifiedForConditionalGeneration": {"pixel_values", "image_position_ids"},
    "LongformerForMaskedLM": {"global_attention_mask"},
    "MusicFlamingoForConditionalGeneration": {"input_features"},
    "T5Gemma2ForConditionalGeneration": {"pixel_values"},
    "VideoLlama3ForConditionalGeneration": {"pixel_values", "image_merge_sizes"},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"pixel_values", "input_features"},
    "IdeficsForVisionText2Text": {"pixel_values"},
    "BlipForQuestionAnswering": {"pixel_values"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (at > 3)) for at, name in enumerate(SEEN_AND_HEARD)]
)
def test_a_batch_reaches_the_towers_and_all_kinds_of_layers(name: str) -> None:
    built = build(Subject(name))
    assert built.own_loss
    assert built.batch.keys() >= SEEN_AND_HEARD[name]
    loss_of(call_model(built.model, built.batch)).backward()
    sizes = {param: param.numel() for param in built.model.parameters()}
    assert sum(size for param, size in sizes.items() if param.grad is not None) > 0.85 * sum(sizes.values())


@pytest.mark.parametrize("name", ["Pix2StructForConditionalGeneration", "VisionEncoderDecoderModel"])
def test_a_model_without_weights_runs_on_an_example_of_images_and_words(name: str) -> None:
    model = meta_copy(build(Subject(name)).model)
    ran = []
    for batch in example_batches(model):
        try:
            with without_data():
                call_model(model, batch)
        except Exception:  # of the model's own code, on a batch that was guessed
            continue
        ran.append(batch)
    assert any({"decoder_input_ids"} < batch.keys() for batch in ran)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("int", 8),
        ("int | list[int] | tuple[int, int]", 8),
        ("list[int] | None", [8, 8]),
        ("tuple[int, int]", (8, 8)),
        ("<class 'int'>", 8),
        ("dict[str, int] | None", 8),
    ],
)
def test_sizes_are_given_as_fields_are_declared(kind: str, expected: object) -> None:
    assert _as_declared(8, kind) == expected
