"""What is known of a unit of stage 3 while its model runs, and of the calls of its modules."""

from __future__ import annotations

from .sharded_bucket import ShardedBucket


class GatheredUnit:
    """name      for traces
    pending   whether reads of its parameters are those of a script, which must be shown values that last
    needed    how many forwards and backwards use it now, `opened` of them backwards
    kept      stays when nobody needs it, until a backward is through with it
    repeated  its modules are called several times in one forward
    between   two of these calls, in which it stays
    lasting   stays until the step: a backward that makes a graph of its own keeps the parameters for another one
    recorded  whether the last forward has recorded something of it
    coming    the calls that have, as long as no backward has begun with them
    read      whether the last forward has looked rows of it up
    calls     of its modules that are running, the innermost last
    """

    def __init__(self, buckets: list[ShardedBucket]) -> None:
        self.buckets = buckets
        slots = buckets[0].plan.slots
        self.name = f"bucket {buckets[0].index}, from {slots[0].entry.name} on" if slots else "nothing"
        self.num_bytes = sum(bucket.plan.numel * bucket.dtype.itemsize for bucket in buckets)
        self.filled = self.ready = False  # gathered or on its way; gathered
        self.pending = True
        self.needed = self.opened = 0
        self.kept = self.lasting = self.repeated = self.between = self.recorded = self.read = False
        self.coming: set[UnitCall] = set()
        self.calls: list[UnitCall | None] = []

    @property
    def is_through(self) -> bool:
        """Whether no backward is to come. Of layers under reentrant checkpoints nothing is recorded until there is."""
        return not self.coming if self.recorded else self.read


class UnitCall:
    """One call of a unit's module, until its backward is through.

    first, last   graph times of what the call recorded
    """

    __slots__ = ("first", "is_open", "last", "unit")

    def __init__(self, unit: GatheredUnit) -> None:
        self.unit = unit
        self.first = self.last = -1
        self.is_open = False
