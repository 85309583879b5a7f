"""Split sequences of models whose layers are put together in ways of their own, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequence_ranks import IGNORED, compare

from shardwright.testing import keep_float64, run_ranks
from shardwright.testing.matrix import Subject
from shardwright.testing.matrix.subject import build

GATHERED: dict[str, Any] = {"enable_sequence_parallelism": True, "tp_size": 2}
RING: dict[str, Any] = {**GATHERED, "sequence_parallelism_mode": "ring"}
ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
AROUND: dict[str, Any] = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
# Attention that is given hidden states three times; that returns its own bias; whose linears are in modules of their
# own; layers that are given features of every token besides; several streams of hidden states; layers that are left
# out.
ALONG = (
    "CTRLLMHeadModel",
    "GPTNeoXJapaneseForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma3nForCausalLM",
)
# The same in more ways: row linears that are given whole features; layers that read what was before other layers.
MORE_ALONG = (
    "MoshiForCausalLM",
    "MllamaForCausalLM",
    "XLMWithLMHeadModel",
    "CpmAntForCausalLM",
    "Qwen4ExpForCausalLM",
    "Inkling2ForCausalLM",
    "ZambaForCausalLM",
    "Zamba2ForCausalLM",
)
# Convolutions that only a state space reads; experts that are chosen by token ids.
OVER = ("RecurrentGemmaForCausalLM", "DeepseekV4ForCausalLM")


def batch_of(length: int = 15) -> dict[str, torch.Tensor]:
    """Ragged, of a length that does not divide."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 60, (3, length), generator=generator)
    mask = (torch.arange(length) < length - 3 * torch.arange(3)[:, None]).long()
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, :5] = IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def compare_all(rank: int, world: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    for name, arguments in cases:
        with keep_float64():
            try:
                # Some keep what a cache would hold in themselves from call to call.
                compare(build(Subject(name)).model, batch_of(), arguments, True, use_cache=False)
            except Exception as error:
                error.add_note(f"{name}, {arguments}")
                raise


def test_along_tensor_parallelism() -> None:
    run_ranks(compare_all, 2, [*((name, GATHERED) for name in ALONG), ("CTRLLMHeadModel", RING)], timeout=240)


def compare_with_images(rank: int, world: int, modes: list[dict[str, Any]]) -> None:
    """States that some layers attend to, and tokens that see none of them, which a layer masks itself."""
    for mode in modes:
        with keep_float64():
            model: Any = build(Subject("MllamaForCausalLM")).model
            batch = batch_of()
            samples, length = batch["input_ids"].shape
            generator = torch.Generator().manual_seed(4)
            states = torch.randn(samples, 7, model.config.hidden_size, generator=generator, dtype=torch.float64)
            sees = torch.arange(length)[:, None] > 4 + torch.arange(samples)[:, None, None, None]  # [B, 1, S, 1]
            hidden = torch.zeros(samples, 1, length, 7).masked_fill(torch.arange(7) > 4, -1e9).double()
            compare(
                model,
                {
                    **batch,
                    "cross_attention_states": states,
                    "cross_attention_mask": hidden,
                    "full_text_row_masked_out_mask": sees.double(),
                },
                mode,
                True,
                use_cache=False,
            )


def test_images_that_some_tokens_do_not_see() -> None:
    run_ranks(compare_with_images, 2, [GATHERED, RING], timeout=120)


def test_over_an_axis() -> None:
    run_ranks(compare_all, 2, list(zip(OVER, (ULYSSES, AROUND), strict=True)), timeout=240)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*ALONG, *MORE_ALONG, *OVER])
def test_in_every_mode(name: str) -> None:
    """Some in those that serve them."""
    modes = (ULYSSES, AROUND) if name in OVER else (GATHERED, RING, ULYSSES, AROUND)
    run_ranks(compare_all, 2, [(name, mode) for mode in modes], timeout=240)
