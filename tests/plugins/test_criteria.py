"""Losses as people write them: right to the last digits on every layout, or refused on every rank before the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

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
        return {key: value if value.dim() == 0 or value.shape[0] == 1 else value[first : first + samples] for key, value in whole.items()}

    def run(self, criterion: Any, batch: dict[str, Any], training: bool = True) -> Any:
        return self.booster.execute_pipeline(iter([batch]), self.model, criterion, self.optimizer if training else None)["loss"]

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


def run_sharded(rank: int, world: int) -> None:
    """Logits of which every rank holds a part of the vocabulary, and whole ones."""
    config = {"num_hidden_layers": 2}
    means, by_hand = losses.means, losses.by_hand
    split = (means.cross_entropy, means.smoothed, means.summed, by_hand.counted_by_item, by_hand.num_items)
    whole = (by_hand.hand_written_log_softmax, by_hand.selected_mean, means.z_loss, by_hand.trainer_label_smoother)
    with keep_float64():
        batch = zoo.inputs("llama-causal-lm", batch_size=5, seq_len=9, **config)
        batch["num_items_in_batch"] = (batch["labels"][:, 1:] != -100).sum()
        for parallel_output, criteria in ((True, split), (False, whole)):
            model = zoo.build("llama-causal-lm", dtype=torch.float64, **config)
            job = Job({"tp_size": 2, "num_microbatches": 2, "parallel_output": parallel_output}, model)
            for criterion in criteria:
                job.check(criterion, batch, 5)
        with pytest.raises(ValueError, match="samples of the batch together"):
            job.run(losses.refused.softmax_over_logits, batch)


def test_losses_of_sharded_models() -> None:
    run_ranks(run_sharded, 2, timeout=120)
