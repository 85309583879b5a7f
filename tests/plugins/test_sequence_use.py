"""How scripts use split sequences: what they hand on beside tokens, their own losses, short and packed rows."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from sequence_ranks import compare, gemma2, packed, sgd
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from shardwright import Booster
from shardwright.attention.zigzag import Share
from shardwright.kernels.lazy_logits import LazyLogits
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.sequence_axis import Positions, SequenceAxis, SequenceFacts
from shardwright.plugins.hybrid.sequence_loss import SequenceLoss
from shardwright.plugins.hybrid.sequence_probe import probe_ring, probe_ulysses
from shardwright.shardformer import fused_head
from shardwright.shardformer.adapters import refuse_prefixes, refuse_prompts
from shardwright.shardformer.small_copy import build_small
from shardwright.testing import compare_models, keep_float64, run_ranks, zoo

ON: dict[str, Any] = {"enable_sequence_parallelism": True}
ULYSSES: dict[str, Any] = {**ON, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
SPLIT = {**ON, "tp_size": 2}
LLAMA = "llama-causal-lm"


def smooth(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **_: Any) -> torch.Tensor:
    """A loss of one's own that is a mean over labels."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    return F.cross_entropy(logits.view(-1, vocab_size), shifted.flatten(), label_smoothing=0.3)


def summed(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **_: Any) -> torch.Tensor:
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    return F.cross_entropy(logits.view(-1, vocab_size), shifted.flatten(), reduction="sum")


def recomputed(name: str) -> nn.Module:
    """By transformers' own switch, which also keeps models from making a cache in training."""
    model = zoo.build(name, use_cache=True)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def with_loss(function: Any) -> nn.Module:
    model: Any = zoo.build(LLAMA)
    model.loss_function = function
    return model


def penalty(model: nn.Module) -> torch.Tensor:
    """Of weights, which all ranks hold alike."""
    return 0.01 * sum((param.square().sum() for param in model.parameters()), torch.zeros(()))


def roberta() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.RobertaConfig(
        vocab_size=101, **sizes, pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    torch.manual_seed(0)
    return tf.RobertaForMaskedLM(config).double().train()


def counted(classes: int = 100) -> dict[str, torch.Tensor]:
    """Labels of fewer tokens on one rank than on the other, to be divided by a number that is told."""
    batch = packed(3, 13)
    del batch["position_ids"]
    batch["labels"] = (batch["labels"] % classes).masked_fill(batch["labels"] < 0, -100)
    return {**batch, "num_items_in_batch": torch.tensor(17)}


def padded(padding: int) -> dict[str, torch.Tensor]:
    """Behind and in front, where ids are those of padding."""
    batch = packed(3, 13)
    seen = (torch.arange(13) < torch.tensor([13, 9, 13])[:, None]) & (
        torch.arange(13) >= torch.tensor([0, 0, 4])[:, None]
    )
    ids = batch["input_ids"].masked_fill(~seen, padding)
    return {"input_ids": ids, "labels": ids.masked_fill(~seen, -100), "attention_mask": seen.long()}


def use_axis(rank: int, world: int) -> None:
    rows = packed(3, 13)
    with keep_float64():
        compare(zoo.build("bert-masked-lm"), counted(), ULYSSES, True)
        compare(zoo.build(LLAMA), counted(), ULYSSES, True)
        compare(recomputed("gpt2-causal-lm"), rows, RING, True)
        compare(zoo.build(LLAMA, use_cache=True), {**rows, "use_cache": None}, RING, True)
        compare(zoo.build(LLAMA, use_cache=True), rows, ULYSSES, False, use_cache=False)
        compare(with_loss(smooth), rows, RING, True, penalty)
        compare(roberta(), padded(1), ULYSSES, True)
        prompt_of_the_script(rows)


def use_axis_more(rank: int, world: int) -> None:
    with keep_float64():
        compare(zoo.build("llama-token-classification", classifier_dropout=0.0), counted(3), RING, True)
        compare(recomputed(LLAMA), {**packed(3, 13), "use_cache": None}, ULYSSES, True)


def prompt_of_the_script(rows: dict[str, torch.Tensor]) -> None:
    """What is added to embeddings outside of the model gets its whole gradient on every rank."""
    model: Any = zoo.build(LLAMA)
    alone = copy.deepcopy(model)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **RING))
    model, optimizer, *_ = booster.boost(model, sgd(model))
    given = {**rows, "use_cache": False}
    ids, found = given.pop("input_ids"), []
    for called, embeddings in ((alone, alone.get_input_embeddings()), (model, model.unwrap().get_input_embeddings())):
        prompt = torch.linspace(-1, 1, embeddings.weight.shape[1], dtype=torch.float64).requires_grad_()
        loss = called(inputs_embeds=embeddings(ids) + prompt, **given).loss
        if called is alone:
            loss.backward()
        else:
            booster.backward(loss, optimizer)
        found.append(prompt.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    compare_models(alone, model, gradients=optimizer.gradients(), weights=False)


def test_sequences_over_an_axis_are_those_of_one_process() -> None:
    run_ranks(use_axis, 2, timeout=200)


@pytest.mark.sweep
def test_more_sequences_over_an_axis() -> None:
    run_ranks(use_axis_more, 2, timeout=200)


def adapted(*targets: str) -> nn.Module:
    """LoRA, with embeddings that are not trained."""
    import peft

    model = zoo.build("llama-token-classification", classifier_dropout=0.0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets), modules_to_save=[])).double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora" in name:
                param.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


