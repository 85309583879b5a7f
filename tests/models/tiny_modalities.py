"""Tiny random models of every modality: images, sounds, videos, pairs of images and texts."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn

from shardwright.testing.matrix.modalities import CONFIGS

# Class -> class of the config, arguments besides the tiny ones.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", {}),
    "ViTForMaskedImageModeling": ("ViTConfig", {}),
    "WhisperForConditionalGeneration": ("WhisperConfig", {}),
    "WhisperForAudioClassification": ("WhisperConfig", {}),
    "BeitForImageClassification": ("BeitConfig", {}),
    "SwinForImageClassification": ("SwinConfig", {}),
    "Swinv2ForImageClassification": ("Swinv2Config", {}),
    "CLIPModel": ("CLIPConfig", {}),
    "Blip2ForConditionalGeneration": ("Blip2Config", {}),
    "SamModel": ("SamConfig", {}),
    "Gemma2Model": ("Gemma2Config", {}),
    "Gemma2ForSequenceClassification": ("Gemma2Config", {}),
    "Gemma2ForTokenClassification": ("Gemma2Config", {}),
    "DebertaV2ForQuestionAnswering": ("DebertaV2Config", {"num_labels": 2}),
    "DebertaV2ForMultipleChoice": ("DebertaV2Config", {}),
    "VideoMAEForVideoClassification": ("VideoMAEConfig", {}),
    "Wav2Vec2ForSequenceClassification": ("Wav2Vec2Config", {}),
    "Siglip2ForImageClassification": ("Siglip2Config", {}),
    "Qwen2VLForConditionalGeneration": ("Qwen2VLConfig", {}),
    "LlavaForConditionalGeneration": ("LlavaConfig", {}),
}


def build(name: str) -> nn.Module:
    """The model `name` in float64 without dropout; always the same weights, none at the zero or one that it was
    initialised with.
    """
    kind, arguments = MODELS[name]
    config = getattr(transformers, kind)(**{**copy.deepcopy(CONFIGS[kind]), **arguments})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.double().eval()


def batch(name: str) -> dict[str, Any]:
    """Three samples, written by hand for every kind of model, with labels that are spread unevenly."""
    generator = torch.Generator().manual_seed(4)
    samples = 3
    ids = torch.randint(5, 99, (samples, 9), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 5:], mask[1, 5:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    text = {"input_ids": ids, "attention_mask": mask}
    classes = torch.tensor([4, 0, 2])

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(samples, *shape, generator=generator, dtype=torch.float64)

    def with_places(count: int) -> dict[str, torch.Tensor]:
        front = torch.full((samples, count), 100)
        return {
            "input_ids": torch.cat([front, ids], 1),
            "attention_mask": torch.cat([torch.ones_like(front), mask], 1),
            "labels": torch.cat([torch.full_like(front, -100), labels], 1),
        }

    family = name.split("For")[0].removesuffix("Model")
    if family in ("Gemma2", "DebertaV2"):
        if name.endswith("QuestionAnswering"):
            return {**text, "start_positions": torch.tensor([1, 0, 3]), "end_positions": torch.tensor([2, 4, 3])}
        if name.endswith("MultipleChoice"):
            return {key: torch.stack([value, value.flip(0)], 1) for key, value in text.items()} | {
                "labels": torch.tensor([0, 1, 1])
            }
        if name.endswith("TokenClassification"):
            return {**text, "labels": labels.where(labels == -100, labels % 5)}
        return {**text, "labels": classes} if name.endswith("SequenceClassification") else text
    if family == "Wav2Vec2":
        return {"input_values": noise(1200), "labels": classes}
    if family == "Siglip2":
        mask = torch.ones(samples, 16, dtype=torch.long)
        mask[1, 8:] = 0
        shapes = torch.tensor([[4, 4], [2, 4], [4, 4]])
        return {
            "pixel_values": noise(16, 48),
            "pixel_attention_mask": mask,
            "spatial_shapes": shapes,
            "labels": classes,
        }
    if family == "Qwen2VL":
        seen = with_places(4)
        kinds = (seen["input_ids"] == 100).long()
        grid = torch.tensor([[1, 4, 4]] * samples)
        return {**seen, "mm_token_type_ids": kinds, "pixel_values": noise(16, 96).flatten(0, 1), "image_grid_thw": grid}
    if family == "Whisper":
        return {"input_features": noise(12, 32), "labels": labels if name.endswith("Generation") else classes}
    if family == "CLIP":
        return {**text, "pixel_values": noise(3, 20, 20), "return_loss": True}
    if family in ("Blip2", "Llava"):
        return {"pixel_values": noise(3, 20, 20), **with_places(4 if family == "Blip2" else 16)}
    if family == "Sam":
        return {
            "pixel_values": noise(3, 32, 32),
            "input_points": torch.tensor([[[[3.0, 9.0]]], [[[20.0, 5.0]]], [[[30.0, 30.0]]]]).double(),
        }
    if family == "VideoMAE":
        return {"pixel_values": noise(4, 3, 20, 20), "labels": classes}
    size = 64 if family.startswith("Swin") else 20
    target = (
        {"bool_masked_pos": torch.arange(48).view(3, 16) % 5 == 0}
        if name.endswith("MaskedImageModeling")
        else {"labels": classes}
    )
    return {"pixel_values": noise(3, size, size), **target}
