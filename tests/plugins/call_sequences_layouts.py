"""Sequences of calls on a language model under tensor and pipeline parallelism and in half precision; and how
sequences are run.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from call_sequences import Pair, Sequence
from habits import HALF, OPTIMIZERS, Habits, Reference
from hybrid_ranks import ROUNDED, rows
from torch import nn

from shardwright.booster import Booster
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.testing import compare_models, keep_float64, loss_of, zoo
from shardwright.testing.compare import GRADIENT_FLOOR

NAME = "llama-tied-causal-lm"
PER_RANK = 2


class LayoutPair(Pair):
    """As `Pair`; the plain side in half precision is `habits.Reference`: a working copy in it, gradients and steps
    in fp32.
    """

    def __init__(self, rank: int, world: int, sequence: Sequence) -> None:
        self.rank, self.world, self.sequence = rank, world, sequence
        half = sequence.half
        self.dtype = torch.float32 if half else torch.float64
        self.tolerance = 2 * ROUNDED[half] if half else 1e-10
        self.reference = Reference(self._build(), Habits(optimizer=sequence.optimizer, half=half))
        self.plain, self.plain_optim = self.reference.masters, self.reference.optimizer
        settings: dict[str, Any] = {"precision": half or "fp32", "max_norm": sequence.max_norm, **sequence.options}
        if half == "fp16":
            settings["initial_scale"] = 2**8
        if sequence.plugin == "hybrid":
            plugin: Any = HybridParallelPlugin(
                zero_stage=sequence.stage, num_microbatches=2, **sequence.sizes, **settings
            )
        else:
            plugin = LowLevelZeroPlugin(stage=sequence.stage, **settings)
        self.mesh = plugin.mesh
        self.booster = Booster(plugin=plugin)
        model = self._build()
        self.model, self.optim, *_ = self.booster.boost(model, OPTIMIZERS[sequence.optimizer](model))
        self.norm: float | None = None
        self.has_gradients = self.stepped = self.unsynced = False
        self.clamped = False  # whether gradients of this step have been clipped by value
        self.saved: Any = None
        self.hooks: list[Any] = []

    def _build(self) -> nn.Module:
        return zoo.build(NAME, seed=0, dtype=self.dtype)

    @property
    def is_split(self) -> bool:
        return any(self.mesh.size(axis) > 1 for axis in ("tp", "pp"))

    def refuses(self, name: str) -> bool:
        if name == "restore" and self.saved is None:
            return False
        if name in ("torch_clip", "groups_clip", "read") and self.has_gradients:
            return self.is_split or (self.world > 1 and (self.sequence.stage > 0 or self.unsynced))
        return super().refuses(name)

    # Calls.

    def _batch(self, number: int) -> dict[str, torch.Tensor]:
        return zoo.inputs(
            NAME, batch_size=PER_RANK * self.mesh.size("dp"), seq_len=9 + number % 3, seed=number, dtype=self.dtype
        )

    def _mine(self, number: int) -> dict[str, torch.Tensor]:
        return rows(self._batch(number), self.mesh.coordinate("dp"), PER_RANK)

    def do_backward(self, number: int, sync: bool = True) -> None:
        if self.mesh.size("pp") > 1:
            return self.do_pipeline(number)
        with self.booster.no_sync(self.model, self.optim) if not sync else torch.enable_grad():
            self.booster.backward(self.model(**self._mine(number)).loss, self.optim)
        replicas = self.mesh.size("dp")
        for replica in range(replicas):
            part = rows(self._batch(number), replica, PER_RANK)
            self.reference.backward(part, lambda outputs, _: loss_of(outputs) / replicas)
        self.norm, self.has_gradients, self.unsynced = None, True, not sync
        return None

    def do_pipeline(self, number: int) -> None:
        if self.sequence.plugin != "hybrid":
            return self.do_backward(number)
        self.booster.execute_pipeline(
            iter([self._mine(number)]), self.model, lambda outputs, _: outputs.loss, self.optim
        )
        self.reference.backward(self._batch(number), lambda outputs, _: loss_of(outputs))
        self.norm, self.has_gradients, self.unsynced = None, True, False
        return None

    def do_step(self, number: int) -> None:
        super().do_step(number)
        if self.sequence.half == "fp16" and self.norm is None:  # the step has measured it, to see an overflow
            self.norm = self._plain_norm() if self.has_gradients else 0.0

    def do_read(self, number: int) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.norm()

    def do_clip_value(self, number: int) -> None:
        super().do_clip_value(number)
        self.clamped = True

    def do_inspect(self, number: int) -> None:
        gradients = self.optim.gradients()
        if not (self.sequence.half and self.clamped):  # rounding is measured against gradients as they were before
            self._compare(gradients)
        self.unsynced = False

    def do_load(self, number: int) -> None:
        torch.manual_seed(number)
        state = {name: value + 0.01 * torch.randn_like(value) for name, value in self.plain.state_dict().items()}
        if self.sequence.half:
            state = {name: value.to(HALF[self.sequence.half]).to(value.dtype) for name, value in state.items()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.plain.load_state_dict(state)
        self.model.load_state_dict(state)

    def do_edit(self, number: int) -> None:
        for module in (self.model, self.plain):
            with torch.no_grad():
                for name, param in module.named_parameters():
                    if "norm" in name or "down_proj" in name:
                        param.mul_(1 + 0.01 * (number % 5))

    def call(self, name: str, number: int) -> None:
        if name not in ("edit", "assign", "clamp") or not self.sequence.half or self.sequence.stage == 3:
            super().call(name, number)
            self._refresh()
        else:
            self._write_working(name, number)
        self.clamped = self.clamped and not name.startswith("zero")

    def _write_working(self, name: str, number: int) -> None:
        """What a script writes to rounded weights: masters take what has changed."""
        self.plain, masters = self.reference.model, self.plain
        super().call(name, number)
        self.plain = masters
        with torch.no_grad():
            for master, working in zip(masters.parameters(), self.reference.model.parameters(), strict=True):
                master.copy_(torch.where(working == master.to(working.dtype), master, working.to(master.dtype)))

    def do_average(self, _: int) -> None:
        pass

    def do_evaluate(self, number: int) -> None:
        if self.mesh.size("pp") > 1:
            return  # a stage alone has no output
        self.model.eval()
        with torch.no_grad():
            self.model(**self._mine(number))
        self.model.train()

    def do_states(self, _: int) -> None:
        assert self.optim.sharded is None or list(self.optim.sharded.shards())

    def _refresh(self) -> None:
        """The working copy follows the masters."""
        if self.sequence.half:
            with torch.no_grad():
                for master, working in zip(self.plain.parameters(), self.reference.model.parameters(), strict=True):
                    working.copy_(master)

    def _compare(self, gradients: Any) -> None:
        compare_models(
            self.plain,
            self.model,
            coordinate=self.mesh.coordinate,
            gradients=gradients,
            gradient_floor=1.0 if self.sequence.half else GRADIENT_FLOOR,
            weights=gradients is False,
            tolerance=max(self.tolerance, self.reference.rounding_allowed())
            if self.sequence.half and gradients is not False
            else self.tolerance,
        )

    def compare(self) -> None:
        self._compare(False)


def run_sequence(rank: int, world: int, sequence: Sequence) -> None:
    pair = (LayoutPair if sequence.of_a_layout else Pair)(rank, world, sequence)
    for position, (name, number) in enumerate(sequence.calls):
        try:
            pair.call(name, number)
            if name in ("step", "load", "edit", "assign", "clamp", "restore"):
                if number % 2:
                    pair.do_average(number)
                pair.compare()
        except BaseException as error:
            error.add_note(f"at call {position}, {name}({number}), of {sequence}")
            raise
    pair.compare()
    release = getattr(pair.optim, "release", None)
    if release is not None:
        release()


def run_sequences(rank: int, world: int, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        with nullcontext() if sequence.single else keep_float64():
            run_sequence(rank, world, sequence)
        dist.barrier()
