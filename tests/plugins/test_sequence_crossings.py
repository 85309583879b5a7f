"""Every mode of split sequences with every family that differs in attention, beside tensor parallelism and pipelines:
three steps on ragged and packed batches, whose lengths change and do not divide, against one process, in double and in
single precision.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequence_ranks import IGNORED, Batch, compare, gemma2, packed

from shardwright.testing import keep_float64, run_ranks, zoo

ON: dict[str, Any] = {"enable_sequence_parallelism": True}
SPLIT = {**ON, "sequence_parallelism_mode": "split_gather"}
RING = {**ON, "sequence_parallelism_mode": "ring"}
ULYSSES = {**ON, "sequence_parallelism_mode": "all_to_all"}
AROUND = {**ON, "sequence_parallelism_mode": "ring_attn"}
PIPE = {"pp_size": 2, "num_microbatches": 3}

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{**SPLIT, "tp_size": 2}, {**RING, "tp_size": 2}, {**ULYSSES, "sp_size": 2}, {**AROUND, "sp_size": 2}],
    4: [
        *({**mode, "tp_size": 4} for mode in (SPLIT, RING)),
        *({**mode, **PIPE, "tp_size": 2} for mode in (SPLIT, RING)),
        *({**mode, "sp_size": 4} for mode in (ULYSSES, AROUND)),
        *({**mode, "sp_size": 2, "tp_size": 2} for mode in (ULYSSES, AROUND)),
        *({**mode, **PIPE, "sp_size": 2} for mode in (ULYSSES, AROUND)),
        {**AROUND, "sp_size": 4, "ulysses_size": 2},
    ],
}
PACKED = ("llama", "qwen3", "gpt2", "gemma2", "mixtral", "qwen3-moe")
MODELS = {
    **{name: f"{name}-causal-lm" for name in PACKED},
    "t5": "t5-conditional-generation",
    "bert": "bert-masked-lm",
}
LAYERS = {"gpt2": {"n_layer": 2}, "t5": {"num_layers": 2, "num_decoder_layers": 2}}
CASES = [(name, world, dtype) for name in MODELS for world in LAYOUTS for dtype in (torch.float64, torch.float32)]


def model_of(name: str) -> Any:
    """Of two layers, in double precision; Gemma 2 with windows and soft caps."""
    two = LAYERS.get(name, {"num_hidden_layers": 2})
    return gemma2(**two) if name == "gemma2" else zoo.build(MODELS[name], **two)


def ragged(model: Any, length: int) -> Batch:
    """Padded behind, with few labels. An encoder-decoder's labels have a length of their own."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 99, (3, length), generator=generator)
    mask = (torch.arange(length) < length - 4 * torch.arange(3)[:, None]).long()
    labels = ids.masked_fill(mask == 0, IGNORED)
    if model.config.is_encoder_decoder:
        labels = torch.randint(5, 99, (3, length - 4), generator=generator)
    labels[0, :5], labels[2, 6:] = IGNORED, IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def cross(rank: int, world: int, name: str, dtype: torch.dtype) -> None:
    for arguments in LAYOUTS[world]:
        with keep_float64():
            model = model_of(name).to(dtype)
            between = packed(3, 18) if name in PACKED else ragged(model, 18)
            batches = [ragged(model, 19), between, ragged(model, 14)]
            try:
                compare(model, batches, arguments, "pp_size" not in arguments)
            except Exception as error:
                error.add_note(f"{name}, {arguments}")
                raise


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "world", "dtype"), CASES, ids=str)
def test_crossing(name: str, world: int, dtype: torch.dtype) -> None:
    run_ranks(cross, world, name, dtype, timeout=1100)
