"""Recipes on ranks against a loop of transformers and torch in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from recipe_files import LLAMA, recipe, sentences, write_chat, write_text
from torch.utils.data import DataLoader
from transformers import (
    Adafactor,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    get_scheduler,
)

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import RankError, run_ranks
from shardwright.trainer import RecipeError, Trainer, build_recipe
from shardwright.trainer.build import prepare
from shardwright.trainer.run import exported, train_here
from shardwright.trainer.trainer import Progressed


def train_on_rank(rank: int, world_size: int, *given: dict[str, Any]) -> list[int]:
    return [train_here(build_recipe(one)) for one in given]


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
    # With less of it, what rounding leaves of a gradient that is none makes whole steps of Adam.
    return recipe(folder, model=str(folder / "start"), adam_epsilon=1e-5)


def by_hand(
    given: dict[str, Any], batch_size: int, steps: int, change: Callable[[Any, int], None] | None = None
) -> tuple[list[float], Any]:
    """The losses of a plain loop on the same samples, in the order of one process, and its model."""
    parts = prepare(build_recipe(given))
    dataset = parts.dataset("data")
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    optimizer: torch.optim.Optimizer
    if given.get("optim") == "adafactor":  # as transformers' Trainer makes it
        optimizer = Adafactor(model.parameters(), lr=given["learning_rate"], scale_parameter=False, relative_step=False)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=given["learning_rate"], eps=given["adam_epsilon"], weight_decay=0.0
        )
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    order = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, seed=given["seed"], shuffle=True)
    losses = []
    for batch in DataLoader(dataset, batch_size, sampler=order, collate_fn=parts.collate("data")):
        if change is not None:
            change(optimizer, len(losses))
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


def test_a_recipe_goes_back_from_losses_that_are_not_finite(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At this rate the second loss is none, also behind the first checkpoint, so that the run ends after going back."""
    steps = {"max_steps": 4, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}
    given = recipe(tmp_path, learning_rate=1e30, on_nan="stop", rollbacks=1, layout={"tp_size": 2}, **steps)
    with pytest.raises(RankError, match="NonFiniteLoss"):
        run_ranks(train_on_rank, 2, given)
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count(
        "back to step 1, without the data of the steps since; rollbacks left: 0"
    ) == 1


def evaluate_by_hand(given: dict[str, Any], model: Any) -> float:
    dataset = prepare(build_recipe(given)).dataset("eval_data")
    total, count = 0.0, 0
    for at in range(len(dataset)):
        item = {name: value[None] for name, value in dataset[at].items()}
        labelled = int((item["labels"][:, 1:] != -100).sum())
        total, count = total + model(**item).loss.item() * labelled, count + labelled
    return total / count


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
        assert (theirs - ours).abs().max() < 1e-5, name


def test_adafactor_is_that_of_transformers(tmp_path: Path) -> None:
    given = {**start_model(tmp_path), "optim": "adafactor", "layout": {"zero_stage": 2}}
    del given["adam_epsilon"]
    wanted, model = by_hand(given, 2 * given["per_device_train_batch_size"], 3)
    run_ranks(train_on_rank, 2, given)
    assert losses_of(given) == pytest.approx(wanted, abs=2e-5)
    trained = AutoModelForCausalLM.from_pretrained(Path(given["output_dir"]) / "model", dtype=torch.float32)
    for (name, theirs), ours in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert (theirs - ours).abs().max() < 1e-5, name


