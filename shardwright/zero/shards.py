"""What an optimizer's parts must fit when they come back from a checkpoint (see `interface.shards` for the parts)."""

from __future__ import annotations

from ..interface.shards import LoadedShard, ParamShard

__all__ = ["LoadedShard", "ParamShard", "check_complete"]


def check_complete(wanted: set[str], given: set[str]) -> None:
    """Refuse a set of loaded parameters that does not match this rank's."""
    missing, unknown = sorted(wanted - given), sorted(given - wanted)
    if missing or unknown:
        raise ValueError(
            f"optimizer state does not fit: {len(missing)} parameters of this rank are missing ({', '.join(missing[:5])}), "
            f"{len(unknown)} are unknown ({', '.join(unknown[:5])})"
        )
