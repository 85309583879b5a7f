"""Images of batches that are made from what a model's config and the arguments of its forward say.

Sizes: B samples, C channels, H x W pixels, F frames, P patches of one image or of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

Batch = dict[str, Any]
SAMPLES = 2
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_index")
_GRID = 4  # rows and columns of patches that are told where they are


class PictureMaker:
    """
    config      of the model; `vision` that of the part that sees, or the whole
    arguments   names that the model's forward takes
    """

    config: Any
    vision: Any
    arguments: set[str]
    _generator: torch.Generator

    def patches(self) -> Iterator[Batch]:
        """Images that were cut before: patches of all of them [P, d] or [P, C, h, w] and a grid for each, (t, h, w) or
        (h, w); several patches of one place [P, h, w, C]; patches side by side [1, C, h, P w]; or [B, P, d].
        """
        if "flattened_patches" in self.arguments:
            yield self._numbered_patches()
        size = getattr(self.vision, "patch_size", None)
        if not isinstance(size, int):
            return
        features = channels_of(self.vision) * size * size
        if "image_grid_thw" in self.arguments:
            side = 2 * self._merged()
            frames = size_in(self.vision, "temporal_patch_size") or size_in(self.vision, "patch_temporal") or 1
            grid = torch.tensor([[1, side, side]] * SAMPLES)
            count = SAMPLES * side * side
            if "image_merge_sizes" in self.arguments:
                merged = torch.full((SAMPLES,), 2)
                yield {
                    "pixel_values": self._noise(count, features),
                    "image_grid_thw": grid,
                    "image_merge_sizes": merged,
                }
            yield {"pixel_values": self._noise(count, frames * features), "image_grid_thw": grid}
            yield {"pixel_values": self._noise(count, channels_of(self.vision), size, size), "image_grid_thw": grid}
            wide = size * self._merged()
            yield {"pixel_values": self._noise(count, wide, wide, channels_of(self.vision)), "image_grid_thw": grid}
        if "image_grid_hw" in self.arguments:
            grid = torch.tensor([[_GRID, _GRID]] * SAMPLES)
            yield {"pixel_values": self._noise(SAMPLES * _GRID**2, features), "image_grid_hw": grid}
        if "image_position_ids" in self.arguments:
            wide = size_in(self.vision, "model_patch_size") or size
            where = torch.cartesian_prod(torch.arange(_GRID), torch.arange(_GRID)).flip(1)
            yield {
                "pixel_values": self._noise(SAMPLES, _GRID**2, channels_of(self.vision) * wide * wide),
                "image_position_ids": where.expand(SAMPLES, -1, -1).contiguous(),
            }
        if "target_sizes" in self.arguments:
            row = SAMPLES * _GRID**2 * size
            grid = torch.tensor([[_GRID, _GRID]] * SAMPLES)
            yield {"pixel_values": self._noise(1, channels_of(self.vision), size, row), "target_sizes": grid}
        if "spatial_shapes" in self.arguments:
            side = round((size_in(self.vision, "num_patches") or 16) ** 0.5)
            mask = torch.ones(SAMPLES, side * side, dtype=torch.long)
            shown = {"pixel_attention_mask": mask} if "pixel_attention_mask" in self.arguments else {}
            shapes = torch.tensor([[side, side]] * SAMPLES)
            yield {"pixel_values": self._noise(SAMPLES, side * side, features), "spatial_shapes": shapes, **shown}

    def _numbered_patches(self) -> Batch:
        """[B, P, 2 + d]: the row and column of each patch, from one on, in front of its pixels."""
        rows = torch.arange(_GRID**2) // _GRID + 1.0
        columns = torch.arange(_GRID**2) % _GRID + 1.0
        where = torch.stack([rows, columns], 1).double().expand(SAMPLES, -1, -1)
        features = size_in(self.vision, "patch_embed_hidden_size") or 48
        return {"flattened_patches": torch.cat([where, self._noise(SAMPLES, _GRID**2, features)], 2)}

    def pictures(self) -> Iterator[Batch]:
        """[B, C, H, W], and as one of several images of each sample where texts have places for them or look at them
        by a mask; first of all with its crops, where the config says which.
        """
        yield from self._crops()
        made = self.images()
        shown = [made]
        has_places = any(hasattr(self.config, name) for name in PLACEHOLDERS)
        if "input_ids" in self.arguments and (has_places or "image_attention_mask" in self.arguments):
            shown.append({key: value[:, None] for key, value in made.items()})
            if "pixel_attention_mask" in self.arguments:
                shown.append({**shown[-1], "pixel_attention_mask": torch.ones(SAMPLES, 1, dtype=torch.bool)})
        yield from shown
        if "image_sizes" in self.arguments:  # each image's own, before it was brought to one size: some towers take it
            sizes = {"image_sizes": torch.tensor([image_size_of(self.vision)] * SAMPLES)}
            yield from ({**each, **sizes} for each in shown)
        if "aspect_ratio_ids" in self.arguments:  # tiles of one image [B, 1, T, C, H, W]
            tiles = size_in(self.vision, "max_num_tiles") or 1
            yield {
                "pixel_values": made["pixel_values"][:, None, None].expand(-1, -1, tiles, -1, -1, -1).contiguous(),
                "aspect_ratio_ids": torch.ones(SAMPLES, 1, dtype=torch.long),
                "aspect_ratio_mask": torch.ones(SAMPLES, 1, tiles, dtype=torch.long),
            }

    def _crops(self) -> Iterator[Batch]:
        """[B, 1 + crops, C, H, W]: each image as a whole, then cut into parts of the tower's size; it has the smallest
        of the sizes that the config lets images have.
        """
        known = getattr(self.config, "image_grid_pinpoints", None)
        if known and "image_sizes" in self.arguments:
            height, width = min(map(pair_of, known), key=lambda size: size[0] * size[1])
            high, wide = image_size_of(self.vision)
            crops = -(-height // high) * -(-width // wide)
            yield {
                "pixel_values": self._noise(SAMPLES, 1 + crops, channels_of(self.vision), high, wide),
                "image_sizes": torch.tensor([[height, width]] * SAMPLES),
            }

    def images(self, zeros: bool = False) -> Batch:
        """[B, C, H, W]; again for a second tower, at its size."""
        towers = {"pixel_values": self.vision}
        for name in sorted(self.arguments):
            part = getattr(self.config, name.replace("_pixel_values", "_vision_config"), None)
            if name.endswith("_pixel_values") and part is not None:
                towers[name] = part
        shapes = {name: (SAMPLES, channels_of(part), *image_size_of(part)) for name, part in towers.items()}
        return {name: torch.zeros(shape) if zeros else self._noise(*shape) for name, shape in shapes.items()}

    def videos(self) -> Batch:
        """[B, F, C, H, W]"""
        frames = size_in(self.vision, "num_frames") or size_in(self.vision, "frames_per_clip")
        if frames is None:
            return {}
        name = "pixel_values" if "pixel_values" in self.arguments else "pixel_values_videos"
        return {name: self._noise(SAMPLES, frames, channels_of(self.vision), *image_size_of(self.vision))}

    def prompts(self) -> Iterator[Batch]:
        """What to segment, one thing per sample, where the model is asked with points; nothing for the others."""
        if "input_points" not in self.arguments:
            yield {}
            return
        points = {"input_points": torch.full((SAMPLES, 1, 1, 2), 8.0)}
        marked = {**points, "input_labels": torch.ones(SAMPLES, 1, 1, dtype=torch.long)}
        boxes = {"input_boxes": torch.tensor([[[2.0, 3.0, 9.0, 9.0]]] * SAMPLES)}
        side = 4 * image_size_of(self.vision)[0] // pair_of(getattr(self.vision, "patch_size", 16) or 16)[0]
        if {"input_labels", "input_boxes", "input_masks"} <= self.arguments:
            yield {**marked, **boxes, "input_masks": self._noise(SAMPLES, 1, side, side)}
            yield {**marked, **boxes}
        if "input_labels" in self.arguments:
            yield marked
        yield points

    def _image_places(self, seen: Batch) -> int:
        """How many ids of a text stand for one image; 0 where none do."""
        if "image_embeds_position_mask" in self.arguments:
            return size_in(self.config, "latent_query_num") or 0
        if all(getattr(self.config, name, None) is None for name in PLACEHOLDERS):
            return 0
        if "image_grid_thw" in seen:
            return int(seen["image_grid_thw"][0].prod()) // self._merged() ** 2
        queries = (
            size_in(self.config, "num_query_tokens")
            or size_in(self.config, "image_seq_length")
            or size_in(self.config, "mm_tokens_per_image")
        )
        height, width = image_size_of(self.vision)
        patch = pair_of(getattr(self.vision, "patch_size", 16) or 16)
        patches = (height // patch[0]) * (width // patch[1])
        # The numbers of a model that was made small may still be those of large images.
        is_stale = queries is not None and "num_query_tokens" not in vars(self.config) and patches < queries
        if queries is None or is_stale:
            return round(patches * getattr(self.vision, "pixel_shuffle_ratio", 1) ** 2)
        return queries

    def _merged(self) -> int:
        """Patches along a side of what becomes one place of a text."""
        names = ("spatial_merge_size", "merge_kernel_size", "merge_size")
        return pair_of(next((size for name in names if (size := getattr(self.vision, name, None))), 1))[0]

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)


def part_of(config: Any, name: str) -> Any:
    part = getattr(config, name, None)
    return config if part is None else part


def size_in(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def channels_of(config: Any) -> int:
    return next((size for name in ("num_channels", "in_channels", "in_chans") if (size := size_in(config, name))), 3)


def image_size_of(config: Any) -> tuple[int, int]:
    known = (getattr(config, name, None) for name in ("image_size", "input_size", "crop_size"))
    return pair_of(next(filter(None, known), 64))


def pair_of(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        return size["height"], size["width"]
    values = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return values[-2], values[-1]
