"""Boosted models that are asked as if they were whole and plain, against plain torch and transformers in the same
process.
"""

from __future__ import annotations

import copy
import gc
import logging
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import Booster
from shardwright.checkpoint import roll_call as roll_calls
from shardwright.checkpoint.roll_call import roll_call
from shardwright.logging import get_dist_logger
from shardwright.plugins import HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import adamw, compare_models, keep_float64, loss_of, run_ranks, zoo

TWO = {"num_hidden_layers": 2}
PLUGINS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "tp2": (2, HybridParallelPlugin, {"tp_size": 2}),
    "pp2": (2, HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 2}),
    "tp2-pp2": (4, HybridParallelPlugin, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "zero_stage": 1}),
    "zero3": (2, HybridParallelPlugin, {"zero_stage": 3}),
    "zero1": (2, HybridParallelPlugin, {"zero_stage": 1}),
    "ddp": (2, TorchDDPPlugin, {}),
    "fsdp": (2, TorchFSDPPlugin, {}),
}
NAME = "llama-tied-causal-lm"


class Twin:
    """A boosted model and the same one in one process."""

    def __init__(self, layout: str) -> None:
        _, plugin, settings = PLUGINS[layout]
        self.booster = Booster(
            plugin=plugin(**{"precision": "fp32"} if plugin is HybridParallelPlugin else {}, **settings)
        )
        self.plugin: Any = self.booster.plugin
        plain = zoo.build(NAME, dtype=torch.float64, **TWO)
        self.reference: Any = copy.deepcopy(plain)
        self.reference_optimizer = adamw(self.reference)
        self.model: Any
        self.model, self.optimizer, *_ = self.booster.boost(plain, adamw(plain))

    def step(self, seed: int) -> None:
        """The same on both; samples have as many tokens each, so that the mean over ranks is that over samples."""
        ranks, rank = self.plugin.data_parallel
        batch = zoo.inputs(NAME, batch_size=2 * ranks, seq_len=9, seed=seed, **TWO)
        batch.pop("attention_mask", None)
        batch["labels"] = batch["input_ids"].clone()
        mine = {key: value[2 * rank : 2 * rank + 2] for key, value in batch.items()}
        if isinstance(self.plugin, HybridParallelPlugin):
            self.booster.execute_pipeline(iter([mine]), self.model, None, self.optimizer)
        else:
            self.booster.backward(loss_of(self.model(**mine)), self.optimizer)
        loss_of(self.reference(**batch)).backward()
        for optimizer in (self.optimizer, self.reference_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def compare(self) -> None:
        mesh = getattr(self.plugin, "mesh", None)
        compare_models(self.reference, self.model, coordinate=mesh.coordinate if mesh else lambda _: 0, gradients=False)


def save_and_load(rank: int, world: int, layout: str, path: Path) -> None:
    with keep_float64():
        twin = Twin(layout)
        twin.step(0)
        twin.model.save_pretrained(path / "one")
        twin.booster.save_model(twin.model, path / "other")
        dist.barrier()
        cls = type(twin.reference)
        one, other = (cls.from_pretrained(path / name, dtype=torch.float64) for name in ("one", "other"))
        compare_models(twin.reference, one, gradients=False)
        assert all(
            torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        )
        # Other weights, whole; then a share of the trained ones taken back. The optimizer goes on from them both times.
        fresh = zoo.build(NAME, dtype=torch.float64, seed=5, **TWO).state_dict()
        twin.reference.load_state_dict(fresh)
        twin.model.load_state_dict(fresh)
        twin.compare()
        twin.step(1)
        twin.compare()
        mine = {name: tensor.clone() for name, tensor in twin.model.local_state_dict().items()}
        whole = copy.deepcopy(twin.reference.state_dict())
        twin.step(2)
        twin.model.load_local_state_dict(mine)
        twin.reference.load_state_dict(whole)
        twin.step(3)
        twin.compare()


@pytest.mark.parametrize("layout", list(PLUGINS))
def test_weights_go_out_and_in_whole(layout: str, tmp_path: Path) -> None:
    run_ranks(save_and_load, PLUGINS[layout][0], layout, tmp_path, debug="INFO")


def changes(rank: int, world: int, layout: str) -> None:
    with keep_float64():
        twin = Twin(layout)
        twin.step(0)
        twin.model.gradient_checkpointing_enable()  # recomputing after boost changes no number
        twin.model.train()
        twin.step(1)
        twin.compare()
        if layout != "ddp":  # whose reducer waits for every gradient
            for model in (twin.model, twin.reference):
                for name, param in model.named_parameters():
                    param.requires_grad_("layers.0" not in name)  # frozen after boost: stays where it is
            twin.step(2)
            twin.compare()
        if "pp" not in layout:
            prompt = torch.tensor([[1, 2, 3]]) if "tp" in layout else torch.tensor([[1, 2, 3 + rank]])
            length = 3 if "tp" in layout else 3 + 2 * rank  # ranks of ZeRO-3 wait for each other's forwards
            settings = {"max_new_tokens": length, "do_sample": False}
            assert torch.equal(twin.model.generate(prompt, **settings), twin.reference.generate(prompt, **settings))
            twin.step(3)
            twin.compare()


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3", "ddp"])
def test_what_may_change_after_boost_changes_no_number(layout: str) -> None:
    run_ranks(changes, PLUGINS[layout][0], layout, debug="INFO")


def lone_calls(rank: int, world: int) -> tuple[str, str]:
    roll_calls.WORD_AFTER = 0.1
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    get_dist_logger().logger.addHandler(handler)
    if rank == 1:
        time.sleep(0.8)  # comes after rank 0 has given up, and is told so
    with pytest.raises(ValueError) as caught:
        roll_call("model.save_pretrained", timedelta(seconds=0.4))
    dist.barrier()
    roll_call("booster.save_model")  # the next one is complete
    return str(caught.value), " ".join(words)


def test_a_call_on_one_rank_names_those_that_are_missing() -> None:
    (first, words), (second, _) = run_ranks(lone_calls, 2)
    assert first == second
    assert "model.save_pretrained was called, but not on rank 1" in first
    assert "if rank == 0" in first
    assert "model.save_pretrained waits for rank 1" in words


def collected(rank: int, world: int) -> int:
    """Boosted models and optimizers of 5 boosts that are still there after their last reference went."""
    left: list[weakref.ref[Any]] = []
    for _ in range(5):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        original = adamw(model)
        booster = Booster(plugin=TorchDDPPlugin())
        boosted, optimizer, *_ = booster.boost(model, original)
        left += [weakref.ref(each) for each in (model, original, boosted, optimizer)]
        del model, original, booster, boosted, optimizer
    gc.collect()
    return sum(each() is not None for each in left)


def test_boosts_leave_nothing_behind() -> None:
    assert run_ranks(collected, 1, debug="INFO") == [0]


def half_precision(rank: int, world: int, path: Path) -> str:
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    get_dist_logger().logger.addHandler(handler)
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16"))
    model = zoo.build(NAME, dtype=torch.float32, **TWO)
    boosted, *_ = booster.boost(model, adamw(model))
    booster.save_model(boosted, path)
    booster.save_model(boosted, path)
    return "\n".join(words)


def test_saving_half_precision_says_where_the_masters_are(tmp_path: Path) -> None:
    (words,) = run_ranks(half_precision, 1, tmp_path)
    told = "the optimizer's fp32 masters are written by save_model(masters=True), and kept by booster.save("
    assert words.count(f"torch.bfloat16; {told}") == 1


def take_state_over(rank: int, world: int, path: Path) -> None:
    """An optimizer that has stepped in plain torch goes on under a layout, by way of a checkpoint: what the refusal
    advises.
    """
    with keep_float64():
        plain = zoo.build(NAME, dtype=torch.float64, **TWO)
        optimizer = adamw(plain)
        batch = zoo.inputs(NAME, batch_size=2, seq_len=9, **TWO)
        loss_of(plain(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2))
        started = copy.deepcopy(plain)
        with pytest.raises(ValueError, match=r"stepped already.*Booster\(\).*booster.load"):
            booster.boost(started, _like(optimizer, started))
        if rank == 0:
            alone = Booster(device="cpu")
            model, wrapped, *_ = alone.boost(plain, optimizer)
            alone.save(path / "taken", model=model, optimizer=wrapped)
        dist.barrier()
        other = zoo.build(NAME, dtype=torch.float64, seed=9, **TWO)
        boosted, stepped, *_ = booster.boost(other, adamw(other))
        booster.load(path / "taken", model=boosted, optimizer=stepped)
        booster.execute_pipeline(iter([batch]), boosted, None, stepped)
        loss_of(plain(**batch)).backward()
        stepped.step()  # type: ignore[union-attr]
        optimizer.step()
        compare_models(plain, boosted, coordinate=booster.plugin.mesh.coordinate, gradients=False)  # type: ignore[union-attr]


def _like(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    other = adamw(model)
    other.load_state_dict(optimizer.state_dict())
    return other


def test_the_state_of_a_plain_optimizer_can_be_taken_over(tmp_path: Path) -> None:
    run_ranks(take_state_over, 2, tmp_path)
