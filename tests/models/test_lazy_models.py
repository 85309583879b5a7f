"""Lazily built transformers models: the distribution of transformers' own initialisation, the weights of its own
loading.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

from shardwright.files.huggingface import HfSource
from shardwright.lazy import LazyInitContext
from shardwright.lazy.weights import LazyWeights
from shardwright.shardformer.modeling.chatglm2_6b.configuration_chatglm import ChatGLMConfig
from shardwright.shardformer.modeling.chatglm2_6b.modeling_chatglm import ChatGLMForConditionalGeneration
from shardwright.spec import ParamSpec, even_pieces, set_spec

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 77}
MODELS: dict[str, tuple[type, Any]] = {
    "llama": (
        tf.LlamaForCausalLM,
        lambda: tf.LlamaConfig(**SMALL, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "gpt2": (tf.GPT2LMHeadModel, lambda: tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=77)),
    "bert": (tf.BertForMaskedLM, lambda: tf.BertConfig(**SMALL, intermediate_size=40)),
    "t5": (
        tf.T5ForConditionalGeneration,
        lambda: tf.T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=44, vocab_size=50),
    ),
    "chatglm": (
        ChatGLMForConditionalGeneration,
        lambda: ChatGLMConfig(
            **SMALL, kv_channels=8, ffn_hidden_size=40, multi_query_attention=True, add_qkv_bias=True, pre_seq_len=3
        ),
    ),
    "vit": (
        tf.ViTForImageClassification,
        lambda: tf.ViTConfig(**{**SMALL, "intermediate_size": 40, "image_size": 32, "patch_size": 8}),
    ),
    "mixtral": (
        tf.MixtralForCausalLM,
        lambda: tf.MixtralConfig(**SMALL, intermediate_size=40, num_key_value_heads=2, num_local_experts=4),
    ),
    "bloom": (tf.BloomForCausalLM, lambda: tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=77)),
}


def _shard(model: nn.Module, world: int, coordinate: int) -> dict[str, ParamSpec]:
    """Cut every matrix along its first dim, some along the second; sizes that do not come out even get padding."""
    specs: dict[str, ParamSpec] = {}
    made: dict[int, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if id(param) not in made:
            dim = None if param.ndim < 2 else 1 if any(part in name for part in ("down", "o_proj", "position")) else 0
            specs[name] = ParamSpec(
                name, tuple(param.shape), dim, even_pieces(param.shape[dim], world) if dim is not None else ()
            )
            local = nn.Parameter(torch.empty(specs[name].local_shape(coordinate), dtype=param.dtype, device="meta"))
            set_spec(local, specs[name])
            made[id(param)] = local
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, made[id(param)])
    return specs


def _unsharded(build: Any, world: int) -> dict[str, torch.Tensor]:
    shards: list[dict[str, torch.Tensor]] = []
    for coordinate in range(world):
        with LazyInitContext(seed=9):
            model = build()
        weights = LazyWeights.of(model)
        specs = _shard(model, world, coordinate)
        weights.materialize(model, {"tp": coordinate})
        shards.append({name: param.detach() for name, param in model.named_parameters()})
    return {name: spec.unshard([shard[name] for shard in shards]) for name, spec in specs.items()}


@pytest.mark.parametrize("family", MODELS)
def test_initialisation_and_loading(family: str, tmp_path: Path) -> None:
    cls, config = MODELS[family]
    torch.manual_seed(0)
    eager = cls(config())
    with LazyInitContext(seed=9):
        lazy = cls(config())
    assert all(param.is_meta for param in lazy.parameters())
    LazyInitContext.materialize(lazy)
    own = dict(lazy.named_parameters())
    for name, param in eager.named_parameters():
        got = own.pop(name)
        assert (got.shape, got.dtype) == (param.shape, param.dtype)
        if param.unique().numel() <= 2:
            assert torch.equal(got, param), name
        elif param.numel() >= 400:
            assert abs(got.std() - param.std()) < 0.15 * param.std(), name
            assert abs(got.mean()) < 0.2 * param.std() + abs(param.mean()), name
    assert not own
    for (name, got), (_, want) in zip(lazy.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(got, want), name

    # Every layout has these weights.
    for world in (2, 3):
        whole = _unsharded(lambda: cls(config()), world)
        for name, param in lazy.named_parameters():
            assert torch.equal(whole[name], param), (name, world)

    # The same from files, in several shards and in another dtype than the default.
    eager.bfloat16().save_pretrained(tmp_path, max_shard_size="30KB")
    loaded = cls.from_pretrained(tmp_path)
    whole = _unsharded(lambda: cls.from_pretrained(tmp_path), 2)
    for name, param in loaded.named_parameters():
        assert whole[name].dtype == param.dtype == torch.bfloat16
        assert torch.equal(whole[name], param), name
    with LazyInitContext():
        lazy = cls.from_pretrained(tmp_path, dtype=torch.float32)
    LazyInitContext.materialize(lazy)
    assert not lazy.training
    for (name, got), want in zip(lazy.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert got.dtype == torch.float32 or not want.is_floating_point()
        assert torch.equal(got.to(want.dtype), want), name


def test_only_own_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, config = MODELS["llama"]
    cls(config()).save_pretrained(tmp_path)
    with LazyInitContext():
        model = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = LazyWeights.of(model)
    specs = _shard(model, 2, 1)
    del model.model.layers[0]
    read: list[tuple[str, int]] = []
    original = HfSource.shard

    def reading(self: HfSource, spec: ParamSpec, coordinate: int) -> torch.Tensor:
        tensor = original(self, spec, coordinate)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), (
            "a slice keeps the whole tensor alive"
        )
        read.append((spec.name, tensor.numel()))
        return tensor

    monkeypatch.setattr(HfSource, "shard", reading)
    weights.materialize(model, 1)
    names = [name for name, _ in read]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert not any("layers.0." in name for name in names)
    assert all(numel == torch.Size(specs[name].local_shape(1)).numel() for name, numel in read)


def test_new_heads_are_initialised_and_bad_sources_refused(tmp_path: Path) -> None:
    cls, config = MODELS["bert"]
    cls(config()).save_pretrained(tmp_path)
    with LazyInitContext(seed=1):
        model = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    LazyInitContext.materialize(model)
    assert model.classifier.weight.shape == (5, 32)
    assert 0.01 < model.classifier.weight.std() < 0.03
    assert torch.equal(
        model.bert.embeddings.word_embeddings.weight,
        cls.from_pretrained(tmp_path).bert.embeddings.word_embeddings.weight,
    )
    with LazyInitContext():
        with pytest.raises(ValueError, match="local directory"):
            tf.BertForMaskedLM.from_pretrained("bert-base-nowhere", config=config())
        with pytest.raises(ValueError, match="use_safetensors=False"):
            cls.from_pretrained(tmp_path, use_safetensors=False)
        with pytest.raises(ValueError, match="device_map"):
            cls.from_pretrained(tmp_path, device_map="auto")
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"neither model\.safetensors"):
            cls.from_pretrained(tmp_path)
    assert tf.PreTrainedModel.from_pretrained.__func__.__module__ == "transformers.modeling_utils"


def _rewrite(directory: Path, change: Callable[[str], str | None]) -> None:
    """Rename the tensors of a checkpoint, or leave them out."""
    file = directory / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in tensors.items() if name is not None}, file, metadata={"format": "pt"})


def test_what_files_and_model_have_not_in_common_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    logger = SimpleNamespace(warning=lambda text, ranks: said.append(text))
    monkeypatch.setattr("shardwright.lazy.from_pretrained.get_dist_logger", lambda: logger)
    cls, config = MODELS["llama"]

    def load() -> None:
        with LazyInitContext(seed=1):
            cls.from_pretrained(tmp_path)

    cls(config()).save_pretrained(tmp_path)
    load()
    assert not said
    _rewrite(tmp_path, lambda name: None if "norm" in name else name)
    load()
    assert "not in the files and initialised anew: model.layers.0.input_layernorm.weight, " in said.pop()
    _rewrite(tmp_path, lambda name: f"other.{name}" if "embed_tokens" in name else name)
    load()
    assert said.pop().endswith("in the files and not used: other.model.embed_tokens.weight")
    cls(config()).save_pretrained(tmp_path)
    _rewrite(tmp_path, lambda name: f"other.{name}" if "layers.0" in name else name)
    with pytest.raises(ValueError, match=r"has no place for other\.model\.layers\.0") as caught:
        load()
    assert "has no model.layers.0." in str(caught.value)


def test_copies_read_the_same_files_and_unsafe_ones_are_refused(tmp_path: Path) -> None:
    cls, config = MODELS["llama"]
    torch.manual_seed(0)
    whole = cls(config())
    whole.save_pretrained(tmp_path / "one")
    whole.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "one" / "model.fp16.safetensors")
    for directory in (tmp_path / "one", tmp_path / "many"):
        with LazyInitContext():
            lazy = cls.from_pretrained(directory)
        for model in (copy.deepcopy(lazy), lazy):
            LazyInitContext.materialize(model)
            for name, param in model.named_parameters():
                assert torch.equal(param, whole.get_parameter(name)), name
    index = tmp_path / "many" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    for bad in ("../one/model.fp16.safetensors", "/etc/passwd", "..", 3):
        index.write_text(json.dumps({"weight_map": {**table["weight_map"], "model.norm.weight": bad}}))
        with LazyInitContext(), pytest.raises(ValueError, match="plain names inside the directory"):
            cls.from_pretrained(tmp_path / "many")
