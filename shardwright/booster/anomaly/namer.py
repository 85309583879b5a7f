"""What `Booster(detect_anomaly="name")` does: it keeps what the running step was given, and says where a number that is
not finite came from by running the step once more, on all ranks, from the same random numbers.

A step of `execute_pipeline` is run again as it was. Of a loop of the script's own the calls of the model are, with the
backward of the loss that the model returns; what the script computes itself is not seen, and what is said says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...checkpoint import rng
from ...checkpoint.held import held_tensors
from ...cluster.heart import heart
from ...cluster.job import running_again
from ...plugins.agreement import exchange_facts, place_of
from ...plugins.base import Plugin, unwrapped
from ...utils.errors import one_of
from ...utils.tensors import local_tensor
from .notes import Notes, Remembered
from .origin import Origin, first_of
from .trace import Trace, find_bad

_SOURCES = 3  # gradients named where nothing can be run again


class Namer:
    """Of one boosted model and its optimizer."""

    def __init__(self, plugin: Plugin | None, model: nn.Module, optimizer: Any) -> None:
        self._plugin = plugin
        # the optimizer holds this, and must go when the script lets go of it
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self.notes = Notes()
        self._trace: Trace | None = None
        self._in_pipeline = False
        model.register_forward_pre_hook(self._note_call, with_kwargs=True)

    # What the step is given.

    def pipeline(self, run: Callable[[Any], Any], data_iter: Any) -> Any:
        """`run(data_iter)`, a step of execute_pipeline with an optimizer, which is noted."""
        if self.notes.is_running_again:
            return run(data_iter)
        given: list[Any] = []
        settings = getattr(getattr(self._model(), "executor", None), "settings", None)
        call = self.notes.add(lambda: run(iter(given)), given, settings)
        self._in_pipeline = True
        try:
            return run(Remembered(data_iter, call))
        finally:
            self._in_pipeline = False

    def _note_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._in_pipeline or self.notes.is_running_again or not (model.training and torch.is_grad_enabled()):
            return
        self.notes.add(lambda: self._run_alone(args, kwargs), [{**dict(enumerate(args)), **kwargs}])

    def _run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model, optimizer = self._model(), self._optimizer()
        assert model is not None
        assert optimizer is not None
        outputs = model(*args, **kwargs)
        loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", outputs)
        if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
            optimizer.backward(loss)

    def note_loss(self, loss: torch.Tensor) -> None:
        """The loss that a backward begins with."""
        if self._trace is not None:
            self._trace.note_loss(loss)

    def forget(self) -> None:
        """The step is over, or its gradients were dropped."""
        if not self.notes.is_running_again:
            self.notes.forget()

    # What is said of it.

    def explain(self) -> str:
        """Where it came from. Called by all ranks in the same step, before weights change; gradients are gone then."""
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return "what made it is not known: the model is gone"
        before = find_bad(unwrapped(model), self._held(model))
        with optimizer.plain_parameters():
            light = _bad_gradients(model) if before is None else ""
        records = self._exchange({"before": before.to_json() if before else "", "calls": str(len(self.notes.calls))})
        if any(record["before"] for record in records):
            return self._told(records, "before")
        if len({record["calls"] for record in records}) > 1 or not self.notes.calls:
            why = "ranks have called the model unequally often" if self.notes.calls else "no call of the model was seen"
            return self._lightly(light, f"the step cannot be run again, since {why}")
        trace = self._run_again(model, optimizer)
        found = {"reached": trace.reached, "first": trace.first}
        records = self._exchange({key: origin.to_json() if origin else "" for key, origin in found.items()})
        for key, needs in (("reached", True), ("first", True), ("reached", False)):
            if any(record[key] and (Origin.from_json(record[key]).is_sure or not needs) for record in records):
                return self._told(records, key)
        return self._lightly(
            light, "run again from the same random numbers, all that torch's operators made was finite"
        )

    def _run_again(self, model: nn.Module, optimizer: Any) -> Trace:
        states = rng.get_states()
        kept = [(buffer, buffer.clone()) for buffer in unwrapped(model).buffers()]
        self.notes.is_running_again = True
        trace = self._trace = Trace(unwrapped(model))
        try:
            optimizer.zero_grad()
            with heart.untimed(), running_again(), trace.watching():
                for call in self.notes.calls:
                    rng.set_states(call.states)
                    trace.begin(call)
                    call.again()
            return trace
        finally:
            self._trace = None
            optimizer.zero_grad()
            self.notes.is_running_again = False
            rng.set_states(states)
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)

    def _held(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        plain = unwrapped(model)
        if self._plugin is None:
            return list(plain.named_parameters())
        try:
            return [(held.name, held.tensor) for held in held_tensors(plain, self._plugin.position(model))]
        except ValueError:  # what checkpoints cannot hold
            return list(plain.named_parameters())

    def _exchange(self, facts: dict[str, str]) -> list[dict[str, str]]:
        place = "" if self._plugin is None else place_of(self._plugin)
        rank = dist.get_rank() if dist.is_initialized() else 0
        own = {**facts, "who": f"rank {rank} ({place})" if place else f"rank {rank}"}
        together = self._plugin is not None and dist.is_initialized() and dist.get_world_size() > 1
        return exchange_facts(own) if together else [own]

    def _told(self, records: list[dict[str, str]], key: str) -> str:
        origins = [Origin.from_json(record[key]) if record[key] else None for record in records]
        first = first_of(origins)
        assert first is not None
        rank, origin, others = first
        also = f"; the same on rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}" if others else ""
        lost = f" (of the step's calls the first {self.notes.dropped} were not kept)" if self.notes.dropped else ""
        return f"{origin.sentence(records[rank]['who'])}{also}{lost}"

    def _lightly(self, mine: str, why: str) -> str:
        records = self._exchange({"gradients": mine})
        found = next((f"{each['gradients']} on {each['who']}" for each in records if each["gradients"]), "")
        rest = f"; of the step itself is known that {found}" if found else ""
        return f"{why}{rest}. What a script computes of the outputs of a model that it calls itself is not seen"


def _bad_gradients(model: nn.Module) -> str:
    """Without running anything: which gradients of this rank are not finite, as far as they are there."""
    bad = [
        name
        for name, param in unwrapped(model).named_parameters()
        if isinstance(param.grad, torch.Tensor) and not bool(local_tensor(param.grad).isfinite().all())
    ]
    more = f" and {len(bad) - _SOURCES} more" if len(bad) > _SOURCES else ""
    return f"gradients of {', '.join(bad[:_SOURCES])}{more} are not finite" if bad else ""


def require_nameable(detect_anomaly: str | None, on_nan: str, plugin: Plugin | None) -> str | None:
    """What `Booster(detect_anomaly=)` was given, or ValueError."""
    if detect_anomaly is None:
        return None
    if detect_anomaly != "name":
        raise one_of("detect_anomaly", detect_anomaly, ["name"])
    if on_nan == "warn":
        raise ValueError(
            "detect_anomaly='name' with on_nan='warn': the step is run again before weights change, by all ranks "
            "together, where 'warn' takes the step and waits for nobody. Say on_nan='stop' or 'skip'"
        )
    if plugin is not None and not plugin.support_skipped_steps():
        raise ValueError(
            f"detect_anomaly='name' with {type(plugin).__name__}: it clears gradients in its step only, so that no "
            "step can be run again; leave it out"
        )
    return detect_anomaly
