"""Which modules of a model's layers look along sequences, found by running a small copy of it.

A module computes every token for itself if another value of one token in what it is given changes its result for that
token alone. A layer does not; going down from it, with the results of what is found held fixed, leads to the modules in
which tokens meet.

That the plan is right is not assumed, see `layer_check`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.sequence_modes import native_function, use_attention
from ...models.config import is_encoder_decoder
from ...models.cross_attention import MASK, STATES, made_up_states
from ...models.layer_chain import layer_lists
from ...precision.policy import BATCH_NORMS
from ...shardformer.layer.sequence import first_tensor, with_first
from .layer_plan import LayerPlan, Path, Places, Stack, changed_inputs, tensors_in
from .sequence_axis import IGNORED

_SAMPLES, _LENGTH, _DECODED, _ENCODED = 3, 22, 18, 15
_NOT_CUT = ("mask", "bias", "alibi")  # in names of arguments: attention functions are given them as they are


class CannotSplit(ValueError):
    """Why the layers of a model cannot have parts."""


class Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def given(self) -> dict[Path, Tensor]:
        return dict(tensors_in({"args": self.args, "kwargs": self.kwargs}))


class Sizes(NamedTuple):
    """Of what a stack of layers is given.

    lengths     of its sequences, and of those that it reads besides
    """

    samples: int
    lengths: tuple[int, ...]

    @property
    def token(self) -> int:
        """One in the middle of all sequences."""
        return min(self.lengths) // 2

    def shapes(self, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(samples, length) for samples in (1, self.samples) for length in lengths]


class Probe:
    """
    model       a small copy, in evaluation mode
    name        of the attention function that it calls
    trades      whether attention that goes through the interface may be traded
    """

    wide = False  # see `_Walk`

    def __init__(self, model: nn.Module, name: str, trades: bool) -> None:
        self.model = model
        self._calls: dict[str, Call] = {}
        self._times: dict[str, int] = {}
        self._attended: dict[nn.Module, Any] = {}
        self._fixed: dict[nn.Module, Any] = {}
        self._records = False
        self.callers: set[nn.Module] = set()
        native = native_function(name)

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
        ) -> Any:
            if module in self._fixed:
                return self._fixed[module]
            self.callers.add(module)
            made = native(module)(module, query, key, value, attention_mask, **options)
            if self._records:
                self._attended[module] = made
            return made

        if trades:
            use_attention(model, attention, "trial", masks_of=name)
        self._names = {module: name for name, module in model.named_modules()}

    def run(self) -> Any:
        """Call the model with what it is tried on."""
        raise NotImplementedError

    # Plans.

    def plan(self, stacks: list[Stack] | None = None) -> LayerPlan:
        """For `stacks`; None: for all that there are."""
        plan = LayerPlan(self._stacks() if stacks is None else stacks)
        with torch.no_grad():
            self._record(None)
            calls, times, attended = dict(self._calls), dict(self._times), dict(self._attended)
            plan.stacks = self._in_order(plan.stacks, times)
            for stack in plan.stacks:
                first = next(name for name in stack.layers if name in times)
                self._require_samples_first(calls[first], self._sizes(stack, stack is plan.stacks[-1]))
                self._record(first)
                others = dict(self._calls)
                self._calls, self._attended = calls, attended
                walk = _Walk(self, plan, others, self._sizes(stack, stack is plan.stacks[-1]))
                for name in stack.layers:
                    if name in times:
                        walk.layer(name)
        return plan

    def _require_samples_first(self, call: Call, sizes: Sizes) -> None:
        shape = tuple(first_tensor(call.args, call.kwargs).shape)
        if len(shape) > 2 and shape[0] in sizes.lengths and shape[1] == sizes.samples not in sizes.lengths:
            raise CannotSplit(
                f"its layers are given [length, batch, ...], {shape[0]} tokens of {shape[1]} rows, and sequences are "
                "split in the second dim"
            )

    def _sizes(self, stack: Stack, is_last: bool) -> Sizes:
        raise NotImplementedError

    def _stacks(self) -> list[Stack]:
        found = [Stack([f"{name}.{index}" for index in range(len(each))]) for name, each in layer_lists(self.model)]
        if not found:
            raise CannotSplit("it has no list of layers")
        return found

    def _in_order(self, stacks: list[Stack], times: Mapping[str, int]) -> list[Stack]:
        order = list(times)
        found = []
        for stack in stacks:
            called = [name for name in stack.layers if name in times]
            if not called:
                continue
            if any(times[name] > 1 for name in called) and not stack.apart:
                raise CannotSplit(f"its layer {called[0]} runs several times")
            if len(called) < len(stack.layers) and not stack.apart:
                raise CannotSplit(f"some of its layers do not run ({stack.layers[0]}, ...)")
            found.append(stack)
        if not found:
            raise CannotSplit("none of its layers run")
        found.sort(key=lambda stack: min(order.index(name) for name in stack.layers if name in times))
        for stack in found[:-1]:
            stack.gathers = True
        return found

    def _record(self, changed: str | None) -> None:
        """Keep what modules are given and return; `changed`: a layer that is given something else."""
        self._calls, self._times, self._attended = {}, {}, {}
        with ExitStack() as stack:
            for module, name in self._names.items():
                stack.callback(module.register_forward_pre_hook(self._note(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._keep(name), with_kwargs=True).remove)
            if changed is not None:
                layer = self.model.get_submodule(changed)
                stack.callback(layer.register_forward_pre_hook(_noise, with_kwargs=True, prepend=True).remove)
            self._records = True
            try:
                self.run()
            finally:
                self._records = False

    def _note(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._times[name] = self._times.get(name, 0) + 1

        return hook

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._calls.setdefault(name, Call(args, kwargs, output))

        return hook

    # What a module makes of another token.

    def call_of(self, module: nn.Module) -> Call | None:
        return self._calls.get(self._names[module])

    def name_of(self, module: nn.Module) -> str:
        return self._names[module]

    def has_attended(self, module: nn.Module) -> bool:
        return module in self._attended

    def times(self, module: nn.Module) -> int:
        return self._times.get(self._names[module], 0)

    @contextmanager
    def fixed(self, modules: list[nn.Module], attention: nn.Module | None = None) -> Iterator[None]:
        """Let modules return what they did, and the attention function for `attention`."""
        with ExitStack() as stack:
            for module in modules:
                call = self.call_of(module)
                assert call is not None
                stack.callback(module.register_forward_hook(lambda *_, output=call.output: output).remove)
            if attention is not None:
                self._fixed = {attention: self._attended[attention]}
            try:
                yield
            finally:
                self._fixed = {}

    def is_by_token(self, module: nn.Module, call: Call, parts: Places, sizes: Sizes) -> bool:
        """Whether another value of one token changes the module's result for that token alone."""

        def other(x: Tensor, dim: int) -> Tensor:
            if not x.is_floating_point():
                return x
            x = x.clone()
            # below 0: all samples in one dim
            token = x.unflatten(0, (sizes.samples, -1))[:, sizes.token] if dim < 0 else x.select(dim, sizes.token)
            token += torch.linspace(0, 50, token.numel(), dtype=x.dtype).view_as(token).cos()  # no norm hides it
            return x

        args, kwargs = changed_inputs(call.args, call.kwargs, parts, other)
        try:
            first, second = module(*call.args, **call.kwargs), module(*args, **kwargs)
        except Exception:  # of the model's own code
            return False
        before, after = dict(tensors_in(_plain(first))), dict(tensors_in(_plain(second)))
        return before.keys() == after.keys() and all(
            _same_elsewhere(before[path], after[path], sizes) for path in before
        )