def one_token() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[5], [9]]), "labels": torch.tensor([[1], [0]])}


def use_tensor(rank: int, world: int) -> None:
    with keep_float64():
        compare(recomputed(LLAMA), packed(3, 13), SPLIT, True)
        compare(recomputed("gpt2-causal-lm"), packed(3, 13), {"tp_size": 2}, True)
        compare(adapted("v_proj"), one_token(), SPLIT, True)  # all that is trained sees whole sequences
        model: Any = adapted("v_proj", "o_proj")
        model, *_ = Booster(plugin=HybridParallelPlugin(precision="fp32", **SPLIT)).boost(model, sgd(model))
        with pytest.raises(ValueError, match="sequences of 1 cannot be split over tp_size=2"):
            model(**one_token())


def test_sequences_along_tensor_parallelism_are_those_of_one_process() -> None:
    run_ranks(use_tensor, 2, timeout=200)
    run_ranks(alone, 1)


def alone(rank: int, world: int) -> None:
    with keep_float64():
        compare(recomputed(LLAMA), packed(3, 13), {}, True)


def layerdrop() -> nn.Module:
    return zoo.build("opt-causal-lm", layerdrop=0.2)


def boost(model: nn.Module, mode: dict[str, Any]) -> None:
    Booster(plugin=HybridParallelPlugin(precision="fp32", **mode)).boost(model)


def refuse(rank: int, world: int) -> None:
    def refused(words: str, call: Any) -> None:
        with pytest.raises(ValueError, match=words):
            call()

    fused_head.tokens_at_a_time = lambda *_: 1  # type: ignore[assignment]
    for mode in (SPLIT, ULYSSES):
        refused("layerdrop=0.2.*set it to 0", lambda mode=mode: boost(layerdrop(), mode))
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **ULYSSES))
    model: Any = zoo.build(LLAMA, dtype=torch.float32)
    ids = zoo.inputs(model)["input_ids"]
    batch = {"input_ids": ids, "labels": ids}
    model, optimizer, *_ = booster.boost(model, sgd(model))
    for name, value in (
        ("ignore_index", 7),
        ("logits_to_keep", 1),
        ("output_hidden_states", True),
        ("use_cache", True),
    ):
        refused(f"{name}.*leave it out", lambda name=name, value=value: model(**batch, **{name: value}))
    outputs = model(**batch)
    assert isinstance(outputs.logits, LazyLogits)  # nobody has looked at them
    refused("train on outputs.loss alone", lambda: (outputs.loss + outputs.logits.mean()).backward())
    hidden: list[Any] = []
    model.unwrap().lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    loss = model(**batch).loss
    refused("computed from activations", lambda: booster.backward(loss + hidden[0].square().mean(), optimizer))
    assert math.isfinite(float(outputs.logits.max()))
    booster.backward(model(**batch, return_dict=False)[0], optimizer)
    model.loss_function = smooth
    refused("loss_function=.*after booster.boost", lambda: model(**batch))


def test_what_would_be_of_a_part_is_refused() -> None:
    run_ranks(refuse, 2)


