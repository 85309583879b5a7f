"""Boxes: every element of a full tensor lies in exactly one owned part of one rank, and where it says."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from shardwright.files.boxes import Box, flat_boxes, parts_of, whole
from shardwright.spec import ParamSpec, Piece, even_pieces, joined_pieces


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (4, 1, 3), (2, 3, 4, 2), (1, 6), (0, 3)])
def test_flat_ranges(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        boxes = list(flat_boxes(shape, start, stop))
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        parts = [box.view(tensor, (0,) * len(shape)).flatten() for box in boxes]
        assert torch.cat([torch.arange(0), *parts]).tolist() == list(range(start, stop))


def specs() -> list[ParamSpec]:
    fused = joined_pieces(even_pieces(12, 4, 0), even_pieces(8, 4, 12), even_pieces(8, 4, 20))
    # first rows everywhere, others in pairs
    shared = tuple((Piece(0, 4), Piece(8 + 2 * (rank // 2), 2)) for rank in range(4))
    return [
        ParamSpec("plain", (9, 5)),
        ParamSpec("scalar", ()),
        ParamSpec("column", (10, 3), 0, even_pieces(10, 4)),
        ParamSpec("row", (3, 10), 1, even_pieces(10, 4)),
        ParamSpec("fused", (28, 3), 0, fused),
        ParamSpec("fused row", (2, 28), 1, fused),
        ParamSpec("experts", (3, 28, 2), 1, fused),
        ParamSpec("shared", (12, 2), 0, (*shared[:2], *shared[2:-1], (*shared[3], Piece(4, 4)))),
        ParamSpec("padded away", (3, 2), 0, even_pieces(3, 4)),
    ]


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_parts_cover_the_full_tensor_once(spec: ParamSpec) -> None:
    rng = random.Random(0)
    full = torch.arange(math.prod(spec.full_shape)).view(spec.full_shape)
    written, loaded = torch.zeros_like(full), torch.full_like(full, -1)
    origin = (0,) * full.ndim
    for coordinate in range(len(spec.pieces) or 1):
        local = spec.shard(full, coordinate)
        cuts = sorted({0, local.numel(), *(rng.randint(0, local.numel()) for _ in range(3))})
        rebuilt = torch.zeros_like(local).flatten()
        for start, stop in itertools.pairwise(cuts):
            flat = local.flatten()[start:stop]
            for part in parts_of(spec, coordinate, local.shape, start, stop, owned=True):
                assert torch.equal(part.view(flat), part.box.view(full, origin))
                part.box.view(written, origin).add_(1)
                part.box.view(loaded, origin).copy_(part.view(flat))
            for part in parts_of(spec, coordinate, local.shape, start, stop, owned=False):
                part.view(rebuilt[start:stop]).copy_(part.box.view(full, origin))
        assert torch.equal(rebuilt, local.flatten())
    assert torch.equal(loaded, full)
    assert (written == 1).all()


def test_intersections() -> None:
    box = Box((1, 2), (3, 4))
    assert box.intersect(whole((3, 3))) == Box((1, 2), (2, 1))
    assert box.intersect(Box((4, 2), (1, 1))) is None
    assert whole(()).intersect(whole(())) == whole(())
