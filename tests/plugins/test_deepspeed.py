"""DeepSpeedPlugin: what it makes of a config everywhere, and training where deepspeed is installed."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.booster import Booster
from shardwright.plugins.deepspeed import DeepSpeedPlugin, _normalised, _read
from shardwright.testing import run_ranks


def test_auto_is_resolved_and_nothing_is_compiled(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    result = _normalised(_read(path))
    assert result["train_micro_batch_size_per_gpu"] == result["gradient_accumulation_steps"] == 1
    assert result["optimizer"]["params"] == {"lr": 1e-3, "torch_adam": True}
    assert result["zero_optimization"] == {"stage": 2}
    assert config["optimizer"]["params"]["betas"] == "auto"  # the caller's dict is left alone


@pytest.mark.parametrize(("text", "message"), [(None, "no file"), ("{", "not valid json"), ("[]", "holds a list")])
def test_bad_config_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        _read(path)


def missing(rank: int, world_size: int) -> None:
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # what an import finds where it is not installed
    with pytest.raises(ValueError, match="pip install deepspeed"):
        DeepSpeedPlugin({"zero_optimization": {"stage": 1}})


def test_install_line_is_given_where_deepspeed_is_missing() -> None:
    run_ranks(missing, 1)


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def train(rank: int, world_size: int, stage: int, offload: bool) -> None:
    inputs = torch.randn(4, 2, 8, 6, generator=torch.Generator().manual_seed(1))
    reference = model_of()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    zero: dict[str, object] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    booster = Booster(plugin=DeepSpeedPlugin({"zero_optimization": zero, "gradient_clipping": 0.5}))
    model = model_of()
    model, optim, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    share = 8 // world_size
    for micros in inputs:
        for number, x in enumerate(micros):
            with booster.no_sync(model, optim) if number == 0 else nullcontext():
                booster.backward(model(x[rank * share : (rank + 1) * share]).square().mean() / 2, optim)
            (reference(x).square().mean() / 2).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
        expected.step()
        expected.zero_grad()
        assert stage == 0 or optim.get_grad_norm() == pytest.approx(norm.item(), rel=1e-4)
    if stage < 3:
        for one, two in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (2, False), (3, False), (2, True)])
def test_training_matches_one_process(stage: int, offload: bool) -> None:
    run_ranks(train, 2, stage, offload, timeout=100, debug="OFF")
