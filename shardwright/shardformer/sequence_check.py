"""Whether a model may have its sequences split along tensor parallelism: tried on a small copy of it.

What layers do with whole sequences outside of attention and MLPs (convolutions, state spaces, positions that they count
themselves) shows as a wrong shape, loss or gradient. Then regions are tried as whole ones whose output is split, which
is right for all that looks along the sequence within a module; then modules of which nothing is known are given parts,
which is right for all that computes token by token. Then layers are taken for such of several streams, and at last
each of them splits and gathers by itself, which is right for models that do something between their layers, or leave
some of them out. What fails then too is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

import torch.nn as nn

from ..models.windows import why_no_sequence
from ..utils.device import host_device
from .apply import apply_decisions
from .config import ShardConfig
from .plan import Plan
from .random_branches import refuse_branches
from .regions import Region, find_regions
from .self_check import SelfCheck
from .sequence import AlongTensor, SequencePlan, Way, plan_sequence
from .small_copy import small_copies
from .styles import Decision

_LOGGER = logging.getLogger(__name__)
WAYS = (
    Way(),
    Way(careful=True),
    Way(trusting=True),
    Way(returning=True),
    Way(trusting=True, streams=True),
    Way(careful=True, trusting=True, streams=True),
    Way(alone=True),
    Way(alone=True, trusting=True),
)


def verified(
    model: nn.Module,
    plan: Plan,
    decisions: Sequence[Decision],
    regions: Sequence[Region],
    lists: Sequence[str] | None,
    config: ShardConfig,
    how: AlongTensor,
) -> SequencePlan:
    """What becomes of the model's modules; ValueError, on all ranks alike, when its layers cannot have parts of
    sequences. Collective.
    """
    refuse_branches(model, "enable_sequence_parallelism=True")
    name = type(model).__name__
    why = why_no_sequence(model)
    if why:
        raise ValueError(f"enable_sequence_parallelism=True: of {name} {why}; use enable_sequence_parallelism=False")
    first = plan_sequence(model, decisions, regions, lists)
    if config.parallel.is_played:  # a layout on paper
        return first
    if not hasattr(model, "config"):
        raise ValueError(
            f"enable_sequence_parallelism=True: {name} is not built from a config, so that no small copy of it can be "
            "made to try it on; use enable_sequence_parallelism=False"
        )
    example = config.example_inputs
    device = host_device(config.parallel.group)
    made = small_copies(model, config.parallel.size, keep_inputs=example is not None)
    copies = (copied.to(device) for copied in made)
    smallest = next(copies, None)
    if smallest is None:
        raise ValueError(
            f"enable_sequence_parallelism=True: no small copy of {name} can be built to try it on; use "
            "enable_sequence_parallelism=False"
        )
    check = SelfCheck(chain([smallest], copies), config.parallel, example)
    why = ""
    for way in WAYS:

        def apply(copied: nn.Module, way: Way = way) -> None:
            own = plan.decide(copied, config.parallel, complete=False)
            around = find_regions(copied, own)
            split = plan_sequence(copied, own, around, lists, way)
            apply_decisions(copied, split.decisions(copied, own), around, config.parallel, split.for_dropout(around))
            split.apply(copied, config.parallel, how)

        found = check.failures(apply)
        if found == []:
            if way.careful:
                _LOGGER.warning(
                    f"{name}: attention and MLPs are computed from whole sequences and their outputs split, since they "
                    "cannot scatter where they end; this sends twice what plain tensor parallelism does"
                )
            if way.alone:
                _LOGGER.warning(
                    f"{name}: each layer splits what it is given and gathers what it returns, since the model leaves "
                    "layers out or has something to do between them; whole sequences are kept there, and one gather "
                    "of them more is sent per layer and direction"
                )
            return first if way == Way() else plan_sequence(model, decisions, regions, lists, way)
        why = why or (
            f"{', '.join(found[:3])} came out wrong"
            if found
            else f"its forward on parts of sequences fails ({check.reason or 'on another rank'})"
        )
    raise ValueError(
        f"enable_sequence_parallelism=True: layers of {name} need whole sequences outside of attention and MLPs; on a "
        f"small copy of it {why}; use enable_sequence_parallelism=False"
    )
