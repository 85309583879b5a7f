"""Small helpers that training scripts import: the accelerator, loggers, learning-rate schedules."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from shardwright.accelerator import get_accelerator
from shardwright.logging import disable_existing_loggers, get_dist_logger
from shardwright.optim.lr_scheduler import CosineAnnealingWarmupLR, LinearWarmupLR
from shardwright.utils import get_current_device


def test_the_accelerator_describes_this_process() -> None:
    accelerator = get_accelerator()
    assert accelerator is get_accelerator()
    assert accelerator.get_current_device() == get_current_device()
    assert accelerator.name == get_current_device().type
    assert accelerator.is_available() == torch.cuda.is_available()
    assert accelerator.max_memory_allocated() >= 0
    accelerator.manual_seed(7)
    first = torch.rand(3)
    accelerator.manual_seed(7)
    assert torch.equal(torch.rand(3), first)
    accelerator.synchronize()


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def optimizer(*learning_rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in learning_rates])


def test_cosine_with_warm_up() -> None:
    seen = rates(CosineAnnealingWarmupLR(optimizer=optimizer(2.0), total_steps=12, warmup_steps=4, eta_min=0.5), 15)
    assert seen[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert seen[8] == pytest.approx(1.25)  # half way
    assert seen[12:] == pytest.approx([0.5] * 3)


def test_groups_end_at_the_same_least_rate() -> None:
    scheduler = CosineAnnealingWarmupLR(optimizer(1.0, 0.1), total_steps=5, eta_min=0.01)
    rates(scheduler, 5)
    assert scheduler.get_last_lr() == pytest.approx([0.01, 0.01])


def test_linear_with_warm_up() -> None:
    seen = rates(LinearWarmupLR(optimizer(1.0), total_steps=6, warmup_steps=1), 8)
    assert seen == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps=5 must be at least 0 and less than total_steps=5"):
        CosineAnnealingWarmupLR(optimizer(1.0), total_steps=5, warmup_steps=5)


def test_loggers_speak_for_chosen_ranks_and_into_files(tmp_path: Path) -> None:
    logger = get_dist_logger("shardwright.test")
    logger.log_to_file(tmp_path, suffix="run")
    logger.info("for all")
    logger.info("for another rank", ranks=[3])
    logger.set_level("ERROR")
    logger.warning("too quiet")
    text = (tmp_path / "rank_0_run.log").read_text()
    assert "[rank 0] for all" in text
    assert len(text.splitlines()) == 1
    with pytest.raises(ValueError, match="level='LOUD'"):
        logger.set_level("LOUD")


def test_disabling_loggers_leaves_the_excluded_ones() -> None:
    logging.getLogger("some.chatty").setLevel(logging.INFO)
    logging.getLogger("some.wanted").setLevel(logging.INFO)
    disable_existing_loggers(include=["some.chatty", "some.wanted"], exclude=["some.wanted"])
    assert logging.getLogger("some.chatty").level == logging.ERROR
    assert logging.getLogger("some.wanted").level == logging.INFO
