"""One layout of HybridParallelPlugin trained for some steps and compared with one process, on every rank."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from habits import OPTIMIZERS, Habits, Reference, accumulating, as_embeds, criterion_of, prepare, values
from torch import nn

from shardwright import Booster
from shardwright.pipeline import offload
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.testing import MismatchError, compare_models, keep_float64, zoo
from shardwright.testing.compare import GRADIENT_FLOOR
from shardwright.utils import get_current_device
from shardwright.utils.tensors import local_tensor

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
# What one rounding to the format of computation, or of gradients on the wire, may leave of a gradient as large as the
# largest.
ROUNDED = {"bf16": 3e-2, "fp16": 1e-2, "fp32": 1e-6}


@dataclass(frozen=True)
class Layout:
    """A job. `plugin` are arguments of HybridParallelPlugin; batches are those of all data-parallel ranks together.

    calls  the plain loop, model(**batch) and booster.backward, in place of execute_pipeline
    zero   LowLevelZeroPlugin instead
    """

    model: str
    world: int
    plugin: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)  # of the model's config
    dtype: str = "fp64"
    batch: int = 4  # samples of one data-parallel rank
    accumulate: int = 1
    seed: int = 0
    checkpointing: bool = False
    habits: Habits = field(default_factory=Habits)
    steps: int = 2  # of two lengths
    calls: bool = False
    zero: bool = False

    def __str__(self) -> str:
        shown = {
            name: value for name, value in asdict(self).items() if name != "habits" and value not in (0, 0.0, False, {})
        }
        return ", ".join(f"{name}={value!r}" for name, value in shown.items()) + (
            f", {self.habits}" if str(self.habits) else ""
        )

    @property
    def family(self) -> str:
        return self.model.split("-")[0]

    @property
    def rounding(self) -> float | None:
        """Tolerance where numbers are rounded on the way; None for that of the dtype."""
        return ROUNDED.get(self.habits.half or self.habits.wire)


def build(layout: Layout, seed: int | None = None) -> nn.Module:
    model = zoo.build(
        layout.model, seed=layout.seed if seed is None else seed, dtype=DTYPES[layout.dtype], **layout.overrides
    )
    return prepare(model, layout.family, layout.habits)


def batches(layout: Layout, step: int, replicas: int) -> list[dict[str, torch.Tensor]]:
    """The global batches of one step, one per accumulation; sequence lengths and label counts differ from one to the
    next.
    """
    found = [
        zoo.inputs(
            layout.model,
            batch_size=layout.batch * replicas,
            seq_len=11 + 2 * ((step + micro) % 2),
            seed=1000 * layout.seed + 10 * step + micro,
            dtype=DTYPES[layout.dtype],
            **layout.overrides,
        )
        for micro in range(layout.accumulate)
    ]
    if layout.habits.embeds:
        width = zoo.config(layout.model, **layout.overrides).hidden_size
        found = [as_embeds(batch, width, DTYPES[layout.dtype]) for batch in found]
    return found


def rows(batch: dict[str, torch.Tensor], replica: int, size: int) -> dict[str, torch.Tensor]:
    return {name: value[replica * size : (replica + 1) * size] for name, value in batch.items()}


def run_layout(rank: int, world: int, layout: Layout) -> dict[str, Any]:
    """Train both sides in this process; raises where they differ. Returns what was compared."""
    with keep_float64() if layout.dtype == "fp64" else nullcontext(), small_things_leave():
        return Run(rank, world, layout).run()


@contextmanager
def small_things_leave(smallest: int = 256, block: int = 3000) -> Iterator[None]:
    """`offload_activations` takes the activations of tiny models too, and cuts them."""
    usual = offload.SMALLEST, offload.BLOCK
    offload.SMALLEST, offload.BLOCK = smallest, block
    try:
        yield
    finally:
        offload.SMALLEST, offload.BLOCK = usual


class Run:
    """Both sides of one layout: `reference` in this process, `model` over all of them."""

    def __init__(self, rank: int, world: int, layout: Layout) -> None:
        self.rank, self.world, self.layout = rank, world, layout
        self.habits = layout.habits
        self.plugin = self._plugin()
        self.booster = Booster(plugin=self.plugin)
        self.mesh = self.plugin.mesh
        plain = build(layout)
        self.reference = Reference(plain, self.habits)
        self._boost(copy.deepcopy(plain))
        self.refused: list[str] = []
        self.held: set[str] = set()

    def _plugin(self) -> Any:
        layout, habits = self.layout, self.habits
        settings: dict[str, Any] = {"precision": habits.half or "fp32", **layout.plugin}
        settings["max_norm"] = habits.clip_at if habits.clip == "plugin" else 0.0
        if habits.wire:
            settings["communication_dtype"] = {"bf16": torch.bfloat16, "fp32": torch.float32}[habits.wire]
        if habits.half == "fp16":
            settings["initial_scale"] = 2**8
        return (LowLevelZeroPlugin if layout.zero else HybridParallelPlugin)(**settings)

    def _boost(self, model: nn.Module) -> None:
        if self.layout.checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        before = list(model.named_parameters())
        self.model, self.optimizer, *_ = self.booster.boost(model, OPTIMIZERS[self.habits.optimizer](model))
        self.optimizer: Any = self.optimizer
        # Parameters stay the objects they were, unless layers are replaced.
        stay = self.mesh.size("tp") == self.mesh.size("pp") == 1
        self.captured = before if stay else list(self.model.named_parameters())

    @property
    def criterion(self) -> Any:
        return criterion_of(self.habits, self.layout.accumulate)

    def _everywhere(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def _agreed(self, refusal: str) -> bool:
        """Whether all ranks with something to train refused; raises when only some did."""
        everywhere = self._everywhere((refusal, bool(self.optimizer.trained())))
        said = [text for text, trains in everywhere if trains]
        assert all(said) or not any(said), f"refused on some ranks only: {said}"
        if any(said):
            self.refused.append(refusal)
        return any(said)

    # One step.

    def _backward(self, batch: dict[str, torch.Tensor], last: bool) -> torch.Tensor | None:
        mine = rows(batch, self.mesh.coordinate("dp"), self.layout.batch)
        with accumulating(self.booster, self.model, self.optimizer, last, self.habits):
            if self.layout.calls or self.layout.zero:
                mine = {name: value.to(get_current_device()) for name, value in mine.items()}
                loss = self.criterion(self.model(**mine), mine)
                self.booster.backward(loss, self.optimizer)
                loss = loss.detach() / self.mesh.size("dp")
                dist.all_reduce(loss, group=self.mesh.group("dp"))
                return loss
            result = self.booster.execute_pipeline(
                iter([mine]), self.model, self.criterion, self.optimizer, return_loss=True
            )
            return result["loss"]

    def _reference_backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of the global batch; the plain loop averages the losses of data-parallel ranks, as DDP does."""
        if not (self.layout.calls or self.layout.zero):
            return self.reference.backward(batch, self.criterion)
        replicas = self.mesh.size("dp")
        parts = [rows(batch, replica, self.layout.batch) for replica in range(replicas)]
        return sum(self.reference.backward(part, lambda o, i: self.criterion(o, i) / replicas) for part in parts)  # type: ignore[return-value]

    def _all_backwards(self, step: int) -> list[torch.Tensor | None]:
        """Every backward of a step on the boosted side, the norm read in between where that is the habit."""
        losses = []
        todo = batches(self.layout, step, self.mesh.size("dp"))
        for micro, batch in enumerate(todo):
            losses.append(self._backward(batch, last=micro == len(todo) - 1))
            if self.habits.read_norm:
                self.optimizer.get_grad_norm()
        return losses

    def _try_backwards(self, step: int) -> list[torch.Tensor | None]:
        """A criterion that is refused gives way to the model's own loss, on both sides."""
        if not self.habits.criterion or step:
            return self._all_backwards(step)
        refusal, losses = "", []
        try:
            losses = self._all_backwards(step)
        except ValueError as error:
            refusal = str(error)
        if self._agreed(refusal):
            self.habits = Habits(**{**asdict(self.habits), "criterion": ""})
            self.reference.habits = self.habits
            self.optimizer.zero_grad()
            losses = self._all_backwards(step)
        return losses

    def _clip(self) -> None:
        habits = self.habits
        if habits.clip == "norm":
            self.optimizer.clip_grad_by_norm(habits.clip_at)
        elif habits.clip == "value":
            self.optimizer.clip_grad_by_value(habits.clip_at)
        elif habits.clip == "outside":
            refusal = ""
            try:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), habits.clip_at)
            except ValueError as error:
                refusal = str(error)
            if self._agreed(refusal):
                self.optimizer.clip_grad_by_norm(habits.clip_at)

    def _step(self, step: int) -> None:
        """Step, unless clipping from outside is noticed only now: then the step is done again by the book."""
        if self.habits.clip != "outside":
            self.optimizer.step()
            return
        refusal = ""
        try:
            self.optimizer.step()
        except ValueError as error:
            refusal = str(error)
        if self._agreed(refusal):
            self.optimizer.zero_grad()
            self._all_backwards(step)
            self.optimizer.clip_grad_by_norm(self.habits.clip_at)
            self.optimizer.step()

    def _compare(self, step: int, losses: list[torch.Tensor | None], expected: list[torch.Tensor]) -> None:
        layout, dtype = self.layout, DTYPES[self.layout.dtype]
        seen = [loss for loss in losses if loss is not None]
        gradients = self.optimizer.gradients()

        def compare(tolerance: float | None) -> None:
            compare_models(
                self.reference.masters,
                self.model,
                coordinate=self.mesh.coordinate,
                losses=(torch.stack(expected).to(dtype).cpu(), torch.stack(seen).to(dtype).cpu()) if seen else None,
                gradients=gradients,
                gradient_floor=GRADIENT_FLOOR if layout.dtype == "fp64" and layout.rounding is None else 1.0,
                weights=False,
                tolerance=tolerance,
            )

        try:
            compare(layout.rounding)
        except MismatchError:
            if not self.habits.half:
                raise
            compare(self.reference.rounding_allowed())

    def run(self) -> dict[str, Any]:
        layout, losses = self.layout, []
        for step in range(layout.steps):
            self.optimizer.zero_grad()
            losses = self._try_backwards(step)
            expected = [self._reference_backward(batch) for batch in batches(layout, step, self.mesh.size("dp"))]
            self._compare(step, losses, expected)
            mine = self.optimizer.get_grad_norm()
            norm = self.reference.clip()
            assert abs(norm - mine) <= (layout.rounding or 1e-5) * norm, f"norm {mine}, one process {norm}"
            self._clip()
            self._step(step)
            self.reference.step()
            seen = values(self.captured) if self.habits.captured else {}
            report = compare_models(
                self.reference.masters,
                self.model,
                coordinate=self.mesh.coordinate,
                gradients=False,
                tolerance=layout.rounding,
            )
            self.held |= report.held
            for name, param in self.captured:
                assert name not in seen or torch.equal(seen[name], local_tensor(param.detach())), (
                    f"{name} was read before it was whole"
                )
            if self.habits.resume and step == 0:
                self._resume()
        held = set().union(*self._everywhere(self.held))
        missing = {name for name, _ in self.reference.masters.named_parameters(remove_duplicate=False)} - held
        assert not missing, f"held by no rank: {sorted(missing)}"
        return {"losses": losses, "held": len(self.held), "refused": self.refused}

    def _resume(self) -> None:
        """Go on with a model of other weights that loads what was saved."""
        path = self._everywhere(tempfile.mkdtemp(prefix="shardwright-fuzz-") if self.rank == 0 else None)[0]
        self.booster.save(f"{path}/saved", model=self.model, optimizer=self.optimizer)
        self._boost(build(self.layout, seed=self.layout.seed + 1))
        self.booster.load(f"{path}/saved", model=self.model, optimizer=self.optimizer)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)
