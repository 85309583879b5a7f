"""What ZeRO stage 3 gathers when, how long it stays, and that the numbers are those of one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from stage3_watch import Watch, adamw, build, usual
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.testing import run_ranks, zoo


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
    plain_optim = torch.optim.SGD(plain.parameters(), lr=0.1)
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
        plain_optim.step()
        plain_optim.zero_grad()
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
    plain_optim = torch.optim.SGD(plain.parameters(), lr=0.1)
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
        plain_optim.step()
        plain_optim.zero_grad()
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
