"""Sequences of calls on a boosted model and optimizer, beside the same calls on plain torch in one process.

A sequence is data: how the job is laid out, and calls by name. Every rank makes the calls of both sides and compares
weights after each of them; a call that a rank cannot answer must be refused with a ValueError on all ranks, and must
change nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.booster import Booster
from shardwright.kernels import compiled_adam
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.zero import one_pass

SAMPLES = 8
TINY_BUCKET = 300e-6  # elements in millions: several buckets


class OwnStep(torch.optim.AdamW):
    """A subclass that steps in its own way: by the sign of the gradient where that is large, so that its scale
    matters.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                        param.grad.clamp(-0.05, 0.05), alpha=-group["lr"]
                    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=5e-2, momentum=0.9),
    "own step": lambda params: OwnStep(params, lr=1e-2, weight_decay=0.1),
    # what rounding changes stays small, also where gradients are nearly zero
    "adamw, single": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-2),
    "adam, single": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, eps=1e-2),
}


@dataclass(frozen=True)
class Sequence:
    """`calls` are (name, number) pairs; the number seeds a batch, or says how much. `sizes` are of the model's axes.

    single  in fp32, where steps are taken in one pass
    """

    stage: int
    calls: tuple[tuple[str, int], ...]
    plugin: str = "hybrid"
    optimizer: str = "adamw"
    max_norm: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    half: str = ""
    single: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.single or self.half else torch.float64

    @property
    def of_a_layout(self) -> bool:
        """Whether it is for `LayoutPair`."""
        return bool(self.sizes or self.half)


