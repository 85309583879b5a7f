"""Models that do something of their own between their layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = 1.0

    def forward(self, x: torch.Tensor, mask: Any = None, skip: Any = None) -> torch.Tensor:
        x = x + torch.tanh(self.linear(x)) * self.scale
        if isinstance(mask, list):
            mask.append(float(len(mask)))
            mask = mask[-1]
        if mask is not None:
            x = x + mask
        return x if skip is None else x + skip


class Net(nn.Module):
    """Two layers in each of six stages."""

    _no_split_modules = ["Layer", "Half", "Writer"]
    main_input_name = "input_ids"
    # F of the four stages between the first and the last, three microbatches each, that need no forward of the model
    expected = 12

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(self.layer(index) for index in range(12))
        self.head = nn.Linear(8, 4)

    def layer(self, index: int) -> nn.Module:
        return Layer()

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        mask = torch.ones(input_ids.shape, dtype=torch.float64) if mask is None else mask
        return {"logits": self.head(self.through(self.embed(input_ids), mask[..., None].double()))}

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Computes(Net):
    """Between its layers."""

    expected = 0

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask) * 0.9
        return x


class ComputesOnce(Net):
    """Between two layers of stage 2: only that stage needs the model, and those behind it as well, which a trace
    does not reach.
    """

    expected = 6

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x if index != 5 else x * 0.9, mask)
        return x


class ComputesOnPadding(Net):
    """On a way that only some masks take."""

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        padded = not mask.all()
        for layer in self.layers:
            x = layer(x, mask)
            if padded:
                x = x * 0.9
        return x


class WritesInPlace(Net):
    expected = 0

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
            x[:, 0] *= 0.9
        return x


class ReadsActivations(Net):
    expected = 0

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, 0.5 if x.sum() > 0 else 0.25)
        return x


class ReadsLists(Net):
    """`tolist` is no operator."""

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        values = mask.tolist()
        for layer in self.layers:
            x = layer(x, sum(row[0] for row in values[0]))
        return x


class ReadsListsOfActivations(Net):
    expected = 0

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, x.detach().tolist()[0][0][0])
        return x


class ReadsNumpy(Net):
    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        value = float(mask.numpy().sum())
        for layer in self.layers:
            x = layer(x, value)
        return x


class HasBias(Net):
    """A parameter outside the layers that all of them get."""

    expected = 0

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(1, 8)

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = self.bias(mask)
        for layer in self.layers:
            x = layer(x, bias)
        return x


class SetsAttributes(Net):
    """Layers read what the model has put beside their arguments."""

    expected = 0

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.scale = float(mask.mean())  # type: ignore[assignment]
        for layer in self.layers:
            x = layer(x, mask)
        return x


class HandsOnLists(Net):
    expected = 0

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, [0.5, 0.25])
        return x


class Skips(Net):
    """The second layer of every stage gets what the layer before the first returned, too."""

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = second(first(x, mask=mask), skip=x)
        return x


class InContext(Net):
    expected = 0

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = layer(x, mask)
        return x


class Shrinks(Net):
    """Layers that return another shape than they get: noticed at the first one."""

    expected = 0

    class Half(Layer):
        def forward(self, x: torch.Tensor, mask: Any = None, skip: Any = None) -> torch.Tensor:
            return super().forward(x)[..., 1:, :]

    def layer(self, index: int) -> nn.Module:
        return Shrinks.Half() if index in (3, 4, 6, 8) else Layer()

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, float(mask.sum()))
        return x


class WritesToMask(Net):
    """Layers that write to what all get: the first microbatch's own, then no more. Not in a dry run, whose questions
    are answered with no: that would be refused.
    """

    expected = 0

    class Writer(Layer):
        def forward(self, x: torch.Tensor, mask: Any = None, skip: Any = None) -> torch.Tensor:
            return super().forward(x, mask.clamp_(max=0.5) if (mask > 0.5).any() else mask)

    def layer(self, index: int) -> nn.Module:
        return WritesToMask.Writer()
