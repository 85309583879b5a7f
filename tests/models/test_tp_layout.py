"""What each rank holds, how often ranks talk, what comes out of them."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

from shardwright.lazy import LazyInitContext
from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer import ModelSharder, ShardConfig
from shardwright.shardformer.layer import VocabParallelLMHead1D
from shardwright.spec import get_spec
from shardwright.testing import keep_float64, run_ranks, zoo
from tests.models.tp_ranks import overrides, shard

NAMES = [
    "llama-causal-lm",
    "qwen3-tied-causal-lm",
    "gpt2-causal-lm",
    "bert-masked-lm",
    "t5-conditional-generation",
    "bloom-causal-lm",
]


class CountedCollectives:
    """Counts `torch.distributed.all_reduce` and friends by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for name in (
            "all_reduce",
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_single",
            "reduce_scatter_tensor",
            "broadcast",
        ):
            if hasattr(dist, name):
                monkeypatch.setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return call(*args, **kwargs)

        return counted

    def take(self) -> dict[str, int]:
        taken = dict(self.calls)
        self.calls.clear()
        return taken


def count_collectives(
    rank: int, world_size: int, name: str, layers: int
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    key = {"gpt2": "n_layer", "bloom": "n_layer"}.get(zoo.entry(name).family, "num_hidden_layers")
    model = zoo.build(name, dtype=torch.float32, **{key: layers})
    ModelSharder(model, None, ShardConfig(make_vocab_size_divisible_by=8)).shard()  # as plugins do
    batch = zoo.inputs(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = CountedCollectives(monkeypatch)
        loss = model(**batch).loss
        forward = counted.take()
        loss.backward()
        backward = counted.take()
        sync_shared_gradients(model.parameters(), dist.group.WORLD)
        return forward, backward, counted.take()


@pytest.mark.parametrize(
    "name", ["llama-causal-lm", "qwen3-causal-lm", "gpt2-causal-lm", "bert-masked-lm", "bloom-causal-lm"]
)
def test_two_reductions_per_layer_and_pass(name):
    [few, *_], [many, *_] = (run_ranks(count_collectives, 2, name, layers) for layers in (1, 3))
    for one, three in zip(few[:2], many[:2], strict=True):
        assert set(three) == {"all_reduce"}
        assert three["all_reduce"] - one["all_reduce"] == 2 * 2
    # The embedding once; the loss twice. Backward: the head's input, nothing for the embedding.
    assert few[0]["all_reduce"] == 2 + 1 + 2
    assert few[1]["all_reduce"] == 2 + 1
    assert few[2] == many[2] == ({"all_reduce": 1} if name.startswith("qwen3") else {})


def held_bytes(rank: int, world_size: int, name: str, settings: dict[str, Any], multiple: int) -> tuple[int, int, int]:
    reference = zoo.build(name, dtype=torch.float32, **settings)
    model = shard(copy.deepcopy(reference), make_vocab_size_divisible_by=multiple)
    sharded = {spec.name for spec in map(get_spec, model.parameters()) if spec is not None and spec.is_sharded}
    full = {name: param.numel() * param.element_size() for name, param in reference.named_parameters()}
    own = sum(param.untyped_storage().nbytes() for param in model.parameters())
    return (
        own,
        sum(size for name, size in full.items() if name in sharded),
        sum(size for name, size in full.items() if name not in sharded),
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_holds_its_share_and_no_byte_more(name):
    # Sizes that divide: without padding, the share is exact.
    settings: dict[str, Any] = {"vocab_size": 104}
    for own, sharded, replicated in run_ranks(held_bytes, 2, name, settings, 1):
        assert own == sharded / 2 + replicated
        assert sharded > 10 * replicated


def same_tokens(rank: int, world_size: int, names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        reference = zoo.build(name, **overrides(name)).eval()
        model = shard(zoo.build(name, **overrides(name))).eval()
        batch = {key: value for key, value in zoo.inputs(reference).items() if key in ("input_ids", "attention_mask")}
        for options in ({"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}):
            tokens = []
            for one in (reference, model):
                torch.manual_seed(3)
                tokens.append(one.generate(**batch, max_new_tokens=8, use_cache=True, **options))
            if not torch.equal(*tokens):
                wrong.append(f"{name} {options}")
    return wrong


def test_generation_gives_the_tokens_of_one_process():
    names = [
        "llama-causal-lm",
        "qwen3-tied-causal-lm",
        "gpt2-causal-lm",
        "bloom-causal-lm",
        "opt-causal-lm",
        "t5-conditional-generation",
    ]
    assert run_ranks(same_tokens, 2, names, timeout=110) == [[], []]
    # two key/value heads on four ranks, in the cache too
    assert run_ranks(same_tokens, 4, names[:1], timeout=110) == [[]] * 4


def logits(rank: int, world_size: int, parallel_output: bool) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    reference = zoo.build("llama-causal-lm", **overrides("llama-causal-lm"))
    model = shard(zoo.build("llama-causal-lm", **overrides("llama-causal-lm")), parallel_output=parallel_output)
    model.for_scripts = False  # the columns as the forward leaves them
    batch = zoo.inputs(reference)
    with torch.no_grad(), keep_float64():
        # a clone does not carry the mark of the shard
        expected, actual = reference(**batch).logits, model(**batch).logits.clone()
    assert isinstance(model.lm_head, VocabParallelLMHead1D)
    shard_of = model.lm_head.vocabulary
    return expected, actual, (shard_of.start, shard_of.length)


def test_parallel_output_is_this_ranks_columns():
    for expected, actual, (start, length) in run_ranks(logits, 2, True):
        torch.testing.assert_close(actual[..., :length], expected[..., start : start + length])


def test_gathered_output_is_the_whole_vocabulary():
    for expected, actual, _ in run_ranks(logits, 2, False):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected)


def keeps_identity(rank: int, world_size: int) -> None:
    reference = zoo.build("llama-tied-causal-lm")
    model = zoo.build("llama-tied-causal-lm")
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    sharded = shard(model)
    assert sharded is model
    assert isinstance(model, type(reference))
    assert type(model).__name__ == type(reference).__name__
    assert dict(model.named_modules()) == modules
    assert {name: id(param) for name, param in model.named_parameters()} == {
        name: id(param) for name, param in params.items()
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight
    linears = [name for name, module in reference.named_modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(modules[name], nn.Linear) for name in linears)
    attention = model.model.layers[0].self_attn
    assert (
        attention.q_proj.out_features
        == attention.q_proj.weight.shape[0]
        == reference.model.layers[0].self_attn.q_proj.out_features // 2
    )
    assert all(get_spec(param).name == name for name, param in model.named_parameters())
    twin = copy.deepcopy(model)
    batch = zoo.inputs(model)
    torch.testing.assert_close(twin(**batch).loss, model(**batch).loss)


def test_modules_and_parameters_stay_who_they_are():
    run_ranks(keeps_identity, 2)


def dropout_masks(rank: int, world_size: int) -> list[torch.Tensor]:
    """Which outputs of replicated and of sharded dropout are zero, and the hidden states at the end."""
    name = "gpt2-causal-lm"
    torch.manual_seed(100 + rank)  # different seeds, as some scripts have them: sharding brings the ranks in step
    model = shard(zoo.build(name, attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3, n_layer=2, dtype=torch.float32))
    seen: list[torch.Tensor] = []
    block = model.transformer.h[0]
    block.attn.c_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    block.mlp.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    model.transformer.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state.detach()))
    model(**zoo.inputs(model))
    return seen


def test_dropout_agrees_on_replicated_and_differs_on_sharded_activations():
    [sharded0, mlp0, hidden0], [sharded1, mlp1, hidden1] = run_ranks(dropout_masks, 2)
    assert torch.equal(mlp0 == 0, mlp1 == 0)
    assert 0.2 < float((mlp0 == 0).float().mean()) < 0.4
    torch.testing.assert_close(hidden0, hidden1)
    assert not torch.equal(sharded0, sharded1)


def checkpointed(rank: int, world_size: int, use_reentrant: bool) -> list[str]:
    """Gradients with and without activation checkpointing, dropout on."""
    name = "gpt2-causal-lm"
    settings = {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "n_layer": 2}
    gradients = []
    for checkpointing in (False, True):
        model = shard(zoo.build(name, **settings))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(5)
        model(**zoo.inputs(model)).loss.backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    return [name for name, grad in gradients[0].items() if not torch.allclose(grad, gradients[1][name], atol=1e-12)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_dropout(use_reentrant):
    assert run_ranks(checkpointed, 2, use_reentrant) == [[], []]


def lazy_weights(rank: int, world_size: int) -> None:
    """Lazily built and sharded: the shards of what one process would have built, tied and padded ones too."""
    name = "llama-tied-causal-lm"
    config = zoo.config(name, num_hidden_layers=2)
    with LazyInitContext(seed=3):
        whole, model = LlamaForCausalLM(config), LlamaForCausalLM(config)
    LazyInitContext.materialize(whole)
    shard(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = dict(whole.named_parameters())
    for full_name, param in model.named_parameters():
        assert torch.equal(param, get_spec(param).shard(expected[full_name].data, rank)), full_name
    batch = zoo.inputs(name, num_hidden_layers=2)
    torch.testing.assert_close(model(**batch).loss, whole(**batch).loss)


def test_lazily_built_models_get_their_shards():
    run_ranks(lazy_weights, 2)
