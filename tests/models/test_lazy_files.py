"""Files that are not laid out as the model is: what transformers makes of them, a lazy build makes too or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from shardwright import Booster
from shardwright.checkpoint.hf_import import LoadReport
from shardwright.lazy import LazyInitContext

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 77}


def qwen3(seed: int, **changed: Any) -> Any:
    torch.manual_seed(seed)
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL, intermediate_size=40, num_key_value_heads=2, **changed))


def mixtral(seed: int) -> Any:
    torch.manual_seed(seed)
    config = tf.MixtralConfig(**SMALL, intermediate_size=40, num_key_value_heads=2, num_local_experts=4)
    return tf.MixtralForCausalLM(config)


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=77))


def lazy(cls: Any, directory: Path, **arguments: Any) -> Any:
    with LazyInitContext(seed=1):
        model = cls.from_pretrained(directory, **arguments)
    LazyInitContext.materialize(model)
    return model


def loaded(cls: Any, directory: Path, unexpected: Sequence[str] = ()) -> Any:
    """By `load_model`, into a model with other weights."""
    booster = Booster()
    torch.manual_seed(99)
    model, *_ = booster.boost(cls(tf.AutoConfig.from_pretrained(directory)))
    assert booster.load_model(model, directory, strict=not unexpected) == LoadReport(unexpected=list(unexpected))
    return model.unwrap()


def assert_same(got: Any, want: Any) -> None:
    ours, theirs = got.state_dict(), want.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name, value in theirs.items() if not torch.equal(value, ours[name])] == []


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("build", [gpt2, mixtral])
def test_files_of_a_base_model_fit_a_model_with_a_head_and_the_reverse(
    build: Callable[[int], Any], tmp_path: Path
) -> None:
    model = build(5)
    base = model.base_model
    model.save_pretrained(tmp_path / "head")
    base.save_pretrained(tmp_path / "base")
    assert_same(lazy(type(base), tmp_path / "head"), base)
    assert_same(loaded(type(base), tmp_path / "head", () if build is gpt2 else ["lm_head.weight"]), base)
    assert_same(lazy(tf.AutoModel, tmp_path / "head"), base)
    assert_same(lazy(type(model), tmp_path / "base").base_model, base)  # Mixtral's head is not in these files
    if build is gpt2:
        assert_same(lazy(type(model), tmp_path / "base"), model)
        assert_same(loaded(type(model), tmp_path / "base"), model)


def test_a_tied_weight_is_found_under_either_name(tmp_path: Path) -> None:
    model = qwen3(5, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_same(tf.Qwen3ForCausalLM.from_pretrained(tmp_path), model)
    assert_same(lazy(tf.Qwen3ForCausalLM, tmp_path), model)
    assert_same(loaded(tf.Qwen3ForCausalLM, tmp_path), model)
    edit(tmp_path, lambda tensors: tensors.update({"model.embed_tokens.weight": tensors["lm_head.weight"].clone()}))
    assert_same(lazy(tf.Qwen3ForCausalLM, tmp_path), model)


def test_arguments_choose_the_files_and_dtypes_that_they_choose_in_transformers(tmp_path: Path) -> None:
    qwen3(1).save_pretrained(tmp_path)
    qwen3(2).half().save_pretrained(tmp_path, variant="fp16")
    qwen3(3).save_pretrained(tmp_path / "sub")
    qwen3(4).save_pretrained(tmp_path / "sub", variant="many", max_shard_size="20KB")
    choices: list[dict[str, Any]] = [{}, {"variant": "fp16"}, {"subfolder": "sub"}, {"dtype": {"": torch.bfloat16}}]
    choices += [{"subfolder": "sub", "variant": "many"}, {"dtype": {"vision": "bfloat16"}}, {"dtype": "bfloat16"}]
    for cls in (tf.Qwen3ForCausalLM, tf.AutoModelForCausalLM):
        for arguments in choices:
            want = cls.from_pretrained(tmp_path, **arguments)
            got = lazy(cls, tmp_path, **arguments)
            assert got.dtype == want.dtype
            assert_same(got, want)
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        (r"dtype='foo'.*'auto'", tmp_path, {"dtype": "foo"}),
        (r"dtype=torch\.int8", tmp_path, {"dtype": torch.int8}),
        (r"dtype=3\b", tmp_path, {"dtype": 3}),
        (r"from_pretrained\(None\).*directory", None, {}),
        (r"state_dict", tmp_path, {"state_dict": {}}),
        (r"neither model\.bf16\.safetensors", tmp_path, {"variant": "bf16"}),
        (r"nowhere.*local directory", tmp_path, {"subfolder": "nowhere"}),
    ]
    for message, directory, arguments in refused:
        with pytest.raises(ValueError, match=message):
            lazy(tf.Qwen3ForCausalLM, directory, **arguments)


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    qwen3(1).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = qwen3(2)
    model.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert_same(tf.Qwen3ForCausalLM.from_pretrained(tmp_path), model)
    assert_same(lazy(tf.Qwen3ForCausalLM, tmp_path), model)
    assert_same(loaded(tf.Qwen3ForCausalLM, tmp_path), model)
