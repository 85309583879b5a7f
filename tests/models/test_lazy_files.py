"""Files that are not laid out as the model is: what transformers makes of them, a lazy build makes too or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from shardwright import Booster
from shardwright.checkpoint.hf_import import LoadReport
from shardwright.files.huggingface import HfFiles
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


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    logger = SimpleNamespace(warning=lambda text, ranks: said.append(text))
    monkeypatch.setattr("shardwright.lazy.from_pretrained.get_dist_logger", lambda: logger)
    return said


@pytest.mark.parametrize("build", [gpt2, mixtral])
def test_files_of_a_base_model_fit_a_model_with_a_head_and_the_reverse(
    build: Callable[[int], Any], tmp_path: Path
) -> None:
    model = build(5)
    base, head = type(model.base_model), type(model)
    model.save_pretrained(tmp_path / "head")
    model.base_model.save_pretrained(tmp_path / "base")
    want = base.from_pretrained(tmp_path / "head")
    assert_same(want, model.base_model)
    assert_same(lazy(base, tmp_path / "head"), want)
    assert_same(loaded(base, tmp_path / "head", () if build is gpt2 else ["lm_head.weight"]), want)
    assert_same(lazy(tf.AutoModel, tmp_path / "head"), want)
    assert_same(lazy(head, tmp_path / "base").base_model, want)  # Mixtral's head is not in these files
    if build is gpt2:
        assert_same(lazy(head, tmp_path / "base"), head.from_pretrained(tmp_path / "base"))
        assert_same(loaded(head, tmp_path / "base"), model)


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
    choices: list[dict[str, Any]] = [
        {},
        {"variant": "fp16"},
        {"subfolder": "sub", "state_dict": None},
        {"dtype": {"": torch.bfloat16}},
    ]
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
        (r"dtype=torch\.float8", tmp_path, {"dtype": torch.float8_e4m3fn}),
        (r"dtype=3\b", tmp_path, {"dtype": 3}),
        (r"dtype='foo'", tmp_path, {"dtype": {"": "foo"}}),
        (r"from_pretrained\(None\).*directory", None, {}),
        (r"state_dict", tmp_path, {"state_dict": {}}),
        (r"gguf_file", tmp_path, {"gguf_file": "x"}),
        (r"neither model\.bf16\.s.*it has model\.fp16\.s.*leave variant='bf16' out", tmp_path, {"variant": "bf16"}),
        (r"neither model\.\*\.safetensors", tmp_path, {"variant": "*"}),
        (r"variant=3\b", tmp_path, {"variant": 3}),
        (r"subfolder=3\b", tmp_path, {"subfolder": 3}),
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


def test_a_variant_in_several_files_is_found_by_itself(tmp_path: Path) -> None:
    model = qwen3(4)
    model.save_pretrained(tmp_path, variant="many", max_shard_size="20KB")
    assert_same(lazy(tf.Qwen3ForCausalLM, tmp_path), model)
    assert_same(loaded(tf.Qwen3ForCausalLM, tmp_path), model)


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
NORM = "model.layers.1.input_layernorm.weight"
FUSED = r"model\.layers\.1\.mlp\.experts\.gate_up_proj"
DAMAGES: list[tuple[str, torch.Tensor | None, str]] = [
    (NORM, torch.zeros(7), NORM + r" \(file \(7,\), model \(32,\)\)"),
    (EXPERT.format(2, "w1"), None, FUSED + r", which .*\.0\.w1\.weight \(40, 32\) and 2 more.*\(model \(4, 80, 32\)\)"),
    (EXPERT.format(2, "w3"), torch.zeros(40, 31), FUSED + r", .*experts\.2\.w3\.weight \(40, 31\)"),
    (EXPERT.format(3, "w2"), None, r"experts\.down_proj \(file \(3, 32, 40\), model \(4, 32, 40\)\)"),
]


@pytest.mark.parametrize(("key", "value", "message"), DAMAGES)
def test_shapes_and_missing_experts_are_found_in_the_headers(
    key: str, value: torch.Tensor | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtral(1).save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(key) if value is None else tensors.update({key: value}))
    with pytest.raises(RuntimeError, match=r"conversion|ignore_mismatched_sizes"):
        tf.MixtralForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"(?s){message}.*strict=False"):
        loaded(tf.MixtralForCausalLM, tmp_path)
    monkeypatch.setattr(HfFiles, "read", None)
    with LazyInitContext(), pytest.raises(ValueError, match=f"(?s){message}.*the config that the files"):
        tf.MixtralForCausalLM.from_pretrained(tmp_path)


def test_mismatched_sizes_are_ignored_as_transformers_does(tmp_path: Path, warnings: list[str]) -> None:
    mixtral(1).save_pretrained(tmp_path)
    changed: dict[str, Any] = {"ignore_mismatched_sizes": True, "vocab_size": 97, "num_local_experts": 3}
    anew = ["model.embed_tokens.weight", "lm_head.weight"]
    anew += [f"model.layers.{i}.mlp.{name}" for i in (0, 1) for name in ("experts.gate_up_proj", "experts.down_proj")]
    anew += [f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)]
    want = tf.MixtralForCausalLM.from_pretrained(tmp_path, **changed).state_dict()
    got = lazy(tf.MixtralForCausalLM, tmp_path, **changed).state_dict()
    assert "of another shape in the files and initialised anew: model.embed_tokens" in warnings[0]
    assert {name: value.shape for name, value in got.items()} == {name: value.shape for name, value in want.items()}
    assert {name for name in got if not torch.equal(got[name], want[name])} == set(anew)
    assert got["lm_head.weight"].std().item() == pytest.approx(want["lm_head.weight"].std().item(), rel=0.1)
    edit(tmp_path, lambda tensors: tensors.pop(EXPERT.format(2, "w1")))
    for load in (tf.MixtralForCausalLM.from_pretrained, lambda *args, **kw: lazy(tf.MixtralForCausalLM, *args, **kw)):
        with pytest.raises((ValueError, RuntimeError), match=r"conversion|experts\.gate_up_proj"):
            load(tmp_path, ignore_mismatched_sizes=True)
