"""Stage 3: parameters are gathered before their unit runs and freed behind it, forward and backward.

    forward    a unit is gathered when one of its modules is called, and those that follow it in the order of the last
               forward are started ahead, as far as `ahead` reaches; behind the call it is freed. What ends the forward
               stays: backward begins there
    backward   a gradient that arrives at the output of a module gathers its unit again, and starts those before it;
               when the gradient of its newest input is there the unit is freed, at the latest when backward ends

A pipeline says itself which sections it needs when (`open_section`, `close_section`); then no hooks are installed.

[Note: who looks at a freed parameter] Outside of these windows a parameter is *pending* (see `param_guard`): an
operation on it shows its bucket, which all ranks of the sub-group must do alike, and from then on until the next step
it has values that last. So weights used away from their module, state dicts and averages of weights are right, at the
price of memory.

[Note: when the backward of a call is through] Autograd runs what is ready from the newest operation to the oldest. So a
call gets the newest of its inputs under a name of its own, made when it begins: everything that it records is newer,
and has run when the gradient under that name is complete. Older inputs stay the model's own tensors. Under a name for
each call, the gradient of what several layers get (an encoder's output, a table of positions) would be summed per layer
first, which rounds another way than the model alone does.

[Note: what a module gives away] Hooks see a backward begin where they see what the forward gave: tensors in its output,
in its attributes (losses of routers), and in lists, dicts and objects of its input, which stay the very ones that the
caller has, because a module may write to them. A module that computes and shows none of it stays gathered until the
step: what it returns unchanged gets its gradient when its own backward is over. A part of a weight that is returned is
copied: it would go with the weight.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..cluster import job
from ..comm.compat import graph_time, next_graph_time, runs_backward
from ..interface.shards import KeptShard, keep_shard
from ..logging import get_dist_logger
from ..models.skipped_layers import that_skip
from ..utils.labels import labelled
from ..utils.pytree import tree_map_only
from .call_values import held_by, mutable, replaced, tensors_in
from .data_writes import DataWrites
from .gathered_unit import GatheredUnit, UnitCall
from .groups import Groups
from .lookups import looks_up, only_looks_up
from .param_guard import ParamGuard
from .sharded_bucket import ShardedBucket
from .units import ParamUnit


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter)


def _time_made(tensor: torch.Tensor) -> int:
    return -1 if tensor.grad_fn is None else graph_time(tensor)


class _Hook:
    """Calls `function`. A deep copy of the model (an average of weights) has parameters of its own, and there it
    does nothing.
    """

    __slots__ = ("_function",)
    of_layout = True  # and not a script's, which looks at what modules return

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None)


class UnitGatherer:
    """Gathers and frees the buckets of `units`, which are numbered as in `BucketPlan.unit`.

    groups    whose sub-groups share the buckets
    ahead     how many units are gathered before they are needed; None: as many as take the memory of the largest one,
              and no more
    hooks     whether the modules' calls gather and free
    guard     of the parameters
    """

    guard: ParamGuard

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ParamUnit],
        buckets: Sequence[ShardedBucket],
        groups: Groups,
        data: DataWrites,
        *,
        ahead: int | None = None,
        hooks: bool = True,
    ) -> None:
        earlier = _GATHERERS.get(model)
        if earlier is not None:
            earlier.release()
        _GATHERERS[model] = self
        self.buckets = list(buckets)
        of_unit: list[list[ShardedBucket]] = [[] for _ in units]
        for bucket in buckets:
            of_unit[bucket.plan.unit].append(bucket)
        self._units = [GatheredUnit(held) for held in of_unit]
        self._places = {slot.entry.param: (bucket, slot) for bucket in buckets for slot in bucket.plan.slots}
        self._groups = groups
        self._data = data
        self._ahead = ahead
        self._room = max((unit.num_bytes for unit in self._units), default=0)
        self._order: list[GatheredUnit] = []  # of the last forward
        self._position: dict[GatheredUnit, int] = {}
        self._seen: dict[GatheredUnit, None] = {}  # in this forward
        self._uses: list[UnitCall] = []  # of this forward, as they ended
        self._open: dict[UnitCall, None] = {}
        self._recomputed: GatheredUnit | None = None  # in this backward, which stays for what comes next
        self._depth = 0  # calls of the model that are running: it may call itself
        self._generation = job.generation()
        # a parameter that knew itself would live for ever
        for number, (param, (bucket, slot)) in enumerate(self._places.items()):
            start, stop, _ = bucket.values_of(slot)
            replica = groups.of(bucket.plan.family).replica
            is_first = replica is None or dist.get_rank(replica) == 0  # of all ranks that keep the same
            keep_shard(param, KeptShard(start, stop, is_first, partial(_read_kept, weakref.ref(self), number)))
        self._hooks = self._install(model, units) if hooks else []
        self._sections = self._by_section()

    def _by_section(self) -> dict[int, list[GatheredUnit]]:
        found: dict[int, list[GatheredUnit]] = {}
        for unit in self._units:
            for section in {bucket.plan.family.section for bucket in unit.buckets}:
                found.setdefault(section, []).append(unit)
        return found

    def _install(self, model: nn.Module, units: Sequence[ParamUnit]) -> list[Any]:
        hooks: list[Any] = []
        self._lookups = {module for unit in units for module in unit.modules if only_looks_up(module)}
        for unit, described in zip(self._units, units, strict=True):
            for module in described.modules:
                stays = module is model  # it would be freed and gathered again at once
                hooks.append(
                    module.register_forward_hook(_Hook(partial(self._after_forward, unit, stays)), with_kwargs=True)
                )
                before = _Hook(partial(self._before_forward, unit))
                hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        for owner in that_skip(model):
            hooks.append(owner.register_forward_pre_hook(_Hook(self._hold_all), prepend=True))
        hooks.append(model.register_forward_hook(_Hook(lambda _, args, output: self._end_forward(output))))
        hooks.append(model.register_forward_hook(_Hook(lambda *_: self._leave_forward()), always_call=True))
        hooks.append(model.register_forward_pre_hook(_Hook(lambda *_: self._begin_forward()), prepend=True))
        return hooks

    # Forward.

    def _begin_forward(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._close_uses()
        for unit in self._units:
            if torch.is_grad_enabled():  # an evaluation leaves a backward that is still to come what it begins with
                unit.kept = unit.recorded = unit.read = False
                unit.coming.clear()
            unit.needed = 0
            unit.calls.clear()
        self._seen = {}
        self._uses = []

    def _hold_all(self, owner: nn.Module, args: Any) -> None:
        """Before a module that leaves out layers at random, other ones on each rank: no rank knows what others gather
        when. All units are there until the step, and in the order of a forward that has none left out.
        """
        for unit in self._units if owner.training else ():
            self._bring(unit)
            self._seen.setdefault(unit)
            unit.lasting = True
            self._free_unneeded(unit)

    def _end_forward(self, output: Any) -> None:
        """Also: a backward can begin inside of a module, at what it gave away beside its output (attention weights,
        logits of routers).
        """
        if self._depth > 1:
            return
        for leaf in tensors_in(output):
            if leaf.grad_fn is not None:
                made = graph_time(leaf)
                use = next((use for use in self._uses if use.first <= made < use.last), None)
                if use is not None:
                    leaf.register_hook(_Hook(partial(self._output_asked, use)))
        if list(self._seen) != self._order:
            self._order = list(self._seen)
            self._position = {unit: place for place, unit in enumerate(self._order)}
            if self._order and self._order[-1].recorded:  # was not known to be the last
                self._order[-1].kept = True
                self._bring(self._order[-1])

    def _leave_forward(self) -> None:
        """Also after an exception, which other ranks may not have had: gathers nothing."""
        self._depth -= 1
        if self._depth:
            return
        for unit in self._units:
            unit.needed -= len(unit.calls)
            unit.calls.clear()
            unit.between = False
        self._sweep()

    def _before_forward(self, unit: GatheredUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._bring(unit)
        if unit.opened:
            return None  # computed again, for the backward that holds it
        self._let_go_of_recomputed()
        unit.needed += 1
        again = unit in self._seen and not runs_backward()  # else computed again
        unit.repeated = unit.repeated or again
        self._seen.setdefault(unit)
        if not again:  # what follows its first call is over when a head with the weights of the embedding is called
            self._start_ahead(unit, 1)
        if not torch.is_grad_enabled():
            unit.calls.append(None)
            return None
        if module in self._lookups and looks_up(module, args, kwargs):
            unit.read = True
            unit.calls.append(None)
            return None
        use = UnitCall(unit)
        unit.calls.append(use)
        use.first = next_graph_time()
        newest = max(filter(_is_differentiable, tensors_in((args, kwargs))), key=_time_made, default=None)
        if newest is None:
            return None
        aliases: list[torch.Tensor] = []  # see [Note: when the backward of a call is through]

        def rename(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is not newest:
                return tensor
            if not aliases:
                aliases.append(tensor.view_as(tensor))
            return aliases[0]

        renamed = replaced(rename, args), {key: replaced(rename, value) for key, value in kwargs.items()}
        if aliases:
            use.first = next_graph_time()
            aliases[0].register_hook(partial(self._input_done, use))
            return renamed
        if newest.grad_fn is not None:
            newest.register_hook(partial(self._input_done, use))
        return None

    def _after_forward(
        self, unit: GatheredUnit, stays: bool, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        if unit.opened or not unit.calls:
            return None
        use = unit.calls.pop()
        unit.needed -= 1
        given = tensors_in(output)
        copied = None
        if any(tensor._base in self._places for tensor in given if tensor._base is not None):
            copied = tree_map_only(torch.Tensor, self._own_memory, output)
            given = tensors_in(copied)
        if use is not None:
            elsewhere = [*mutable((args, tuple(kwargs.values()))), *(() if stays else held_by(module))]
            self._await_backward(use, given, elsewhere)
            if use.last >= 0:
                if not stays:
                    self._uses.append(use)
                unit.recorded = True
                unit.coming.add(use)
                unit.kept = stays or unit.repeated or bool(self._order and unit is self._order[-1])
                if runs_backward() and not unit.kept:  # the backward of what was computed last comes next
                    self._recomputed, unit.kept = unit, True
        unit.between = unit.repeated
        self._free_unneeded(unit)
        return copied

    def _let_go_of_recomputed(self) -> None:
        """Of several layers that a reentrant checkpoint computes again the last one stays."""
        unit, self._recomputed = self._recomputed, None
        if unit is not None:
            unit.kept = False
            self._free_unneeded(unit)

    def _own_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor._base is not None and tensor._base in self._places else tensor

    def _await_backward(self, use: UnitCall, given: Sequence[torch.Tensor], elsewhere: list[Any]) -> None:
        """See [Note: what a module gives away]."""
        has_recorded = next_graph_time() > use.first
        written = tensors_in(elsewhere)
        # Where a view is changed in place, its own history is no longer that of the tensor it looks at.
        for tensor in (*given, *written, *(tensor._base for tensor in given if tensor._base is not None)):
            if tensor.grad_fn is None:
                continue
            made = graph_time(tensor)
            if made >= use.first:  # else it was given to the call, whose backward is over when its gradient is there
                use.last = max(use.last, made)
                tensor.register_hook(_Hook(partial(self._output_asked, use)))
        if has_recorded and use.last < 0:
            use.unit.lasting = True

    # Backward.

    def _output_asked(self, use: UnitCall, grad: torch.Tensor) -> None:
        unit = use.unit
        if use.is_open:
            return
        use.is_open = True
        self._open[use] = None
        unit.needed += 1
        unit.opened += 1
        unit.coming.discard(use)
        if unit is self._recomputed:
            self._recomputed = None
        unit.kept = unit.repeated and bool(unit.coming)
        unit.lasting = unit.lasting or torch.is_grad_enabled()
        self._bring(unit)
        self._start_ahead(unit, -1)

    def _input_done(self, use: UnitCall, grad: torch.Tensor) -> None:
        if use.is_open:
            self._close(use)

    def _close(self, use: UnitCall, on: bool = True) -> None:
        """`on`: backward goes on with what ran before."""
        use.is_open = False
        del self._open[use]
        use.unit.needed -= 1
        use.unit.opened -= 1
        self._free_unneeded(use.unit)
        place = self._position.get(use.unit, 0)
        while place and self._order[place - 1].is_through:
            place -= 1
        # its backward may begin at what it gave away unseen (an attribute)
        if on and place and self._order[place - 1].recorded:
            self._bring(self._order[place - 1])

    def _close_uses(self) -> None:
        for use in list(self._open):
            self._close(use, on=False)

    def end_backward(self) -> None:
        """What backward has not freed by itself: units whose inputs need no gradient, and those that were started in
        vain.
        """
        self._close_uses()
        self._recomputed = None
        for use in self._uses:  # a graph that is retained may be gone through once more
            use.unit.coming.add(use)
        for unit in self._units:
            unit.kept = unit.between = False
            unit.needed = 0
        self._sweep()

    # Sections, for pipelines.

    def open_section(self, section: int) -> None:
        """Start gathering what the section needs."""
        for unit in self._sections.get(section, ()):
            unit.needed += 1
            if not unit.filled:
                self._start(unit)

    def wait_section(self, section: int) -> None:
        for unit in self._sections.get(section, ()):
            self._bring(unit)

    def close_section(self, section: int) -> None:
        for unit in self._sections.get(section, ()):
            unit.needed -= 1
            self._free_unneeded(unit)

    # One unit.

    def _bring(self, unit: GatheredUnit) -> None:
        if not unit.ready:
            if not unit.filled:
                self._start(unit)
            for bucket in unit.buckets:
                bucket.finish_gather()
            unit.ready = True
        self._pend(unit, False)

    def _pend(self, unit: GatheredUnit, pending: bool) -> None:
        """Only the calls that a unit is gathered for know how long it stays: others that read it are shown a copy."""
        changed, unit.pending = unit.pending != pending, pending
        for bucket in unit.buckets if changed else ():
            if bucket.shown is None:
                self.guard.values_pending(bucket.params, pending)

    @labelled(lambda _, unit: f"gather {unit.name}")
    def _start(self, unit: GatheredUnit) -> None:
        if any(bucket.shown is not None for bucket in unit.buckets):
            self._take_shown()
        for bucket in unit.buckets:
            bucket.start_gather(self._groups.of(bucket.plan.family).sharing)
        unit.filled = True

    def _start_ahead(self, unit: GatheredUnit, direction: int) -> None:
        """Start the units that come after (1) or came before (-1) `unit` in the last forward; in a backward those that
        may still have one.
        """
        place = self._position.get(unit)
        if place is None:
            return
        started = taken = 0
        while 0 <= (place := place + direction) < len(self._order):
            other = self._order[place]
            if (direction < 0 or runs_backward()) and other.is_through:
                continue
            taken += other.num_bytes
            if (started and taken > self._room) if self._ahead is None else started >= self._ahead:
                return
            started += 1
            if not other.filled:
                self._start(other)

    def _free_unneeded(self, unit: GatheredUnit) -> None:
        if unit.needed or not unit.filled:
            return
        if not (unit.kept or unit.lasting or unit.between):
            self._free(unit)
        elif unit.ready:
            self._pend(unit, True)

    def _free(self, unit: GatheredUnit) -> None:
        for bucket in unit.buckets:
            bucket.free()
        self._pend(unit, True)
        unit.filled = unit.ready = False

    def _sweep(self) -> None:
        for unit in self._units:
            self._free_unneeded(unit)

    # Scripts.

    def values_wanted(self, params: Iterable[nn.Parameter]) -> None:
        """See `param_guard.ValueReads`."""
        for bucket in {self._places[param][0]: None for param in params}:
            if bucket.shown is None:
                bucket.take_assigned()
                with told_when_alone(bucket):
                    bucket.show(self._groups.of(bucket.plan.family).sharing)
                self.guard.values_pending(bucket.params, False)

    def show_all(self) -> None:
        self.values_wanted(self._places)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self._places)

    def _take_shown(self) -> None:
        """Let masters follow what scripts have written to parameters that they were shown."""
        written = self._data.take()
        for unit in self._units:
            for bucket in unit.buckets:
                bucket.take_edits(written)

    def take_edits(self) -> None:
        """Free everything, with the masters up to date; parameters that a script has seen keep their values."""
        self._close_uses()
        self._uses = []
        for unit in self._units:
            unit.needed = unit.opened = 0
            unit.kept = unit.lasting = False
            unit.coming.clear()  # which refer to the unit: it would wait for a garbage collection
            if unit.filled:
                self._free(unit)
            for bucket in unit.buckets:
                bucket.take_assigned()
        self._take_shown()

    # What the optimizer asks for, as of `ParamGatherer`.

    def publish(self, exactly: bool = True) -> None:
        """The masters have changed: what is gathered from here on is new. Everything has been freed by `take_edits`."""
        for bucket in self.buckets:
            self._hide(bucket)

    def written_by_steps(self) -> frozenset[int]:
        """None: working parameters do not exist between steps."""
        return frozenset()

    def _hide(self, bucket: ShardedBucket) -> None:
        if bucket.shown is not None:
            self._data.forget(bucket.params)
            bucket.hide()
            self.guard.values_pending(bucket.params, True)

    def wait(self) -> None:
        """Nothing is on its way between steps."""

    def begin(self, guard: ParamGuard) -> None:
        """Parameters are pending from here on."""
        self.guard = guard
        guard.values_pending(self._places, True)

    def reset(self) -> None:
        """Forget a step that failed."""
        if self._generation != job.generation():
            self._generation = job.generation()
            for unit in self._units:
                for bucket in unit.buckets:
                    bucket.abandon()
                self._pend(unit, True)
                unit.filled = unit.ready = False
        if self._open:
            self.take_edits()

    def release(self) -> None:
        """Leave the model with parameters of its own, and without hooks. Collective."""
        self.take_edits()
        self.show_all()
        for hook in self._hooks:
            hook.remove()
        for bucket in self.buckets:
            bucket.release()
        for param in self._places:
            keep_shard(param, None)

    def read_kept(self, number: int) -> torch.Tensor:
        """This rank's part of a parameter, in the master; what is gathered is forgotten, because it may be written
        to.
        """
        bucket, slot = list(self._places.values())[number]
        unit = self._units[bucket.plan.unit]
        if unit.filled:
            self._free(unit)
        bucket.take_assigned()
        if bucket.shown is not None:
            self._take_shown()
            self._hide(bucket)
        return bucket.values_of(slot)[2]


@contextmanager
def told_when_alone(bucket: ShardedBucket) -> Iterator[None]:
    """Say what this rank waits for when others do not come."""
    name = bucket.plan.slots[0].entry.name
    timer = threading.Timer(
        _PATIENCE,
        lambda: get_dist_logger().warning(
            f"rank {dist.get_rank()} has waited {_PATIENCE} s for the others to read {name} and what is stored with "
            "it: at ZeRO stage 3 parameters are gathered when a script reads them, which all ranks must do alike (not "
            "under `if rank == 0`)"
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_PATIENCE = 10  # seconds

# What a model that is boosted again must be given back by.
_GATHERERS: weakref.WeakKeyDictionary[nn.Module, UnitGatherer] = weakref.WeakKeyDictionary()


def _read_kept(gatherer: weakref.ref[UnitGatherer], number: int) -> torch.Tensor:
    here = gatherer()
    assert here is not None
    return here.read_kept(number)
