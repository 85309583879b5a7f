"""The layout of a run: what a recipe says, and what is chosen for it where it says nothing."""

from __future__ import annotations

from typing import Any

from .recipe import Recipe

_SHARE = 0.6  # of a GPU's memory for weights, gradients and optimizer state; the rest is for activations
_CHECKPOINT = "gradient_checkpoint_config"


def arguments(recipe: Recipe, world_size: int, parameters: int, memory: int | None) -> dict[str, Any]:
    """Arguments of HybridParallelPlugin for `world_size` ranks, without objects.

    parameters   of the model
    memory       bytes of one GPU; None where there is none
    """
    layout = dict(recipe.layout) if isinstance(recipe.layout, dict) else _automatic(world_size, parameters, memory)
    layout.setdefault("precision", "bf16" if recipe.bf16 else "fp16" if recipe.fp16 else "fp32")
    layout["max_norm"] = recipe.max_grad_norm
    if recipe.activation_checkpointing:
        layout[_CHECKPOINT] = {"gradient_checkpointing_ratio": 1.0}
    if not {"num_microbatches", "microbatch_size"} & set(layout):
        layout["num_microbatches"] = _microbatches(recipe, layout)
    return layout


def ranks_of_one_replica(recipe: Recipe) -> int:
    """Ranks that a recipe's layout needs at least."""
    layout = recipe.layout if isinstance(recipe.layout, dict) else {}
    product = 1
    for name in ("tp_size", "pp_size", "sp_size"):
        size = layout.get(name)
        product *= size if isinstance(size, int) and size > 0 else 1
    return product


def samples_of_a_step(recipe: Recipe) -> int:
    """Samples of one data-parallel rank in one optimizer step."""
    return recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps


def _automatic(world_size: int, parameters: int, memory: int | None) -> dict[str, Any]:
    """Data-parallel ranks alone, with the lowest ZeRO stage whose state fits.

    With mixed precision and AdamW a parameter has 2 bytes of weight, 4 of gradient, 12 of master and moments.
    """
    if world_size == 1:
        return {}
    if memory is None:
        return {"zero_stage": 1}
    room = _SHARE * memory
    per_stage = {1: 6 + 12 / world_size, 2: 2 + 16 / world_size}
    for stage, bytes_each in per_stage.items():
        if bytes_each * parameters <= room:
            return {"zero_stage": stage}
    return {"zero_stage": 3}


def _microbatches(recipe: Recipe, layout: dict[str, Any]) -> int:
    """Those of gradient accumulation; under a pipeline enough to keep its stages busy, as far as they divide."""
    samples, stages = samples_of_a_step(recipe), layout.get("pp_size", 1)
    if not isinstance(stages, int) or stages <= 1:
        return recipe.gradient_accumulation_steps
    chunks = layout.get("num_model_chunks", 1)
    wanted = max(recipe.gradient_accumulation_steps, 4 * stages * (chunks if isinstance(chunks, int) else 1))
    return max(number for number in range(1, samples + 1) if samples % number == 0 and number <= wanted)
