"""The modes of sequence parallelism: what each asks of the settings, and who serves it.

split_gather   along tensor parallelism: regions gather and scatter (`sequence_tensor`)
ring           the same, collectives in parts beside the products
all_to_all     sequences over `sp_size` ranks; attention trades them for heads (`attention.ulysses`)
ring_attn      sequences over `sp_size` ranks; keys and values travel round them (`attention.ring`). With
               `ulysses_size` as many neighbours trade sequences for heads, and rings join those of the same heads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ...attention.exchange import Exchange
from ...attention.padded_exchange import PaddedExchange, TrueLengths
from ...attention.ring import RingAttention
from ...attention.sequence_modes import attention_of, form_of, native_function, use_attention
from ...attention.ulysses import AttentionFunction, Trade, Ulysses
from ...attention.whole_masks import RingWithMasks, TradedHeads
from ...attention.zigzag import Share
from ...cluster.mesh import ParallelMesh
from ...comm.ring import rings_of
from ...models.config import is_encoder_decoder
from ...models.cross_attention import states_argument
from ...models.example_inputs import takes_more_than_text
from ...models.windows import why_no_sequence
from ...shardformer.adapters import native_model, refuse_prompts
from ...shardformer.attention_routes import hides_by_numbers, route_attention
from ...shardformer.random_branches import refuse_branches
from ...utils.errors import divisors
from ...utils.torch_names import disable_current_modes
from ..settings import HybridSettings
from .enclosed_axis import EnclosedAxis, draw_apart
from .enclosed_check import probe_enclosed
from .layer_axis import ENCLOSED, LayerAxis, LayerFacts, check_layers
from .layer_check import probe_layers, split_layers
from .layer_probe import CannotSplit
from .sequence_axis import SequenceAxis, SequenceFacts
from .sequence_loss import SequenceLoss
from .sequence_probe import probe_ring, probe_ulysses
from .sequence_tensor import TENSOR_MODES, check_along_tensor

AXIS_MODES = ("all_to_all", "ring_attn")


def check_sequence(settings: HybridSettings) -> None:
    """ValueError for settings that contradict each other, or that nothing serves."""
    options, layout, mode = settings.sharding, settings.layout, settings.sequence_mode
    size = layout.sp_size or 1
    for name in ("inner_ring_size", "ulysses_size"):
        if getattr(layout, name) is not None and mode != "ring_attn":
            raise ValueError(
                f"{name}={getattr(layout, name)} belongs to sequence_parallelism_mode='ring_attn', which is off; "
                "leave it None"
            )
    if not options.enable_sequence_parallelism:
        if size > 1:
            raise ValueError(
                f"sp_size={size} without enable_sequence_parallelism=True: nothing would cut sequences; pass "
                "enable_sequence_parallelism=True, sequence_parallelism_mode='all_to_all', or sp_size=1"
            )
        if options.enable_sequence_overlap:
            raise ValueError(
                "enable_sequence_overlap=True needs enable_sequence_parallelism=True, with tp_size of at least 2; set "
                "both or neither"
            )
    elif mode is None:
        raise ValueError(
            "enable_sequence_parallelism=True with tp_size=1 and sp_size=1: there is no second rank to share sequences "
            "with; use tp_size=2 or more ('split_gather', 'ring'), or sp_size=2 or more ('all_to_all', 'ring_attn')"
        )
    elif mode in TENSOR_MODES:
        check_along_tensor(settings, mode)
    else:
        _check_axis(settings, mode, size)


def _check_axis(settings: HybridSettings, mode: str, size: int) -> None:
    if size == 1:
        raise ValueError(
            f"sequence_parallelism_mode={mode!r} with sp_size={settings.layout.sp_size}: there is no second rank to "
            "share sequences with; use sp_size=2 or more, or enable_sequence_parallelism=False"
        )
    if settings.sharding.enable_sequence_overlap:
        raise ValueError(
            f"enable_sequence_overlap=True belongs to sequence_parallelism_mode='split_gather' or 'ring', not to "
            f"{mode!r}; leave it out"
        )
    if settings.pipeline.num_sequence_slices > 1:
        raise ValueError(
            f"num_sequence_slices={settings.pipeline.num_sequence_slices} with sequence_parallelism_mode={mode!r}: "
            "both cut sequences, and slices need the keys of those before them on one rank; use num_sequence_slices=1"
        )
    inner, ulysses = settings.layout.inner_ring_size, settings.layout.ulysses_size or 1
    if size % ulysses:
        raise ValueError(
            f"ulysses_size={ulysses} does not divide sp_size={size}; use one of {divisors(size)}, or None for a ring "
            "of all ranks"
        )
    if inner is not None and size // ulysses % inner:
        ring = f"sp_size={size}" + (f" / ulysses_size={ulysses} = {size // ulysses}" if ulysses > 1 else "")
        raise ValueError(
            f"inner_ring_size={inner} does not divide {ring}; use one of {divisors(size // ulysses)}, or None for one "
            "ring"
        )


@disable_current_modes()  # what is tried is tried with numbers, also where a plan has tensors without memory
def probe_sequences(settings: HybridSettings, model: nn.Module) -> SequenceFacts | LayerFacts | None:
    """Whether the whole model can have its sequences cut: ValueError if not. None: nobody wants to."""
    mode = settings.sequence_mode
    if mode not in AXIS_MODES:
        return None
    refuse_branches(model, f"sequence_parallelism_mode={mode!r}")
    refuse_prompts(model, f"sequence_parallelism_mode={mode!r}")
    facts = probe_mode(mode, model, settings.sharding.example_inputs)
    if isinstance(facts, LayerFacts):
        check_layers(settings, facts, type(native_model(model)).__name__)
    return facts


def probe_mode(mode: str, model: nn.Module, example: Any = None) -> SequenceFacts | LayerFacts:
    """How a model can be given parts of sequences: as a whole, within its layers alone, or these within what is whole.
    ValueError: not at all.

    example     a batch, where the user gave one
    """
    native = native_model(model)
    if not hasattr(getattr(native, "config", None), "get_text_config"):
        raise ValueError(
            f"sequence_parallelism_mode={mode!r}: {type(native).__name__} is no model of transformers, and nothing "
            "tells which of its modules is attention; use zero_stage=3 or gradient checkpointing to save memory, or a "
            "model of transformers"
        )
    ways: dict[str, Callable[[], SequenceFacts | LayerFacts]] = {
        "cut before the model": partial(probe_ulysses if mode == "all_to_all" else probe_ring, model),
        "cut before its layers": partial(probe_layers, mode, model),
        "cut before its layers, with states of an encoder": partial(probe_layers, mode, model, reads=True),
        "cut before its layers, all around them whole": partial(probe_enclosed, mode, model, example),
    }
    in_parts, in_layers, reading, enclosed = ways
    if why_no_sequence(native) or takes_more_than_text(native, example):
        chosen = [enclosed]
    elif _reads_states(native, example):
        chosen = [reading, enclosed, in_parts, in_layers]
    else:
        chosen = [in_parts, in_layers, enclosed]
    reasons: dict[str, str] = {}
    for context in (nullcontext, _double_by_default):
        for name in chosen:
            try:
                with context():
                    return ways[name]()
            except CannotSplit as error:
                reasons.setdefault(name, str(error))
    said = "; ".join(f"{name}: {why}" for name, why in reasons.items()) if len(reasons) > 1 else reasons[chosen[0]]
    raise ValueError(
        f"sequence_parallelism_mode={mode!r}: {type(native).__name__} cannot have its sequences split ({said}); use "
        "tp_size and pp_size"
    )


@contextmanager
def _double_by_default() -> Iterator[None]:
    """Inside, a tensor made of a number is in double precision, as small copies are: some models make one of the least
    number that their scores can be (XGLM), which single precision does not hold.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _reads_states(model: nn.Module, example: Any) -> bool:
    """Whether batches may hold states of an encoder that is no part of the model."""
    name = None if is_encoder_decoder(model) else states_argument(model)
    return name is not None and (not isinstance(example, Mapping) or name in example)


