"""Models without a policy of their own: what their plan is tried on, and what becomes of it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from shardwright.models.dry_run import call_model
from shardwright.models.example_inputs import loss_of, training_batches
from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer import ModelSharder, ShardConfig
from shardwright.shardformer.layer.parallel_module import ParallelGroup
from shardwright.shardformer.self_check import SelfCheck
from shardwright.shardformer.small_copy import small_copies
from shardwright.spec import get_spec
from shardwright.testing import compare_models, keep_float64, run_ranks
from shardwright.testing.matrix.modalities import CONFIGS
from tests.models import tiny_modalities as tiny

SHARDED_AT_LEAST = {
    "BeitForImageClassification": 0.4,
    "Swinv2ForImageClassification": 0.4,
    "Blip2ForConditionalGeneration": 0.4,
}
SHARDED_AT_LEAST |= {
    "DebertaV2ForQuestionAnswering": 0.3,
    "DebertaV2ForMultipleChoice": 0.3,
    "VideoMAEForVideoClassification": 0.35,
    "Wav2Vec2ForSequenceClassification": 0.3,
}


def sharded(model: nn.Module, **config: Any) -> ModelSharder:
    sharder = ModelSharder(model, None, ShardConfig(make_vocab_size_divisible_by=8, **config))
    sharder.shard()
    return sharder


def share(model: nn.Module) -> float:
    """Of the parameters that are sharded."""
    sizes = [
        (torch.Size(spec.full_shape).numel(), spec.is_sharded)
        for param in model.parameters()
        if (spec := get_spec(param)) is not None
    ]
    return sum(size for size, is_sharded in sizes if is_sharded) / sum(size for size, _ in sizes)


def against_one_process(rank: int, world_size: int, names: list[str]) -> list[str]:
    """Loss and every gradient of a batch that the check has not seen; returns what differs."""
    problems = []
    for name in names:
        with keep_float64():
            reference, batch = tiny.build(name), tiny.batch(name)
            model = sharded(tiny.build(name)).model
            expected = loss_of(call_model(reference, batch))
            expected.backward()
            actual = loss_of(call_model(model, batch))
            actual.backward()
        sync_shared_gradients(model.parameters(), dist.group.WORLD)
        report = compare_models(
            reference, model, coordinate=rank, losses=(expected.detach(), actual.detach()), check=False
        )
        try:
            report.check()
        except AssertionError as error:
            problems.append(f"{name}: {error}")
        if share(model) < SHARDED_AT_LEAST.get(name, 0.55):
            problems.append(f"{name}: {share(model):.0%} sharded")
    return problems


def check(problems: list[list[str]]) -> None:
    found = [f"rank {rank}: {problem}" for rank, one in enumerate(problems) for problem in one]
    assert not found, "\n".join(found)


def test_every_modality_and_head_has_the_gradients_of_one_process() -> None:
    check(run_ranks(against_one_process, 2, list(tiny.MODELS), timeout=110))


def test_four_ranks_too() -> None:
    names = ["ViTForImageClassification", "WhisperForConditionalGeneration", "CLIPModel", "Gemma2Model"]
    check(run_ranks(against_one_process, 4, names, timeout=110))


REAL_SIZES = {
    "ViTForImageClassification": "ViTConfig",
    "BeitForImageClassification": "BeitConfig",
    "WhisperForConditionalGeneration": "WhisperConfig",
    "CLIPModel": "CLIPConfig",
    "SamModel": "SamConfig",
    "LlavaForConditionalGeneration": "LlavaConfig",
    "BertForPreTraining": "BertConfig",
    "Gemma2ForSequenceClassification": "Gemma2Config",
    "DebertaV2ForSequenceClassification": "DebertaV2Config",
    "BartForConditionalGeneration": "BartConfig",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "BambaForCausalLM": "BambaConfig",
    "FalconH1ForCausalLM": "FalconH1Config",
    "GPTJForCausalLM": "GPTJConfig",
    "DPTForDepthEstimation": "DPTConfig",
    "Wav2Vec2ForXVector": "Wav2Vec2Config",
    "ConvNextForImageClassification": "ConvNextConfig",
    "ResNetForImageClassification": "ResNetConfig",
}


@pytest.mark.parametrize(("model", "config"), REAL_SIZES.items(), ids=list(REAL_SIZES))
def test_a_small_copy_of_a_model_of_real_size_runs_on_a_guessed_batch(model: str, config: str) -> None:
    with torch.device("meta"):
        real = getattr(transformers, model)(getattr(transformers, config)())
    small = next(small_copies(real, 2))
    assert sum(param.numel() for param in small.parameters()) < 20_000_000

    def runs(batch: Any) -> bool:
        try:
            loss_of(call_model(copy.deepcopy(small), batch)).backward()
        except Exception:
            return False
        return True

    assert any(map(runs, training_batches(small)))


class Steered(transformers.LlamaForCausalLM):
    """Takes an argument that nobody could guess."""

    def forward(
        self, input_ids: torch.Tensor, strength: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:  # type: ignore[override]
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state * strength.unsqueeze(-1).unsqueeze(
            -1
        )
        logits = self.lm_head(hidden)
        return {"loss": self.loss_function(logits, labels, vocab_size=self.config.vocab_size), "logits": logits}


def test_a_small_copy_cuts_its_small_images_as_the_model_cuts_large_ones() -> None:
    config = transformers.LlavaNextConfig()
    with torch.device("meta"):
        real = transformers.LlavaNextForConditionalGeneration(config)
    small: Any = next(small_copies(real, 2))
    crop = small.config.vision_config.image_size
    assert crop < config.vision_config.image_size == 336
    crops = [[high // 336, wide // 336] for high, wide in config.image_grid_pinpoints]
    assert small.config.image_grid_pinpoints == [[high * crop, wide * crop] for high, wide in crops]


class SteeredConfig(transformers.LlamaConfig):
    model_type = "steered"


def steered() -> nn.Module:
    torch.manual_seed(0)
    arguments = {key: value for key, value in CONFIGS["LlavaConfig"]["text_config"].items() if key != "model_type"}
    return Steered(SteeredConfig(**arguments)).double().eval()


def own_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 99, (5, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "strength": torch.arange(1.0, 6.0), "labels": ids}


def with_levers(rank: int, world_size: int) -> dict[str, Any]:
    with pytest.raises(
        ValueError, match=r"Steered has no policy.*no batch that could be guessed.*pass example_inputs="
    ):
        sharded(steered())
    with pytest.raises(
        ValueError, match=r"example_inputs: a small copy of Steered does not run on it.*next\(iter\(dataloader\)\)"
    ):
        sharded(steered(), example_inputs={"input_ids": torch.ones(2, 3, dtype=torch.long)})
    reference = steered()
    sharder = sharded(steered(), example_inputs=own_batch())
    batch = {key: value.double() if value.is_floating_point() else value for key, value in own_batch().items()}
    with keep_float64():
        for model in (reference, sharder.model):
            model(**batch)["loss"].backward()
    sync_shared_gradients(sharder.model.parameters(), dist.group.WORLD)
    compare_models(reference, sharder.model, coordinate=rank)
    text = {"input_ids": torch.arange(5, 13).expand(2, 8), "labels": torch.arange(5, 13).expand(2, 8)}
    unseen = sharded(tiny.build("LlavaForConditionalGeneration"), example_inputs=text)
    return {
        "steered": share(sharder.model),
        "unseen": unseen.policy.findings.dropped,
        "checked": sharder.policy.findings.checked,
    }  # type: ignore[attr-defined]


def test_a_batch_of_the_users_is_taken_where_none_can_be_guessed_and_what_it_does_not_reach_stays_whole() -> None:
    for found in run_ranks(with_levers, 2):
        assert found["steered"] > 0.9
        assert found["checked"]
        assert found["unseen"]
        assert all(name.startswith("model.vision_tower.") for name in found["unseen"])


class Fails(nn.Module):
    """Raises in the forward of one rank alone, between two collectives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a shape that only this rank has")


