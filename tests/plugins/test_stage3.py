"""ZeRO stage 3 against one process: ways to use weights and losses that gather and free in other orders than the
usual one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

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


def build(recompute: bool | None = None, tied: bool = False) -> nn.Module:
    """`recompute`: layers are computed again in backward, True: by reentrant checkpoints."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).double()
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    return model.train()


def usual(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


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


class Watch:
    """Bytes that are gathered, and in which order units come and go, by the name of their first parameter."""

    def __init__(self) -> None:
        self.bytes = self.most = 0
        self.events: list[tuple[str, str]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        start, free = ShardedBucket.start_gather, ShardedBucket.free

        def started(bucket: ShardedBucket, group: Any) -> None:
            self.bytes += bucket.plan.numel * bucket.dtype.itemsize
            self.most = max(self.most, self.bytes)
            self.events.append(("gather", bucket.plan.slots[0].entry.name))
            start(bucket, group)

        def freed(bucket: ShardedBucket) -> None:
            if bucket.filled:
                self.bytes -= bucket.plan.numel * bucket.dtype.itemsize
                self.events.append(("free", bucket.plan.slots[0].entry.name))
            free(bucket)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardedBucket, "start_gather", started)
            patch.setattr(ShardedBucket, "free", freed)
            yield


def hold_no_more(rank: int, world: int) -> None:
    """At most the unit that runs, those started ahead, the one where backward begins, and the small rest of the
    model.
    """
    ids = torch.arange(14).view(2, 7)
    for ahead in (0, 1):
        model = build(recompute=False)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32", gather_ahead=ahead))
        model, optim, *_ = booster.boost(model, adamw(model))
        units = optim.units
        sizes = {bucket.plan.slots[0].entry.name: bucket.plan.numel * bucket.dtype.itemsize for bucket in units.buckets}
        layer, head = sizes["model.layers.0.self_attn.q_proj.weight"], sizes["lm_head.weight"]
        assert len(sizes) == 4 + 3, "layers, embedding, head, the rest"
        for accumulated in (1, 3):
            for step in range(2):
                watch = Watch()
                with watch.installed():
                    for micro in range(accumulated):
                        with booster.no_sync(model, optim) if micro < accumulated - 1 else nullcontext():
                            booster.backward(usual(model, ids), optim)
                    optim.step()
                    optim.zero_grad()
                assert watch.bytes == 0, "nothing is gathered between steps"
                rest = sizes["model.norm.weight"]
                if step:
                    assert watch.most <= rest + head + (1 + ahead) * layer, (ahead, accumulated, watch.most)
                    # Forward and backward; what backward begins with is gathered once, and so are the rest and the
                    # embedding, whose backward reads no weight.
                    gathers = [name for kind, name in watch.events if kind == "gather"]
                    assert len(gathers) == accumulated * (2 * 4 + 3), gathers
        assert all(param.grad is None for param in optim.param_groups[0]["params"]), "gradients are in shards alone"


def test_nothing_is_held_longer_than_its_layer_needs() -> None:
    run_ranks(hold_no_more, 2, timeout=60)


class Reentrant(nn.Module):
    """Its layers are computed again by reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


def recompute_ahead(rank: int, world: int) -> None:
    x = torch.randn(4, 16, dtype=torch.float64).requires_grad_()
    plain, model = Reentrant(), Reentrant()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32", gather_ahead=1))
    model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        loss, watch = model(x), Watch()
        with watch.installed():
            booster.backward(loss, optim)
        if step:
            for layer in range(1, 4):
                names = [f"layers.{number}.0.weight" for number in (layer - 1, layer)]
                assert watch.events.index(("gather", names[0])) < watch.events.index(("free", names[1])), watch.events
            assert len(watch.events) == 2 * 5, watch.events
            assert watch.most == 2 * optim.units.buckets[0].plan.numel * 8, watch.most
        optim.step()
        optim.zero_grad()
        plain(x).backward()
        with torch.no_grad():
            for param in plain.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_layers_are_gathered_while_the_one_behind_is_computed_again() -> None:
    """Of reentrant checkpoints nothing is recorded in the forward, and their weights are needed all the same."""
    run_ranks(recompute_ahead, 2, timeout=60)


def chunks(rank: int, world: int, style: str, number: int) -> None:
    """A rank has the weights of three chunks, or of one, and trains as at stage 1; nothing but the schedule gathers
    them.
    """
    results = []
    for stage, ahead in ((3, None), (3, 0), (1, None)):
        plugin = HybridParallelPlugin(
            pp_size=2,
            num_microbatches=4,
            pp_style=style,
            num_model_chunks=number,
            zero_stage=stage,
            precision="fp32",
            gather_ahead=ahead,
        )
        booster = Booster(plugin=plugin)
        model = zoo.build("llama-causal-lm", dtype=torch.float64, num_hidden_layers=2 * number)
        model, optim, *_ = booster.boost(model, adamw(model))
        watch = Watch()
        with watch.installed():
            for step in range(3):
                batch = zoo.inputs(
                    "llama-causal-lm", batch_size=4, seq_len=9, seed=10 * step + plugin.mesh.coordinate("dp")
                )
                booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optim)
                assert not any(bucket.shown is not None for bucket in (optim.units.buckets if stage == 3 else ()))
                optim.step()
                optim.zero_grad()
        if stage == 3:
            held, most = set[str](), 0
            for kind, name in watch.events:
                (held.add if kind == "gather" else held.discard)(name)
                most = max(most, len({each.split(".")[2] for each in held if "layers." in each}))
            assert most == (min(3, number) if ahead is None else 1), most
            assert not held
        results.append([param.detach().clone() for param in model.unwrap().parameters()])
    for got, few, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(few, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("style", "number"), [("interleaved", 4), ("zbv", 2), ("zb", 1)])
def test_pipelines_gather_the_chunks_that_they_need_next(style: str, number: int) -> None:
    run_ranks(chunks, 4, style, number, timeout=60)


class Recurrent(nn.Module):
    """One block for all layers, as ALBERT has it, and one that is called in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x + self.layers[0](x)
        return self.layers[1](x).square().mean()


def call_again(rank: int, world: int) -> None:
    """A layer that runs five times is gathered once for them, once for their backwards, and once without gradients."""
    x = torch.randn(4, 16, dtype=torch.float64)
    plain, model = Recurrent(), Recurrent()
    plain_optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32"))
    model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        watch = Watch()
        with watch.installed():
            booster.backward(model(x), optim)
            trained = [name for kind, name in watch.events if kind == "gather" and "layers.0" in name]
            with torch.no_grad():
                model(x)
            assert watch.bytes == 0
        if step:
            assert len(trained) <= 2
        model.unwrap().layers[0][0].weight.data.clamp_(-0.2, 0.2)  # hands out the values
        optim.step()
        optim.zero_grad()
        assert not optim._data._handed_out, "values that were handed out do not stay"
        plain(x).backward()
        plain.layers[0][0].weight.data.clamp_(-0.2, 0.2)
        plain_optim.step()
        plain_optim.zero_grad()
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_layer_that_runs_several_times_is_gathered_once() -> None:
    run_ranks(call_again, 2, timeout=60)


class PassingOn(nn.Module):
    """Its layers return what they were given, too: what the first one computed for all, as T5's positions, and their
    inputs.
    """

    class Layer(nn.Module):
        def __init__(self, computes: bool) -> None:
            super().__init__()
            self.linear, self.places = nn.Linear(16, 16), nn.Linear(16, 16) if computes else None

        def forward(self, x: torch.Tensor, place: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
            if self.places is not None:
                place = self.places(x)
            assert place is not None
            return self.linear(x + place).tanh(), place, x

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(self.Layer(index == 0) for index in range(6))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = None
        for layer in self.layers:
            x, place, given = layer(x, place)
            x = x + 0.5 * given
        return x.square().mean()


def pass_on(rank: int, world: int) -> None:
    x = torch.randn(4, 16, dtype=torch.float64)
    plain, model = PassingOn(), PassingOn()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32", gather_ahead=1))
    model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = [bucket.plan.numel * bucket.dtype.itemsize for bucket in optim.units.buckets]
    for step in range(3):
        watch = Watch()
        with watch.installed():
            booster.backward(model(x), optim)
        gathers = [name for kind, name in watch.events if kind == "gather"]
        if step:
            assert len(gathers) == 2 * 6 - 1, gathers  # backward begins with the last one
            assert watch.most <= sizes[0] + 2 * max(sizes[1:]), (watch.most, sizes)
        optim.step()
        optim.zero_grad()
        plain(x).backward()
        with torch.no_grad():
            for param in plain.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_layers_that_pass_on_what_they_were_given_are_gathered_twice_and_go() -> None:
    run_ranks(pass_on, 2, timeout=60)


class Scaled(nn.Embedding):
    """Its backward reads the weight."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.weight.square().mean().sqrt()


def keep_size(module: Any, args: Any, output: torch.Tensor) -> None:
    module.size = module.weight.square().mean()


def tables(rank: int, world: int) -> None:
    """A table whose rows are looked up is gathered for the forward, and stays for the backward of a head with the same
    weights; where anything else is done to it, it is gathered for the backward, too.
    """
    for case in ("alone", "tied", "scaled", "read by a hook"):
        results = []
        for sharded in (True, False):
            model = build(tied=case == "tied", recompute=False)
            if case == "scaled":
                scaled = Scaled(97, 32).double()
                scaled.weight = model.get_input_embeddings().weight
                model.set_input_embeddings(scaled)
            elif case == "read by a hook":
                model.get_input_embeddings().register_forward_hook(keep_size)
            optim: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32", gather_ahead=1))
            if sharded:
                model, optim, *_ = booster.boost(model, optim)
            for step in range(3):
                ids = torch.arange(2 * step, 14 + 2 * step).view(2, 7)
                watch = Watch()
                with watch.installed():
                    loss = usual(model, ids)
                    if case == "read by a hook":
                        loss = loss + model.get_input_embeddings().size
                    booster.backward(loss, optim) if sharded else loss.backward()
                optim.step()
                optim.zero_grad()
                if sharded and step:
                    table, events = "model.embed_tokens.weight", watch.events
                    gathered = [name for kind, name in events if kind == "gather"]
                    assert len(gathered) == {"alone": 11, "tied": 6 + 3}.get(case, 12), (case, gathered)
                    if case == "tied":
                        order = [name for kind, name in events if kind == "gather" or name == table]
                        first = "model.layers.0.self_attn.q_proj.weight"
                        assert order.index(table) < order.index(table, 3) < len(order) - 1, "gone behind its head"
                        assert order.count(first) == 2, order
            results.append([param.detach().clone() for param in model.parameters()])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_tables_are_gathered_for_what_reads_them() -> None:
    run_ranks(tables, 2, timeout=60)


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
