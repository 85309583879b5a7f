"""Batches of images in rows of patches, and packed rows of documents, cut into microbatches: against plain
transformers on all at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from microbatch_ranks import compare_steps
from torch import nn

from shardwright import Microbatches
from shardwright.pipeline.batch.regroup import regroup
from shardwright.shardformer.documents import DocumentProbe
from shardwright.testing import run_ranks, zoo
from tests.models import tiny_qwen2_vl
from tests.models.tiny_qwen2_vl import IMAGE, PATCH, START

GRIDS = [[(1, 4, 4)], [], [(1, 2, 4), (1, 4, 2)], [(1, 4, 6)], [(1, 2, 2), (1, 4, 4), (1, 2, 2)]]  # of every sample


def vision_model() -> nn.Module:
    return tiny_qwen2_vl.build(num_hidden_layers=4).double()


def images(seed: int, samples: int = 5, length: int = 24, first: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grids = [GRIDS[(first + sample) % len(GRIDS)] for sample in range(samples)]
    ids = torch.randint(5, 99, (samples, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(19, length + 1, (samples, 1), generator=generator)).long()
    for sample, shapes in enumerate(grids):
        place = 1
        for frames, height, width in shapes:
            number = frames * height * width // 4
            ids[sample, place], ids[sample, place + 1 : place + 1 + number] = START, IMAGE
            place += number + 2
    flat = [shape for shapes in grids for shape in shapes]
    patches = sum(frames * height * width for frames, height, width in flat)
    labels = ids.masked_fill((mask == 0) | (ids >= IMAGE), -100)
    labels[-1, 5:] = -100
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(patches, PATCH, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor(flat),
    }


def packed(seed: int, lengths: tuple[int, ...], flash: bool = False) -> dict[str, Any]:
    """As transformers' DataCollatorWithFlattening makes it."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(5, 99, (length,), generator=generator).tolist() for length in lengths]
    labels = [
        [-100 if token % 3 == index % 3 else token for token in document] for index, document in enumerate(documents)
    ]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_seq_idx=flash)
    return dict(
        collate(
            [{"input_ids": ids, "labels": each} for ids, each in zip(documents, labels, strict=True)],
            return_tensors="pt",
        )
    )


def only(microbatches: Any) -> Any:
    return microbatches[0]


def image_ranks(rank: int, world: int) -> None:
    example = {"example_inputs": images(9, samples=3)}
    steps = [[[images(0)], [images(1, samples=4, first=1)]], [[images(2, length=27, first=2)], [images(3)]]]
    for layout in (
        {"pp_size": 2, "num_microbatches": 5, "num_layers_per_stage": [1, 3], **example},
        # the tower and the embeddings alone
        {"pp_size": 2, "num_microbatches": 3, "num_layers_per_stage": [0, 4], **example},
        {"pp_size": 2, "microbatch_size": 2, "pp_style": "zb", **example},
        {"num_microbatches": 2},
    ):
        compare_steps(layout, vision_model, steps, only)
    given = [images(4, samples=2, length=22, first=2), images(5, samples=2, length=26), images(6, samples=3, length=24)]
    compare_steps({"pp_size": 2, "num_microbatches": 3, **example}, vision_model, [[given, given]], Microbatches)


def test_images() -> None:
    run_ranks(image_ranks, 2)


def packed_ranks(rank: int, world: int) -> None:
    steps = [
        [[packed(0, (7, 12, 5, 9, 3))], [packed(1, (4, 4, 15))]],
        [[packed(2, (20, 2, 2, 2))], [packed(3, (6, 7, 8, 9))]],
    ]
    for layout in (
        {"pp_size": 2, "num_microbatches": 3, "num_layers_per_stage": [0, 4]},
        {"num_microbatches": 4, "zero_stage": 1},
    ):
        compare_steps(layout, partial(zoo.build, "llama-causal-lm"), steps, only)


def test_packed_rows() -> None:
    run_ranks(packed_ranks, 2)


def cut(batch: dict[str, Any], number: int, alike: bool = False) -> Any:
    return regroup(batch, number, None, alike=alike, keeps_documents_apart=lambda: True)


def test_which_models_keep_documents_apart() -> None:
    for name, expected in (
        ("llama-causal-lm", True),
        ("mixtral-causal-lm", True),
        ("bloom-causal-lm", False),
        ("bert-masked-lm", False),
    ):
        assert DocumentProbe(zoo.build(name))() is expected, name
    assert not DocumentProbe(nn.Linear(2, 2))()


def test_pieces_of_whole_documents() -> None:
    batch = packed(0, (7, 12, 5, 9, 3), flash=True)
    pieces = cut(batch, 3)
    assert pieces is not None
    assert [piece["input_ids"].shape[1] for piece in pieces] == [7, 17, 12]
    assert [piece["cu_seq_lens_q"].tolist() for piece in pieces] == [[0, 7], [0, 12, 17], [0, 9, 12]]
    assert [piece["max_length_k"] for piece in pieces] == [7, 12, 9]
    for key in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert torch.equal(torch.cat([piece[key] for piece in pieces], 1), batch[key])
    assert [piece["input_ids"].shape[1] for piece in cut(batch, 9) or []] == [7, 12, 5, 9, 3]
    for plain in (
        {"input_ids": batch["input_ids"]},
        {"input_ids": batch["input_ids"], "position_ids": torch.arange(36)[None]},
        # attention without flash kernels would not know
        {key: value for key, value in batch.items() if key != "position_ids"},
        {**batch, "attention_mask": torch.ones(1, 36)},  # a row with a mask is one sample
    ):
        assert cut(plain, 3) is None
    assert cut(batch, 1) is None


def test_what_is_refused() -> None:
    batch = packed(0, (7, 12, 5))
    batch["labels"][0, 7] = 11
    with pytest.raises(ValueError, match=r"labels\[0, 7\]=11 .*shardwright\.Microbatches"):
        cut(batch, 3)
    with pytest.raises(ValueError, match=r"'bias' of shape \[1, 24, 24\]"):
        cut({**packed(0, (7, 12, 5)), "bias": torch.zeros(1, 24, 24)}, 3)
    with pytest.raises(ValueError, match="3 documents cannot be cut into num_microbatches=4"):
        cut(packed(0, (7, 12, 5)), 4, alike=True)
    config = vision_model().config
    with pytest.raises(ValueError, match=r"no image_token_id.*shardwright\.Microbatches"):
        regroup(images(0), 2, None)
    mixed, spare = images(0), images(0)
    mixed["image_grid_thw"] = mixed["image_grid_thw"][[0, 3, 1, 2, 4, 5, 6]]
    with pytest.raises(ValueError, match="those of sample 2 are not filled"):
        regroup(mixed, 2, None, config)
    spare["input_ids"][4, 1:] = 7
    spare["input_ids"][4, 1:6] = IMAGE
    with pytest.raises(ValueError, match="1 of 7 rows of image_grid_thw belong to no sample"):
        regroup(spare, 2, None, config)
    with pytest.raises(ValueError, match="pixel_values has shape"):
        regroup({**images(0), "pixel_values": images(0)["pixel_values"][:-1]}, 2, None, config)
