"""Files that are not laid out as the model is: what transformers makes of them, a lazy build makes too or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from shardwright import Booster
from shardwright.checkpoint.hf_import import LoadReport
from shardwright.files.huggingface import HfFiles
from shardwright.lazy import LazyInitContext
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks

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


def refuse_and_train(rank: int, world: int, damaged: Path, torn: Path, head: Path, want: dict[str, float]) -> None:
    """Pipelines: what concerns one stage is found by both; ties that the files break or turn round hold on both."""
    with LazyInitContext(), pytest.raises(ValueError, match=DAMAGES[0][2]):
        tf.MixtralForCausalLM.from_pretrained(damaged)
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)}

    def loss_of(model: Any, directory: Path | None = None) -> float | None:
        booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if directory is not None:
            assert booster.load_model(boosted, directory).fits
        for _ in range(2):  # the second loss is that of updated weights
            result = booster.execute_pipeline(iter([batch]), boosted, lambda output, inputs: output.loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return None if result["loss"] is None else float(result["loss"])

    for directory in (torn, head):
        with LazyInitContext(seed=1):
            model = tf.Qwen3ForCausalLM.from_pretrained(directory)
        assert loss_of(model) in (None, pytest.approx(want[directory.name], rel=1e-5))
    eager = tf.Qwen3ForCausalLM(tf.AutoConfig.from_pretrained(head)).eval()
    assert loss_of(eager, head) in (None, pytest.approx(want["head"], rel=1e-5))
    with pytest.raises((ValueError, RuntimeError), match=r"(lm_head|embed).* is tied to .*(lm_head|embed)"):
        loss_of(tf.Qwen3ForCausalLM(tf.AutoConfig.from_pretrained(torn)), torn)
    boosted, *_ = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")).boost(
        qwen3(1, tie_word_embeddings=True)
    )
    with pytest.raises(ValueError, match=r"state dict does not fit .* is tied to"):
        boosted.load_state_dict(
            {**qwen3(1, tie_word_embeddings=True).state_dict(), "lm_head.weight": torch.ones(77, 32)}
        )


def plain_loss(directory: Path) -> float:
    model = tf.Qwen3ForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(12).view(2, 6)
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_pipelines_find_the_same_and_train_what_transformers_trains(tmp_path: Path) -> None:
    damaged, torn, head = (tmp_path / name for name in ("damaged", "torn", "head"))
    mixtral(1).save_pretrained(damaged)
    edit(damaged, lambda tensors: tensors.update({NORM: torch.zeros(7)}))
    tied = qwen3(1, tie_word_embeddings=True)
    for directory in (torn, head):
        tied.save_pretrained(directory)
    name = "model.embed_tokens.weight"
    edit(torn, lambda tensors: tensors.update({"lm_head.weight": tensors[name].flip(0)}))
    edit(head, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(name)}))
    want = {directory.name: plain_loss(directory) for directory in (torn, head)}
    run_ranks(refuse_and_train, 2, damaged, torn, head, want)


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


def test_tied_weights_that_differ_in_the_files_are_parted(tmp_path: Path, warnings: list[str]) -> None:
    model = qwen3(1, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    differing = model.lm_head.weight.detach() + 1
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": differing}))
    want = tf.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(want.lm_head.weight, want.model.embed_tokens.weight)
    got = lazy(tf.Qwen3ForCausalLM, tmp_path)
    assert_same(got, want)
    assert got.all_tied_weights_keys == want.all_tied_weights_keys
    assert "different values (tie_word_embeddings=False says so): lm_head.weight" in warnings[0]
    booster = Booster()
    boosted, *_ = booster.boost(got)
    booster.save_model(boosted, tmp_path / "again")
    assert_same(tf.Qwen3ForCausalLM.from_pretrained(tmp_path / "again"), want)
    assert booster.load_model(boosted, tmp_path).fits  # and it has room for both
    with pytest.raises(ValueError, match=r"lm_head\.weight is tied to model\.embed_tokens\.weight.*embeddings=False"):
        loaded(tf.Qwen3ForCausalLM, tmp_path)


def test_ties_to_a_tensor_that_the_files_lack_are_parted_as_in_transformers(tmp_path: Path) -> None:
    """T5 ties three modules to one embedding: the files name all, differing, but not the embedding itself."""
    config = tf.T5Config(
        d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=40, vocab_size=77, decoder_start_token_id=0
    )
    torch.manual_seed(1)
    tf.T5ForConditionalGeneration(config).save_pretrained(tmp_path)

    def tear(tensors: dict[str, torch.Tensor]) -> None:
        shared = tensors.pop("shared.weight")
        names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        tensors.update({name: shared + number // 2 for number, name in enumerate(names)})

    edit(tmp_path, tear)
    want = tf.T5ForConditionalGeneration.from_pretrained(tmp_path)
    got = lazy(tf.T5ForConditionalGeneration, tmp_path)
    assert_same(got, want)
    assert got.all_tied_weights_keys == want.all_tied_weights_keys
    assert len(set(got.parameters())) == len(set(want.parameters()))


def test_models_inside_of_others_read_their_files(tmp_path: Path) -> None:
    """peft's adapters stand around a model and its linears, and copy a module that is trained whole."""
    wanted = qwen3(5)
    wanted.save_pretrained(tmp_path)
    with LazyInitContext(seed=1):
        inner = tf.Qwen3ForCausalLM.from_pretrained(tmp_path)
        adapted: Any = peft.get_peft_model(
            inner, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
        )
        beside = torch.nn.ModuleDict(
            {"one": adapted, "other": tf.GPT2Model(tf.GPT2Config(n_embd=32, n_layer=1, n_head=4))}
        )
    LazyInitContext.materialize(beside)
    ids = torch.arange(20).view(2, 10)
    assert torch.equal(adapted(input_ids=ids).logits, wanted(input_ids=ids).logits)  # a new B is zero
    assert adapted.base_model.model.lm_head.modules_to_save["default"].weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tables_of_positions_are_those_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """They are computed in single precision and rounded, not computed in the dtype of the weights."""
    configs = [
        (tf.GPTJForCausalLM, tf.GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, vocab_size=77)),
        (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SMALL, intermediate_size=40, num_key_value_heads=2)),
    ]
    for cls, config in configs:
        cls(config).save_pretrained(tmp_path / config.model_type)
        wanted = dict(cls.from_pretrained(tmp_path / config.model_type, dtype=dtype).named_buffers())
        for name, made in lazy(cls, tmp_path / config.model_type, dtype=dtype).named_buffers():
            assert made.dtype == wanted[name].dtype, name
            assert torch.equal(made, wanted[name]), name


def test_what_trains_is_what_trains_in_transformers(tmp_path: Path) -> None:
    """Which takes every weight that it reads to be trained, positions too that the class has made constant."""
    config = tf.WhisperConfig(
        **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim", "vocab_size"), 32),
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
        max_source_positions=8,
        max_target_positions=8,
    )
    written = tf.WhisperForConditionalGeneration(config)
    written.save_pretrained(tmp_path)
    with LazyInitContext():
        fresh = tf.WhisperForConditionalGeneration(config)
        lazy = tf.WhisperForConditionalGeneration.from_pretrained(tmp_path)
    read = tf.WhisperForConditionalGeneration.from_pretrained(tmp_path)
    for model, plain in ((fresh, written), (lazy, read)):
        assert [param.requires_grad for param in model.parameters()] == [p.requires_grad for p in plain.parameters()]
