"""The loop: batches, steps, evaluations, checkpoints, and what is told about them. It uses the public API alone."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..booster import Booster
from ..booster.profile import Profile
from ..checkpoint import rng
from ..checkpoint.directory import candidates
from ..checkpoint.guard import Guard
from ..checkpoint.lock import claim
from ..checkpoint.preemption import SaveOnSignal
from ..interface import NonFiniteLoss
from ..interface.loss_guard import say_why_not_back
from ..logging import get_dist_logger
from ..pipeline.snapshots import WARM_UP, Camera
from ..pipeline.timeline import Timeline
from ..utils.device import get_current_device
from .counting import labels_of, tokens_of
from .progress import Clock, Listener, peak_memory
from .resuming import Options, require_match
from .spikes import LossSpike, SpikeWatch

Batch = Mapping[str, Any]


@dataclass
class Progressed:
    """How far a run is; a checkpoint has it as `extra`. `best_loss` is the lowest evaluation, that of `best_step`.
    `unevaluated`: a signal has kept the step from being evaluated, so the run that goes on does it first.
    """

    step: int = 0
    epoch: int = 0
    tokens_seen: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    without_better: int = 0
    unevaluated: bool = False


class _Interrupted(Exception):
    """A signal has come in an evaluation; on all ranks alike."""


@dataclass(frozen=True)
class Every:
    """How often something is done.

    steps   after so many steps; None: never
    epoch   at the end of every pass over the data
    """

    steps: int | None = None
    epoch: bool = False

    def is_now(self, step: int, pass_ended: bool) -> bool:
        return (self.steps is not None and step % self.steps == 0) or (self.epoch and pass_ended)


class Trainer:
    """Trains what `booster.boost` returned.

    booster        of a HybridParallelPlugin, whose execute_pipeline serves every layout
    model, optimizer, data, lr_scheduler   as `boost` returned them; the scheduler is stepped once per step
    total_steps    optimizer steps of the whole run, those before a resumption included
    directory      for checkpoints/; this job's alone from the first step until its process ends
    evaluation     loader of batches whose mean loss per token is reported; all of one size
    criterion      (outputs, inputs) -> the loss of the batch; left out: the model's own
    evaluate, save how often
    evaluate_at_ends  evaluate before the first step and behind the last, too
    keep           checkpoints that are kept
    keep_best      keep the one of the best evaluation besides, in best/, and end with its weights
    patience       evaluations without a lower loss after which training ends
    must_match     plain values that a checkpoint must have, too, to be gone on from: how batches are made
    rollbacks      how often a loss that is not finite (of a booster with on_nan="stop") or that jumps sends the run
                   back to its last checkpoint, without the data of the steps since; behind the last time it is raised
    on_save_error  "warn": a full or vanished disk costs that checkpoint; "raise" ends the run
    spike_factor   of the median of the last 50 losses, above which one has jumped; None: none does
    listeners      told about it on the first rank
    profile_steps   steps that torch's profiler records behind the first ones; traces come to profile/
    timeline_steps  steps of the pipeline whose timeline is recorded; the typical one is in timeline.json, and on every
                    rank in `timeline`

    While the device computes a step the next batch is made and sent to it (`look_ahead`, which a `train_step` of yours
    may call when its work has been launched). Checkpoints have the position behind the batches that were trained on.

    Subclass it and override `criterion` or `train_step` for another objective, `count_tokens` and `count_labels` for
    batches of something else than text, `count_right` (with counts_right = True) for an accuracy beside the loss,
    `measure` (with columns = how many numbers it gives of each sample) and `figures` for other figures.
    """

    counts_right = False
    columns = 0  # numbers of each sample that `measure` gives; 0: nothing is measured
    measured: Any = None  # the samples of the evaluation, where what is measured needs them

    def __init__(
        self,
        booster: Booster,
        model: Any,
        optimizer: Any,
        data: Any,
        lr_scheduler: Any = None,
        *,
        total_steps: int,
        directory: str | Path,
        evaluation: Any = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        evaluate: Every = Every(),
        evaluate_at_ends: bool = False,
        save: Every = Every(),
        keep: int | None = None,
        keep_best: bool = False,
        patience: int | None = None,
        must_match: Mapping[str, Any] | None = None,
        rollbacks: int = 0,
        spike_factor: float | None = None,
        on_save_error: str = "warn",
        listeners: Sequence[Listener] = (),
        timeline_steps: int = 0,
        profile_steps: int = 0,
    ) -> None:
        if evaluate_at_ends and evaluation is None:
            raise ValueError("evaluate_at_ends=True needs evaluation, a loader of batches; give it, or leave it out")
        self.booster, self.model, self.optimizer, self.data = booster, model, optimizer, data
        self.lr_scheduler = lr_scheduler
        # A function, since a method's object would be copied when the loss is followed ahead.
        self._loss = criterion or (lambda outputs, inputs: self.criterion(outputs, inputs))
        if criterion is not None:
            self.criterion = criterion  # type: ignore[method-assign, assignment]
        self.total_steps, self.directory = total_steps, Path(directory)
        self.checkpoints = self.directory / "checkpoints"
        self.best = self.directory / "best"
        self.evaluation, self.evaluate_when, self.save_when = evaluation, evaluate, save
        self.keep, self.keep_best, self.patience = keep, keep_best, patience
        self.must_match = dict(must_match or {})
        if rollbacks < 0:
            raise ValueError(f"rollbacks={rollbacks} must be at least 0")
        self.rollbacks, self._allowed = rollbacks, rollbacks  # that are left, and those of the whole run
        self._spikes = SpikeWatch(spike_factor)
        self._guarded = Guard(on_save_error)
        self._saving, self._begun = 0, True  # the step of the last save, and whether it got to the background
        self.listeners = listeners if dist.get_rank() == 0 else ()
        self.evaluate_at_ends = evaluate_at_ends
        self.timeline_steps, self.profile_steps = timeline_steps, profile_steps
        self.timeline: Timeline | None = None
        self.progress = Progressed()
        self.accuracy: float | None = None
        self.told: dict[str, float] = {}  # the figures of the last evaluation
        self._supply: Any = None  # the iterator over the running pass
        self._pass_ended = False
        self._random: dict[str, torch.Tensor] | None = None  # states of generators before the next batch was made
        self._resumed: tuple[int, Options] | None = None  # the step that was gone on from, and what the run was given
        self._has_own = False  # whether what is in `checkpoints` is of this run
        self.interrupted = False
        self._signalled: SaveOnSignal | None = None  # while steps are taken
        if timeline_steps and model.executor.runtime is None:
            raise ValueError(f"timeline_steps={timeline_steps} needs a pipeline (pp_size of at least 2); leave it out")

    def criterion(self, outputs: Any, inputs: Batch) -> torch.Tensor:
        """The loss of a batch of which `outputs` are what the model returned."""
        found: torch.Tensor = outputs.loss
        return found

    def resume(self, path: str | Path | None = None) -> bool:
        """Go on from a checkpoint, or from the newest of the run; False where there is none.

        Options of the optimizer and the schedule stay those that the trainer was given.
        """
        if path is None and self._is_new():
            return False
        options = Options(self.optimizer, self.lr_scheduler)
        extra = self._load(path or self.checkpoints, dataloader=self.data)
        require_match(extra.pop("must_match", {}), self.must_match, path or self.checkpoints)
        self._spikes.load_state_dict(extra.pop("losses", []))
        options.restore()
        self.progress = Progressed(**extra)
        if self.keep_best and not self._best_is_here():
            self.progress.best_loss, self.progress.best_step = math.inf, 0
        self._resumed = self.progress.step, options
        self._has_own = self._has_own or path is None
        return True

    def _is_new(self) -> bool:
        """Whether the run has no checkpoint and never had one: what a first save leaves that was cut off is none."""
        return not (any(self.checkpoints.glob("[!.]*")) or candidates(self.checkpoints)[0])

    def train(self, facts: Mapping[str, Any] | None = None) -> Progressed:
        """All steps that are left. `facts` are told to listeners at the start, beside what is known here."""
        claim(self.directory)
        plugin: Any = self.booster.plugin
        known = {
            "model": type(self.model.unwrap()).__name__,
            "parameters": self.model.num_parameters(),
            "layout": str(plugin.mesh),
        }
        self._tell("started", {**known, **(facts or {}), "total_steps": self.total_steps, "step": self.progress.step})
        if self.evaluate_at_ends and not self.progress.step:
            self._tell_evaluated(self.evaluate())
        supply, clock, saved = self._batches(), Clock(), self.progress.step
        left = self.total_steps - saved
        skip = max(0, min(WARM_UP, left - self.timeline_steps))
        camera = Camera(self.model.executor, self.timeline_steps, skip, self.directory / "timeline.json")
        self.model.train()
        # A second signal, as torchrun and SLURM send one each, must not end what the first lets be saved.
        with self._heeding_signals():
            with self._profile(left) as profile:
                if self.progress.unevaluated and self.evaluation is not None:
                    self.interrupted = not self._evaluated()
                while not self.interrupted and self.progress.step < self.total_steps and not self._is_worse():
                    clock.restart()
                    batch, pass_ended = next(supply)
                    try:
                        with camera.watching():
                            metrics = self.train_step(batch)
                        self._spikes.note(self.progress.step + 1, metrics["loss"])
                    except (NonFiniteLoss, LossSpike) as error:
                        if not self._roll_back(error):
                            raise
                        saved = self.progress.step
                        continue
                    self._tell("step", self._finish(metrics, clock.lap()))
                    if profile is not None:
                        profile.step()
                    step = self.progress.step
                    at_end = self.evaluate_at_ends and step == self.total_steps
                    is_due = self.evaluation is not None and (at_end or self.evaluate_when.is_now(step, pass_ended))
                    self.progress.unevaluated = is_due
                    self.interrupted = self._is_signalled() or (is_due and not self._evaluated())
                    if self.save_when.is_now(step, pass_ended) or self.interrupted:
                        self.save()
                        saved = step
                    if self.interrupted:
                        break
            self.timeline = camera.typical()
            if self.save_when != Every() and saved != self.progress.step:
                self.save()
            is_saved = self._wait()
        if self.keep_best and not self.interrupted and not self._best_is_here():  # its save has failed
            self.progress.best_loss, self.progress.best_step = math.inf, 0
        done = {"step": self.progress.step, "tokens_seen": self.progress.tokens_seen, "interrupted": self.interrupted}
        done["saved"] = is_saved
        if self.keep_best and not self.interrupted and self._best_is_here():
            if self.progress.best_step != self.progress.step:
                self._load(self._best_path())
            done["best_step"] = self.progress.best_step
        self._tell("finished", {**done, "total_steps": self.total_steps})
        return self.progress

    def _roll_back(self, error: Exception) -> bool:
        """To the last checkpoint, and on behind the batch that was used last; False where there is none, or it was done
        often enough, which `error` says then. On all ranks alike.
        """
        self._wait()
        if self.rollbacks == 0 or not (self._has_own and candidates(self.checkpoints)[0]):
            say_why_not_back(error, self._allowed, self.rollbacks)
            return False
        self.rollbacks -= 1
        # The data goes on where it is, and in best/ is what evaluations since the checkpoint have put there.
        kept = {name: getattr(self.progress, name) for name in ("epoch", "best_loss", "best_step")}
        self.optimizer.zero_grad()
        extra = self._load(self.checkpoints)
        for name in ("must_match", "losses"):  # what is usual was learned of the steps since, too
            extra.pop(name, None)
        self.progress = Progressed(**{**extra, **kept})
        if self._resumed is not None and self._resumed[0] == self.progress.step:
            self._resumed[1].restore()
        get_dist_logger().warning(
            f"{error}\nback to step {self.progress.step}, without the data of the steps since; rollbacks left: "
            f"{self.rollbacks}",
            ranks=[0],
        )
        return True

    def _profile(self, left: int) -> AbstractContextManager[Profile | None]:
        """Of so many steps that are left; all of them where there are few."""
        steps = min(self.profile_steps, left)
        if not steps:
            return nullcontext()
        skipped = min(WARM_UP, left - steps)
        warmup = min(1, skipped)
        return self.booster.profile(self.directory / "profile", steps, wait=skipped - warmup, warmup=warmup)

    def train_step(self, batch: Batch) -> dict[str, Any]:
        """Forward, backward and the optimizer's step on one batch of every rank. The loss is that of all of them."""
        result = self.booster.execute_pipeline(iter([batch]), self.model, self._loss, self.optimizer)
        self.look_ahead()
        self.optimizer.step()
        norm = self.optimizer.get_grad_norm()
        self.optimizer.zero_grad()
        rate = self.optimizer.param_groups[0]["lr"]
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        loss, tokens = self._everyones(result["loss"], self.count_tokens(batch))
        return {
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": None if norm is None else float(norm),
            "tokens": tokens,
        }

    def look_ahead(self) -> None:
        """Make the next batch now, unless an evaluation or a checkpoint comes before it."""
        step = self.progress.step + 1
        make = getattr(self._supply, "look_ahead", None)
        if make is None or step == self.total_steps or self._pauses(step, self._pass_ended):
            return
        self._random = rng.get_states()
        make()

    def _pauses(self, step: int, pass_ended: bool) -> bool:
        evaluates = self.evaluation is not None and self.evaluate_when.is_now(step, pass_ended)
        return evaluates or self.save_when.is_now(step, pass_ended)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Generators as they were before the next batch was made, which a run that goes on makes again."""
        if self._random is None:
            yield
            return
        now = rng.get_states()
        rng.set_states({name: state for name, state in self._random.items() if name != "cuda"})
        try:
            yield
        finally:
            rng.set_states(now)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of the evaluation, in which batches weigh as `count_labels` says. With `counts_right` the share of
        labels that are met is in `accuracy` then.
        """
        self.model.eval()
        total, counted, right = 0.0, 0, 0
        rows: list[torch.Tensor] = []
        returns = self.counts_right or self.columns > 0
        for number, batch in enumerate(self.evaluation):
            if self._is_signalled():
                raise _Interrupted
            result = self.booster.execute_pipeline(iter([batch]), self.model, self._loss, return_outputs=returns)
            loss, labelled = self._everyones(result["loss"], self.count_labels(batch))
            if labelled:
                total, counted = total + loss * labelled, counted + labelled
            if self.counts_right:
                right += self._everyones_right(result["outputs"], batch)
            if self.columns:
                rows.append(self._everyones_rows(result["outputs"], batch, number))
        self.model.train()
        self.told = self.figures(torch.cat(rows)) if rows else {}
        self.accuracy = right / max(counted, 1) if self.counts_right else None
        return total / max(counted, 1)

    def count_tokens(self, batch: Batch) -> int:
        """Tokens of this rank's batch, without padding."""
        return tokens_of(batch)

    def count_labels(self, batch: Batch) -> int:
        """What a batch counts for in the evaluation: its labels, or samples where it has none."""
        return labels_of(batch)

    def count_right(self, outputs: Any, batch: Batch) -> int:
        """Labels of this rank's batch that the model's outputs meet."""
        raise NotImplementedError

    def measure(self, outputs: Any, batch: Batch, samples: range) -> torch.Tensor:
        """Numbers [samples, columns] of this rank's batch. `samples` are their places in the evaluation's data, where
        `plugin.prepare_dataloader` deals it without shuffling.
        """
        raise NotImplementedError

    def figures(self, rows: torch.Tensor) -> dict[str, float]:
        """What is told of an evaluation beside its loss, by name, of what `measure` gave for all samples, in their
        order.
        """
        raise NotImplementedError

    def save(self, path: Path | None = None, keep: int | None = None) -> None:
        """A checkpoint that a run at any layout can go on from, written in the background."""
        self._wait()
        self._has_own, self._saving = self._has_own or path is None, self.progress.step
        with self._as_before():
            self._begun = self._guarded(
                self._saving,
                lambda: self.booster.save(
                    str(path or self.checkpoints / f"step-{self.progress.step}"),
                    model=self.model,
                    optimizer=self.optimizer,
                    lr_scheduler=self.lr_scheduler,
                    dataloader=self.data,
                    step=self.progress.step,
                    extra=self._extra(),
                    keep_last=keep or self.keep,
                    use_async=True,
                ),
            )

    def _extra(self) -> dict[str, Any]:
        return {**asdict(self.progress), "must_match": self.must_match, "losses": self._spikes.state_dict()}

    def _wait(self) -> bool:
        """Until the last save is on disk, or has failed: whether it is."""
        return self._guarded(self._saving, self.booster.wait) and self._begun

    def _load(self, path: str | Path, dataloader: Any = None) -> dict[str, Any]:
        state = self.booster.load(
            str(path),
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            dataloader=dataloader,
        )
        return dict(state["extra"])

    def _best_path(self) -> Path:
        return self.best / f"step-{self.progress.best_step}"

    def _best_is_here(self) -> bool:
        """Which it is not when a run goes on that kept none, or one of another directory."""
        return self._best_path().is_dir()

    def _batches(self) -> Iterator[tuple[Batch, bool]]:
        """Batches of pass after pass, and whether one is the last of its pass, which of a stream nobody knows.

        The loader counts a batch when it is asked for, which is when it is used, also where it was made before.
        """
        empty = 0
        while empty < 2:  # a pass that was saved at its end is empty
            empty += 1
            left = _length(self.data)
            self._supply = iter(self.data)
            for batch in self._supply:
                empty, left = 0, left - 1
                self.progress.epoch += left == 0
                self._pass_ended, self._random = left == 0, None
                if hasattr(self._supply, "look_ahead"):  # a generator's `send` would take the next batch
                    self._supply.send(batch)
                yield batch, left == 0
        raise ValueError("the loader has no batches; give it more samples, or smaller batches")

    def _finish(self, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
        tokens = metrics.pop("tokens")
        self.progress.step += 1
        self.progress.tokens_seen += tokens
        return {
            "step": self.progress.step,
            **metrics,
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": tokens / seconds / dist.get_world_size(),
            "step_time": seconds,
            "tokens_seen": self.progress.tokens_seen,
            "epoch": self.progress.epoch,
            "memory_gib": peak_memory() / 2**30,
        }

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        with SaveOnSignal(signal.SIGTERM, signal.SIGUSR1) as self._signalled:
            try:
                yield
            finally:
                self._signalled = None

    def _is_signalled(self) -> bool:
        """Whether any rank has got a signal; the same on all of them. Never outside of `train`."""
        return self._signalled is not None and self._signalled.anywhere()

    def _evaluated(self) -> bool:
        """Evaluate the step that is reached; False where a signal has come first, which lets it be saved at once."""
        try:
            loss = self.evaluate()
        except _Interrupted:
            self.model.train()
            return False
        self.progress.unevaluated = False
        self._note(loss)
        return True

    def _note(self, loss: float) -> None:
        self._tell_evaluated(loss)
        if not loss < self.progress.best_loss:
            self.progress.without_better += 1
            return
        self.progress.best_loss, self.progress.best_step, self.progress.without_better = loss, self.progress.step, 0
        if self.keep_best:
            self.save(self._best_path(), keep=1)

    def _tell_evaluated(self, loss: float) -> None:
        accuracy = {} if self.accuracy is None else {"eval_accuracy": self.accuracy}
        others = {f"eval_{name}": value for name, value in self.told.items()}
        self._tell("evaluated", {"step": self.progress.step, "eval_loss": loss, **accuracy, **others})

    def _is_worse(self) -> bool:
        return self.patience is not None and self.progress.without_better >= self.patience

    def _everyones(self, loss: torch.Tensor | None, count: int) -> tuple[float, int]:
        """The loss, which is on the last stage alone, and the sum of what data-parallel ranks count."""
        plugin: Any = self.booster.plugin
        replicas, _ = plugin.data_parallel
        shared = torch.zeros(3, dtype=torch.float64, device=get_current_device())
        if loss is not None:
            shared[0], shared[1] = loss.detach().double(), 1.0
        shared[2] = count
        dist.all_reduce(shared)
        total, holders, counted = shared.tolist()
        return total / holders, round(counted * replicas / dist.get_world_size())

    def _everyones_right(self, outputs: Any, batch: Batch) -> int:
        """The sum of what data-parallel ranks count, each on its last stage."""
        plugin: Any = self.booster.plugin
        right, held = (0, 0) if outputs is None else (self.count_right(outputs, batch), 1)
        shared = torch.tensor([right, held], dtype=torch.float64, device=get_current_device())
        dist.all_reduce(shared)
        total, holders = shared.tolist()
        return round(total * plugin.data_parallel[0] / holders)

    def _everyones_rows(self, outputs: Any, batch: Batch, number: int) -> torch.Tensor:
        """What data-parallel ranks measure of their batches of this number, each on its last stage, in the order of
        the samples: those of a batch are dealt in turn.
        """
        plugin: Any = self.booster.plugin
        replicas, replica = plugin.data_parallel
        size = len(next(value for value in batch.values() if isinstance(value, torch.Tensor)))
        first = number * size * replicas + replica
        mine = torch.zeros(size, self.columns + 2, dtype=torch.float64, device=get_current_device())
        if outputs is not None:
            samples = range(first, first + size * replicas, replicas)
            mine[:, :-2], mine[:, -1] = self.measure(outputs, batch, samples).to(mine), 1.0
        mine[:, -2] = replica
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        held = {int(one[0, -2]): one[:, :-2] for one in every if one[0, -1] > 0}
        return torch.stack([held[at] for at in range(replicas)], dim=1).flatten(0, 1).cpu()

    def _tell(self, what: str, news: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            getattr(listener, what)(news)


def _length(data: Any) -> int:
    """Batches that are left of a pass; of a stream less than any."""
    try:
        return len(data)
    except TypeError:
        return -1