def test_a_run_goes_on_at_another_layout(tmp_path: Path) -> None:
    """The samples, the rate and the losses after a resumption are those of a run that was never cut."""
    given = recipe(tmp_path, max_steps=5, lr_scheduler_type="constant", save_strategy="steps", save_steps=2)
    whole = {**given, "output_dir": str(tmp_path / "whole"), "save_strategy": "no", "per_device_train_batch_size": 8}
    del whole["save_steps"]  # without effect then, which is refused
    run_ranks(train_on_rank, 1, whole)
    run_ranks(train_on_rank, 2, {**given, "max_steps": 3, "profile_steps": 1})
    traces = sorted(path.name for path in (tmp_path / "out" / "profile").iterdir())
    assert traces == ["merged.json", "rank0.json", "rank1.json"]
    assert "ProfilerStep#2" in (tmp_path / "out" / "profile" / "merged.json").read_text()
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*")) == ["step-2", "step-3"]
    on = {**given, "resume": True, "layout": {"tp_size": 2, "zero_stage": 1}, "save_total_limit": 1}
    run_ranks(train_on_rank, 4, on)
    assert [one["step"] for one in metrics_of(given)] == [1, 2, 3, 4, 5]
    assert losses_of(given) == pytest.approx(losses_of(whole), abs=2e-5)
    assert metrics_of(given)[-1]["tokens_seen"] == metrics_of(whole)[-1]["tokens_seen"]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*")] == ["step-5"]


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
    assert evaluated == pytest.approx(evaluate_by_hand(given, model), abs=2e-5)
    assert len(AutoTokenizer.from_pretrained(Path(given["output_dir"]) / "model")) == 260


def test_a_stream_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    given = recipe(tmp_path, max_steps=4, lr_scheduler_type="constant", save_strategy="steps", save_steps=0.5)
    given["data"] |= {"streaming": True, "packing": True}
    whole = {**given, "output_dir": str(tmp_path / "whole"), "per_device_train_batch_size": 2}
    given["per_device_train_batch_size"] = 1
    run_ranks(train_on_rank, 1, whole)
    run_ranks(train_on_rank, 2, {**given, "max_steps": 2})
    run_ranks(train_on_rank, 1, {**given, "resume": True, "per_device_train_batch_size": 2})
    assert losses_of(given) == pytest.approx(losses_of(whole), abs=2e-5)


def test_a_pass_ends_with_what_is_left(tmp_path: Path) -> None:
    """30 samples, 8 a step: the last step has 6, whatever ranks and microbatches they fall on; as packed sequences
    they are few.
    """
    given = start_model(tmp_path)
    given["data"]["path"] = str(write_text(tmp_path / "t.jsonl", 30))
    given |= {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 8}
    packed = {**given, "data": {**given["data"], "packing": True}, "output_dir": str(tmp_path / "packed")}
    wanted, model = by_hand(given, 8, 4)
    wanted_packed, _ = by_hand(packed, 8, 1)
    staged = {**given, "layout": {"pp_size": 2, "num_microbatches": 4}}
    dealt = {"layout": {"zero_stage": 1}, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    apart = {**given, **dealt, "output_dir": str(tmp_path / "apart")}
    run_ranks(train_on_rank, 2, staged, apart, {**packed, **dealt, "max_steps": 1})
    for one in (staged, apart):
        assert losses_of(one) == pytest.approx(wanted, abs=2e-5)
        trained = AutoModelForCausalLM.from_pretrained(Path(one["output_dir"]) / "model", dtype=torch.float32)
        for (name, theirs), ours in zip(model.named_parameters(), trained.parameters(), strict=True):
            assert (theirs - ours).abs().max() < 1e-5, name
        assert metrics_of(one)[-1]["tokens_seen"] == sum(min(64, len(text) + 1) for text in sentences(30))
        assert [metric["epoch"] for metric in metrics_of(one)] == [0, 0, 0, 1]
    assert losses_of(packed) == pytest.approx(wanted_packed, abs=2e-5)


def resume_on_rank(rank: int, world_size: int, first: dict[str, Any], then: dict[str, Any]) -> list[str]:
    train_here(build_recipe(first))
    said = []
    for changes in ({"seed": 5}, {"data": {**first["data"], "packing": True}}):
        with pytest.raises(RecipeError) as caught:
            train_here(build_recipe({**first, "resume": True, **changes}))
        said.append(str(caught.value))
    train_here(build_recipe(then))
    return said


def test_options_are_those_that_are_given_when_a_run_goes_on(tmp_path: Path) -> None:
    """A longer schedule from another rate on, and other options of the optimizer; other data is refused."""
    given = start_model(tmp_path)
    first = {**given, "max_steps": 2, "save_strategy": "steps", "per_device_train_batch_size": 2}
    then = {**first, "max_steps": 4, "resume": True, "learning_rate": 4e-4, "weight_decay": 0.5, "adam_beta1": 0.5}
    said = run_ranks(resume_on_rank, 2, {**first, "layout": {"zero_stage": 1}}, {**then, "layout": {"zero_stage": 1}})
    assert "seed was 1 and is 5" in said[0][0]
    assert "data.packing was False and is True" in said[0][1]
    assert [one["learning_rate"] for one in metrics_of(then)] == pytest.approx([1e-3, 5e-4, 2e-4, 1e-4])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float32)

    def change(optimizer: torch.optim.Optimizer, step: int) -> None:
        (group,) = optimizer.param_groups
        group["lr"] = [1e-3, 5e-4, 2e-4, 1e-4][step]
        if step == 2:
            group |= {"betas": (0.5, 0.999), "weight_decay": 0.5}

    _, model = by_hand(given, 4, 4, change)
    for (name, theirs), ours in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert theirs.ndim < 2 or (theirs - ours).abs().max() < 1e-5, name


