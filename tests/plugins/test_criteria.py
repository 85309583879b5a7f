"""Losses as people write them: right to the last digits on every layout, or refused on every rank before the step."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import compare_models, keep_float64, run_ranks, zoo
from tests.plugins import criteria as losses

LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {  # ranks, arguments of the plugin, samples of a replica
    "three microbatches": (1, {"num_microbatches": 3}, 7),
    "two stages": (2, {"pp_size": 2, "num_microbatches": 2}, 5),
    "two replicas": (2, {}, 3),
    "two replicas of two stages": (4, {"pp_size": 2, "num_microbatches": 2}, 3),
}


class Job:
    """One boosted model, and the same one in plain torch, that compute one criterion after another."""

    def __init__(self, plugin: dict[str, Any], model: Any) -> None:
        self.booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **plugin))
        self.plugin: Any = self.booster.plugin
        self.reference = copy.deepcopy(model)
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def mine(self, whole: dict[str, Any], samples: int) -> dict[str, Any]:
        first = self.plugin.mesh.coordinate("dp") * samples
        return {
            key: value if value.dim() == 0 or value.shape[0] == 1 else value[first : first + samples]
            for key, value in whole.items()
        }

    def run(self, criterion: Any, batch: dict[str, Any], training: bool = True) -> Any:
        return self.booster.execute_pipeline(
            iter([batch]), self.model, criterion, self.optimizer if training else None
        )["loss"]

    def check(self, criterion: Any, whole: dict[str, Any], samples: int) -> None:
        self.reference.zero_grad()
        self.optimizer.zero_grad()
        expected = criterion(self.reference(**whole), copy.deepcopy(whole))  # some write to it
        expected.backward()
        found = self.run(criterion, self.mine(copy.deepcopy(whole), samples))
        compare_models(
            self.reference,
            self.model,
            coordinate=self.plugin.mesh.coordinate,
            losses=None if found is None else (expected.detach().reshape(1), found.reshape(1)),
            gradients=self.optimizer.gradients(),
            weights=False,
        )

    def refuses(self, criterion: Any, batch: dict[str, Any]) -> str:
        try:
            self.run(criterion, batch)
        except ValueError as error:
            return str(error)
        return ""


def run_layout(rank: int, world: int, plugin: dict[str, Any], samples: int) -> tuple[list[str], dict[str, str]]:
    """(what went wrong, what was said to the criteria that must be refused)"""
    with keep_float64():
        job = Job(plugin, losses.build())
        whole = losses.batch(samples * job.plugin.dp_size)
        even = 4 if plugin.get("num_microbatches") != 3 else 6
        pairs = losses.batch(even * job.plugin.dp_size)
        jobs = [(criterion, whole, samples) for criterion in (*losses.RIGHT.values(), losses.Weighted())]
        jobs += [(criterion, pairs, even) for criterion in losses.PAIRS.values()]
        wrong, said = [], {}
        for criterion, batch, size in jobs:
            name = getattr(criterion, "__name__", "Weighted")
            try:
                job.check(criterion, batch, size)
            except (AssertionError, ValueError) as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
            except RuntimeError as error:  # other ranks wait now
                raise RuntimeError(f"{name}: {error}") from error
        if samples > 1 and "num_microbatches" in plugin:
            mine = job.mine(whole, samples)
            said = {name: job.refuses(criterion, mine) for name, criterion in losses.REFUSED.items()}
            if samples % 2:
                said |= {name: job.refuses(criterion, mine) for name, criterion in losses.PAIRS.items()}
            job.check(losses.means.cross_entropy, whole, samples)  # nothing is left of what was refused
        return wrong, said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_losses_are_right_or_refused_on_every_rank(layout: str) -> None:
    ranks, plugin, samples = LAYOUTS[layout]
    results = run_ranks(run_layout, ranks, plugin, samples, timeout=240)
    for rank, (wrong, _) in enumerate(results):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
    said = [refusals for _, refusals in results]
    accepted = [name for name, text in said[0].items() if not text]
    assert not accepted, f"accepted: {accepted}"
    assert all(other == said[0] for other in said), "ranks say different things"


def uniform_part(outputs: Any, inputs: Any) -> torch.Tensor:
    """The number of columns enters as a number."""
    losses_of_tokens = F.cross_entropy(*losses.shifted(outputs, inputs), reduction="none")
    return (1 - 1 / outputs.logits.size(-1)) * losses_of_tokens.sum() / inputs["num_items_in_batch"]


class _LogSumExp(torch.autograd.Function):
    """Nobody sees what it reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad[..., None] * ctx.saved_tensors[0].softmax(-1)


def own_function(outputs: Any, inputs: Any) -> torch.Tensor:
    return _LogSumExp.apply(outputs.logits).mean()


