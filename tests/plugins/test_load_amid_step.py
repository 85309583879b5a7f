"""Loading in the middle of a step: the gradients of the calls before were those of other weights, and are dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardwright import Booster
from shardwright.booster import checkpoints
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import keep_float64, run_ranks, zoo

NAME = "gpt2-causal-lm"
PLUGINS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "zero3": lambda: LowLevelZeroPlugin(stage=3, precision="fp32"),
    "tp2": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "pp2": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"),
}
IDS = torch.randint(3, 101, (3, 4, 11), generator=torch.Generator().manual_seed(1))  # call, row, place


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_process() -> dict[str, torch.Tensor]:
    """Steps of the first and the last batch, by plain torch."""
    model = zoo.build(NAME, dtype=torch.float64)
    optimizer = sgd(model)
    with keep_float64():
        for call in (0, 2):
            model(input_ids=IDS[call], labels=IDS[call]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(rank: int, world: int, layout: str, path: Path) -> list[str]:
    """A step, a save, a call whose gradients are nan, a load, a step. Returns what this rank says of the load."""
    plugin = PLUGINS[layout]()
    booster, model = Booster(plugin=plugin), zoo.build(NAME, dtype=torch.float64)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    count, place = plugin.data_parallel
    told = list[str]()

    def call(number: int, factor: float = 1.0) -> None:
        batch = {"input_ids": IDS[number].chunk(count)[place], "labels": IDS[number].chunk(count)[place]}
        if isinstance(plugin, HybridParallelPlugin):
            booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss * factor, optimizer)
        else:
            booster.backward(model(**batch).loss * factor, optimizer)

    with keep_float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(checkpoints.get_dist_logger()), "warning", lambda _, words, *rest, **more: told.append(words)
        )
        call(0)
        optimizer.step()
        optimizer.zero_grad()
        booster.save(path, model=model, optimizer=optimizer, step=1)
        booster.load(path, model=model, optimizer=optimizer)
        assert not [words for words in told if "in the middle" in words]
        with booster.no_sync(model, optimizer):
            call(1, float("nan"))
        booster.load(path, model=model, optimizer=optimizer)
        call(2)
        optimizer.step()
        booster.save_model(model, path / "weights.safetensors")
    dist.barrier()
    return [words for words in told if "in the middle" in words]


@pytest.mark.parametrize("layout", PLUGINS)
def test_gradients_of_other_weights_are_dropped(layout: str, tmp_path: Path) -> None:
    debug = "INFO" if layout == "ddp" else "DETAIL"
    told = run_ranks(train, 2, layout, tmp_path / "step-1", debug=debug)
    (words,) = [words for each in told for words in each]
    assert words.startswith(f"booster.load of {tmp_path / 'step-1'} in the middle of a step: ")
    weights = load_file(tmp_path / "step-1" / "weights.safetensors")
    expected = one_process()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-10, rtol=0, msg=lambda text, name=name: name + text)
