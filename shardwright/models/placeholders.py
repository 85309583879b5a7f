"""How many ids of a text stand for one image or sound, as the model's own tower counts them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_METHODS = ("get_audio_features", "get_image_features")
_LENGTHS = "_get_feat_extract_output_lengths"


def feature_counts(model: nn.Module, inputs: Mapping[str, Any], samples: int) -> list[int] | None:
    """Features of every sample of the images or sounds in `inputs`, each sample computed alone; None where the model
    does not say, or does not run on them.
    """
    main = next(iter(inputs))
    name = _METHODS["pixel" in main]
    method: Any = next((getattr(module, name) for module in model.modules() if hasattr(module, name)), None)
    if next(model.parameters()).device.type == "meta":
        return None
    found = None if method is None else _features(model, method, inputs, samples)
    return found if found is not None or "pixel" in main else _frames_left(model, inputs)


def _frames_left(model: nn.Module, inputs: Mapping[str, Any]) -> list[int] | None:
    """What an encoder of sounds says that it leaves of as many frames as the mask of every sample has."""
    method: Any = next((getattr(module, _LENGTHS) for module in model.modules() if hasattr(module, _LENGTHS)), None)
    mask = next((value for key, value in inputs.items() if "mask" in key), None)
    if method is None or mask is None:
        return None
    try:
        left = method(mask.sum(-1))
    except Exception:  # of the model's own code
        return None
    return (left[-1] if isinstance(left, tuple) else left).tolist()  # type: ignore[no-any-return]


def _features(model: nn.Module, method: Any, inputs: Mapping[str, Any], samples: int) -> list[int] | None:
    parameters = inspect.signature(method).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    found = []
    trained = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for row in range(samples):
                kept = {key: value for key, value in inputs.items() if takes_all or key in parameters}
                one = {key: _of_sample(value, row, samples) for key, value in kept.items()}
                found.append(_count(method(**one)))
    except Exception:  # of the model's own code, on inputs that were guessed
        return None
    finally:
        for module in trained:
            module.training = True
    return found


def _of_sample(value: torch.Tensor, row: int, samples: int) -> torch.Tensor:
    """One sample's rows, of which it may have several; its part of the last axis where all samples are one row."""
    axis = 0 if len(value) >= samples else -1
    return value.tensor_split(samples, axis)[row]


def _count(outputs: Any) -> int:
    features = outputs if isinstance(outputs, torch.Tensor | list | tuple) else outputs.pooler_output
    if isinstance(features, torch.Tensor):
        return features.numel() // features.shape[-1]
    return sum(each.numel() // each.shape[-1] for each in features)