def test_the_best_model_is_kept_and_exported(tmp_path: Path) -> None:
    """Where the evaluation gets worse, training ends; the lowest loss is that of the exported model."""
    given = start_model(tmp_path)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"text": text[::-1]}) + "\n" for text in sentences(9, 9)))
    given |= {
        "max_steps": 20,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "eval_data": {"path": str(held_out), "max_length": 64},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "early_stopping_patience": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
    }
    run_ranks(train_on_rank, 1, given)
    found = [one["eval_loss"] for one in metrics_of(given) if "eval_loss" in one]
    best = found.index(min(found)) + 1
    assert len(found) == best + 2 < 20
    assert [path.name for path in (tmp_path / "out" / "best").glob("step-*")] == [f"step-{best}"]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*")] == [f"step-{best + 2}"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float32)
    assert evaluate_by_hand(given, model.eval()) == pytest.approx(min(found), abs=2e-5)


class Halved(Trainer):
    def criterion(self, outputs: Any, inputs: Any) -> torch.Tensor:
        return super().criterion(outputs, inputs) / 2


class Told:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, metrics: dict[str, Any]) -> None:
        self.losses.append(metrics["loss"])

    def started(self, facts: Any) -> None: ...

    evaluated = finished = started


def images_on_rank(rank: int, world_size: int, folder: Path) -> list[list[float]]:
    """Two steps on images, as they are and with half of the loss."""
    losses = []
    for kind in (Trainer, Halved):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = ViTConfig(**sizes, num_attention_heads=4, image_size=16, patch_size=8, num_labels=3)
        model: Any = ViTForImageClassification(config)
        rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(at % 3)} for at in range(8)]
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        data: Any = booster.plugin.prepare_dataloader(rows, batch_size=4)
        model, optimizer, _, data, _ = booster.boost(model, optimizer, dataloader=data)
        told: Any = Told()
        trainer = kind(
            booster, model, optimizer, data, total_steps=1, directory=folder, evaluation=data, listeners=[told]
        )
        trainer.train()
        losses.append([*told.losses, trainer.evaluate()])
    return losses


def test_a_trainer_of_images_and_one_with_a_criterion(tmp_path: Path) -> None:
    (whole, half) = run_ranks(images_on_rank, 1, tmp_path)[0]
    assert half[0] == pytest.approx(whole[0] / 2)
    assert 0 < half[1] < whole[1]


def test_training_ends_when_the_evaluation_does_not_get_better(tmp_path: Path) -> None:
    given = recipe(tmp_path, max_steps=9, learning_rate=0.0, early_stopping_patience=2)
    given |= {"eval_data": given["data"], "eval_strategy": "steps", "eval_steps": 1}
    run_ranks(train_on_rank, 1, given)
    assert [one["step"] for one in metrics_of(given) if "loss" in one] == [1, 2, 3]


def test_the_step_of_the_model_is_told() -> None:
    """Of the last step, which may have been the best one, or of the best where that is kept."""
    done = Progressed(step=9, best_step=4, best_loss=1.25)
    best = "step 4, whose eval_loss was the lowest, 1.2500"
    assert exported(Progressed(step=9), keeps_best=False) == "step 9"
    assert exported(done, keeps_best=False) == f"step 9; the best evaluation was that of {best}"
    assert exported(done, keeps_best=True) == best
    done.step = 4
    assert exported(done, keeps_best=False) == best
