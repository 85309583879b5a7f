"""The zoo: every model runs, its inputs hide nothing, equal arguments give equal models."""

from __future__ import annotations

import random

import pytest
import torch

from shardwright.interface.model import ModelWrapper
from shardwright.testing import inputs, keep_float64, loss_of, zoo

# Gradients that are zero in theory, up to rounding: softmax does not see a constant added to all its inputs.
# Rotary positions break this for keys; heads with a single output feed a softmax over positions or choices.
VANISHING = {
    "bert": ("key.bias",),
    "opt": ("k_proj.bias",),
    "vit": ("k_proj.bias",),
    "question_answering": ("qa_outputs.bias", "ln_f.bias", "final_layer_norm.bias", "layer.3.output.LayerNorm.bias"),
    "multiple_choice": ("classifier.bias",),
    "double_heads": ("multiple_choice_head.summary.bias",),
}
# The untied decoder of BERT has a bias of its own, and transformers leaves this one behind.
# The base model of ChatGLM holds the head over the vocabulary.
UNREACHED = {
    "bert-untied-masked-lm": ["cls.predictions.bias"],
    "chatglm-base": ["output_layer.weight"],
    "chatglm-sequence-classification": ["transformer.output_layer.weight"],
}


@pytest.mark.parametrize("name", zoo.names())
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = zoo.build(name)
    entry = zoo.entry(name)
    with keep_float64():
        loss = loss_of(model(**zoo.inputs(model)))
        loss.backward()
    assert loss.dtype == torch.float64
    assert torch.isfinite(loss)
    vanishing = VANISHING.get(entry.family, ()) + VANISHING.get(entry.task, ())
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == UNREACHED.get(name, [])
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        assert torch.isfinite(parameter.grad).all(), parameter_name
        if not parameter_name.endswith(vanishing):
            assert parameter.grad.abs().max() > 1e-6, parameter_name


def test_all_heads_of_transformers_are_there() -> None:
    import transformers

    for family, prefix in {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "gpt2": "GPT2",
        "bert": "Bert",
    }.items():
        assert heads_of(transformers, family, prefix) == {zoo.entry(name).model_class for name in zoo.names(family)}
    assert heads_of(transformers, "t5", "T5") == {zoo.entry(name).model_class for name in zoo.names("t5")}


def heads_of(transformers: object, family: str, prefix: str) -> set[str]:
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["__all__"])
    excluded = (f"{prefix}PreTrainedModel", f"{prefix}Layer")
    return {
        name
        for name in module.__all__
        if name not in excluded and issubclass(getattr(module, name), module.PreTrainedModel)
    }


def test_build_is_deterministic_and_leaves_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = zoo.build("gpt2-causal-lm", seed=3), zoo.build("gpt2-causal-lm", seed=3)
    other, single = zoo.build("gpt2-causal-lm", seed=4), zoo.build("gpt2-causal-lm", seed=3, dtype=torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    for a, b, c, d in zip(
        first.parameters(), second.parameters(), other.parameters(), single.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert torch.equal(a, d.double())
    assert first.training


def test_no_parameter_keeps_its_initial_constant() -> None:
    for name in ("llama-causal-lm", "bert-masked-lm", "opt-causal-lm", "vit-image-classification"):
        for parameter_name, parameter in zoo.build(name).named_parameters():
            assert parameter.unique().numel() > 0.9 * parameter.numel(), parameter_name


def test_overrides_and_tied_weights() -> None:
    model = zoo.build("llama-tied-causal-lm", num_hidden_layers=2)
    assert len(model.model.layers) == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = zoo.build("llama-causal-lm")
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize("seed", range(5))
def test_causal_inputs_hide_nothing(seed: int) -> None:
    batch = zoo.inputs("llama-causal-lm", seed=seed)
    lengths = batch["attention_mask"].sum(-1)
    assert lengths.max() == 13
    assert lengths.min() < 13
    counted = (batch["labels"][:, 1:] != inputs.IGNORE).sum(-1)
    assert counted.min() >= 1
    assert len(set(counted.tolist())) > 1
    assert (batch["labels"][batch["attention_mask"] == 0] == inputs.IGNORE).all()
    again = zoo.inputs("llama-causal-lm", seed=seed)
    assert all(torch.equal(batch[key], again[key]) for key in batch)


@pytest.mark.parametrize("name", zoo.names())
def test_inputs_by_name_equal_those_by_model(name: str) -> None:
    random.seed(0)
    shape = {"batch_size": random.randint(2, 5), "seq_len": random.randint(7, 20)}
    model = zoo.build(name, dtype=torch.float32)
    by_model, by_name = zoo.inputs(ModelWrapper(model), **shape), zoo.inputs(name, dtype=torch.float32, **shape)
    assert by_model.keys() == by_name.keys()
    assert all(torch.equal(by_model[key], by_name[key]) for key in by_model)
    assert all(value.shape[0] == shape["batch_size"] for value in by_name.values())


def test_names_are_filtered_and_errors_help() -> None:
    assert zoo.names("qwen3", "causal_lm") == ["qwen3-causal-lm", "qwen3-tied-causal-lm"]
    assert {entry.task for entry in zoo.ENTRIES.values()} == set(inputs.TASKS)
    with pytest.raises(ValueError, match="did you mean 'llama'"):
        zoo.names("lama")
    with pytest.raises(ValueError, match="did you mean 'llama-causal-lm'"):
        zoo.build("llama-causal")
    with pytest.raises(ValueError, match="overrides go with a name"):
        zoo.inputs(zoo.build("llama-causal-lm"), num_hidden_layers=2)
    with pytest.raises(ValueError, match="not a class of the zoo"):
        zoo.inputs(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="seq_len=3"):
        zoo.inputs("llama-causal-lm", seq_len=3)
    with pytest.raises(ValueError, match="is not one of"):
        inputs.make_inputs("chess", None)


def test_loss_of_outputs_without_a_loss() -> None:
    state = torch.randn(2, 3, 4)
    plain = loss_of({"last_hidden_state": state, "index": torch.arange(3)})
    assert not torch.isclose(plain, loss_of({"last_hidden_state": state.flip(1)}))
    with pytest.raises(ValueError, match="neither a loss nor"):
        loss_of({"index": torch.arange(3)})
