"""What a user can get wrong with the foundation: one ValueError, before any collective, that says what would work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.plugins import TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import run_ranks


def _boost(model: nn.Module | None = None, optimizer_of: nn.Module | None = None, **booster: Any) -> Any:
    model = model if model is not None else nn.Linear(3, 3)
    optimizer = torch.optim.SGD((optimizer_of or model).parameters(), lr=0.1) if optimizer_of is not None else None
    return Booster(plugin=booster.pop("plugin", None) or TorchDDPPlugin(), **booster).boost(model, optimizer)


def _stepped_optimizer() -> Any:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return Booster(plugin=TorchFSDPPlugin()).boost(model, optimizer)


def _empty_optimizer() -> Any:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = []
    return Booster(plugin=TorchDDPPlugin()).boost(model, optimizer)


def _pipeline_without_one() -> Any:
    return Booster(plugin=TorchDDPPlugin()).execute_pipeline(iter([]), nn.Linear(3, 3), lambda outputs, inputs: outputs)


def _loader(**kwargs: Any) -> Any:
    return TorchDDPPlugin().prepare_dataloader(
        torch.utils.data.TensorDataset(torch.arange(5)), **{"batch_size": 2, **kwargs}
    )


CASES: dict[str, tuple[Any, list[str]]] = {
    "a model without parameters": (lambda: _boost(nn.ReLU()), ["ReLU", "no parameters"]),
    "another model's optimizer": (lambda: _boost(optimizer_of=nn.Linear(4, 4)), ["2 of 2 parameters", "Linear"]),
    "an optimizer without parameters": (_empty_optimizer, ["SGD", "no parameters"]),
    "an optimizer that already stepped": (_stepped_optimizer, ["already taken steps", "load_optimizer"]),
    "an unknown precision": (
        lambda: Booster(mixed_precision="fp17"),
        ["mixed_precision='fp17'", "did you mean 'fp16'"],
    ),
    "an unknown FSDP precision": (
        lambda: TorchFSDPPlugin(mixed_precision="half"),
        ["mixed_precision='half'", "'bf16'"],
    ),
    "a precision of the wrong type": (
        lambda: TorchFSDPPlugin(mixed_precision=16),
        ["mixed_precision=16", "param_dtype"],
    ),
    "a shard size that does not divide": (
        lambda: TorchFSDPPlugin(shard_size=3),
        ["shard_size=3", "world_size=2", "1, 2"],
    ),
    "classes the model lacks": (
        lambda: Booster(plugin=TorchFSDPPlugin(auto_wrap_policy=["Block"])).boost(nn.Linear(3, 3)),
        ["auto_wrap_policy=['Block']", "Linear"],
    ),
    "a model on the meta device": (
        lambda: Booster(plugin=TorchFSDPPlugin()).boost(nn.Linear(3, 3, device="meta")),
        ["meta device", "param_init_fn"],
    ),
    "an empty bucket": (lambda: TorchDDPPlugin(bucket_cap_mb=0), ["bucket_cap_mb=0", "25"]),
    "something that is no plugin": (lambda: Booster(plugin="ddp"), ["plugin='ddp'", "did you mean 'torch_ddp'?"]),
    "a device next to a plugin": (
        lambda: Booster(device="cpu", plugin=TorchDDPPlugin()),
        ["device='cpu'", "places the model"],
    ),
    "a pipeline on a plugin without one": (_pipeline_without_one, ["TorchDDPPlugin", "HybridParallelPlugin"]),
    "a pipeline without a plugin": (
        lambda: Booster().execute_pipeline(iter([]), nn.Linear(3, 3), lambda outputs, inputs: outputs),
        ["HybridParallelPlugin(tp_size=1, pp_size=1)"],
    ),
    "a bare optimizer in backward": (
        lambda: Booster().backward(torch.zeros(()), torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)),
        ["SGD", "boost returned"],
    ),
    "no_sync without the model": (
        lambda: Booster(plugin=TorchDDPPlugin()).no_sync(),
        ["booster.no_sync(model, optimizer)"],
    ),
    "a sampler of one's own": (lambda: _loader(sampler=[0, 1]), ["sampler", "distributed_sampler_cls"]),
    "an empty batch": (lambda: _loader(batch_size=0), ["batch_size=0", "at least 1"]),
    "a batch larger than the data": (
        lambda: _loader(batch_size=4, drop_last=True),
        ["5 samples", "drop_last=True", "at least 8"],
    ),
}


def _raise_each(rank: int, world_size: int) -> dict[str, str]:
    said = {}
    collectives = _count_collectives()
    for name, (attempt, _) in CASES.items():
        try:
            attempt()
        except ValueError as error:
            said[name] = str(error)
    assert collectives == [], f"collectives before an error: {collectives}"
    return said


def _count_collectives() -> list[str]:
    """Replace the collectives of torch.distributed by ones that leave their name."""
    calls: list[str] = []
    for name in (
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_object",
        "barrier",
        "new_group",
        "broadcast_object_list",
    ):
        setattr(torch.distributed, name, lambda *args, _name=name, **kwargs: calls.append(_name))
    return calls


def test_every_mistake_is_a_value_error_on_every_rank() -> None:
    for said in run_ranks(_raise_each, 2):
        assert list(said) == list(CASES), f"no ValueError for {set(CASES) - set(said)}"
        for name, (_, words) in CASES.items():
            for word in words:
                assert word in said[name], f"{name}: {word!r} is not in {said[name]!r}"


@pytest.mark.parametrize("plugin", [TorchDDPPlugin, TorchFSDPPlugin])
def test_plugins_need_a_process_group(plugin: type) -> None:
    with pytest.raises(ValueError, match="launch_from_torch"):
        plugin()