class TokenProbe(Probe):
    """Of token ids, padded, with labels.

    words       token ids are below it
    reads       states of an encoder that is no part of the model are given to it, too
    """

    def __init__(self, model: nn.Module, name: str, words: int, trades: bool, reads: bool = False) -> None:
        super().__init__(model, name, trades)
        self._decodes = is_encoder_decoder(model)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, words, (_SAMPLES, _LENGTH), generator=generator)
        self.labels = torch.randint(5, words, (_SAMPLES, _DECODED if self._decodes else _LENGTH), generator=generator)
        if not self._decodes:
            self.labels = self.ids.clone()
        self.labels[0, :6], self.labels[2, 9:14] = IGNORED, IGNORED
        self.mask = torch.ones_like(self.ids)
        self.mask[1, -4:] = 0
        self.states, self.masked_states = _encoder_states(model, generator) if reads else ({}, {})

    def run(self) -> Any:
        batch = {"input_ids": self.ids, "attention_mask": self.mask, "labels": self.labels, **self.masked_states}
        return self.model(**batch, use_cache=False)

    def _sizes(self, stack: Stack, is_last: bool) -> Sizes:
        if is_last and self._decodes:
            return Sizes(_SAMPLES, (_DECODED, _LENGTH))
        return Sizes(_SAMPLES, (_LENGTH, _ENCODED) if is_last and self.states else (_LENGTH,))


