"""Batches travel to the device beside what it computes, under the model of CUDA's streams: the next one while this one
is computed, that of a model which a script calls while the step before it is; what waits too little is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.data.dataloader import build_dataloader
from shardwright.testing import keep_float64, run_ranks, stream_model, zoo
from shardwright.testing.calls import replaced
from shardwright.testing.stream_model import StreamModel
from shardwright.utils import transfer

CPU = torch.device("cpu")
NAME, STEPS = "llama-causal-lm", 3


def _on_host(model: StreamModel, values: Tensor, pinned: bool) -> Tensor:
    """As loaders make them: by the host, which no stream has seen."""
    made = torch.from_numpy(values.numpy().copy())
    model.is_on_host(made, pinned)
    return made


@contextmanager
def _copies_seen(streams: StreamModel) -> Iterator[list[bool]]:
    """For every tensor that is sent, whether its copy need not wait for what the device was last given."""
    beside: list[bool] = []
    default = streams.default.line

    def watched(send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(tensor: Tensor, device: torch.device) -> Any:
            copy = send(tensor, device)
            if copy.arrived is not None:
                beside.append(copy.arrived._clock.get(default.number, 0) < max(default.clock[default.number], 1))
            return copy

        return sent

    with replaced(transfer, "_sent", watched):
        yield beside


def _short_run(ahead: bool, pinned: bool) -> set[str]:
    """Kinds of what is found in some steps of one product, and "late" where copies wait for what is computed."""
    with StreamModel() as model, _copies_seen(model) as beside:
        weight = torch.ones(4)
        lane = transfer.Transfers(CPU)
        batches = [_on_host(model, torch.full((4,), float(step)), pinned) for step in range(5)]
        parcels = [lane.send(batches[0])] if ahead else []
        for step in range(5):
            if ahead:
                parcels.pop(0).hand_over()
                parcels += [lane.send(batch) for batch in batches[step + 1 : step + 2]]
            here = transfer.to_device(batches[step], CPU)
            assert here is not batches[step]
            weight = weight + here
            batches[step].add_(1)  # by the host, which may fill it with what comes next
            del here
        assert weight.tolist() == [11.0] * 4
        assert len(beside) == 5
        return {hazard.kind for hazard in model.hazards} | ({"late"} if not all(beside) else set())


BROKEN: dict[str, tuple[Any, str, Any, str]] = {
    "the step for its batch": (stream_model.Stream, "wait_event", lambda _: lambda self, event: None, "read"),
    "memory for its last use": (StreamModel, "_recording", lambda _: lambda self, __: lambda tensor, on: None, "free"),
    "the script for its copy": (stream_model.Event, "synchronize", lambda _: lambda self: None, "write"),
    "no stream of its own": (transfer, "_lane_to", lambda _: lambda device, streams: streams.current_stream(), "late"),
}


@pytest.mark.parametrize("ahead", [True, False])
def test_copies_are_in_order_and_beside_what_is_computed(ahead: bool) -> None:
    assert _short_run(ahead, pinned=True) == set()
    assert _short_run(ahead, pinned=False) == set(), "pinned by a copy of its own"
    for what, (owner, name, by, kind) in BROKEN.items():
        with replaced(owner, name, by):
            assert kind in _short_run(ahead, pinned=kind == "write"), what


def _boosted(rank: int, world: int, ahead: bool | None) -> list[float]:
    """ahead: None for the way of the trainer, which takes a batch, sends it, and then asks for the next to be made."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
    bare = zoo.build(NAME, dtype=torch.float64, num_hidden_layers=1)
    model: Any
    optimizer: Any
    model, optimizer, *_ = booster.boost(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    losses: list[Tensor] = []
    with StreamModel() as streams, _copies_seen(streams) as beside, keep_float64():

        def collate(indices: list[int]) -> dict[str, Tensor]:
            made = zoo.inputs(NAME, batch_size=2, seq_len=6, seed=indices[0])
            return {name: _on_host(streams, value, pinned=True) for name, value in made.items()}

        samples: Any = list(range(2 * STEPS))
        loader: Any = build_dataloader(samples, 2, num_replicas=1, rank=0, collate_fn=collate)
        batches = iter(loader)
        batches._looks_ahead = bool(ahead)  # which it does when workers make the batches
        for _ in range(STEPS):
            if ahead:
                loss = booster.execute_pipeline(batches, model, lambda out, _: out.loss, optimizer)["loss"]
            elif ahead is None:
                batch = next(batches)
                batches.send(batch)
                loss = booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, optimizer)["loss"]
                batches.look_ahead()
            else:
                batch = next(batches)
                loss = model(**batch).loss
                for value in batch.values():
                    value.zero_()
                booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        del batches, loader
    streams.check()
    assert all(beside), "copies wait for what is computed"
    assert len(beside) == 3 * STEPS, "ids, mask and labels of every step"
    return [float(loss) for loss in losses]


def _both(rank: int, world: int) -> list[list[float]]:
    return [_boosted(rank, world, ahead) for ahead in (True, False, None)]


def test_boosted_models_are_given_the_batches_that_were_sent() -> None:
    [found] = run_ranks(_both, 1, timeout=60)
    model = zoo.build(NAME, dtype=torch.float64, num_hidden_layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with keep_float64():
        for step in range(STEPS):
            loss = model(**zoo.inputs(NAME, batch_size=2, seq_len=6, seed=2 * step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(float(loss.detach()))
    for losses in found:
        assert torch.allclose(torch.tensor(losses).double(), torch.tensor(expected).double(), rtol=0, atol=1e-6)
