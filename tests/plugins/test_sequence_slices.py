"""Microbatches cut along the sequence: results, order, memory, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from hybrid_ranks import Layout, run_layout
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright import Booster, Microbatches
from shardwright.pipeline.cut.surveyor import survey_model
from shardwright.pipeline.planning.actions import validate
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.simulate import simulate
from shardwright.pipeline.planning.sliced_schedule import get_sliced
from shardwright.pipeline.runtime import PipelineRuntime
from shardwright.pipeline.schedules import STYLES
from shardwright.pipeline.slices.past_keys import Past
from shardwright.pipeline.slices.sequence_slices import SlicedInputs, SliceRule
from shardwright.pipeline.slices.slice_check import slice_rule
from shardwright.pipeline.stage import StagedModel
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.shardformer.small_copy import small_copies
from shardwright.testing import adamw, keep_float64, run_ranks, zoo
from shardwright.zero.param_guard import own_gradient

FOUR = {"num_hidden_layers": 4}


def layout(model: str, world: int, slices: int, **others: Any) -> Layout:
    known = {name: others.pop(name) for name in ("overrides", "batch", "checkpointing", "dtype") if name in others}
    plugin = {"pp_size": 2, "num_microbatches": 2, "num_sequence_slices": slices, **others}
    return Layout(model, world, plugin, steps=2, **{"batch": 3, "overrides": FOUR, **known})


def _train(rank: int, world: int, layouts: list[Layout]) -> None:
    for one in layouts:
        run_layout(rank, world, one)


def test_two_stages_train_as_one_process() -> None:
    selective = PipelineGradientCheckpointConfig(selective_ratio=1.0)
    layouts = [
        layout("llama-tied-causal-lm", 2, 4, pp_style="zb", checkpointing=True),
        layout("gpt2-causal-lm", 2, 3, pp_style="zbv", num_model_chunks=2, overrides={"n_layer": 4}),
        layout("qwen3-moe-causal-lm", 2, 2, gradient_checkpoint_config=selective),
        layout("bloom-causal-lm", 2, 3, num_layers_per_stage=[0, 4], overrides={"n_layer": 4, "n_head": 4}),
        layout("llama-sequence-classification", 2, 3, num_layers_per_stage=[4, 0], offload_activations=1.0),
    ]
    run_ranks(_train, 2, layouts, timeout=120)


def test_four_ranks_train_as_one_process() -> None:
    chunks = {"pp_style": "dualpipev", "num_model_chunks": 2}
    layouts = [
        layout("llama-causal-lm", 4, 5, pp_size=4, num_microbatches=1),
        layout("llama-causal-lm", 4, 2, zero_stage=2, pp_style="interleaved", num_model_chunks=2),
        layout("llama-causal-lm", 4, 3, zero_stage=3, checkpointing=True),
        layout("gpt2-causal-lm", 4, 3, tp_size=2, overrides={"n_layer": 4}, **chunks),
    ]
    run_ranks(_train, 4, layouts, timeout=120)


@keep_float64()
def _one_step(rank: int, world: int, slices: int) -> list[Any]:
    """Losses, gradients, outputs, in training and in evaluation, of ready-made microbatches of unequal lengths and
    with router losses.
    """
    found: list[Any] = []
    torch.manual_seed(0)
    model = zoo.build("mixtral-causal-lm", dtype=torch.float64, num_hidden_layers=3).train()
    model.config.output_router_logits = True
    plugin = HybridParallelPlugin(pp_size=world, microbatch_size=4, num_sequence_slices=slices, precision="fp32")
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    parts = [zoo.inputs("mixtral-causal-lm", batch_size=2 + n, seq_len=9 + 4 * n, seed=n) for n in range(2)]
    parts[0]["attention_mask"][0, :3] = 0  # padding in front, a whole slice of it
    for optimizer_given in (optimizer, None):
        result = booster.execute_pipeline(
            iter([Microbatches(parts)]), model, None, optimizer_given, return_outputs=True
        )
        found += [result["loss"], None if result["outputs"] is None else result["outputs"]["logits"]]
    owned = {name: own_gradient(param) for name, param in model.unwrap().named_parameters()}
    grads = {name: grad.clone() for name, grad in owned.items() if grad is not None}
    return [*found, grads]


def _beside_whole(rank: int, world: int) -> None:
    whole, sliced = _one_step(rank, world, 1), _one_step(rank, world, 4)
    for one, other in zip(whole[:-1], sliced[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)  # routers compute in fp32
    assert whole[-1].keys() == sliced[-1].keys()
    for name, grad in whole[-1].items():
        torch.testing.assert_close(grad, sliced[-1][name], rtol=1e-6, atol=1e-8)


def test_router_losses_ready_microbatches_and_evaluation() -> None:
    run_ranks(_beside_whole, 3, timeout=60)


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "attn_implementation": "sdpa",
}
FAMILIES = {
    "mistral": {"sliding_window": 5},
    "falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bert": {"is_decoder": True},
    "megatron-bert": {"is_decoder": True, "attn_implementation": "eager"},
    "modernbert-decoder": {"local_attention": 4, "global_attn_every_n_layers": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_see_what_the_whole_sees(family: str) -> None:
    """Logits and gradients of a model that is given its sequence in slices, with padding behind and in front."""
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    model: Any = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    length, ends = 17, [6, 9, 17]
    ids, mask = torch.randint(4, 96, (3, length)), torch.ones(3, length, dtype=torch.long)
    mask[0, -9:], mask[1, :7] = 0, 0
    weight = torch.randn(3, length, 1, dtype=torch.float64) * mask[..., None]
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    (logits.square() * weight).sum().backward()
    whole = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    past, start, parts = Past(length), 0, []
    for end in ends:
        given = {"attention_mask": mask[:, :end], "past_key_values": past.before(start), "use_cache": False}
        parts.append((start, end, model(ids[:, start:end], **given).logits))
        start = end
    for start, end, part in reversed(parts):
        (part.square() * weight[:, start:end]).sum().backward()
    seen = mask[..., None].bool()
    torch.testing.assert_close(torch.cat([part for *_, part in parts], 1) * seen, logits * seen, rtol=1e-10, atol=1e-10)
    for name, param in model.named_parameters():
        if name in whole:
            torch.testing.assert_close(param.grad, whole[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("style", STYLES)
def test_every_schedule_takes_slices(style: str) -> None:
    chunks = STYLES[style].min_chunks
    for ranks, microbatches, slices in ((2, 1, 2), (2, 3, 3), (3, 4, 2), (4, 2, 5), (4, 8, 2)):
        schedule = get_sliced(style, ranks, microbatches, slices, chunks)
        validate(schedule.actions, schedule.placement, microbatches * slices)
        lowered = lower(schedule)
        validate([list(lowered.actions[rank]) for rank in range(ranks)], schedule.placement, microbatches * slices)
        for actions in schedule.actions:
            backward = [(a.stage, a.microbatch) for a in actions if a.kind in "BI"]
            for stage in {stage for stage, _ in backward}:
                order = [number for other, number in backward if other == stage]
                assert order == sorted(order, key=lambda number: (number // slices, -number))
    sliced, whole = simulate(get_sliced("1f1b", 4, 8, 4)), simulate(get_sliced("1f1b", 4, 8, 1))
    assert sliced.peak_live == [4 - rank + 3 for rank in range(4)]  # a fourth each
    assert sliced.bubble == pytest.approx(3 / 35)
    assert whole.bubble == pytest.approx(3 / 11)


def test_slices_take_equal_time() -> None:
    rule = SliceRule(4, ("input_ids",), linear=1000.0, per_key=2.0)
    ends = rule.ends(4096, 4)

    def cost(low: int, high: int) -> float:
        return sum(rule.linear + rule.per_key * place for place in range(low, high))

    costs = [cost(low, high) for low, high in zip([0, *ends], ends, strict=False)]
    assert max(costs) < 1.13 * min(costs)  # an end is off by 32 tokens at most
    assert all(end % 64 == 0 for end in ends)
    assert ends[0] > 2 * (ends[3] - ends[2])
    assert rule.ends(5, 4) == [1, 3, 4, 5]
    assert rule.ends(4, 4) == [1, 2, 3, 4]


def test_unknown_attention_is_refused_where_it_cannot_be_tried() -> None:
    config = transformers.AutoConfig.for_model(
        "big_bird", **{**SMALL, "attn_implementation": None, "attention_type": "original_full"}
    )
    built = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="looks at earlier tokens only is not known"):
        slice_rule(built, survey_model(built), 2)


REFUSED = {
    "t5-conditional-generation": "its encoder looks at the whole sequence at once",
    "vit-image-classification": "looks ahead (is_causal=False)",
    "bert-base": "looks ahead (is_causal=False)",
}


@pytest.mark.parametrize("model", REFUSED)
def test_models_that_look_elsewhere_are_refused(model: str) -> None:
    built = zoo.build(model)
    with pytest.raises(
        ValueError, match=r"num_sequence_slices=2: sequences of .*; use num_sequence_slices=1"
    ) as caught:
        slice_rule(built, survey_model(built), 2)
    assert REFUSED[model] in str(caught.value)


@pytest.mark.parametrize(
    ("family", "others", "why"),
    [
        ("recurrent_gemma", {}, "keeps keys and values 0 times"),
        ("jamba", {}, "did not run on a part of a sequence"),
        ("roberta", {"is_decoder": True}, "counts positions from the tokens"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "(rope_type='dynamic')",
        ),
        ("big_bird", {"attention_type": "original_full"}, "do not give what the whole gives"),
    ],
)
def test_other_memories_than_keys_are_refused(family: str, others: dict[str, Any], why: str) -> None:
    config = transformers.AutoConfig.for_model(family, **{**SMALL, "attn_implementation": None, **others})
    built = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="num_sequence_slices=2") as caught:
        slice_rule(built, survey_model(built), 2, lambda: small_copies(built, 1))
    assert why in str(caught.value)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    rule = SliceRule(2, ("input_ids", "attention_mask"), 1.0, 0.0)
    ids = torch.ones(2, 8, dtype=torch.long)
    for batch, why in (
        ({"pixel_values": torch.ones(2, 3, 4, 4), "input_ids": ids}, "a batch with pixel_values"),
        ({"labels": ids}, "and the batch has neither"),
        ({"input_ids": ids[:, None]}, "input_ids of shape [2, 1, 8]"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 1, 8, 8)}, "it may let tokens look ahead"),
        ({"input_ids": ids, "attention_mask": {"full_attention": None}}, "an attention_mask that is a dict"),
        ({"input_ids": ids, "past_key_values": ()}, "slices are told by these what came before"),
        ({"input_ids": ids, "position_ids": ids}, "position_ids but no attention_mask"),
    ):
        with pytest.raises(ValueError, match="num_sequence_slices=2") as caught:
            rule.length(batch)
        assert why in str(caught.value)
    for entry in ({"attention_mask": torch.ones(2, 9)}, {"bias": torch.ones(5, 7)}):
        with pytest.raises(ValueError, match="num_sequence_slices=2: entry"):
            rule.cut({"input_ids": ids, **entry}, [4, 8])
    given = {"input_ids": ids, "past_key_values": None, "labels": torch.ones(2, 3), "cache_position": torch.arange(8)}
    for batch in ((ids, torch.ones(2, 8)), {**given, "attention_mask": torch.ones(2, 8)}):
        parts = rule.cut(batch, [3, 8])
        assert [{name: part.shape[1] for name, part in entries.items()} for entries in parts] == [
            {"input_ids": 3, "attention_mask": 3},
            {"input_ids": 5, "attention_mask": 8},
        ]


def test_slices_are_copied_when_a_model_gets_them() -> None:
    """What stages only look at (shapes, contents of masks) takes no memory; what a model writes to is its own."""
    ids = torch.arange(16).view(2, 8)
    inputs = SlicedInputs([{"input_ids": ids}], SliceRule(2, ("input_ids",), 1.0, 0.0), lambda batch: batch)
    for part in inputs.microbatches:
        assert part["input_ids"].untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()
    given = inputs.batch(1)
    assert given is inputs.batch(1), "a trace and the forward behind it look at one copy"
    given["input_ids"].zero_()
    assert ids.equal(torch.arange(16).view(2, 8))
    assert inputs.batch(0)["input_ids"].equal(ids[:, :4])


@contextmanager
def held_bytes(fixed: set[int]) -> Iterator[list[int]]:
    """What autograd has saved and is there, at the end of every forward."""
    forward, met, seen = PipelineRuntime._forward_of, dict[int, tuple[StorageWeakRef, int]](), list[int]()

    def add(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            met.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return tensor.detach()

    def forward_of(self: PipelineRuntime, stage: int, received: Any, microbatch: int) -> Any:
        with saved_tensors_hooks(add, lambda tensor: tensor):
            result = forward(self, stage, received, microbatch)
        for key in [key for key, (reference, _) in met.items() if reference.expired()]:
            del met[key]
        seen.append(sum(size for _, size in met.values()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineRuntime, "_forward_of", forward_of)
        yield seen


def _measured(rank: int, world: int) -> list[tuple[int, list[int]]]:
    """Most bytes held, and how often the model's forward ran in every step, whole and in slices."""
    found = []
    for slices in (1, 4):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        model = zoo.build(
            "llama-causal-lm",
            dtype=torch.float32,
            num_hidden_layers=world,
            hidden_size=64,
            intermediate_size=160,
            **heads,
        )
        plugin = HybridParallelPlugin(pp_size=world, num_microbatches=6, num_sequence_slices=slices, precision="fp32")
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, adamw(model))
        fixed = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*boosted.unwrap().parameters(), *boosted.unwrap().buffers())
        }
        calls, call = [0], StagedModel._call

        def counted(self: StagedModel, batch: Any, calls: list[int] = calls, call: Any = call) -> Any:
            calls[-1] += 1
            return call(self, batch)

        with pytest.MonkeyPatch.context() as patch, held_bytes(fixed) as held:
            patch.setattr(StagedModel, "_call", counted)
            for _ in range(3):
                batch = zoo.inputs("llama-causal-lm", batch_size=6, seq_len=128, seed=3)
                batch.pop("attention_mask")
                booster.execute_pipeline(iter([batch]), boosted, lambda outputs, _: outputs.loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                calls.append(0)
        found.append((max(held[len(held) // 3 :]), calls[:-1]))
    return found


def test_slices_hold_less_and_masks_are_made_once() -> None:
    ranks = run_ranks(_measured, 3, timeout=60)
    (whole, _), (sliced, _) = ranks[0]
    # 3 microbatches, or 3 + 3 slices of a fourth each, and all keys and values (2 of some 20 hidden states) of two or
    # three microbatches.
    assert sliced < 0.62 * whole
    middle = ranks[1]
    assert middle[0][1][1:] == [1, 1], "one trace for all microbatches"
    assert middle[1][1][1:] == [4, 4], "one for each place of slices"