def _encoder_states(model: nn.Module, generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Arguments of a call: states alone, and with a mask of padding."""
    states = made_up_states(model, _SAMPLES, _ENCODED, generator)
    if states is None or MASK not in inspect.signature(model.forward).parameters:
        raise CannotSplit(f"it takes no {MASK}, which would hide where states of an encoder are padded")
    mask = torch.ones(_SAMPLES, _ENCODED, dtype=torch.long)
    mask[0, -3:], mask[2, :2] = 0, 0
    alone = {STATES: states.to(next(model.parameters()).dtype)}
    return alone, {**alone, MASK: mask}


def _noise(_: nn.Module, args: Any, kwargs: Any) -> Any:
    def other(x: Tensor) -> Tensor:
        return x + torch.linspace(0, 50, x.numel(), dtype=x.dtype).view_as(x).cos()

    return with_first(other, args, kwargs)


def _plain(output: Any) -> Any:
    return tuple(output.values()) if isinstance(output, Mapping) else output


def _same_elsewhere(before: Tensor, after: Tensor, sizes: Sizes) -> bool:
    if before.shape != after.shape:
        return False
    samples, lengths = sizes
    by_sample = before.dim() > 1 and before.shape[0] == samples and before.shape[1] in lengths
    if not by_sample and before.dim() > 0 and before.shape[0] in [samples * length for length in lengths]:
        before, after = before.unflatten(0, (samples, -1)), after.unflatten(0, (samples, -1))
        by_sample = True
    if by_sample:
        keep = torch.arange(before.shape[1]) != sizes.token
        before, after = before[:, keep], after[:, keep]
    return torch.equal(before, after) or torch.allclose(before.double(), after.double(), rtol=1e-9, atol=1e-10)


class _Walk:
    """Goes down from layers to the modules in which tokens meet.

    others      calls where hidden states have other values

    Where the probe is `wide`, modules without attention are whole from the outermost on: tokens may meet in one whose
    result only another such reads, so that holding that one fixed hides it (RecurrentGemma's convolutions). And layers
    get parts of whole numbers, such as the ids that experts are chosen by.
    """

    def __init__(self, probe: Probe, plan: LayerPlan, others: dict[str, Call], sizes: Sizes) -> None:
        self._probe, self._plan, self._others, self._sizes = probe, plan, others, sizes
        self._times = 1

    def layer(self, name: str) -> None:
        layer = self._probe.model.get_submodule(name)
        self._times = self._probe.times(layer)
        call, parts = self._parts(layer)
        found = self._below(layer, call, parts)
        if found is None:
            raise CannotSplit(f"its layers ({type(layer).__name__}) look along the sequence themselves")
        read = {id(tensor) for module in found for tensor in self._probe_call(module).given().values()}
        hidden = first_tensor(call.args, call.kwargs)
        extras = {
            path: 1
            for path, tensor in call.given().items()
            if tensor is not hidden
            and id(tensor) not in read
            and tensor.shape[:2] in self._sizes.shapes(self._sizes.lengths[:1])
            and path not in parts
            and (tensor.dim() > 2 or (self._probe.wide and tensor.dim() == 2 and tensor.dtype == torch.long))
        }
        if extras:
            self._plan.extras[name] = extras

    def _probe_call(self, module: nn.Module) -> Call:
        call = self._probe.call_of(module)
        assert call is not None
        return call

    def _parts(self, module: nn.Module) -> tuple[Call, Places]:
        """A module's call, and what in it depends on hidden states."""
        call = self._probe_call(module)
        other = self._others[self._probe.name_of(module)]
        return call, self._dependent(call.given(), other.given())

    def _dependent(self, before: dict[Path, Tensor], after: dict[Path, Tensor]) -> Places:
        found: Places = {}
        samples, length = self._sizes.samples, self._sizes.lengths[0]
        for path, tensor in before.items():
            if path not in after or tensor.shape != after[path].shape or torch.equal(tensor, after[path]):
                continue
            if tensor.dim() > 1 and tensor.shape[:2] == (samples, length):
                found[path] = 1
            elif tensor.dim() > 0 and tensor.shape[0] == samples * length:
                found[path] = -1
        return found

    def _below(self, module: nn.Module, call: Call, parts: Places) -> list[nn.Module] | None:
        """The modules in which tokens meet, all noted in the plan; None: `module` itself is one, unnoted."""
        probe = self._probe
        if not self._meets(module, call, parts):
            return []
        meeting = [child for child in _called_below(module, probe) if self._meets(child, *self._parts(child))]
        if module in probe.callers and probe.has_attended(module):
            inner = any(not self._by_token(child, *self._parts(child)) for child in meeting)
            with probe.fixed([], module):
                alone = not inner and self._by_token(module, call, parts)
            if alone:
                self._plan.traded[probe.name_of(module)] = self._whole_arguments(call, parts)
                return [module]
        if not meeting:
            return None
        with probe.fixed(meeting):
            alone = self._by_token(module, call, parts)
        if not alone:
            return None
        found = []
        for child in meeting:
            child_call, child_parts = self._parts(child)
            attends = any(module in probe.callers for module in child.modules())
            below = self._below(child, child_call, child_parts) if attends or not probe.wide else None
            if below is None:
                if not self._can_be_whole(child, child_parts):
                    return None
                self._note_whole(child, child_parts)
                below = [child]
            found += below
        return found

    def _meets(self, module: nn.Module, call: Call, parts: Places) -> bool:
        """Whether tokens meet in a module, or such of another sequence, with masks that are whole."""
        if any(child in self._probe.callers for child in module.modules()):
            return True
        if any(isinstance(child, BATCH_NORMS) for child in module.modules()):  # in training
            return True
        read = [(self._sizes.samples, length) for length in self._sizes.lengths[1:]]
        if any(tensor.dim() > 2 and tensor.shape[:2] in read for tensor in call.given().values()):
            return True
        return not self._by_token(module, call, parts)

    def _by_token(self, module: nn.Module, call: Call, parts: Places) -> bool:
        return self._probe.is_by_token(module, call, parts, self._sizes)

    def _can_be_whole(self, module: nn.Module, parts: Places) -> bool:
        return bool(parts) and all(dim == 1 for dim in parts.values()) and self._probe.times(module) == self._times

    def _note_whole(self, module: nn.Module, parts: Places) -> None:
        name = self._probe.name_of(module)
        before, after = self._probe_call(module).output, self._others[name].output
        returned = self._dependent(dict(tensors_in(before)), dict(tensors_in(after)))
        self._plan.whole[name] = parts, {path: dim for path, dim in returned.items() if dim == 1}

    def _whole_arguments(self, call: Call, parts: Places) -> Places:
        """What of the arguments is whole and along the sequence, masks and biases left out."""
        found: Places = {}
        lengths = self._sizes.lengths
        for path, tensor in call.given().items():
            named = any(isinstance(key, str) and any(part in key for part in _NOT_CUT) for key in path[1:])
            if path in parts or named:
                continue
            shape = tuple(tensor.shape)
            if shape[:2] in self._sizes.shapes(lengths) and (len(shape) < 4 or shape[3] not in lengths):
                found[path] = 1
            elif len(shape) == 4 and shape[1] == 1 and shape[2] in lengths and shape[3] not in lengths:
                found[path] = 2
            elif len(shape) < 4 and shape and shape[0] in lengths:
                found[path] = 0
        return found


def _called_below(module: nn.Module, probe: Probe) -> Iterator[nn.Module]:
    """The outermost modules below that are called."""
    for child in module.children():
        if probe.call_of(child) is not None:
            yield child
        else:
            yield from _called_below(child, probe)
