"""What of a bucket a rank counts in the gradient norm."""

from __future__ import annotations

import math

from ..cluster.mesh import ParallelMesh
from ..precision.grad_norm import owned_ranges
from .bucket import Bucket


def counted_ranges(bucket: Bucket, mesh: ParallelMesh) -> list[tuple[int, int]]:
    """[low, high) of this rank's shard of `bucket` that it counts: neither padding nor rows that other ranks count."""
    specs = [slot.entry.spec for slot in bucket.plan.slots]
    if all(
        owned_ranges(spec, mesh.coordinate(spec.axis)) == [(0, math.prod(spec.local_shape(mesh.coordinate(spec.axis))))]
        for spec in specs
    ):
        return [(0, bucket.plan.shard_numel)]  # with its padding, which is zero
    ranges: list[tuple[int, int]] = []
    filled = -1  # the end of the slot before, where any of it was counted
    for slot in bucket.plan.slots_in(bucket.shard):
        spec = slot.entry.spec
        before, filled = filled, -1
        for start, stop in owned_ranges(spec, mesh.coordinate(spec.axis)):
            low, high = (
                max(slot.start + start, bucket.low) - bucket.low,
                min(slot.start + stop, bucket.high) - bucket.low,
            )
            if low >= high:
                continue
            if ranges and ranges[-1][1] == before and start == 0:  # only zeros of alignment in between
                ranges[-1] = (ranges[-1][0], high)
            else:
                ranges.append((low, high))
            filled = slot.stop - bucket.low
    return ranges
