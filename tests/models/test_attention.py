"""Every attention that a CPU has computes what transformers' eager one does, on one process and on two.

Batches are ragged: rows are padded on the right, and on the left where eager attention has numbers for rows that see
nothing (in fp64 it has none).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    StaticCache,
)

from shardwright.attention import backends
from shardwright.attention.choice import BACKENDS
from shardwright.attention.extra_terms import in_two, sdpa_with_alibi, sdpa_with_sinks
from shardwright.attention.model_needs import find_parts
from shardwright.attention.register import guard
from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.shardformer.attention_choice import pick_attention, use_attention
from shardwright.shardformer.sharder import ModelSharder
from shardwright.testing import compare_models, keep_float64, run_ranks
from shardwright.testing.train import adamw, train_steps
from tests.models import tiny_causal_lm, tiny_text_models

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gpt_oss": {"sliding_window": 5},
    "bert": {},
    "t5": {},
    "bloom": {},
    "falcon": {},
    "gpt_neo": {"window_size": 5},
    "gptj": {},
}
# What a request for each backend comes to, where it can be had: the name in transformers' registers.
SDPA = {"sdpa": "sdpa", "flash": "shardwright_fa", "math": "shardwright_math", "eager": "eager"}
HAD = {
    **dict.fromkeys(FAMILIES, SDPA),
    "gemma2": {"eager": "eager"},
    "t5": {name: had for name, had in SDPA.items() if name != "flash"},  # its position bias is trained
    "gpt_oss": SDPA | {"sdpa": "shardwright_sinks"},
    **{name: {"sdpa": "sdpa", "eager": "eager"} for name in ("bloom", "falcon", "gpt_neo", "gptj")},
}


def build(name: str, **settings: Any) -> nn.Module:
    """With eager attention everywhere."""
    if name == "t5":
        model = tiny_text_models.build(name)
    else:
        model = tiny_causal_lm.build(name, FAMILIES.get(name, {}) | settings)
    for part in model.modules():
        if hasattr(getattr(part, "config", None), "_attn_implementation_internal"):
            part.config._attn_implementation_internal = "eager"
    return model


def ragged(model: nn.Module, left: bool, seed: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(model.config.get_text_config().vocab_size, 99)  # type: ignore[union-attr, operator]
    ids, labels = torch.randint(5, vocabulary, (2, 3, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 11:], mask[2, 14:], mask[2, :3] = 0, 0, 0 if left else 1
    labels = labels.masked_fill(mask == 0, -100)
    labels[0, :5], labels[2, :4] = -100, -100  # position 2 of the last row sees nothing
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


def options(backend: str | None = None, **more: Any) -> ShardConfig:
    return ShardConfig(attention_backend=backend, **more)


def gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [param.grad for param in model.parameters()]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_backend_computes_what_eager_does(name: str) -> None:
    reference = build(name)
    had: dict[str, str] = {}
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        whole = copy.deepcopy(reference).to(dtype)
        batch = ragged(whole, left=dtype is torch.float32)
        exact = keep_float64() if dtype is torch.float64 else contextlib.nullcontext()
        with exact:
            expected = gradients(whole, batch)
            for backend in BACKENDS:
                model = copy.deepcopy(reference).to(dtype)
                if backend not in HAD[name]:
                    with pytest.raises(ValueError, match=f"attention_backend={backend!r} cannot be had"):
                        pick_attention(model, options(backend))
                    continue
                picks = pick_attention(model, options(backend))
                use_attention(model, picks)
                had[backend] = picks[0].name
                torch.testing.assert_close(gradients(model, batch), expected, atol=tolerance, rtol=tolerance)
    assert had == HAD[name]


def test_falcon_with_alibi_follows_transformers_own_sdpa() -> None:
    """transformers' eager form adds alibi twice, in the mask that it makes and in the layers."""
    reference = tiny_causal_lm.build("falcon", {"alibi": True})
    model = copy.deepcopy(reference)
    assert reference.config._attn_implementation == "sdpa"
    use_attention(model, pick_attention(model, ShardConfig(enable_flash_attention=True)))
    batch = ragged(reference, left=False)
    torch.testing.assert_close(gradients(model, batch), gradients(reference, batch))


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "bloom"])
def test_weights_of_attention_are_there_when_asked_for(name: str) -> None:
    reference = build(name)
    model = copy.deepcopy(reference)
    use_attention(model, pick_attention(model, options(enable_flash_attention=True)))
    batch = ragged(reference, left=False)
    for asked in (True, False):
        outputs, expected = (each(**batch, output_attentions=asked) for each in (model, reference))
        torch.testing.assert_close(outputs.loss, expected.loss)
        assert (outputs.attentions is None) == (not asked)
        if asked:
            torch.testing.assert_close(outputs.attentions, expected.attentions)


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "bloom"])
def test_rows_that_see_nothing_have_gradients_of_zero(name: str) -> None:
    """The last token of padding on the left is asked for the first word. Fused kernels, which have no weights of a row
    whose scores are all the least number, and torch's plain products are one.
    """
    model = build(name)
    use_attention(model, pick_attention(model, options("sdpa")))
    batch = ragged(model, left=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(copy.deepcopy(model), batch)
    torch.testing.assert_close(gradients(model, batch), expected, atol=1e-5, rtol=1e-5)


def train(rank: int, world_size: int) -> list[str]:
    """Two AdamW steps of each family on two ranks against eager attention on one."""
    logging.disable(logging.WARNING)
    problems = []
    for name in ("mistral", "gpt_oss", "bloom", "gptj"):
        reference, model = build(name), build(name)
        batches = [ragged(reference, left=False, seed=seed) for seed in range(2)]
        with keep_float64():
            expected = train_steps(reference, adamw(reference), batches)
            sharder = ModelSharder(model, None, options("sdpa", make_vocab_size_divisible_by=8))
            sharder.shard()
            optimizer = adamw(sharder.model)
            actual = train_steps(sharder.model, Synchronized(optimizer), batches)
        report = compare_models(reference, sharder.model, coordinate=rank, losses=(expected, actual), check=False)
        try:
            report.check()
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return problems


class Synchronized:
    """An optimizer that steps with the gradients of all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        sync_shared_gradients(params, dist.group.WORLD)
        self.optimizer.step()


def test_two_ranks_with_sdpa_train_like_one_with_eager_attention() -> None:
    assert run_ranks(train, 2, timeout=200) == [[], []]


def other_machines(rank: int, world_size: int) -> str:
    """Ranks that would choose differently, as on machines with different packages."""
    config = ShardConfig(attention_backend="sdpa" if rank else "math", make_vocab_size_divisible_by=8)
    with pytest.raises(ValueError) as caught:
        ShardFormer(config).shard_model(build("llama", num_hidden_layers=1))
    dist.barrier()
    return str(caught.value)


def test_ranks_agree_on_their_attention() -> None:
    first, second = run_ranks(other_machines, 2)
    assert first == second
    assert "attention math" in first
    assert "on rank 0 and" in first


def test_families_that_have_no_other_attention_are_named() -> None:
    with pytest.raises(ValueError, match=r"enable_flash_attention=True: DebertaV2\w+ can have no fused attention here"):
        pick_attention(tiny_text_models.build("deberta-v2"), ShardConfig(enable_flash_attention=True))
    with pytest.raises(ValueError, match="Linear has no attention of transformers; use None"):
        pick_attention(nn.Linear(2, 2), options("sdpa"))
    with pytest.raises(ValueError, match="attention_backend='eager' with enable_flash_attention=True"):
        options("eager", enable_flash_attention=True)


def test_dropout_is_not_dropped() -> None:
    """torch's flash kernels for CPUs have none; SDPA and eager attention drop with the probability of the config."""
    model = build("llama", attention_dropout=0.5)
    with pytest.raises(ValueError, match=r"it has no dropout, and the model's is 0\.5"):
        pick_attention(model, options("flash"))
    batch = ragged(model, left=False)
    with_gptj = build("gptj", attn_pdrop=0.5)
    with_gptj.transformer.h[0].attn.attn_dropout.p = 0.5
    for dropping in (model, with_gptj):
        use_attention(dropping, pick_attention(dropping, options("sdpa")))
        losses = [dropping(**batch).loss.item() for _ in range(2)]
        dropping.eval()
        losses += [dropping(**batch).loss.item() for _ in range(2)]
        assert losses[0] != losses[1]
        assert losses[2] == losses[3]


def test_terms_of_keys_and_sinks_keep_their_digits_in_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 7, 16, generator=generator, dtype=torch.float64).bfloat16().double()
    sinks, alibi = torch.randn(4, generator=generator), -torch.arange(7.0) * torch.rand(2, 4, 1, generator=generator)
    sinks, alibi, scale = sinks.bfloat16(), alibi.bfloat16(), 24**-0.5
    scores = query @ key.mT * scale
    with_sinks = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(2, 4, 7, 1)], -1).softmax(-1)[..., :-1]
    expected = with_sinks @ value, (scores + alibi.double()[:, :, None]).softmax(-1) @ value
    half = query.bfloat16(), key.bfloat16(), value.bfloat16()
    actual = sdpa_with_sinks(*half, None, sinks, scale, False), sdpa_with_alibi(*half, None, alibi, scale)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)
    halves = in_two(torch.tensor(24**0.5, dtype=torch.float64), torch.bfloat16)
    assert abs(float(halves.double().sum()) - 24**0.5) < 1e-4