def split_sequences(
    settings: HybridSettings,
    mesh: ParallelMesh,
    model: nn.Module,
    facts: SequenceFacts | LayerFacts | None,
    copies: Sequence[nn.Module] = (),
) -> SequenceLoss | None:
    """Let attention work on split sequences, also that of `copies` without data; returns who splits them and
    adds up the loss."""
    if facts is None:
        return None
    mode = settings.sequence_mode
    assert mode is not None
    native, group = native_model(model), mesh.group("sp")
    name = attention_of(native)
    for each in (native, *copies):
        route_attention(each)
    native.generate = partial(_refuse_generate, mode)  # type: ignore[assignment]
    if isinstance(facts, LayerFacts):
        return SequenceLoss(_split_layers(settings, mode, mesh, native, facts, copies), group)
    function: AttentionFunction
    if mode == "all_to_all":
        trade, form = Trade(group), form_of(name)
        if form is None:
            raise ValueError(
                f"attention {name!r} with sequence_parallelism_mode='all_to_all': its masks are not known for whole "
                "sequences here; use attention_backend='sdpa', or sequence_parallelism_mode='ring_attn'"
            )
        share, function = trade.share(), Ulysses(trade, native_function(name), form)
    else:
        share, function = ring_attention(settings, mesh, facts.causal)
    use_attention(native, function, mode, copies)
    native.register_forward_pre_hook(_require_parts, with_kwargs=True)
    axis = SequenceAxis(mode, share, native, facts, pads_in_front=mode == "all_to_all" or name != "eager")
    return SequenceLoss(axis, group)


