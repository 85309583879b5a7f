"""What happens when a loss is not a number: a word in the log by default, or the step is left out, or the run ends.

    "warn"   the optimizer steps as torch's would; the log names the step
    "skip"   weights and optimizer states stay as they are, on all ranks
    "stop"   NonFiniteLoss on all ranks, before the optimizer steps

The default never waits for the device: on a GPU the losses of a step travel to the host while the next one runs and are
looked at then. "skip" and "stop" are decisions that all ranks must take alike and before the step, so they cost a
reduction of one number and a read per step. They look at the gradients' norm as well, under a loss scaler once its
scale is at its lowest: until then it skips steps that overflow by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..cluster import job
from ..logging import get_dist_logger
from ..utils.device import host_device
from ..utils.errors import one_of
from ..utils.streams import host_memory, streams_of

POLICIES = ("warn", "skip", "stop")


class NonFiniteLoss(FloatingPointError):
    """A loss or a gradient norm was nan or inf, and `on_nan="stop"`."""


def say_why_not_back(error: Exception, rollbacks: int, left: int) -> None:
    """Of a loss that ends a run that may go back so often, `left` times more: why it does not, behind its words."""
    if rollbacks:
        why = "had no checkpoint to go back to: save earlier" if left else "has been used up"
        error.args = (f"{error}. rollbacks={rollbacks} {why}",)


class Witness(Protocol):
    """Of steps that are not taken: what says where the number came from."""

    def note_loss(self, loss: torch.Tensor) -> None: ...

    def explain(self) -> str: ...

    def forget(self) -> None: ...


class LossGuard:
    """Watches the losses that one optimizer calls backward on. Steps count from 1, or from a checkpoint's."""

    def __init__(self, policy: str = "warn") -> None:
        if policy not in POLICIES:
            raise one_of("on_nan", policy, POLICIES)
        self.policy = policy
        self.step = 0  # steps asked for, by the whole run
        self.skipped = 0
        self._found = 0
        # their sums, since one that is not finite makes a sum so: of the running step, and of steps that were taken and
        # not looked at yet
        self._losses: torch.Tensor | None = None
        self._taken: torch.Tensor | None = None
        self._since = 0  # step of the first of these
        # steps, sum on the host, the event that says it has arrived
        self._travelling: tuple[str, torch.Tensor, Any] | None = None
        self._room: torch.Tensor | None = None  # for it, on the host
        self._generation = job.generation()
        self._counted_in = self._generation
        self.witness: Witness | None = None
        self.each_step: Callable[[int], None] | None = None  # called by all ranks at the beginning of every step

    def note(self, loss: torch.Tensor) -> None:
        """`loss` is about to be differentiated."""
        if self.witness is not None:
            self.witness.note_loss(loss)
        loss = loss.detach() if loss.dim() == 0 else loss.detach().sum()
        # the job has recovered, and left out the step that the last ones were of
        if self._generation != job.generation():
            self._generation, self._losses, self._taken = job.generation(), None, None
        self._losses = loss if self._losses is None else self._losses + loss.to(self._losses)

    def drop(self) -> None:
        """The gradients were cleared, and with them what the losses since the last step were of."""
        self._losses = None
        if self.witness is not None:
            self.witness.forget()

    @property
    def is_amid_step(self) -> bool:
        """Whether a loss was differentiated since the last step, so that there are gradients of half a step."""
        return self._losses is not None and self._generation == job.generation()

    def go_on_behind(self, step: int) -> None:
        """What is said from here on names the run's steps, not this process's: a checkpoint of `step` was loaded."""
        self.step, self._losses, self._taken = step, None, None

    def withholds(self, optimizer: Any) -> bool:
        """Called first in every step: whether the step must not be taken. All ranks answer alike."""
        if self._counted_in != job.generation() and self.each_step is not None:
            self._count_alike()
        self.step += 1
        if self.each_step is not None:
            self.each_step(self.step)
        if self.policy == "warn":
            self._look()
            return False
        losses, self._losses = self._losses, None
        what = self._agree(losses, optimizer)
        if what is None:
            if self.witness is not None:
                self.witness.forget()
            return False
        if self.policy == "stop":
            raise NonFiniteLoss(
                f"{what} of step {self.step} is not finite, and on_nan='stop': the weights are those of step "
                f"{self.step - 1}. {self._explained()}on_nan='skip' would leave the step out"
            )
        self.skipped += 1
        why = "" if self.witness is None else f". {self._explained()}" if self._is_told(self._found + 1) else ""
        self._say(
            f"{what} of step {self.step} is not finite: the step is left out on all ranks, {self.skipped} so far{why}",
            ranks=[0],
        )
        self.drop()
        return True

    def _explained(self) -> str:
        """Where it came from, where somebody has seen that; else where to look."""
        if self.witness is None:
            return "Look at the data of this step, the learning rate and the number format; "
        try:
            return f"{self.witness.explain()}. "
        except Exception as error:  # what it was called for is the better story
            return f"Where it came from could not be found: {type(error).__name__}: {error}. "
        finally:
            self.drop()

    def _look(self) -> None:
        """Say what is known by now, and send off what is not. What cannot be sent yet waits for a later step."""
        losses, self._losses = self._losses, None
        if losses is not None and self._taken is not None:
            self._taken = self._taken + losses.to(self._taken)
        elif losses is not None:
            self._taken, self._since = losses, self.step
        if self._travelling is not None and self._travelling[2].query():
            steps, total, _ = self._travelling
            self._travelling = None
            self._check(steps, float(total))
        losses = self._taken
        if losses is None or self._travelling is not None:
            return
        self._taken = None
        steps = f"step {self.step}" if self._since == self.step else f"steps {self._since} to {self.step}"
        streams = streams_of(losses.device)
        if streams is None:
            self._check(steps, float(losses))
            return
        if self._room is None:
            self._room = host_memory((), torch.float32, losses.device)
        self._room.copy_(losses.float(), non_blocking=True)
        event = streams.Event()
        event.record()
        self._travelling = steps, self._room, event

    def _check(self, steps: str, value: float) -> None:
        if not math.isfinite(value):
            self._say(
                f"the loss of {steps} is {value}; the optimizer has stepped as torch's would, and weights may be "
                f"{value} from here on. Booster(on_nan='skip') leaves such steps out, on_nan='stop' ends the run"
            )

    def _count_alike(self) -> None:
        """The job has recovered: some ranks had counted the step that failed and others had not come to it."""
        self._counted_in = job.generation()
        taken = torch.tensor([self.step], device=host_device())
        dist.all_reduce(taken, op=dist.ReduceOp.MIN)
        self.step = int(taken)

    def _agree(self, losses: torch.Tensor | None, optimizer: Any) -> str | None:
        """What is not finite on any rank, if anything."""
        bad = losses is not None and not bool(losses.isfinite())
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = host_device()
            flag = torch.tensor([float(bad)], device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            bad = bool(flag)
        if bad:
            return "the loss"
        if optimizer.measures_before_step and (optimizer.scaler is None or not optimizer.scaler.can_fall()):
            norm = optimizer.get_grad_norm()
            if norm is not None and not math.isfinite(norm):
                return "the norm of the gradients"
        return None

    def _say(self, message: str, ranks: list[int] | None = None) -> None:
        """The 1st, 10th, 100th ... time, so that a run that is lost does not fill the log."""
        self._found += 1
        if self._is_told(self._found):
            times = "" if self._found == 1 else f" ({self._found} steps so far)"
            get_dist_logger().warning(message + times, ranks=ranks)

    @staticmethod
    def _is_told(time: int) -> bool:
        return math.log10(time).is_integer()
