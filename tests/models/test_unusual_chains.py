"""Pipelines through models whose layers are no plain list of [B, T, C] to [B, T, C], against one process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._device import _device_constructors

from shardwright import Booster
from shardwright.models.layer_chain import find_units
from shardwright.pipeline.cut.plan import plan_cut
from shardwright.pipeline.cut.surveyor import survey_model
from shardwright.pipeline.loss.probes import sample_dims
from shardwright.pipeline.settings import PipelineSettings
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import compare_models, keep_float64, run_ranks
from tests.models.beside_one_process import train_beside

WORDS, WIDTH, LENGTH, SAMPLES = 23, 12, 6, 4


class Block(nn.Module):
    """[T, B, C] -> the same; every position sees those before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x.cumsum(0)))))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


class TimeFirst(nn.Module):
    """Stages of blocks on [T, B, C], one of them for images alone."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.stages = nn.ModuleList(Stage() for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor, images: Tensor | None = None) -> dict[str, Tensor]:
        x = self.words(input_ids).transpose(0, 1)
        for number, stage in enumerate(self.stages):
            if number == 1 and images is None:
                continue
            x = stage(x)
        logits = self.head(x).transpose(0, 1)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 1:] = labels[2, :3] = -100  # so that microbatches weigh differently
    return {"input_ids": ids, "labels": labels}


def made() -> nn.Module:
    torch.manual_seed(0)
    return TimeFirst().double()


def trained(rank: int, world: int) -> None:
    # A microbatch has 2 samples of 6 tokens: sizes of one run do not say which dim counts samples.
    plugin = HybridParallelPlugin(
        tp_size=1, pp_size=2, num_microbatches=2, precision="fp32", example_inputs=batch(5), custom_policy="auto"
    )
    plain, model = made(), made()
    booster = Booster(plugin=plugin)
    boosted = train_beside(booster, plain, model, batch, (1, 2))
    compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)


def test_stages_of_layers_that_have_samples_on_another_dim_and_are_passed_over() -> None:
    assert [unit.layer for unit in find_units(made())] == [f"stages.{number}" for number in range(4)]
    run_ranks(trained, 2)


class Staged(nn.Module):
    """Stages that are lists of blocks, as PVT and PoolFormer have them, and something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.enter = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.block = nn.ModuleList(nn.ModuleList(Block() for _ in range(depth)) for depth in (1, 2, 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids).transpose(0, 1)
        for enter, blocks in zip(self.enter, self.block, strict=True):
            x = torch.tanh(enter(x))
            for block in blocks:  # type: ignore[union-attr]
                x = block(x)
        logits = self.head(x).transpose(0, 1)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Declared(Staged):
    _no_split_modules = ("Block",)


def trained_stages(rank: int, world: int) -> None:
    for kind in (Staged, Declared):
        for style in ("1f1b", "zbv"):
            chunks = {"num_model_chunks": 2} if style == "zbv" else {}
            plugin = HybridParallelPlugin(
                tp_size=1,
                pp_size=2,
                pp_style=style,
                num_microbatches=2,
                precision="fp32",
                example_inputs=batch(5),
                custom_policy="auto",
                **chunks,
            )
            torch.manual_seed(0)
            plain = kind().double()
            boosted = train_beside(Booster(plugin=plugin), plain, copy.deepcopy(plain), batch, (1, 2))
            compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)


def test_lists_of_lists_are_one_chain() -> None:
    for kind in (Staged, Declared):
        layers = [unit.layer for unit in find_units(kind())]
        assert layers == ["block.0.0", "block.1.0", "block.1.1", "block.2.0"]
    run_ranks(trained_stages, 2)


class Nested(nn.Module):
    """An encoder, and a decoder that is a model with an encoder inside, which has more parameters."""

    _no_split_modules = ("Block", "Stage")

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.decoder.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(Block() for _ in range(2))
        self.decoder.encoder.layers = nn.ModuleList(Stage() for _ in range(2))


def test_an_encoder_inside_of_a_decoder_is_the_decoder() -> None:
    found = [(unit.layer, unit.gate) for unit in find_units(Nested())]
    assert found == [
        ("encoder.layers.0", "encoder.layers.0"),
        ("encoder.layers.1", "encoder"),
        ("decoder.encoder.layers.0", "decoder.encoder.layers.0"),
        ("decoder.encoder.layers.1", "decoder.encoder.layers.1"),
    ]


def test_masks_of_the_least_number_keep_double_precision() -> None:
    least = torch.finfo(torch.float64).min
    with keep_float64():
        assert torch.full((2,), least).dtype is torch.float64
        assert torch.tensor(0.5).dtype is torch.float32


def test_devices_hold_for_tensors_of_numbers_in_double_precision() -> None:
    _device_constructors.cache_clear()  # as in a process that has not set a device yet
    with keep_float64(), torch.device("meta"):
        assert torch.tensor(0.0).is_meta
        assert torch.full((2,), 0.0).is_meta


class Aside(TimeFirst):
    """Another list, whose name begins like that of the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stages_aside = nn.ModuleList(nn.ModuleList([Block()]) for _ in range(2))


def test_a_list_is_told_from_one_whose_name_begins_alike() -> None:
    assert [unit.layer for unit in find_units(Aside())] == [f"stages.{number}" for number in range(4)]


def test_layers_that_are_left_out_at_random_are_refused() -> None:
    model = made()
    model.stages[1].layerdrop = 0.1  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"pp_size=2: stages\.1\.layerdrop=0\.1 leaves out whole layers.*set it to 0"):
        plan_cut(model, PipelineSettings(), 2, example_inputs=batch(5))


class Reversed(torch.autograd.Function):
    """Runs all layers by itself, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x = x.detach().requires_grad_()
            for layer in ctx.layers:
                y = layer(y)
        y.backward(grads[0])
        assert x.grad is not None
        return x.grad, None


class Reversible(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        return Reversed.apply(self.words(input_ids), self.layers)


def test_layers_with_a_backward_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Reversible cannot be cut into stages: a torch\.autograd\.Function"):
        survey_model(Reversible(), example_inputs={"input_ids": torch.zeros(2, 3, dtype=torch.long)})


@pytest.mark.parametrize(
    ("once", "twice", "dims"),
    [
        ([(6, 2, 5)], [(6, 4, 5)], (1,)),
        ([(2, 6, 5), (6, 2)], [(4, 6, 5), (6, 4)], (0, 1)),
        ([(2, 6, 5)], [(4, 6, 5)], ()),  # as everywhere
        ([(6, 2, 5)], [(6, 3, 5)], ()),  # no samples
        ([(6, 2, 2)], [(6, 4, 4)], ()),  # which of them?
        ([(6, 2)], [(6, 4), (3,)], ()),
    ],
)
def test_samples_are_on_the_dim_that_doubles_with_them(once: Any, twice: Any, dims: tuple[int, ...]) -> None:
    assert sample_dims([torch.Size(each) for each in once], [torch.Size(each) for each in twice]) == dims
