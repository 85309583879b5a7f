"""Batches and models that `hybrid_ranks` does not have, with sequences split over ranks and in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright import Booster
from shardwright.pipeline.saved_bytes import measure
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import compare_models, keep_float64, zoo

IGNORED = -100
Batch = dict[str, torch.Tensor]


def gemma2(**settings: Any) -> nn.Module:
    """Soft caps, and windows in every second layer."""
    config = transformers.Gemma2Config(
        **{**zoo.entry("llama-causal-lm").config, "tie_word_embeddings": True, **settings},
        head_dim=16,
        sliding_window=4,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=1.5,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Gemma2ForCausalLM(config).double().train()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param), alpha=zoo.PERTURBATION)
    return model


MODELS = {"gemma2": gemma2, **{name: lambda name=name: zoo.build(name) for name in zoo.names()}}


def packed(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Rows of documents of several lengths, which differ from row to row; the first label of each does not count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 100, (samples, length), generator=generator)
    labels, positions = ids.clone(), torch.zeros_like(ids)
    for row in range(samples):
        start = 0
        while start < length:
            stop = min(length, start + 3 + (5 * row + 7 * start) % 6)
            positions[row, start:stop] = torch.arange(stop - start)
            labels[row, start] = IGNORED
            start = stop
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def padded_in_front(samples: int, length: int) -> dict[str, torch.Tensor]:
    batch = packed(samples, length)
    batch["attention_mask"] = (torch.arange(length) >= torch.arange(samples)[:, None] * 3 % length).long()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    del batch["position_ids"]
    return batch


def few_labels(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Some ranks have none."""
    batch = packed(samples, length)
    batch["labels"][:, : length - 2] = IGNORED
    del batch["position_ids"]
    return batch


def masked(samples: int, length: int) -> dict[str, torch.Tensor]:
    """For an encoder, padded behind."""
    batch = few_labels(samples, length)
    batch["attention_mask"] = (torch.arange(length) < length - torch.arange(samples)[:, None]).long()
    return batch


def one_row(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Whose documents are dealt out as microbatches."""
    return packed(1, length)


def one_sample(samples: int, length: int) -> dict[str, torch.Tensor]:
    return few_labels(1, length)


BATCHES = {
    "one row": one_row,
    "one sample": one_sample,
    "packed": packed,
    "in front": padded_in_front,
    "few": few_labels,
    "masked": masked,
}


def compare_all(rank: int, world: int, cases: list[tuple[str, str, dict[str, Any], bool]], length: int = 19) -> None:
    """(model, batch, arguments of the plugin, whether the model is called itself)"""
    for name, kind, arguments, called in cases:
        with keep_float64():
            try:
                compare(MODELS[name](), BATCHES[kind](3, length), arguments, called)
            except Exception as error:
                error.add_note(f"{name}, {kind}, {arguments}")
                raise


Extra = Callable[[nn.Module], torch.Tensor | float]


def compare(
    reference: nn.Module,
    batches: Batch | Sequence[Batch],
    arguments: dict[str, Any],
    called: bool,
    extra: Extra = lambda model: 0.0,
    **of_one_process: Any,
) -> None:
    """Steps of SGD, one on each batch; two on a single one.

    extra   is added to the loss where the model is called itself
    of_one_process  what a call gets there besides
    """
    plugin = HybridParallelPlugin(precision="fp32", **arguments)
    booster = Booster(plugin=plugin)
    plain = sgd(reference)
    model: Any = copy.deepcopy(reference)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    assert optimizer is not None
    for batch in [batches] * 2 if isinstance(batches, dict) else batches:
        expected = reference(**batch, **of_one_process).loss + extra(reference)
        expected.backward()
        if called:
            loss = model(**batch).loss + extra(model)
            booster.backward(loss, optimizer)
        else:
            loss = booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]
        losses = None if loss is None else (expected.detach(), loss.detach())
        compare_models(
            reference,
            model,
            coordinate=plugin.mesh.coordinate,
            losses=losses,
            gradients=optimizer.gradients(),
            weights=False,
        )
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
        compare_models(reference, model, coordinate=plugin.mesh.coordinate, gradients=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1, momentum=0.9)


class Sent(TorchDispatchMode):
    """Calls and elements of what is sent, by the name of the operation; to this rank itself nothing is sent."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.found = rank, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname in ("alltoall_base_", "send"):
            kind, amount = func._opname, sum(tensor.numel() for tensor in tree_leaves(args[0]))
            if kind == "alltoall_base_":
                amount = args[1].numel() - args[4][self.rank % len(args[4])]  # neighbours
            calls, total = self.found.get(kind, (0, 0))
            self.found[kind] = calls + 1, total + amount
        return func(*args, **(kwargs or {}))


def qwen3() -> nn.Module:
    return zoo.build("qwen3-causal-lm", dtype=torch.float32, num_hidden_layers=1)


def latent() -> nn.Module:
    """Keys of 12 features, values of 6, whatever the config says of heads of keys and their size."""
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    parts = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    config = transformers.DeepseekV3Config(
        **sizes, **parts, num_hidden_layers=1, num_key_value_heads=4, first_k_dense_replace=1
    )
    return transformers.DeepseekV3ForCausalLM(config)


def volumes(rank: int, world: int, samples: int, length: int, mode: dict[str, Any]) -> Any:
    """What a layer sends forward and backward, the norm of its gradients, and what the plan says of calls and bytes: in
    both modes, in rings of rings, and with heads traded inside of a ring, the last once more with latent attention.
    """
    found = []
    ids = torch.randint(3, 100, (samples, length))
    for build, name, special in (
        (qwen3, "all_to_all", {}),
        (qwen3, "ring_attn", {}),
        (qwen3, "ring_attn", {"inner_ring_size": 2}),
        (qwen3, "ring_attn", {"ulysses_size": 2}),
        (latent, "ring_attn", {"ulysses_size": 2}),
    ):
        chosen = {"sequence_parallelism_mode": name, "sp_size": world, "zero_stage": 1, **special}
        plugin = HybridParallelPlugin(precision="fp32", **{**mode, **chosen})
        booster = Booster(plugin=plugin)
        model: Any = build()
        plan = plugin.preflight(model, None, samples, length).traffic
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with Sent(rank) as sent, booster.no_sync(model, optimizer):  # gradients stay where they are
            booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
        booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
        planned = [(row.count, row.sent) for row in plan if row.axis == "sp"]
        found.append((sent.found, optimizer.get_grad_norm(), planned))
    return found


def activations(rank: int, world: int, samples: int, length: int, modes: list[dict[str, Any] | None]) -> Any:
    """Bytes that a forward leaves on this rank (None: in one process), in all and for one layer more, by mode."""
    found = []
    ids = torch.randint(3, 100, (samples, length))
    for mode in modes:
        left = []
        for layers in (1, 2):
            model: Any = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=layers)
            if mode is not None:
                plugin = HybridParallelPlugin(precision="fp32", **mode)
                model, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with measure(model.parameters()) as saved:
                loss = model(input_ids=ids, labels=ids).loss
            left.append(saved.bytes)
            del loss
        found.append((left[1], left[1] - left[0]))
    return found