class Model(nn.Module):
    """Odd sizes; `sometimes` is used by some batches, `never` by none."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 9)
        self.sometimes = nn.Linear(9, 9, bias=False)
        self.never = nn.Linear(3, 2)
        self.head = nn.Linear(9, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor, flag: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if flag is None or bool(flag):
            hidden = hidden + self.sometimes(hidden)
        return self.head(hidden)


def batch_of(number: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean() + output.mean()


class Pair:
    """Both sides of one sequence on one rank."""

    tolerance = 1e-10

    def __init__(self, rank: int, world: int, sequence: Sequence) -> None:
        self.rank, self.world, self.sequence = rank, world, sequence
        if sequence.single:
            self.tolerance = 1e-5
        self.plain = Model(sequence.dtype)
        self.plain_optim = OPTIMIZERS[sequence.optimizer](self.plain.parameters())
        model = Model(sequence.dtype)
        optim = OPTIMIZERS[sequence.optimizer](model.parameters())
        self.captured = list(model.parameters())
        settings: dict[str, Any] = {"precision": "fp32", "max_norm": sequence.max_norm, **sequence.options}
        if sequence.plugin == "hybrid":
            plugin: Any = HybridParallelPlugin(
                zero_stage=sequence.stage,
                zero_bucket_size_in_m=TINY_BUCKET,
                ddp_bucket_cap_mb=TINY_BUCKET * 4,
                num_microbatches=2,
                **settings,
            )
        else:
            plugin = LowLevelZeroPlugin(stage=sequence.stage, reduce_bucket_size_in_m=TINY_BUCKET, **settings)
        self.booster = Booster(plugin=plugin)
        with steps_in_one_pass(sequence.single):
            self.model, self.optim, *_ = self.booster.boost(model, optim)
        self.norm: float | None = None  # what get_grad_norm promises
        self.has_gradients = self.stepped = self.unsynced = False
        self.saved: Any = None
        self.hooks: list[Any] = []

    # What can be answered.

    def refuses(self, name: str) -> bool:
        if name in ("backward", "backward_no_sync", "pipeline"):
            return self.stepped
        if name in ("torch_clip", "groups_clip", "read"):
            if self.world == 1 or not self.has_gradients:
                return False
            return self.sequence.stage > 0 or self.unsynced
        return False

    def call(self, name: str, number: int) -> None:
        refused = self.refuses(name)
        try:
            getattr(self, f"do_{name}")(number)
        except ValueError:
            if not refused:
                raise
            return
        assert not refused, "not refused"

    # Calls. The boosted side comes first: where it refuses, the plain side must not move.

    def _uses(self, number: int, rank: int) -> bool:
        """Of `sometimes`: by all ranks, by none, or by rank 0 alone, which stage 3 does not allow."""
        kind = number % 4
        return kind != 0 and (kind != 1 or rank == 0 or self.sequence.stage == 3)

    def _plain_backward(self, number: int, uses: bool = False) -> None:
        total = torch.zeros((), dtype=self.sequence.dtype)
        for rank, share in enumerate(batch_of(number, self.sequence.dtype).chunk(self.world)):
            flag = torch.tensor(uses or self._uses(number, rank))
            total = total + loss_of(self.plain(share, flag)) / self.world
        total.backward()
        self.norm, self.has_gradients = None, True

    def _share(self, number: int) -> torch.Tensor:
        return batch_of(number, self.sequence.dtype).chunk(self.world)[self.rank]

    def do_backward(self, number: int, sync: bool = True) -> None:
        with nullcontext() if sync else self.booster.no_sync(self.model, self.optim):
            loss = loss_of(self.model(self._share(number), torch.tensor(self._uses(number, self.rank))))
            self.booster.backward(loss, self.optim)
        self._plain_backward(number)
        self.unsynced = not sync

    def do_backward_no_sync(self, number: int) -> None:
        self.do_backward(number, sync=False)

    def do_pipeline(self, number: int) -> None:
        if self.sequence.plugin != "hybrid":
            return self.do_backward(number)
        batch = {"x": self._share(number)}
        self.booster.execute_pipeline(iter([batch]), self.model, lambda output, _: loss_of(output), self.optim)
        self._plain_backward(number, uses=True)
        self.unsynced = False
        return None

    def do_norm(self, _: int) -> None:
        got = self.optim.get_grad_norm()
        if self.norm is None and self.has_gradients:
            self.norm = self._plain_norm()
        self.unsynced = self.unsynced and not self.has_gradients
        self.same(got, self.norm, "norm")

    def _plain_norm(self) -> float:
        return float(
            nn.utils.get_total_norm([param.grad for param in self.plain.parameters() if param.grad is not None])
        )

    def do_clip_norm(self, number: int) -> None:
        most = 0.05 * (1 + number % 7)
        norm = float(self.optim.clip_grad_by_norm(most))
        if self.has_gradients:
            self.norm = float(nn.utils.clip_grad_norm_(self.plain.parameters(), most))
            self.same(norm, self.norm, "norm before clipping")
        self.unsynced = False
        if not self.has_gradients:
            self.norm = 0.0

    def do_clip_value(self, number: int) -> None:
        most = 0.01 * (1 + number % 7)
        self.optim.clip_grad_by_value(most)
        if self.has_gradients:  # torch's function cannot do without
            nn.utils.clip_grad_value_(self.plain.parameters(), most)
        self.unsynced = False

    def do_torch_clip(self, number: int, params: Any = None) -> None:
        most = 0.05 * (1 + number % 7)
        norm = nn.utils.clip_grad_norm_(self.model.parameters() if params is None else params, most)
        self.same(float(norm), float(nn.utils.clip_grad_norm_(self.plain.parameters(), most)), "torch's norm")

    def do_groups_clip(self, number: int) -> None:
        self.do_torch_clip(number, [param for group in self.optim.param_groups for param in group["params"]])

    def do_read(self, _: int) -> None:
        for (name, param), plain in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            got, wanted = param.grad, plain.grad
            if got is not None or wanted is not None:
                got = torch.zeros_like(plain) if got is None else got
                self.same(got, torch.zeros_like(plain) if wanted is None else wanted, f"{name}.grad")

    def do_inspect(self, _: int) -> None:
        grads = self.optim.gradients()
        self.unsynced = False
        for name, plain in self.plain.named_parameters():
            wanted = torch.zeros_like(plain) if plain.grad is None else plain.grad
            self.same(grads.get(name, torch.zeros_like(plain)), wanted, f"gradient of {name}")

    def do_load(self, number: int) -> None:
        torch.manual_seed(number)
        state = {name: value + 0.01 * torch.randn_like(value) for name, value in self.plain.state_dict().items()}
        self.plain.load_state_dict(state)
        self.model.load_state_dict(state)

    def do_edit(self, number: int) -> None:
        for module in (self.model, self.plain):
            with torch.no_grad():
                dict(module.named_parameters())["head.weight"].mul_(1 + 0.01 * (number % 5))

    def do_assign(self, number: int) -> None:
        """As torch.nn.utils.vector_to_parameters and scripts that swap in averaged weights do."""
        for module in (self.model, self.plain):
            for param in module.parameters():
                param.data = param.data * (1 + 0.01 * (number % 5))

    def do_clamp(self, number: int) -> None:
        for module in (self.model, self.plain):
            for param in module.parameters():
                param.data.clamp_(-0.25 / (1 + number % 3), 1.5)

    def do_average(self, _: int) -> None:
        """What an average of weights over a list made before boost sees, right now."""
        for captured, plain in zip(self.captured, self.plain.parameters(), strict=True):
            self.same(captured.detach().clone(), plain.detach(), "a captured parameter")

    def do_save(self, _: int) -> None:
        ours = copy.deepcopy(self.optim.state_dict())
        self.saved = (ours, copy.deepcopy(self.plain.state_dict()), copy.deepcopy(self.plain_optim.state_dict()))

    def do_restore(self, _: int) -> None:
        if self.saved is None:
            return
        ours, weights, states = self.saved
        self.optim.load_state_dict(copy.deepcopy(ours))
        self.plain.load_state_dict(weights)
        self.plain_optim.load_state_dict(copy.deepcopy(states))

    def do_zero_grad(self, number: int) -> None:
        if number % 3 == 1:
            self.model.zero_grad()
        elif number % 3 == 2:
            for param in self.model.parameters():
                param.grad = None
        else:
            self.optim.zero_grad()
        self.plain_optim.zero_grad()
        self.has_gradients = self.stepped = self.unsynced = False

    def do_zero_in_place(self, _: int) -> None:
        for optim in (self.optim, self.plain_optim):
            optim.zero_grad(set_to_none=False)
        self.has_gradients = self.stepped = self.unsynced = False

    def do_count_steps(self, _: int) -> None:
        counted: list[str] = []
        self.optim.register_step_pre_hook(lambda *_: counted.append("before"))
        self.optim.register_step_post_hook(lambda *_: counted.append("after"))
        self.do_step(0)
        assert counted == ["before", "after"]

    def do_step(self, _: int) -> None:
        self.optim.step()
        if self.sequence.max_norm and self.has_gradients:
            self.norm = float(nn.utils.clip_grad_norm_(self.plain.parameters(), self.sequence.max_norm))
        elif self.sequence.max_norm:
            self.norm = 0.0
        self.plain_optim.step()
        self.stepped = self.has_gradients
        self.unsynced = False

    def do_lr(self, number: int) -> None:
        for optim in (self.optim, self.plain_optim):
            for group in optim.param_groups:
                group["lr"] *= 0.5 + 0.25 * (number % 4)

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Of both sides, where the optimizer is an Adam."""
        for optim in (self.optim, self.plain_optim):
            yield from (group for group in optim.param_groups if "betas" in group)

    def do_betas(self, number: int) -> None:
        """As OneCycleLR cycles them."""
        for group in self._groups():
            group["betas"] = (0.95 - 0.01 * (number % 20), group["betas"][1])

    def do_decay(self, number: int) -> None:
        for group in self._groups():
            group["weight_decay"] = 0.05 * (number % 3)

    def do_maximize(self, number: int) -> None:
        for group in self._groups():
            group["maximize"] = bool(number % 2)

    def do_tensor_rate(self, number: int) -> None:
        for group in self._groups():
            group["lr"] = torch.tensor(float(group["lr"])) if number % 2 else float(group["lr"])

    def do_hook(self, number: int) -> None:
        """While a script looks at steps torch takes them."""
        while self.hooks:
            self.hooks.pop().remove()
        if number % 2:
            self.hooks.append(self.optim.register_step_post_hook(lambda *_: None))

    def do_evaluate(self, number: int) -> None:
        for module in (self.model, self.plain):
            module.eval()
        with torch.no_grad():
            found, wanted = (module(self._share(number)) for module in (self.model, self.plain))
        for module in (self.model, self.plain):
            module.train()
        self.same(found, wanted, "an output")

    def do_states(self, _: int) -> None:
        """Moments, beside those of plain torch; none where it has none."""
        plain = dict(self.plain.named_parameters())
        for shard in self.optim.sharded.shards() if self.optim.sharded is not None else ():
            wanted = self.plain_optim.state.get(plain[shard.name], {})
            for name, value in shard.state.items():
                where = slice(shard.start, shard.stop)
                expected = wanted[name].flatten()[where] if name in wanted else torch.zeros_like(value)
                self.same(value, expected, f"{name} of {shard.name}")
            if "step" in wanted:
                assert float(shard.extra["step"]) == float(wanted["step"]), f"steps of {shard.name}"

    def same(self, got: Any, wanted: Any, what: str) -> None:
        if got is None or wanted is None or isinstance(wanted, float):
            alike = (
                got is wanted
                if got is None or wanted is None
                else math.isclose(got, wanted, rel_tol=self.tolerance, abs_tol=min(self.tolerance, 1e-7))
            )
            assert alike, f"{what}: {got}, in one process {wanted}"
            return
        close = min(self.tolerance, 1e-5)
        torch.testing.assert_close(got, wanted, rtol=close, atol=close, msg=lambda text: f"{what}: {text}")

    def compare(self) -> None:
        for (name, param), plain in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            self.same(param.detach(), plain.detach(), name)


@contextmanager
def steps_in_one_pass(on: bool) -> Iterator[None]:
    """Inside, optimizers of models of any size are made to step as those of large ones do, without a compiler."""
    before = one_pass._kernel_for
    if on:
        one_pass._kernel_for = lambda *_: Uncompiled()
    try:
        yield
    finally:
        one_pass._kernel_for = before


class Uncompiled(compiled_adam.CompiledAdam):
    def __call__(self, *args: Any) -> None:
        with Looking():
            super().__call__(*args)


class Looking(TorchDispatchMode):
    """While a mode looks at operators nothing is compiled."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def without(sequence: Sequence, position: int) -> Sequence:
    return replace(sequence, calls=sequence.calls[:position] + sequence.calls[position + 1 :])
