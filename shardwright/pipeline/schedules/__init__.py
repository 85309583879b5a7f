"""One short file per pipeline schedule, and the registry that finds them by the name users write (`pp_style`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...utils.argument_types import check_arguments
from ...utils.errors import one_of
from ..planning.actions import Action, separate, validate
from ..planning.placement import STYLES as PLACEMENTS
from ..planning.placement import Placement
from .dual_pipe_v import dual_pipe_v
from .eager import eager_1f1b
from .forward_only import forward_only as _forward_only
from .gpipe import gpipe
from .interleaved import interleaved
from .one_f_one_b import one_f_one_b
from .own import own_phases
from .phases import Letters, number
from .zero_bubble import zero_bubble
from .zero_bubble_v import zero_bubble_v

Builder = Callable[[Placement, int, int], list[Letters]]


class Style(NamedTuple):
    """How a schedule is built and where its stages live."""

    build: Builder  # (placement, rank, num_microbatches) -> phases of that rank
    placement: str
    min_chunks: int
    max_chunks: int | None  # None: any number
    splits: bool = False  # some backwards, into I and W
    own: bool = False  # registered by a user: checked whenever it is built


STYLES: dict[str, Style] = {
    "gpipe": Style(gpipe, "linear", 1, 1),
    "1f1b": Style(one_f_one_b, "linear", 1, 1),
    "eager_1f1b": Style(eager_1f1b, "linear", 1, 1),
    "interleaved": Style(interleaved, "round_robin", 2, None),
    "zb": Style(zero_bubble, "linear", 1, 1, splits=True),
    "zbv": Style(zero_bubble_v, "v", 2, 2, splits=True),
    "dualpipev": Style(dual_pipe_v, "v", 2, 2, splits=True),
}


def register_schedule(
    name: str, function: Builder, *, placement: str = "linear", num_model_chunks: int = 1, splits_backward: bool = False
) -> None:
    """Let `pp_style=name` run the schedule of `function`.

    function          (placement, rank, num_microbatches) -> phases of that rank, written with `schedules.phases`
    placement         "linear" (stage k on rank k), "round_robin" (stage k on rank k modulo p) or "v" (down the ranks
                      and up again)
    num_model_chunks  stages per rank, which the plugin has to be given too
    splits_backward   whether it has I and W in place of some B

    Registering a name again replaces its schedule; those that come with the package stay.
    """
    if not isinstance(name, str) or not name or name == "auto" or (name in STYLES and not STYLES[name].own):
        raise ValueError(
            f"name={name!r} of a schedule must be a text that is not taken by {', '.join(map(repr, [*STYLES, 'auto']))}"
        )
    if not callable(function) or not _takes_three(function):
        raise ValueError(
            f"function={function!r} of schedule {name!r} must be a function (placement, rank, num_microbatches) -> "
            "list of phases"
        )
    if placement not in PLACEMENTS:
        raise one_of("placement", placement, PLACEMENTS)
    check_arguments(register_schedule, {"num_model_chunks": num_model_chunks, "splits_backward": splits_backward})
    if (
        num_model_chunks < 1
        or (placement == "linear" and num_model_chunks != 1)
        or (placement == "v" and num_model_chunks != 2)
    ):
        raise ValueError(
            f"num_model_chunks={num_model_chunks} with placement={placement!r}: 'linear' has 1 stage per rank, 'v' has "
            "2, 'round_robin' any"
        )
    STYLES[name] = Style(function, placement, num_model_chunks, num_model_chunks, splits_backward, own=True)


def _takes_three(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, 0, 1)
    except TypeError:
        return False
    except ValueError:  # of some that are written in C
        return True
    return True


def splits_backward(pp_style: str) -> bool:
    """Whether weight gradients of this style are computed apart from input gradients."""
    return pp_style in STYLES and STYLES[pp_style].splits


class Schedule(NamedTuple):
    """Compute-only actions of every rank; `lowering.lower` adds what has to be sent."""

    placement: Placement
    actions: Sequence[Sequence[Action]]


def get_placement(pp_style: str, num_ranks: int, num_model_chunks: int = 1) -> Placement:
    """Where the stages of this style live; ValueError where style, ranks and chunks do not fit."""
    style = STYLES.get(pp_style)
    if style is None:
        raise one_of("pp_style", pp_style, [*STYLES, "auto"])
    if num_ranks < 1:
        raise ValueError(f"pp_size={num_ranks}: a pipeline needs at least 1 rank")
    too_many = style.max_chunks is not None and num_model_chunks > style.max_chunks
    if num_model_chunks < style.min_chunks or too_many:
        wanted = (
            f"exactly {style.min_chunks}" if style.max_chunks == style.min_chunks else f"at least {style.min_chunks}"
        )
        fitting = [
            name for name, s in STYLES.items() if s.min_chunks <= num_model_chunks <= (s.max_chunks or num_model_chunks)
        ]
        other = f" num_model_chunks={num_model_chunks} works with {', '.join(map(repr, fitting))}." if fitting else ""
        raise ValueError(
            f"num_model_chunks={num_model_chunks}: pp_style={pp_style!r} needs {wanted} chunk(s) per rank.{other}"
        )
    return Placement(num_ranks, num_model_chunks, style.placement)


def get(
    pp_style: str,
    num_ranks: int,
    num_microbatches: int,
    num_model_chunks: int = 1,
    forward_only: bool = False,
    pairs: bool = True,
) -> Schedule:
    """The schedule named `pp_style` (or, when `forward_only`, the evaluation schedule of its placement) for all ranks.

    Any `num_microbatches` >= 1 works; fewer than ranks only means more waiting. Where layers wait for no other rank
    there is nothing that `pairs` of actions hide; without them the two run, and send, one after the other.
    """
    placement = get_placement(pp_style, num_ranks, num_model_chunks)
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}: a step needs at least 1 microbatch")
    style = STYLES[pp_style]
    build = _forward_only if forward_only else style.build
    if style.own and not forward_only:
        build = partial(own_phases, pp_style, style.build, style.splits)
    lists: list[Sequence[Action]] = [
        number(build(placement, rank, num_microbatches), placement, rank, num_microbatches) for rank in range(num_ranks)
    ]
    if style.own:
        try:
            validate(lists, placement, num_microbatches, forward_only)
        except ValueError as error:
            raise ValueError(f"pp_style={pp_style!r}, which was registered: {error}") from None
    return Schedule(placement, lists if pairs else [separate(actions) for actions in lists])
