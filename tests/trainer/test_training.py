"""Recipes on ranks against a loop of transformers and torch in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from recipe_files import LLAMA, recipe, write_chat
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, get_scheduler

from shardwright.testing import run_ranks
from shardwright.trainer import build_recipe
from shardwright.trainer.build import prepare
from shardwright.trainer.datasets import Collate
from shardwright.trainer.run import train_here


def train_on_rank(rank: int, world_size: int, given: dict[str, Any]) -> int:
    return train_here(build_recipe(given))


def metrics_of(given: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(given["output_dir"]) / "metrics.jsonl").read_text().splitlines()]


def losses_of(given: dict[str, Any]) -> list[float]:
    return [one["loss"] for one in metrics_of(given) if "loss" in one]


def start_model(folder: Path) -> dict[str, Any]:
    """A recipe that starts from a directory of transformers."""
    torch.manual_seed(3)
    LlamaForCausalLM(
        LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"})
    ).save_pretrained(folder / "start")
    return recipe(folder, model=str(folder / "start"))


def by_hand(given: dict[str, Any], batch_size: int, steps: int) -> tuple[list[float], Any]:
    """The losses of a plain loop on the same samples, in the order of one process, and its model."""
    parts = prepare(build_recipe(given))
    dataset = parts.dataset("data")
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["learning_rate"], weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    order = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, seed=given["seed"], shuffle=True)
    losses = []
    for batch in DataLoader(dataset, batch_size, sampler=order, drop_last=True, collate_fn=Collate(parts.padding)):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if len(losses) == steps:
            break
    return losses, model


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
        (4, {"per_device_train_batch_size": 8, "layout": {"tp_size": 2, "pp_size": 2, "num_microbatches": 4}}),
        (2, {"layout": {"zero_stage": 2}}),
    ],
    ids=["accumulated", "tp2-pp2", "dp2-zero2"],
)
@pytest.mark.parametrize("packing", [False, True], ids=["single", "packed"])
def test_the_losses_are_those_of_a_plain_loop(
    tmp_path: Path, world_size: int, changes: dict[str, Any], packing: bool
) -> None:
    given = start_model(tmp_path)
    given["data"]["packing"] = packing
    if packing:
        changes = {**changes, "per_device_train_batch_size": changes.get("per_device_train_batch_size", 4) // 2}
    given |= changes
    replicas = 2 if world_size == 2 else 1
    samples = given["per_device_train_batch_size"] * given.get("gradient_accumulation_steps", 1) * replicas
    wanted, model = by_hand(given, samples, 3)
    run_ranks(train_on_rank, world_size, given)
    assert losses_of(given) == pytest.approx(wanted, abs=2e-5)
    trained = AutoModelForCausalLM.from_pretrained(Path(given["output_dir"]) / "model", dtype=torch.float32)
    assert trained.config.use_cache
    for (name, theirs), ours in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert (theirs - ours).abs().max() < 1e-4, name


def test_a_run_goes_on_at_another_layout(tmp_path: Path) -> None:
    """The samples, the rate and the losses after a resumption are those of a run that was never cut."""
    given = recipe(tmp_path, max_steps=5, lr_scheduler_type="constant", save_strategy="steps", save_steps=2)
    whole = {**given, "output_dir": str(tmp_path / "whole"), "save_strategy": "no", "per_device_train_batch_size": 8}
    run_ranks(train_on_rank, 1, whole)
    run_ranks(train_on_rank, 2, {**given, "max_steps": 3})
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == ["step-2", "step-3"]
    on = {**given, "resume": True, "layout": {"tp_size": 2, "zero_stage": 1}, "save_total_limit": 1}
    run_ranks(train_on_rank, 4, on)
    assert [one["step"] for one in metrics_of(given)] == [1, 2, 3, 4, 5]
    assert losses_of(given) == pytest.approx(losses_of(whole), abs=2e-5)
    assert metrics_of(given)[-1]["tokens_seen"] == metrics_of(whole)[-1]["tokens_seen"]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-5"]


def test_conversations_with_adapters_and_evaluation(tmp_path: Path) -> None:
    """LoRA at tp2 on a chat; the evaluation's loss is that of transformers on the same samples, one by one."""
    given = start_model(tmp_path)
    chat = write_chat(tmp_path / "chat.jsonl", 21)
    given |= {
        "data": {"path": str(chat)},
        "eval_data": {"path": str(chat)},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 2,
        "lora": {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "layout": {"tp_size": 2},
    }
    run_ranks(train_on_rank, 2, given)
    (evaluated,) = [one["eval_loss"] for one in metrics_of(given) if "eval_loss" in one]
    base = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, Path(given["output_dir"]) / "model").eval()
    dataset = prepare(build_recipe(given)).dataset("eval_data")
    total, count = 0.0, 0
    for at in range(len(dataset)):
        item = {name: value[None] for name, value in dataset[at].items()}
        labelled = int((item["labels"][:, 1:] != -100).sum())
        total, count = total + model(**item).loss.item() * labelled, count + labelled
    assert evaluated == pytest.approx(total / count, abs=2e-5)
    assert len(AutoTokenizer.from_pretrained(Path(given["output_dir"]) / "model")) == 260


def test_a_stream_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    given = recipe(tmp_path, max_steps=4, lr_scheduler_type="constant", save_strategy="steps", save_steps=2)
    given["data"] |= {"streaming": True, "packing": True}
    whole = {**given, "output_dir": str(tmp_path / "whole"), "per_device_train_batch_size": 2}
    given["per_device_train_batch_size"] = 1
    run_ranks(train_on_rank, 1, whole)
    run_ranks(train_on_rank, 2, {**given, "max_steps": 2})
    run_ranks(train_on_rank, 1, {**given, "resume": True, "per_device_train_batch_size": 2})
    assert losses_of(given) == pytest.approx(losses_of(whole), abs=2e-5)


def test_training_ends_when_the_evaluation_does_not_get_better(tmp_path: Path) -> None:
    given = recipe(tmp_path, max_steps=9, learning_rate=0.0, early_stopping_patience=2)
    given |= {"eval_data": given["data"], "eval_strategy": "steps", "eval_steps": 1}
    run_ranks(train_on_rank, 1, given)
    assert [one["step"] for one in metrics_of(given) if "loss" in one] == [1, 2, 3]