def ring_attention(
    settings: HybridSettings, mesh: ParallelMesh, causal: bool, whole_masks: bool = False, pads: bool = False
) -> tuple[Share, AttentionFunction]:
    """What a rank holds in mode ring_attn, and the attention on it.

    whole_masks     the model makes masks of whole sequences; else they are as `attention.masks` has them
    pads            sequences are padded where layers cut them
    """
    group, ulysses = mesh.group("sp"), settings.layout.ulysses_size or 1
    place = Share(group.rank() // ulysses, group.size() // ulysses, zigzag=causal)
    trade = Trade(mesh.neighbours("sp", ulysses)) if ulysses > 1 else None
    share = place if trade is None else place.shared_by(ulysses, trade.rank)
    rings = rings_of(group, settings.layout.inner_ring_size, apart=ulysses)
    lengths = TrueLengths(share.multiple) if pads else None
    ring = RingWithMasks(place, rings, lengths) if whole_masks else RingAttention(place, rings)
    if trade is None:
        return share, ring
    if whole_masks:
        return share, TradedHeads(trade, lambda module: ring, around_ring=True)
    return share, Ulysses(trade, lambda module: ring, "documents")


def _split_layers(
    settings: HybridSettings,
    mode: str,
    mesh: ParallelMesh,
    native: nn.Module,
    facts: LayerFacts,
    copies: Sequence[nn.Module],
) -> LayerAxis:
    name, group = attention_of(native), mesh.group("sp")
    pads_in_front, pads = not hides_by_numbers(native), facts.loss == ENCLOSED
    function: AttentionFunction
    if mode == "all_to_all":
        trade = Trade(group)
        share = trade.share()
        lengths = TrueLengths(share.multiple) if pads else None
        function = TradedHeads(trade, native_function(name), lengths=lengths)
    else:
        share, function = ring_attention(settings, mesh, facts.causal, whole_masks=True, pads=pads)
    exchange = PaddedExchange(share, group) if pads else Exchange(share, group)
    shapes = split_layers(mode, native, exchange, function, copies, facts)
    if pads:
        draw_apart(native, exchange, facts)
        return EnclosedAxis(mode, exchange, native, facts)
    return LayerAxis(mode, exchange, native, facts, pads_in_front, shapes)


def _require_parts(model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None or (mask is not None and mask.dim() != 4):
        raise ValueError(
            f"{type(model).__name__} was called itself, whose attention works on parts of sequences; call the model "
            "that boost returned, which cuts them"
        )


def _refuse_generate(mode: str, *_: Any, **__: Any) -> None:
    raise ValueError(
        f"generate with sequence_parallelism_mode={mode!r}: every rank has a part of each sequence, and a new token "
        "would need a cache of all; save the model and generate from it in one process, or with tp_size"
    )