def with_accuracy(outputs: Any, inputs: Any) -> torch.Tensor:
    ACCURACY.append((outputs.logits.argmax(-1) == inputs["labels"]).double().mean().detach())
    return F.cross_entropy(
        *losses.shifted(outputs, inputs), weight=torch.linspace(1, 2, outputs.logits.size(-1), dtype=torch.float64)
    )


def looked_at_in_numpy(outputs: Any, inputs: Any) -> torch.Tensor:
    ACCURACY.append(outputs.logits.detach().numpy().max())
    return losses.by_hand.hand_written_log_softmax(outputs, inputs)


def to_a_teacher(outputs: Any, inputs: Any) -> torch.Tensor:
    student, teacher = F.log_softmax(outputs.logits / 2, -1), F.softmax(inputs["teacher"] / 2, -1)
    return F.kl_div(student, teacher, reduction="batchmean") * 4


def sparse(outputs: Any, inputs: Any) -> torch.Tensor:
    """Columns meet after a function that no list knows."""
    return torch.log1p(torch.relu(outputs["logits"])).amax(1).sum(-1).mean()


def steered(outputs: Any, inputs: Any) -> torch.Tensor:
    logits = outputs[1].clone()
    logits[..., 3] = -1e4
    return -logits.softmax(-1).clamp(min=1e-9).log().topk(1).values.mean()


class ReadsItsLogits(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + output.logits.logsumexp(-1).mean()
        return output


ACCURACY: list[Any] = []
COLUMNS = (
    with_accuracy,
    to_a_teacher,
    sparse,
    steered,
    losses.means.z_loss,
    losses.by_hand.trainer_label_smoother,
)
SPLIT = (uniform_part, losses.means.smoothed, losses.by_hand.counted_by_item, losses.by_hand.focal_of_tokens)


def run_sharded(rank: int, world: int, layouts: list[dict[str, Any]]) -> None:
    for plugin in layouts:
        compute_sharded(plugin.get("parallel_output", True), plugin)


def compute_sharded(parallel_output: bool, plugin: dict[str, Any]) -> None:
    """Logits of which every rank holds a part of the vocabulary, and whole ones; gathered for the criteria that read
    all columns.
    """
    config = {"num_hidden_layers": 2}
    with keep_float64():
        batch = zoo.inputs("llama-causal-lm", batch_size=5, seq_len=9, **config)
        batch["num_items_in_batch"] = (batch["labels"][:, 1:] != -100).sum()
        batch["teacher"] = torch.randn(5, 9, 101, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        model = zoo.build("llama-causal-lm", dtype=torch.float64, **config)
        job = Job({"tp_size": 2, **plugin}, copy.deepcopy(model))
        check = job.model.executor.cut.loss_check
        for criterion in (*SPLIT, *COLUMNS, looked_at_in_numpy) if parallel_output else COLUMNS[:2]:
            job.check(criterion, batch, 5)
            gathers = [verdict.gathers for verdict in check._verdicts.values()]
            assert all(gathers) == (criterion not in SPLIT and parallel_output), f"{criterion.__name__}: {gathers}"
            known = len(gathers)
            job.run(criterion, batch)
            assert len(check._verdicts) == known, "followed again"
            check._verdicts.clear()
        if plugin.get("num_microbatches"):
            with pytest.raises(ValueError, match="samples of the batch together"):
                job.run(losses.refused.softmax_over_logits, batch)
        else:
            job.check(own_function, batch, 5)  # of one microbatch anything may be computed
            assert check._verdicts.popitem()[1].gathers
        if plugin.get("pp_size"):
            model.__class__ = ReadsItsLogits
            said = Job({"tp_size": 2, **plugin}, model).refuses(None, batch)
            assert re.match(r"ReadsItsLogits\.forward: logsumexp is not possible .*parallel_output=False", said), said
        losses_of_evaluation = job.run(losses.means.z_loss, batch, training=False), job.run(None, batch, training=False)
        if losses_of_evaluation[0] is not None:
            output = job.reference(**batch)
            torch.testing.assert_close(losses_of_evaluation[0], losses.means.z_loss(output, batch))
            torch.testing.assert_close(losses_of_evaluation[1], output.loss)


SHARDED = {
    "one stage": (2, [{"num_microbatches": 2}, {}, {"num_microbatches": 2, "parallel_output": False}]),
    "two stages": (4, [{"pp_size": 2, "num_microbatches": 3}]),
}


@pytest.mark.parametrize("layouts", list(SHARDED))
def test_losses_of_sharded_models(layouts: str) -> None:
    run_ranks(run_sharded, *SHARDED[layouts], timeout=120)
