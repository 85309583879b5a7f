"""What becomes of a run whose disk fails: it costs that checkpoint and a line in the log, or ends the run."""

from __future__ import annotations

from collections.abc import Callable

from ..files.errors import CheckpointError
from ..logging import get_dist_logger
from ..utils.errors import one_of

ON_SAVE_ERROR = ("warn", "raise")
_SAVE_ERRORS = (OSError, CheckpointError)  # of disks; what is wrong with a call is raised whatever is asked for


class Guard:
    """Around saves in the background, which go wrong on all ranks alike; checkpoints before them stay.

    A save that failed is told of by the next wait. So wait before the next save: its error would be that one's.
    """

    def __init__(self, on_save_error: str) -> None:
        if on_save_error not in ON_SAVE_ERROR:
            raise one_of("on_save_error", on_save_error, ON_SAVE_ERROR)
        self.on_save_error = on_save_error

    def __call__(self, step: int, call: Callable[[], None]) -> bool:
        """Whether `call`, of the save of `step` or the wait for it, did what it should."""
        try:
            call()
        except _SAVE_ERRORS as error:
            if self.on_save_error == "raise":
                raise
            get_dist_logger().warning(
                f"step {step}: a checkpoint could not be written and training goes on without it: {error}", ranks=[0]
            )
            return False
        return True