def test_documents_of_varying_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch function computes on GPUs only; one that computes the same with SDPA takes its place."""
    from torch.nn.attention import varlen

    seen: list[list[int]] = []

    def by_document(
        q: Any, k: Any, v: Any, bounds: Any, *_: Any, window_size: tuple[int, int], **options: Any
    ) -> torch.Tensor:
        assert not options.get("enable_gqa")  # no argument of torch 2.11, nor of this function
        seen.append(bounds.tolist())
        back, ahead = window_size
        outs = []
        for start, end in pairwise(bounds):
            parts = [x[start:end].transpose(0, 1) for x in (q, k, v)]
            where = torch.arange(end - start)
            far = where[:, None] - where
            mask = (far <= back if back >= 0 else far == far) & (far >= -ahead if ahead >= 0 else far == far)
            out = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=options["scale"])
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    monkeypatch.setattr(varlen, "varlen_attn", by_document)
    monkeypatch.setattr("shardwright.attention.choice._device", lambda *_: None)
    monkeypatch.setattr("shardwright.attention.choice._numbers", lambda *_: None)
    for name, settings in (("llama", {}), ("mistral", {"sliding_window": 5}), ("bert", {})):
        reference = build(name, **settings)
        model = copy.deepcopy(reference)
        use_attention(model, pick_attention(model, options("varlen")))
        padded = ragged(reference, left=False)
        packed = {key: value[:1] for key, value in padded.items() if key in ("input_ids", "labels")}
        packed |= {"position_ids": torch.tensor([[*range(4), *range(7), *range(5)]]), "use_cache": False}
        for batch in (padded, packed) if name != "bert" else (padded,):
            with keep_float64():
                expected, actual = gradients(reference, batch), gradients(model, batch)
            torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    assert [0, 16, 27, 41] in seen
    assert [0, 4, 11, 16] in seen


def test_models_of_one_config_keep_their_attention() -> None:
    """Also the text's config within that of a model of two."""
    for name in ("llama", "t5"):
        first = build(name)
        other, third = type(first)(first.config), type(first)(first.config)
        for model, backend in ((first, "math"), (third, "sdpa")):
            use_attention(model, pick_attention(model, options(backend)))
        had = [{part.config._attn_implementation for part in find_parts(model)} for model in (first, other, third)]
        assert had == [{"shardwright_math"}, {"eager"}, {"sdpa"}]


