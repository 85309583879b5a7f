"""ZeRO stage 3 against one process: ways to use weights and losses that gather and free in other orders than the
usual one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage3_watch import adamw, build, usual
from torch import nn
from transformers import LlamaForCausalLM

from shardwright import Booster
from shardwright.comm.compat import without_torch_function
from shardwright.lazy import LazyInitContext
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.testing import run_ranks, zoo
from shardwright.zero.sharded_bucket import ShardedBucket
from shardwright.zero.units import find_param_units

STEPS = 4
SAMPLES = 2  # per rank

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def on_attention_weights(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Its backward enters layers past their outputs, and never reaches the last ones."""
    found = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[:2]
    return sum((each * torch.arange(each.numel()).view(each.shape)).mean() for each in found)


def on_a_layer(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[2].square().mean()


def regularized_before(model: Any, ids: torch.Tensor) -> torch.Tensor:
    weights = sum(param.square().mean() for param in model.parameters())
    return weights + usual(model, ids)


def regularized_after(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return usual(model, ids) + sum(param.square().mean() for param in model.parameters())


def away_from_their_modules(model: Any, ids: torch.Tensor) -> torch.Tensor:
    hidden = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
    logits = nn.functional.linear(hidden, model.get_input_embeddings().weight)
    return logits.logsumexp(-1).mean() + model.model.layers[1].mlp.up_proj.weight.square().mean()


def by_parts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.lm_head(model.model(input_ids=ids, use_cache=False).last_hidden_state).square().mean()


def of_two_forwards(model: Any, ids: torch.Tensor) -> torch.Tensor:
    first = usual(model, ids)
    return first + 2 * model(input_ids=ids.flip(1), labels=ids, use_cache=False).loss


def with_gradient_penalty(model: Any, ids: torch.Tensor) -> torch.Tensor:
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=ids, use_cache=False).loss
    (grad,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + 100 * grad.square().sum()


CASES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "usual": (usual, {}),
    "tied": (usual, {"tied": True}),
    "on attention weights": (on_attention_weights, {}),
    "on a layer": (on_a_layer, {}),
    "regularized before": (regularized_before, {}),
    "regularized after": (regularized_after, {}),
    "away from their modules": (away_from_their_modules, {}),
    "by parts": (by_parts, {}),
    "of two forwards": (of_two_forwards, {}),
    "with gradient penalty": (with_gradient_penalty, {}),
    "recomputed": (usual, {"recompute": False}),
    "recomputed, reentrant": (usual, {"recompute": True}),
    "recomputed, two forwards": (of_two_forwards, {"recompute": False}),
}


def edit(model: nn.Module) -> None:
    """What scripts do to weights between steps."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "up_proj" in name:
                param.data.clamp_(-0.02, 0.02)
            elif "down_proj" in name:
                param.mul_(0.99)
            elif "q_proj" in name:
                param.data = param.data * 1.01


def train(rank: int, world: int, optimizer: Callable[[Any], torch.optim.Optimizer], **settings: Any) -> None:
    for name, (loss, kind) in CASES.items():
        plain = build(**kind)
        plain_optim = optimizer(plain)
        model = build(**kind)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32", **settings))
        model, optim, *_ = booster.boost(model, optimizer(model))
        for step in range(STEPS):
            ids = torch.randint(0, 97, (SAMPLES * world, 7), generator=torch.Generator().manual_seed(step))
            shares = ids.split(SAMPLES)
            sum(loss(plain, share) / world for share in shares).backward()
            booster.backward(loss(model, shares[rank]), optim)
            grads = optim.gradients()
            for key, param in plain.named_parameters():
                wanted = torch.zeros_like(param) if param.grad is None else param.grad
                got = grads.get(key, torch.zeros_like(param))
                torch.testing.assert_close(
                    got, wanted, rtol=1e-10, atol=1e-10, msg=lambda text, k=key, n=name: f"{n}: {k}.grad: {text}"
                )
            for each in (plain_optim, optim):
                each.step()
                each.zero_grad()
            if step == 1:
                edit(plain)
                edit(model.unwrap())
        for (key, got), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                got, wanted, rtol=1e-10, atol=1e-10, msg=lambda text, k=key, n=name: f"{n}: {k}: {text}"
            )


def whole_matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def in_two_ways(rank: int, world: int) -> None:
    train(rank, world, adamw, zero_group_size=2, gather_ahead=0)


@pytest.mark.timeout(240)
def test_every_way_to_use_weights_is_that_of_one_process() -> None:
    run_ranks(train, 2, adamw, timeout=110)


def alone(rank: int, world: int) -> None:
    """One rank has nothing to gather: where masters work themselves, they stay the parameters; with copies they are
    made and freed.
    """
    train(rank, world, adamw)
    for precision in ("fp32", "bf16"):
        traces = []
        for stage in (0, 3):
            model: Any = build().float()
            booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision=precision, max_norm=0.1))
            model, optim, *_ = booster.boost(model, adamw(model))
            trace = []
            for step in range(STEPS):
                ids = torch.randint(0, 97, (SAMPLES, 7), generator=torch.Generator().manual_seed(step))
                loss = usual(model, ids)
                if stage == 3:
                    stay = [param.untyped_storage().nbytes() > 0 for param in kept(model)]
                    assert all(stay) if precision == "fp32" else not all(stay)
                booster.backward(loss, optim)
                optim.step()
                optim.zero_grad()
                trace.append(loss.detach())
            if stage == 3 and precision == "fp32":
                assert all(bucket.master.data_ptr() == bucket.flat.data_ptr() for bucket in optim.buckets)
            traces.append([*trace, *(param.detach().clone() for param in model.parameters())])
        for zeroth, third in zip(*traces, strict=True):
            assert torch.equal(zeroth, third)


@pytest.mark.timeout(240)
def test_one_rank_gathers_nothing() -> None:
    run_ranks(alone, 1, timeout=110)


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_every_way_to_use_weights_in_other_layouts() -> None:
    run_ranks(in_two_ways, 4, timeout=180)
    run_ranks(train, 2, whole_matrices, timeout=180)


def weights_alone(rank: int, world: int) -> None:
    """A model without an optimizer."""
    plain = build()
    ids = torch.arange(14).view(2, 7)
    model = build()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32"))
    model, *_ = booster.boost(model)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-10, atol=1e-10)
    assert all(param.untyped_storage().nbytes() == 0 for param in kept(model)), "freed behind the forward"
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def kept(model: Any) -> list[torch.Tensor]:
    with without_torch_function():
        return [param.data for param in model.parameters()]


def test_a_model_without_optimizer_is_sharded_too() -> None:
    run_ranks(weights_alone, 2, timeout=60)


def live_bytes() -> int:
    """Of all tensors of this process that the collector sees."""
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and not item.is_meta:
            with without_torch_function():
                storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def make_lazily(rank: int, world: int) -> None:
    """Weights are made unit by unit: no more is there at once than this rank's shards and a unit, twice while its
    values are shared.
    """
    gc.collect()
    gc.freeze()
    before = live_bytes()
    with LazyInitContext():
        model: Any = LlamaForCausalLM(zoo.config("llama-causal-lm", num_hidden_layers=12))
    plain = LlamaForCausalLM(zoo.config("llama-causal-lm", num_hidden_layers=1))
    unit = max(sum(param.numel() for param in plain.model.layers[0].parameters()), plain.lm_head.weight.numel()) * 4
    del plain
    numel = sum(param.numel() for param in model.parameters())
    most = 0
    adopt = ShardedBucket.adopt

    def watched(bucket: ShardedBucket, group: Any) -> None:
        nonlocal most
        adopt(bucket, group)
        most = max(most, live_bytes() - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedBucket, "adopt", watched)
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=3, precision="fp32"))
        model, optim, *_ = booster.boost(model, adamw(model))
    shards = sum(bucket.master.numel() * 4 for bucket in optim.buckets)
    assert shards < 1.1 * numel * 4 / world
    assert most <= shards + 4 * unit, f"{most} bytes at boost, {shards} of shards, {unit} of a unit"
    assert most < numel * 4


def test_weights_are_made_unit_by_unit() -> None:
    run_ranks(make_lazily, 4, timeout=60)


def read_late(rank: int, world: int) -> list[str]:
    from shardwright.zero import unit_gatherer

    told: list[str] = []
    unit_gatherer.get_dist_logger = lambda: type("Log", (), {"warning": staticmethod(told.append)})  # type: ignore[assignment]
    unit_gatherer._PATIENCE = 0.3
    model = build()
    model, *_ = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32")).boost(model)
    if rank == 1:
        time.sleep(1.5)
    model.lm_head.weight.sum()
    return told


def test_a_rank_that_reads_alone_says_what_it_waits_for() -> None:
    first, second = run_ranks(read_late, 2, timeout=60)
    assert len(first) == 1
    assert "rank 0 has waited" in first[0]
    assert "which all ranks must do alike" in first[0]
    assert not second


def test_units_of_a_model() -> None:
    model = build(tied=True)
    units = find_param_units(model)
    names = {param: name for name, param in model.named_parameters()}
    listed = [sorted(names[param] for param in unit.params) for unit in units]
    assert listed[0] == ["model.embed_tokens.weight"]
    assert {type(module).__name__ for module in units[0].modules} == {"Embedding", "Linear"}, "the head shares it"
    assert [len(unit) for unit in listed[1:]] == [9, 9, 9, 9, 1]
    assert listed[-1] == ["model.norm.weight"]
    assert units[-1].modules == (model,)
