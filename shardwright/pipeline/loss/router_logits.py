"""Router logits of all layers, wherever they run: what a model with `output_router_logits=True` computes its
load-balancing loss from.

transformers collects them while the model runs, by forward hooks on the routers. A stage runs some of the layers only.
So what the routers of a stage, and of the stages before it, have given travels on beside the output of its last layer,
and a gate of a layer that runs elsewhere tells the hooks what its routers have given there. The last stage thus
collects the logits of all layers, in their order, and their gradients travel back like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from ...models.dry_run import call_model, meta_copy, run_dry, weight_sharing_copy
from ...models.example_inputs import example_batches
from ...models.layer_chain import Unit

FLAG = "output_router_logits"
_COLLECTORS = "transformers.utils.output_capturing"  # where transformers' forward hooks are written


class Tap(NamedTuple):
    """A router: the unit that it is in, its module, and where in its output the logits are (None: they are all of
    it).
    """

    unit: int
    router: str
    place: int | None


def configs_of(model: nn.Module) -> list[Any]:
    """Configs of the model and of its parts that have the flag."""
    found = {
        id(config): config for module in model.modules() if hasattr(config := getattr(module, "config", None), FLAG)
    }
    return list(found.values())


def are_wanted(configs: Sequence[Any], batch: Any = None) -> bool:
    """Whether a forward of this batch collects router logits."""
    asked = batch.get(FLAG) if isinstance(batch, Mapping) else None
    return bool(asked) if asked is not None else any(getattr(config, FLAG) is True for config in configs)


@contextmanager
def without_router_logits(model: nn.Module) -> Iterator[None]:
    """Inside, `model` and its copies collect none."""
    wanting = [config for config in configs_of(model) if getattr(config, FLAG) is True]
    try:
        for config in wanting:
            setattr(config, FLAG, False)
        yield
    finally:
        for config in wanting:
            setattr(config, FLAG, True)


@dataclass
class RouterLogits:
    """Of one model: which routers there are, and what this rank's stages do with their logits.

    taps     in the order in which the model collects them
    configs  that say whether it does
    """

    taps: tuple[Tap, ...]
    configs: list[Any]
    # number, tap and module, by unit
    _routers: dict[int, list[tuple[int, Tap, nn.Module]]] = field(default_factory=dict, repr=False)

    def are_wanted(self, batch: Any) -> bool:
        return are_wanted(self.configs, batch)

    def num_before(self, unit: int) -> int:
        """Routers in the units before this one: what travels over a cut there."""
        return sum(tap.unit < unit for tap in self.taps)

    def attach(self, model: nn.Module, collected: Callable[[], dict[int, torch.Tensor] | None]) -> None:
        """Note what routers return in `collected()`, by number, while there is such a dict."""
        self._routers.clear()
        for number, tap in enumerate(self.taps):
            router = model.get_submodule(tap.router)
            router.register_forward_hook(_noting(number, tap.place, collected))
            self._routers.setdefault(tap.unit, []).append((number, tap, router))

    def replay(self, unit: int, logits: Mapping[int, torch.Tensor]) -> None:
        """Tell transformers' hooks what the routers of a unit have given elsewhere."""
        for number, tap, router in self._routers.get(unit, ()):
            output = logits[number] if tap.place is None else (*[None] * tap.place, logits[number])
            for hook in collecting_hooks(router):
                hook(router, (), output)


def _noting(
    number: int, place: int | None, collected: Callable[[], dict[int, torch.Tensor] | None]
) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        logits = collected()
        if logits is not None:
            logits[number] = output if place is None else output[place]

    return note


def collecting_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """transformers' own hooks, which collect what layers return for the model's outputs."""
    return [hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", "") == _COLLECTORS]


def find_router_logits(model: nn.Module, units: Sequence[Unit], example_inputs: Any = None) -> RouterLogits | None:
    """The routers of `model`, learnt from one dry run; None for a model that collects no logits. ValueError where
    they cannot be found.
    """
    configs = configs_of(model)
    if not are_wanted(configs):
        return None
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    examples = [example_inputs] if example_inputs is not None else list(example_batches(model))
    failure = ""
    for on_meta, example in product((True, False) if has_weights else (True,), examples):
        try:
            return RouterLogits(_find(model, units, example, on_meta), configs)
        except _NotFoundError as error:
            failure = str(error)
            break
        except Exception as error:  # the model's own code: anything can happen on a guessed batch
            failure = failure or f"its dry run failed ({type(error).__name__}: {error})"
    raise ValueError(
        f"{FLAG}=True in the config of {type(model).__name__}: the logits of its routers cannot be brought to the last "
        f"pipeline stage, since {failure}. Set model.config.{FLAG}=False, or use pp_size=1"
    )


class _NotFoundError(Exception):
    pass


def _find(model: nn.Module, units: Sequence[Unit], example: Any, on_meta: bool) -> tuple[Tap, ...]:
    copied = meta_copy(model) if on_meta else weight_sharing_copy(model)
    seen: dict[int, list[tuple[Any, Tap]]] = {}  # id of a tensor -> the tensor, and who returned it

    def hook_of(unit: int, name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            entries = enumerate(output) if isinstance(output, tuple) else [(None, output)]
            for place, value in entries:
                if isinstance(value, torch.Tensor):
                    seen.setdefault(id(value), []).append((value, Tap(unit, name, place)))

        return see

    for unit, (layer, *_) in enumerate(units):
        for name, module in copied.get_submodule(layer).named_modules(prefix=layer):
            module.register_forward_hook(hook_of(unit, name))
    if on_meta:
        output = run_dry(copied, example)
    else:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            output = call_model(copied, example)
    collected = output.get("router_logits") if isinstance(output, Mapping) else None
    if not collected:
        if isinstance(output, Mapping) and any(
            key.endswith("router_logits") and value for key, value in output.items()
        ):
            raise _NotFoundError("its encoder and its decoder have routers each")
        return ()
    taps = []
    for logits in collected:
        homes = [tap for _, tap in seen.get(id(logits), []) if collecting_hooks(copied.get_submodule(tap.router))]
        if not homes:
            raise _NotFoundError("they are not collected by transformers' hooks on modules of its layers")
        taps.append(homes[0])
    if [tap.unit for tap in taps] != sorted(tap.unit for tap in taps):
        raise _NotFoundError("they are not collected in the order of its layers")
    return tuple(taps)
