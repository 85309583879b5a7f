"""Where the gradients of a step are on their way, and what they are scaled by.

[Note: states of gradients] A bucket of gradients (the optimizer as a whole, where there are no buckets) is in one of
four states:

    state         what its buffer holds                                      scaled by
    ACCUMULATING  this rank's own sum since the last reduction               loss scale
    LAUNCHED      nobody's to touch: collectives read and write it           loss scale, on a 16-bit wire / 2^n >= ranks
    FINAL         in this rank's shard the sum over all ranks                loss scale x divisor, clipping factor
    CONSUMED      in this rank's shard the gradient of the step              nothing: the factor has been applied

What each event does in each state ("refused" is a ValueError with the way to do it):

    event                      ACCUMULATING          LAUNCHED              FINAL                 CONSUMED
    backward begins            goes on               settles, then FINAL   sets it aside (1)     and scales it back
    gradient arrives (hook)    adds                  refused               -                     -
    gradient, bare backward    refused               refused               refused               refused
      of another optimizer     adds (2, 5)           spoils (5)            spoils (5)            spoils (5)
    backward ends              launches              -                     -                     -
      under no_sync            stays (2)             -                     -                     -
    settle                     -                     waits -> FINAL (3)    -                     -
    step, norm, clip           launches, settles     settles               reads                 reads
      clip by norm             into the factor       into the factor       into the factor       multiplies
      clip by value            -> CONSUMED           -> CONSUMED           -> CONSUMED           clamps
    param.grad read, assigned  refused (4)           settles -> CONSUMED   -> CONSUMED (4)       the view (4)
    step                       -> CONSUMED (6)       -> CONSUMED (6)       -> CONSUMED (6)       steps again (torch)
    backward after step        refused               refused               refused               refused
    zero_grad                  empties               settles, empties      empties               empties
    weights loaded or edited   masters follow before the next read or step, whatever the state

(1) What was reduced is moved to a `carry`, and what accumulates begins at zero: the next reduction sees fresh gradients
    of this rank only, and the carry is added when it is final. A sum over ranks is so never summed again.
(2) Stage 2 reduces within its sub-group after every backward and keeps the sum of shards; it returns to ACCUMULATING.
(3) Where a carry was set aside it is added here.
(4) Where this rank has the whole gradient and needs nobody to complete it: alone, or at stage 0 without model axes and
    outside no_sync; else refused. A read starts no collective, so that a rank may read alone.
(5) `zero.other_backwards`: where either has a loss scale it spoils in every state. All but zero_grad is refused then.
    Stage 3 adds in every state, as torch does, and refuses only under a loss scale.
(6) Or FINAL: a step in one pass (`zero.one_pass`) reads gradients and leaves them as they are, with their factor.
"""

from __future__ import annotations

from enum import Enum


class GradState(Enum):
    """See [Note: states of gradients]."""

    ACCUMULATING = "accumulating"
    LAUNCHED = "launched"
    FINAL = "final"
    CONSUMED = "consumed"

    @property
    def is_reduced(self) -> bool:
        return self in (GradState.FINAL, GradState.CONSUMED)