def one_rank_fails(rank: int, world_size: int) -> list[Any]:
    model = tiny.build("Gemma2ForSequenceClassification")
    check = SelfCheck([model], ParallelGroup(dist.group.WORLD))
    sharder = ModelSharder(model, None, ShardConfig(make_vocab_size_divisible_by=8))
    rules = sharder.policy

    def apply(copied: Any, broken: int | None) -> None:
        rules.set_model(copied)
        rules.set_shard_config(sharder.shard_config)
        rules._apply(copied, rules.findings.rules)  # type: ignore[attr-defined]
        if rank == broken:
            copied.model.layers[1].mlp = Fails()

    sharder.prepare()
    return [check.failures(lambda copied, broken=broken: apply(copied, broken)) for broken in (None, 0, 1, None)]


def test_a_plan_that_fails_on_one_rank_alone_is_rejected_on_all_and_the_next_one_is_tried() -> None:
    assert run_ranks(one_rank_fails, 2, timeout=30) == [[[], None, None, []]] * 2


class Extended(nn.Module):
    """A linear whose weight is longer by as many rows as `further` has, which may be none (MobileBERT's head)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.further = nn.Parameter(torch.zeros(0, 6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (x @ torch.cat([self.linear.weight, self.further]).T).square().mean()}


def without_elements(rank: int, world_size: int) -> list[str] | None:
    check = SelfCheck([Extended().double()], ParallelGroup(dist.group.WORLD), {"x": torch.arange(12.0).view(2, 6)})
    return check.failures(lambda copied: None)


def test_a_parameter_without_elements_is_no_failure() -> None:
    assert run_ranks(without_elements, 2, timeout=30) == [[], []]


def disagreeing(rank: int, world_size: int) -> list[str]:
    """Ranks whose batches are not one: each refusal comes on all ranks, and none waits."""
    short = {"input_ids": torch.ones(2, 3, dtype=torch.long)}  # which does not run
    found = []
    for batches in ((own_batch(), short), (short, own_batch()), (own_batch(), None), (own_batch(), other_batch())):
        with pytest.raises(ValueError) as caught:
            sharded(steered(), example_inputs=batches[rank])
        found.append(str(caught.value))
    return found


def other_batch() -> dict[str, torch.Tensor]:
    return {**own_batch(), "strength": torch.arange(2.0, 7.0)}


def test_ranks_agree_on_a_batch_before_anything_is_run_together() -> None:
    first, second = run_ranks(disagreeing, 2, timeout=60)
    for found, words in zip(
        zip(first, second, strict=True),
        (
            r"rank 1 has no batch .*: example_inputs: a small copy of Steered does not run on it .*missing 1 required",
            r"rank 0 has no batch .*: example_inputs: a small copy of Steered does not run on it .*missing 1 required",
            r"rank 1 has no batch .*: Steered has no policy of its own.*Give all ranks that share the model the same",
            r"example_inputs differs between ranks .*: rank 0 has {'input_ids': '\[2, 9\] int64 .*; give all of them",
        ),
        strict=True,
    ):
        assert found[0] == found[1]
        assert re.search(words, found[0]), found[0]
