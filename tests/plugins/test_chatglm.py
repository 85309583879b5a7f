"""ChatGLM against its layer equations, written here once more with plain torch, and its layouts against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hybrid_ranks import Layout, run_layout

from shardwright.shardformer.modeling.chatglm2_6b.configuration_chatglm import ChatGLMConfig
from shardwright.shardformer.modeling.chatglm2_6b.modeling_chatglm import (
    ChatGLMForConditionalGeneration,
    ChatGLMForSequenceClassification,
    ChatGLMModel,
)
from shardwright.testing import keep_float64, run_ranks, zoo

PUBLISHED = {
    "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True, "ffn_hidden_size": 13696, "fp32_residual_connection": False, "hidden_dropout": 0.0,
    "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1e-05, "multi_query_attention": True,
    "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28, "original_rope": True,
    "padded_vocab_size": 65024, "post_layer_norm": True, "rmsnorm": True, "seq_length": 32768, "use_cache": True,
    "torch_dtype": "float16", "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LAYER = [
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *("self_attention.query_key_value.weight", "self_attention.query_key_value.bias", "self_attention.dense.weight"),
    *("mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"),
]
PREFIX = {"pre_seq_len": 3, "prefix_projection": True, "prefix_dropout": 0.0}
CAUSAL, PLAIN, CLASSIFIER = "chatglm-causal-lm", "chatglm-plain-causal-lm", "chatglm-sequence-classification"


class Equations:
    """The model of one sequence x [S], from its parameters by name; no code of the model's."""

    def __init__(self, weights: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        self.weights, self.settings = weights, settings

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[f"transformer.{name}"]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        centre = 0.0 if self.settings["rmsnorm"] else x.mean(1, keepdim=True)
        power = ((x - centre) ** 2).sum(1, keepdim=True) / x.shape[1]
        y = (x - centre) / (power + self.settings["layernorm_epsilon"]).sqrt() * self[f"{name}.weight"]
        return y if self.settings["rmsnorm"] else y + self[f"{name}.bias"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("si,oi->so", x, self[f"{name}.weight"])
        return y + self[f"{name}.bias"] if f"transformer.{name}.bias" in self.weights else y

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of a head [S, C], the first half as complex numbers times e^(i position frequency)."""
        half = x.shape[1] // 2
        frequencies = torch.tensor(
            [(1e4 * self.settings["rope_ratio"]) ** (-2 * k / half) for k in range(half // 2)], dtype=torch.float64
        )
        factors = torch.polar(torch.ones(()).double(), positions[:, None].double() * frequencies)
        numbers = torch.complex(x[:, 0:half:2], x[:, 1:half:2]) * factors
        return torch.cat((torch.view_as_real(numbers).reshape(-1, half), x[:, half:]), 1)

    def prefix(self, layer: int, group: int, groups: int, channels: int) -> list[torch.Tensor]:
        """Key and value of a group [P, C]; the features of the table are layer, key or value, group, channel."""
        table = self["prefix_encoder.embedding.weight"]
        if self.settings["prefix_projection"]:
            first = torch.tanh(self.linear("prefix_encoder.trans.0", table))
            table = self.linear("prefix_encoder.trans.2", first)
        start = [((2 * layer + which) * groups + group) * channels for which in (0, 1)]
        return [table[:, at : at + channels] for at in start]

    def attention(self, layer: int, x: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """`seen` [S] of bool: which keys are no padding."""
        settings, name = self.settings, f"encoder.layers.{layer}.self_attention"
        heads, channels = settings["num_attention_heads"], settings["kv_channels"]
        groups = settings["multi_query_group_num"] if settings["multi_query_attention"] else heads
        mixed = self.linear(f"{name}.query_key_value", x)
        outputs = []
        for head in range(heads):
            group = head * groups // heads
            places = [head, heads + group, heads + groups + group]
            if not settings["multi_query_attention"]:
                places = [3 * head, 3 * head + 1, 3 * head + 2]
            q, k, v = (mixed[:, place * channels : (place + 1) * channels] for place in places)
            q, k = self.turned(q, positions), self.turned(k, positions)
            allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril() & (seen | torch.eye(len(x)).bool())
            if settings.get("pre_seq_len"):
                prefix_k, prefix_v = self.prefix(layer, group, groups, channels)
                k, v = torch.cat((prefix_k, k)), torch.cat((prefix_v, v))
                allowed = torch.cat((torch.ones(len(x), len(prefix_k), dtype=torch.bool), allowed), 1)
            scores = (q @ k.T / channels**0.5).masked_fill(~allowed, -1e30).exp()
            outputs.append(scores / scores.sum(1, keepdim=True) @ v)
        return self.linear(f"{name}.dense", torch.cat(outputs, 1))

    def hidden(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        x, positions = self["embedding.word_embeddings.weight"][ids], torch.arange(len(ids))
        after = self.settings["apply_residual_connection_post_layernorm"]
        for layer in range(self.settings["num_layers"]):
            name = f"encoder.layers.{layer}"
            y = self.norm(f"{name}.input_layernorm", x)
            x = (y if after else x) + self.attention(layer, y, positions, seen)
            y = self.norm(f"{name}.post_attention_layernorm", x)
            gate, up = self.linear(f"{name}.mlp.dense_h_to_4h", y).tensor_split(2, dim=1)
            x = (y if after else x) + self.linear(f"{name}.mlp.dense_4h_to_h", gate / (1 + (-gate).exp()) * up)
        return self.norm("encoder.final_layernorm", x) if self.settings["post_layer_norm"] else x

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = []
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            x = self.hidden(ids, mask.bool())
            if labels.ndim:
                rows.append((torch.einsum("sh,vh->sv", x, self["output_layer.weight"])[:-1], labels[1:]))
            else:
                last = x[mask.nonzero().max()]
                scores = self.weights["classifier_head.weight"] @ last + self.weights["classifier_head.bias"]
                rows.append((scores[None], labels[None]))
        scores, labels = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
        counted = labels != -100
        return (scores.logsumexp(1) - scores.gather(1, labels.clamp(min=0)[:, None])[:, 0])[counted].mean()


def in_front(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Padding before the tokens, as the published tokenizer has it. What padding would predict does not count."""
    moved = {name: value.clone() for name, value in batch.items()}
    for row, mask in enumerate(batch["attention_mask"]):
        padding = int((mask == 0).sum())
        for name in ("input_ids", "attention_mask", "labels"):
            if batch[name].ndim == 2:
                moved[name][row] = batch[name][row].roll(padding)
        if batch["labels"].ndim == 2:
            moved["labels"][row, padding] = -100
    return moved


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (CAUSAL, {"rope_ratio": 50.0}),
        (PLAIN, {"post_layer_norm": False}),
        (CLASSIFIER, {"multi_query_group_num": 1}),
        (CAUSAL, PREFIX),
        (PLAIN, {**PREFIX, "prefix_projection": False}),
    ],
    ids=["published", "plain", "classifier", "prefix", "prefix table"],
)
def test_loss_and_gradients_are_those_of_the_equations(name: str, changes: dict[str, Any], attention: str) -> None:
    model: Any = zoo.build(name, num_layers=2, **changes)
    model.set_attn_implementation(attention)
    batch = zoo.inputs(model)
    batch = batch if attention == "eager" else in_front(batch)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert all(("prefix_encoder" in name) == ("pre_seq_len" in changes) for name in trained)
    with keep_float64():
        loss = model(**batch).loss
        loss.backward()
    weights = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    for name in trained:
        weights[name].requires_grad_()
    if model.config.tie_word_embeddings:
        weights["transformer.output_layer.weight"] = weights["transformer.embedding.word_embeddings.weight"]
    expected = Equations(weights, model.config.to_dict()).loss(batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for name, param in trained.items():
        if weights[name].grad is None:
            assert param.grad is None, name
        else:
            error = (param.grad - weights[name].grad).abs().max()
            assert error <= 1e-10 * max(1.0, float(param.grad.abs().max())), f"{name}: {error}"


@pytest.mark.parametrize("changes", [{}, PREFIX], ids=["plain", "prefix"])
def test_generation_with_a_cache_is_that_without(changes: dict[str, Any]) -> None:
    model: Any = zoo.build(CAUSAL, **changes).eval()
    batch = in_front(zoo.inputs(model))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    found = model.generate(
        input_ids=ids, attention_mask=mask, use_cache=True, max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    for _ in range(6):
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # generate counts tokens, not padding
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, return_last_logit=True).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        mask = F.pad(mask, (0, 1), value=1)
    assert logits.shape[1] == 1
    assert torch.equal(found, ids)


def test_published_config_and_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model) is ChatGLMForConditionalGeneration
    assert type(transformers.AutoModelForSequenceClassification.from_config(zoo.config(CLASSIFIER))) is (
        ChatGLMForSequenceClassification
    )
    assert type(transformers.AutoModel.from_config(zoo.config(CAUSAL))) is ChatGLMModel
    layers = {f"transformer.encoder.layers.{index}.{name}" for index in range(28) for name in LAYER}
    rest = "embedding.word_embeddings.weight rotary_pos_emb.inv_freq encoder.final_layernorm.weight output_layer.weight"
    assert set(model.state_dict()) == layers | {f"transformer.{name}" for name in rest.split()}
    assert sum(param.numel() for param in model.parameters()) == 6_243_584_000
    assert model.get_parameter("transformer.encoder.layers.3.self_attention.query_key_value.weight").shape == (
        4608,
        4096,
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization_bit": 4}, "quantization_bit=4 must be 0"),
        ({"original_rope": False}, "original_rope=False"),
        ({"multi_query_attention": True, "multi_query_group_num": 3}, "multi_query_group_num=3 must divide"),
        ({"kv_channels": 126}, "kv_channels=126 must be a multiple of 4.*128"),
        ({"pre_seq_len": 0}, "pre_seq_len=0 must be at least 1"),
        ({"prefix_projection": True}, "prefix_projection=True needs pre_seq_len="),
    ],
)
def test_configs_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatGLMConfig(**settings)


