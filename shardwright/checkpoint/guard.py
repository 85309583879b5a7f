"""What becomes of a run whose disk fails: it costs that checkpoint and a line in the log, or ends the run."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from ..files.errors import CheckpointError
from ..logging import get_dist_logger
from ..utils.errors import one_of

ON_SAVE_ERROR = ("warn", "raise")
_SAVE_ERRORS = (OSError, CheckpointError)  # of disks; what is wrong with a call is raised whatever is asked for


class Guard:
    """Around saves in the background, which go wrong on all ranks alike; checkpoints before them stay.

    A save that failed is told of by the next wait. So wait before the next save: its error would be that one's. Where
    the script is first to wait, by a call of its own, that call goes on as well, and the next one here answers False.
    """

    def __init__(self, on_save_error: str) -> None:
        if on_save_error not in ON_SAVE_ERROR:
            raise one_of("on_save_error", on_save_error, ON_SAVE_ERROR)
        self.on_save_error = on_save_error
        self._step = 0
        self._failed = False  # a save, since the last call

    def __call__(self, step: int, call: Callable[[], None]) -> bool:
        """Whether `call`, of the save of `step` or the wait for it, did what it should."""
        self._step = step
        before = _active.set(self)
        try:
            call()
        except _SAVE_ERRORS as error:
            if not self.forgives(error):
                raise
        finally:
            _active.reset(before)
        failed, self._failed = self._failed, False
        return not failed

    def forgives(self, error: BaseException) -> bool:
        """Whether a save may fail by this, which is said then."""
        if self.on_save_error == "raise" or not isinstance(error, _SAVE_ERRORS):
            return False
        self._failed = True
        get_dist_logger().warning(
            f"step {self._step}: a checkpoint could not be written and training goes on without it: {error}", ranks=[0]
        )
        return True


_active: ContextVar[Guard | None] = ContextVar("guard of what is saved", default=None)


def active() -> Guard | None:
    """The one that the running call is made by."""
    return _active.get()
