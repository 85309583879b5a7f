"""Training that outlives its processes: started again by torchrun, SLURM or a person, it goes on from the newest whole
checkpoint, at whatever layout the ranks of the day have.

    from shardwright import elastic

    def train(run: elastic.Run) -> None:
        booster = Booster(plugin=...)                # for dist.get_world_size() ranks, the same or another number
        model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
        run.resume(booster, model, optimizer, scheduler, loader)
        while run.step < 1000:
            for batch in loader:
                ...
                optimizer.step()
                optimizer.zero_grad()
                run.completed()                      # counts, saves now and then, and when the job is to be taken away
                if run.step == 1000:
                    break

    elastic.run(train, "checkpoints", save_every=100)

SIGTERM, which spot machines, SLURM and `kill` send, and SIGUSR1, which `sbatch --signal=USR1@120` sends two minutes
before the end, let all ranks finish their step, save it and end with exit code 143.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from .booster import Booster
from .checkpoint.directory import candidates
from .checkpoint.guard import Guard
from .checkpoint.lock import claim
from .checkpoint.preemption import SaveOnSignal
from .cluster import launch_from_torch
from .cluster.ending import exit_together
from .files.errors import CheckpointNotFound
from .interface import NonFiniteLoss
from .interface.loss_guard import say_why_not_back
from .logging import get_dist_logger

INTERRUPTED = 143  # what a shell reports of a program that SIGTERM ended


class Preempted(BaseException):
    """A signal has come; it goes through the script up to `run`. Raised on all ranks alike. Its argument: whether the
    step is saved.
    """


class Run:
    """What one `elastic.run` knows.

    step      optimizer steps that are done, by this process and those before it
    resumed   what `booster.load` returned; None where there was no checkpoint
    """

    def __init__(
        self, directory: Path, save_every: int | None, keep_last: int | None, on_save_error: str, rollbacks: int
    ) -> None:
        self.directory, self.save_every, self.keep_last = directory, save_every, keep_last
        self._guarded = Guard(on_save_error)
        self.rollbacks, self._allowed = rollbacks, rollbacks  # that are left, and those of the whole job
        self._behind: dict[str, Any] | None = None  # where data goes on after steps that were left out
        self.step = 0
        self.saved = 0  # the step of the last save that was begun
        self.resumed: dict[str, Any] | None = None
        self._booster: Booster | None = None
        self._trained: dict[str, Any] = {}
        self._signalled: SaveOnSignal | None = None

    def resume(
        self,
        booster: Booster,
        model: nn.Module,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
    ) -> int:
        """Name what is saved, which boost returned, and load it from the newest whole checkpoint. Returns the steps
        that are done.
        """
        self._booster = booster
        self._trained = {
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "dataloader": dataloader,
        }
        try:
            self.resumed = booster.load(self.directory, **self._trained)
        except CheckpointNotFound as nothing:
            if candidates(self.directory)[0]:
                raise CheckpointNotFound(
                    f"{nothing}\nelastic.run does not begin anew where checkpoints were finished: move them away, or "
                    "name another directory, to begin at step 0"
                ) from None
            get_dist_logger().info(f"elastic.run begins at step 0: {nothing}", ranks=[0])
            return 0
        step = self.resumed["step"]
        if step is None:
            raise ValueError(
                f"the checkpoint {self.resumed['path']} has no step: elastic.run goes on from checkpoints that it "
                "wrote, or that booster.save(path, ..., step=step) did"
            )
        self.step = self.saved = step
        if self._behind is not None:
            dataloader.load_state_dict(self._behind)
            self._behind = None
        return self.step

    def completed(self) -> None:
        """The optimizer has stepped. All ranks call it, behind every step: a step is saved when its time has come."""
        booster = self._require()
        self.step += 1
        leave = self._signalled is not None and self._signalled.anywhere()
        if leave:
            raise Preempted(self.save() and self._guarded(self.step, booster.wait))
        if self.save_every is not None and self.step % self.save_every == 0:
            self.save()

    def save(self) -> bool:
        """Save now, in the background; False where that could not even begin."""
        booster = self._require()
        self._guarded(self.saved, booster.wait)
        self.saved = self.step
        return self._guarded(
            self.step,
            lambda: booster.save(
                self.directory / f"step-{self.step}",
                **self._trained,
                step=self.step,
                keep_last=self.keep_last,
                use_async=True,
            ),
        )

    def finish(self) -> None:
        """The script is through: save what is not saved yet, and wait until it is on disk."""
        booster = self._require()
        if self.saved != self.step:
            self.save()
        self._guarded(self.saved, booster.wait)

    def roll_back(self, error: Exception) -> bool:
        """After a loss that is not finite, raised on all ranks before the step was taken: whether to begin again at the
        last checkpoint, without the data of the steps since. There is no going back where nothing was saved, and the
        error says so.
        """
        booster = self._require()
        self._guarded(self.saved, booster.wait)
        if self.rollbacks == 0 or not candidates(self.directory)[0]:
            say_why_not_back(error, self._allowed, self.rollbacks)
            return False
        self.rollbacks -= 1
        loader = self._trained["dataloader"]
        self._behind = None if loader is None else loader.state_dict()
        times = "time" if self.rollbacks == 1 else "times"
        get_dist_logger().warning(
            f"{error}\nback to the last checkpoint, without the data of the steps since: {self.rollbacks} more {times}",
            ranks=[0],
        )
        self._booster, self._trained = None, {}
        self.step = self.saved = 0
        return True

    def _require(self) -> Booster:
        if self._booster is None:
            raise ValueError(
                "call run.resume(booster, model, optimizer, ...) with what boost returned before it is saved"
            )
        return self._booster


def _trained_by(train: Callable[[Run], Any], me: Run) -> Any:
    while True:
        try:
            return train(me)
        except NonFiniteLoss as error:
            if not me.roll_back(error):
                raise


def run(
    train: Callable[[Run], Any],
    directory: str | Path,
    *,
    save_every: int | None = 100,
    keep_last: int | None = 2,
    on_save_error: str = "warn",
    rollbacks: int = 0,
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1),
    **launch: Any,
) -> Any:
    """Join the job, call `train(run)` and return what it returns; see above.

    directory      where checkpoints are, `step-<n>` each; seen by all ranks, and this job's alone until it ends
    save_every     steps between two saves; None saves at the end and on signals alone
    keep_last      of the newest checkpoints; None: all
    on_save_error  "warn": a full or vanished disk costs that checkpoint; "raise" ends the job
    rollbacks      how often a `NonFiniteLoss`, which Booster(on_nan="stop") raises, calls `train` once more: it goes on
                   at the last checkpoint, and its dataloader behind the batch that failed
    signals        that let all ranks save and end with exit code 143
    launch         arguments of `launch_from_torch`
    """
    for name, value in (("save_every", save_every), ("keep_last", keep_last)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1, or None")
    if rollbacks < 0:
        raise ValueError(f"rollbacks={rollbacks} must be at least 0")
    me = Run(Path(directory), save_every, keep_last, on_save_error, rollbacks)
    if not dist.is_initialized():
        launch_from_torch(**launch)
    elif launch:
        raise ValueError(
            f"elastic.run({', '.join(launch)}=...) in a job that was launched before: give these to launch, or leave "
            "launch to elastic.run"
        )
    claim(me.directory)
    try:
        with SaveOnSignal(*signals) as me._signalled:
            result = _trained_by(train, me)
            me.finish()
    except Preempted as preempted:
        (is_saved,) = preempted.args
        said = f"step {me.step} is saved" if is_saved else f"step {me.step} could not be saved"
        get_dist_logger().warning(f"a signal came: {said}, all ranks end", ranks=[0])
        dist.destroy_process_group()
        exit_together(INTERRUPTED)
    return result