@torch.no_grad()
def test_empty_places_of_a_cache_are_not_seen() -> None:
    """With a static cache a causal model gives no mask to its first queries, and keys that are not there yet."""
    for name, backend in (("gpt_oss", "sdpa"), ("llama", "math")):
        reference = build(name, sliding_window=64).eval()
        model = copy.deepcopy(reference)
        use_attention(model, pick_attention(model, options(backend)))
        ids = ragged(reference, left=False)["input_ids"]
        caches = [StaticCache(config=each.config, max_cache_len=24) for each in (reference, model)]
        with keep_float64():
            for part in (ids[:, :9], ids[:, 9:10], ids[:, 10:13]):
                expected, actual = (
                    each(input_ids=part, past_key_values=cache).logits
                    for each, cache in zip((reference, model), caches, strict=True)
                )
                torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_efficient_kernels_get_a_head_of_keys_for_each_query() -> None:
    """They know no groups of heads: where transformers leaves these to the kernel, torch would take another."""
    seen = []

    def function(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        assert getattr(module, "num_key_value_groups", 1) == 1
        seen.append((key.shape[1], value.shape[1], module.is_causal))
        return query, None

    module = nn.Identity()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    backends.Sdpa(function, "efficient")(module, query, key, key, None)
    assert seen == [(4, 4, True)]


def test_attention_to_another_sequence_and_masks_of_functions_are_seen() -> None:
    with torch.device("meta"):
        config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=9)
        (bart,) = find_parts(BartForConditionalGeneration(config))
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = {**vision, "vocab_size": 99, "num_key_value_heads": 1, "head_dim": 8}
        gemma = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))
        parts = {part.config.model_type: part for part in find_parts(gemma)}
        (alone,) = find_parts(Gemma3ForCausalLM(Gemma3TextConfig(**text)))
    assert (bart.crosses, bart.makes_masks) == (True, False)
    assert [parts[name].makes_masks for name in ("gemma3_text", "siglip_vision_model")] == [True, False]
    assert not alone.makes_masks
    assert not any(part.crosses for part in (alone, *parts.values()))


def test_packed_rows_are_refused_before_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = AttentionInterface._global_mapping
    monkeypatch.setitem(mapping, "flash_attention_2", mapping["sdpa"])
    model = build("llama")
    (part,) = find_parts(model)
    part.config._attn_implementation_internal = "flash_attention_2"
    guard(part, "flash_attention_2")
    ids = torch.arange(12).view(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    for allowed in ({}, {"position_ids": positions[:1]}, {"position_ids": positions[1:].expand(2, -1)}):
        model(input_ids=ids, use_cache=False, **allowed)
    with pytest.raises(ValueError, match="in batches of one row only, and this one has 2"):
        model(input_ids=ids, position_ids=positions, use_cache=False)


def test_what_a_function_does_not_know_is_refused() -> None:
    query = torch.randn(1, 2, 4, 8)
    for function, what in ((backends.varlen_attention, "softcap"), (backends.varlen_attention, "s_aux")):
        with pytest.raises(ValueError, match=f"this model's attention has a {what}, which it does not know"):
            function(nn.Identity(), query, query, query, None, **{what: torch.ones(2)})