SPLIT: dict[str, Any] = {"enable_sequence_parallelism": True}
ULYSSES = {**SPLIT, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**SPLIT, "sequence_parallelism_mode": "ring_attn", "sp_size": 2}
ZBV = {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 2}
FOUR = {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}
TWO = {"num_layers": 2}
LAYOUTS = [
    Layout(CAUSAL, 2, {"tp_size": 2, **SPLIT}, {**TWO, **PREFIX}, steps=2),
    Layout(PLAIN, 2, ULYSSES, TWO, steps=2, calls=True, checkpointing=True),
    Layout(CAUSAL, 2, ULYSSES, {**TWO, **PREFIX}, steps=2, calls=True),
    Layout(CLASSIFIER, 2, {"zero_stage": 3}, TWO, steps=2),
    Layout(CAUSAL, 2, {"tp_size": 2}, {**TWO, **PREFIX, "multi_query_group_num": 1}, steps=2, checkpointing=True),
    Layout(CAUSAL, 2, ZBV, PREFIX, steps=2),
]
SWEEP = [
    Layout(name, world, plugin, overrides, steps=2)
    for name in (CAUSAL, PLAIN, CLASSIFIER)
    for overrides in ({}, PREFIX)
    for world, plugin in [
        (2, {"tp_size": 2}),
        (2, {"pp_size": 2, "num_microbatches": 2}),
        (2, {"pp_size": 2, "num_microbatches": 2, "pp_style": "interleaved", "num_model_chunks": 2}),
        (2, ZBV),
        (2, {"zero_stage": 2}),
        (4, {"tp_size": 4, "zero_stage": 1}),
        (4, {**FOUR, "zero_stage": 0}),
        (4, {"tp_size": 2, "zero_stage": 3}),
        (2, {"tp_size": 2, **SPLIT}),
        (2, {"tp_size": 2, **SPLIT, "sequence_parallelism_mode": "ring", "enable_sequence_overlap": True}),
        (2, ULYSSES),
        (2, RING),
        (4, {**ULYSSES, "tp_size": 2}),
        (4, {**RING, **FOUR, "tp_size": 1}),
    ]
    # Sequences of a model without logits for tokens are not split over ranks of their own.
    if "sp_size" not in plugin or name != CLASSIFIER
]


def train_all(rank: int, world: int, layouts: list[Layout]) -> None:
    for one in layouts:
        run_layout(rank, world, one)


def test_layouts_train_like_one_process() -> None:
    run_ranks(train_all, 2, LAYOUTS, timeout=200)


@pytest.mark.sweep
@pytest.mark.parametrize("one", SWEEP, ids=str)
def test_every_layout_trains_like_one_process(one: Layout) -> None:
    run_ranks(run_layout, one.world, one, timeout=200)
