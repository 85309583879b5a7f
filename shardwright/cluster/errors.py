"""What a rank raises when its job cannot go on."""

from __future__ import annotations


class JobError(RuntimeError):
    """Another rank failed, and this one stopped because of it; the message is that rank's story."""


class BrokenJobError(RuntimeError):
    """What ranks need to reach each other is gone: an earlier step failed in the middle, so that communicators no
    longer fit together, or the store has ended with the process that served it.
    """


def without_store(what: str, who: str) -> BrokenJobError:
    """`what` came to nothing; `who` serves the store."""
    return BrokenJobError(
        f"{what}: the job's store does not answer, since {who}, which serves it, has died or cannot be reached. "
        "Restart the job from its last checkpoint"
    )