@pytest.mark.parametrize("function", [summed, partial(ForCausalLMLoss, ignore_index=7)])
def test_losses_that_are_no_means_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"no mean over the labels|-100 does not count"):
        probe_ulysses(with_loss(function))


def read_all(outputs: Any, inputs: Any) -> Any:
    return outputs.loss + sum(value.sum() for value in outputs.values())


def read_if_there(outputs: Any, inputs: Any) -> Any:
    return outputs.loss + (outputs["logits"].sum() if "logits" in outputs else 0)


def read_or_not(outputs: Any, inputs: Any) -> Any:
    try:
        return outputs.loss + outputs.logits.sum()
    except Exception:
        return outputs.loss


def read_inputs(outputs: Any, inputs: Any) -> Any:
    return outputs.loss * (inputs["labels"].numel() if "labels" in inputs else 1)


def test_criteria_that_read_more_than_the_loss() -> None:
    axis = type("Axis", (), {"mode": "ring_attn", "is_whole": False, "require_model_loss": lambda: None})
    loss = SequenceLoss(axis, None)  # type: ignore[arg-type]
    for criterion in (read_all, read_if_there, read_or_not, read_inputs):
        with pytest.raises(ValueError, match=f"criterion='{criterion.__name__}'.*reads outputs.loss alone"):
            loss.require_own(criterion)
    loss.require_own(lambda outputs, inputs: outputs["loss"] + outputs.loss + (outputs.get("mc_loss") or 0))


def gemma3() -> nn.Module:
    """Takes images, whose tokens see each other."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 101, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 4}
    vision = {**sizes, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    ids = {"image_token_index": 99, "boi_token_index": 97, "eoi_token_index": 98}
    config = tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(**text),
        vision_config=tf.SiglipVisionConfig(**vision),
        mm_tokens_per_image=4,
        **ids,
    )
    torch.manual_seed(0)
    return tf.Gemma3ForConditionalGeneration(config)


def test_token_types_that_say_who_sees_whom_are_refused() -> None:
    model = gemma3()
    axis = SequenceAxis("all_to_all", Share(0, 2), model, probe_ulysses(model))
    ids = torch.arange(12).view(1, 12)
    assert axis.divide({"input_ids": ids, "labels": ids})["input_ids"].shape == (1, 6)
    with pytest.raises(ValueError, match=r"token_type_ids.*more of them than features.*leave them out"):
        axis.divide({"input_ids": ids, "labels": ids, "token_type_ids": ids // 6})
    assert probe_ulysses(zoo.build("bert-masked-lm")).adds_types


def test_padding_in_front_is_refused_with_what_the_model_can() -> None:
    """Of eager attention in a ring; soft caps leave no other."""
    facts = SequenceFacts(True, True, True, Positions(0, None, True), (True, False, False))
    ids = torch.arange(12).view(1, 12)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": (ids > 2).long()}
    for model, advice in (
        (zoo.build(LLAMA), "'all_to_all', or attn_implementation='sdpa'$"),
        (gemma2(), "'all_to_all'$"),
    ):
        axis = SequenceAxis("ring_attn", Share(0, 2, zigzag=True), model, facts, pads_in_front=False)
        with pytest.raises(ValueError, match=f"padding in front .*{advice}"):
            axis.divide(batch)


def test_virtual_tokens_are_refused() -> None:
    import peft

    model = zoo.build(LLAMA)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="virtual tokens would stand before every part"):
        refuse_prompts(peft.get_peft_model(model, prompts), "sequence_parallelism_mode='ring_attn'")
    prefixes = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="keys and values of all heads"):
        refuse_prefixes(peft.get_peft_model(zoo.build(LLAMA), prefixes))


def test_kinds_of_layers_far_behind_are_tried() -> None:
    kinds = ["full_attention"] * 7 + ["conv", "full_attention", "conv"]
    config = tf.Lfm2Config(vocab_size=101, hidden_size=32, num_hidden_layers=len(kinds), layer_types=kinds)
    assert build_small(tf.Lfm2ForCausalLM, config, size=10**9, ranks=1) is not None
    assert config.layer_types == ["full_attention"] * 3 + ["conv"]


def test_attention_of_its_own_is_named() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 101}
    own = "its attention does not go through transformers' AttentionInterface"
    with pytest.raises(ValueError, match=own):
        probe_ring(tf.GPTNeoXJapaneseForCausalLM(tf.GPTNeoXJapaneseConfig(**sizes)))
