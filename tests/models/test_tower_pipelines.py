"""Models of several towers are cut through all of them, also where a batch does not reach one."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny_modalities import batch, build

from shardwright.booster import Booster
from shardwright.models.dry_run import call_model
from shardwright.pipeline.cut.surveyor import survey_model
from shardwright.pipeline.towers import Towers
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.testing.compare import compare_models
from shardwright.testing.exact import keep_float64
from shardwright.testing.matrix.sizes import sizes_of
from shardwright.testing.matrix.subject import Subject
from shardwright.testing.matrix.subject import build as build_small

NAME = "LlavaForConditionalGeneration"


def train_with_and_without_images(rank: int, world: int) -> None:
    """Four stages of a layer each: two of the vision tower, two of the text."""
    with keep_float64():
        plain = build(NAME)
        plugin = HybridParallelPlugin(
            pp_size=2, num_microbatches=2, precision="fp32", pp_style="interleaved", num_model_chunks=2
        )
        booster = Booster(plugin=plugin)
        model = copy.deepcopy(plain)
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        held = {name for name, _ in model.unwrap().named_parameters()}
        for tower in ("model.vision_tower.encoder.layers", "model.language_model.layers"):
            assert {name.split(f"{tower}.")[1][0] for name in held if name.startswith(tower)} == {str(rank)}, tower
        seen = batch(NAME)
        text = {key: value.clamp(max=99) for key, value in seen.items() if key != "pixel_values"}
        for inputs in (seen, text, seen):
            plain.zero_grad()
            expected = call_model(plain, inputs).loss
            expected.backward()
            loss = booster.execute_pipeline(iter([inputs]), model, None, optimizer)["loss"]
            losses = None if loss is None else (expected.detach().reshape(1), loss.reshape(1))
            gradients = optimizer.gradients()
            compare_models(
                plain,
                model,
                coordinate=plugin.mesh.coordinate,
                losses=losses,
                gradients=gradients,
                weights=False,
                tolerance=1e-10,
            )
            optimizer.zero_grad()


def test_every_tower_is_cut() -> None:
    run_ranks(train_with_and_without_images, 2)


@pytest.mark.parametrize(("name", "reads"), [("Qwen3VLConfig", (1, 2)), ("CLIPConfig", (3,))])
def test_the_chain_follows_the_run(name: str, reads: tuple[int, ...]) -> None:
    """Without weights: images before text; text layers of Qwen3-VL read inner layers of the tower, what lies behind
    CLIP's layers its last one.
    """
    kind = getattr(transformers, name)
    config = kind(**sizes_of(kind))
    head = "Qwen3VLForConditionalGeneration" if name.startswith("Qwen") else "CLIPModel"
    with torch.device("meta"):
        model = getattr(transformers, head)(config)
    survey = survey_model(model)
    towers = list(dict.fromkeys(survey.lists))
    assert len(survey.units) == 8
    assert "vis" in towers[0]
    assert "text" in towers[1] or "language" in towers[1]
    assert set(reads) <= set(survey.boundary(5))
    with pytest.raises(ValueError, match="runs more often on this batch"):
        Towers(survey).check_again(survey.units[0].layer, 0, 3)


def test_what_is_read_if_there_is_any_is_read() -> None:
    """Evolla's text layers ask a mask of floating numbers, which no run without numbers knows, whether there is a
    protein. Nothing else reads its encoder.
    """
    built = build_small(Subject("EvollaForProteinText2Text"))
    survey = survey_model(built.model, example_inputs=built.batch)
    last = max(number for number, unit in enumerate(survey.units) if "protein_encoder" in unit.layer)
    assert not survey.templates[last].unread
    assert last in survey.boundary(last + 2)
