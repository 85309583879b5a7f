"""`shardwright plan`: what a layout comes to for a model, on any machine, without a GPU or a second process.

The exit status is 0 for a layout that works, 1 for one that does not, 2 where the question cannot be asked: no such
model, no such file.

One process plays rank 0 of the whole job on torch's fake backend; the model is built without its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import plan_search
from .plan_page import command as plan_page
from .presets import PRESETS

HELP = "check a layout against a model and show stages, bytes, schedule and collectives, without GPUs"

# torch, transformers and what imports them are imported in functions, so that `--help` answers at once.

_MOST_RANKS = 2**20
_SILENT = 5.0  # seconds

# Options that are arguments of HybridParallelPlugin, by type; their defaults are the plugin's.
_WHOLE = (
    "tp_size",
    "pp_size",
    "sp_size",
    "inner_ring_size",
    "ulysses_size",
    "ep_size",
    "zero_stage",
    "zero_group_size",
    "num_microbatches",
    "microbatch_size",
    "num_model_chunks",
    "num_sequence_slices",
)
_TEXT = ("precision", "pp_style", "attention_backend")
_FLAGS = (
    "cpu_offload",
    "enable_all_optimization",
    "enable_flash_attention",
    "enable_fused_activation",
    "enable_fused_normalization",
    "enable_fused_rotary",
    "enable_jit_fused",
    "enable_sequence_parallelism",
    "enable_sequence_overlap",
    "use_fp8",
)
_OTHER = (
    "sequence_parallelism_mode",
    "make_vocab_size_divisible_by",
    "num_layers_per_stage",
    "layer_costs",
    "auto_memory",
    "cut_memory",
    "offload_activations",
    "zero_bucket_size_in_m",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model and job")
    model.add_argument(
        "--model", required=True, help=f"config.json, a directory with one, or one of {', '.join(PRESETS)}"
    )
    model.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks of the job")
    model.add_argument("--batch-size", type=int, metavar="N", help="samples of one data-parallel rank and step")
    model.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sample")
    model.add_argument(
        "--target-len",
        type=int,
        metavar="N",
        help="of --peak: tokens of a sample that an encoder-decoder writes (default: as many as it reads)",
    )
    model.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="Python file with parallel = dict(...), as HybridParallelPlugin.from_config takes",
    )
    model.add_argument(
        "--optimizer", choices=("adamw", "sgd", "muon", "none"), default="adamw", help="what trains the model"
    )
    model.add_argument(
        "--check", action="store_true", help="print one line instead of the report; the exit status tells the rest"
    )
    model.add_argument(
        "--peak",
        action="store_true",
        help="replay one step of every pipeline rank without data: the peak of memory, when, and what holds it; needs "
        "--batch-size, and --seq-len for text",
    )
    model.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="type of the ranks' devices, which sizes of buckets and chunks go by, else cuda, wherever this runs",
    )
    model.add_argument("--json", action="store_true", help="the report as one JSON document")
    model.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="what --peak tells as one page that needs no other file: the actions of every rank, and on the same time "
        "scale its memory",
    )
    plan_search.add_arguments(parser)
    layout = parser.add_argument_group(
        "arguments of HybridParallelPlugin", "left out, each has the plugin's own default"
    )
    for name in _WHOLE:
        _add(layout, name, int)
    for name in _TEXT:
        _add(layout, name, str)
    for name in _FLAGS:
        layout.add_argument(_option(name), action="store_true", default=argparse.SUPPRESS, help=f"{name}=True")
    _add(layout, "sequence_parallelism_mode", str)
    _add(layout, "make_vocab_size_divisible_by", int)
    _add(layout, "zero_bucket_size_in_m", float)
    _add(layout, "num_layers_per_stage", _numbers)
    _add(layout, "layer_costs", _costs)
    _add(layout, "auto_memory", float)
    _add(layout, "cut_memory", float)
    _add(layout, "offload_activations", _shares)
    layout.add_argument(
        "--dp-inside", action="store_true", help="data-parallel ranks inside of pipeline stages (dp_outside=False)"
    )
    layout.add_argument(
        "--recompute",
        type=float,
        metavar="SHARE",
        help="share of every stage's layers under activation checkpointing, 0 to 1",
    )
    layout.add_argument(
        "--selective",
        type=float,
        metavar="SHARE",
        help="share of every stage's layers that keep products and attention alone, 0 to 1",
    )


def _add(group: Any, name: str, kind: Callable[[str], Any]) -> None:
    group.add_argument(_option(name), type=kind, default=argparse.SUPPRESS, metavar=_METAVARS[kind], help=f"{name}=")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 4,4,4,4") from None


def _costs(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,1,1.5") from None


def _shares(text: str) -> float | list[float]:
    found = _costs(text)
    return found[0] if len(found) == 1 else found


_METAVARS: dict[Callable[[str], Any], str] = {
    int: "N",
    float: "X",
    str: "NAME",
    _numbers: "N,N,...",
    _costs: "X,X,...",
    _shares: "X or X,X,...",
}


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    ignored = plan_search.without_effect(
        args, [name for name in (*_WHOLE, *_TEXT, *_FLAGS, *_OTHER) if name != "precision"]
    )
    if ignored:
        args.fail(ignored)
    if args.check and args.json:
        args.fail("--check with --json: one prints a line, the other the whole report; leave one of them out")
    try:
        _check_numbers(args)
    except ValueError as error:
        if not args.search:
            args.fail(str(error))  # nothing was learnt about the layout
        print(f"No layout was found: {error}")
        return 1
    try:
        config = _load(args.model)
        form = _load_form(args)
    except ValueError as error:
        args.fail(str(error))  # nothing was learnt about the layout
    if args.search:
        return plan_search.run(args, lambda: _lazy(config), lambda model: _optimizer(args.optimizer, model))
    from ..utils.device import planning_for

    if args.html is not None:
        try:
            plan_page.refuse(args.html)
        except ValueError as error:
            print(f"shardwright plan: {error}", file=sys.stderr)
            return 1
    try:
        given = _given(args)
        with planning_for(args.device or "cuda"):
            layout, attention = _resolve(args, config, form, given)
            asked = args.peak or args.html
            replayed = _replay(args, config, form, given, layout, attention) if asked else _Replayed()
    except ValueError as error:
        print(f"This layout does not work: {error}")
        return 1
    _show(args, layout, attention, replayed)
    if args.html is not None:
        try:
            plan_page.write(args.html, replayed.page)
        except ValueError as error:
            print(f"shardwright plan: {error}", file=sys.stderr)
            return 1
        print(f"wrote {args.html}", file=sys.stderr if args.json else sys.stdout)
    return 0


class _Replayed(NamedTuple):
    """The `Peak` of every pipeline rank, the batch of the step, a word on how they were found, and the page where one
    is asked for.
    """

    peaks: list[Any] = []
    batch: dict[str, Any] = {}
    note: str = ""
    page: str = ""


def _show(args: argparse.Namespace, layout: Any, attention: str, replayed: _Replayed) -> None:
    from ..planner.report import as_text, figures, fullest

    peaks, batch, note, _ = replayed
    if args.json:
        print(json.dumps(figures(layout, attention, peaks, batch, note), indent=1))
    elif args.check:
        print(f"This layout works: {str(layout).splitlines()[1]}{f'; {fullest(peaks)}' if peaks else ''}")
    else:
        print("\n\n".join([str(layout), attention, *([as_text(peaks, batch, note)] if peaks else [])]))


def _load_form(args: argparse.Namespace) -> dict[str, Any]:
    """The dict form that `--config` names."""
    from ..cluster.config import load_config

    try:
        return load_config(args.config)
    except ValueError:
        raise
    except Exception as error:  # of the user's own file
        said = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"--config {args.config} is no Python that runs ({said}); it is to hold parallel = dict(...)"
        ) from error


def _check_numbers(args: argparse.Namespace) -> None:
    for option, value in (
        ("--world-size", args.world_size),
        ("--batch-size", args.batch_size),
        ("--seq-len", args.seq_len),
        ("--target-len", args.target_len),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value} must be at least 1")
    if args.world_size > _MOST_RANKS:
        raise ValueError(
            f"--world-size {args.world_size} must be at most {_MOST_RANKS}: every rank has a place in memory"
        )
    if args.target_len is not None and not (args.peak or args.html):
        raise ValueError(
            f"--target-len {args.target_len}: only a replayed step looks at it; add --peak, or leave it out"
        )


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of HybridParallelPlugin."""
    from ..pipeline.checkpointing import PipelineGradientCheckpointConfig

    given = {name: getattr(args, name) for name in (*_WHOLE, *_TEXT, *_FLAGS, *_OTHER) if hasattr(args, name)}
    if args.dp_inside:
        given["dp_outside"] = False
    if args.recompute is not None or args.selective is not None:
        _check_shares(args.recompute, args.selective)
        given["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(
            args.recompute, selective_ratio=args.selective
        )
    if given.get("pp_size", 1) > 1 and not {"num_microbatches", "microbatch_size"} & set(given) and args.config is None:
        given["num_microbatches"] = 2 * given["pp_size"]
    return given


def _check_shares(whole: float | None, in_part: float | None) -> None:
    """By the names of the options, which are not those of the plugin's configuration."""
    for option, share in (("--recompute", whole), ("--selective", in_part)):
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"{option} {share:g} must be a share of layers, from 0 to 1")
    if whole is not None and in_part is not None and whole + in_part > 1:
        raise ValueError(
            f"--recompute {whole:g} and --selective {in_part:g} are shares of the same layers and sum to "
            f"{whole + in_part:g}, but they can be 1 at most; --selective {1 - whole:g} would work"
        )


def _resolve(args: argparse.Namespace, config: Any, form: dict[str, Any], given: dict[str, Any]) -> tuple[Any, str]:
    """The `ResolvedLayout`, and the attention of this machine; ValueError says what does not fit."""
    import torch

    from ..cluster.launch import launch
    from ..plugins import HybridParallelPlugin
    from ..shardformer.attention_choice import explain

    launch(0, args.world_size, None, None, backend="fake")
    try:
        plugin = HybridParallelPlugin.from_config(form, **given)
        model = _lazy(config)
        optimizer = _optimizer(args.optimizer, model)
        layout = plugin.preflight(model, optimizer, args.batch_size, args.seq_len)
        dtype = plugin.policy.dtype if plugin.policy.is_half else None
        return layout, f"on this machine: {explain(model, plugin.settings.sharding, dtype)}"
    finally:
        torch.distributed.destroy_process_group()


def _optimizer(kind: str, model: Any) -> Any:
    import torch

    if kind == "muon":
        return torch.optim.Muon([param for param in model.parameters() if param.ndim == 2])
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return optimizers[kind](model.parameters()) if kind != "none" else None


def _replay(
    args: argparse.Namespace, config: Any, form: dict[str, Any], given: dict[str, Any], layout: Any, attention: str
) -> _Replayed:
    from ..planner.batches import batch_of, takes_tokens, writes
    from ..planner.peaks import peaks
    from ..planner.replay import Job
    from ..plugins import HybridParallelPlugin

    option = "--html" if args.html else "--peak"
    if args.batch_size is None or args.optimizer == "none":
        raise ValueError(f"{option} replays a training step: it needs --batch-size, and an --optimizer")
    model = _lazy(config)
    if takes_tokens(model) != (args.seq_len is not None):
        name = type(model).__name__
        raise ValueError(
            f"{option} replays a training step: for {name} it needs --seq-len, tokens of a sample"
            if args.seq_len is None
            else f"--seq-len {args.seq_len}: {name} is trained on batches without texts; leave it out"
        )
    if args.target_len is not None and not writes(model):
        raise ValueError(
            f"--target-len {args.target_len}: {type(model).__name__} is no encoder-decoder; leave it out, its texts "
            "have --seq-len tokens"
        )
    if args.target_len is None and args.seq_len is None and writes(model):
        raise ValueError(
            f"{option} replays a training step: for {type(model).__name__}, which reads no texts, it needs "
            "--target-len, tokens that it writes for a sample"
        )
    job = Job(
        lambda **changes: HybridParallelPlugin.from_config(form, **{**given, **changes}),
        lambda: _lazy(config),
        lambda model: _optimizer(args.optimizer, model),
        batch_of(model, args.batch_size, args.seq_len, args.target_len),
    )
    if args.html is None:
        found = peaks(job, args.world_size, say=_teller())
        return _Replayed(found.peaks, dict(job.batch), found.note)
    from .plan_page.page import chosen

    machine = plan_search.device(args)
    found = peaks(job, args.world_size, chosen, _teller())
    shape = args.batch_size, args.seq_len
    text = plan_page.page_of(job, args.world_size, layout, attention, found, machine, *shape)
    return _Replayed(found.peaks, dict(job.batch), found.note, text)


def _teller() -> Callable[[str], None]:
    """Says on stderr what a replay is at, from some seconds on."""
    began = time.monotonic()

    def say(what: str) -> None:
        passed = time.monotonic() - began
        if passed > _SILENT:
            print(f"{passed:4.0f} s  replaying {what}", file=sys.stderr, flush=True)

    return say


def _lazy(config: Any) -> Any:
    """The model without its weights."""
    from ..lazy import LazyInitContext

    with LazyInitContext():
        return _build(config)


def _load(name: str) -> Any:
    """The transformers config that `--model` names."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from ..utils.errors import nearest

    path = Path(name)
    if name and path.exists():  # of nothing the path is the directory that this runs in
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"--model {name} holds no config.json")
        try:
            config = AutoConfig.from_pretrained(file)
        except Exception as error:  # of what the file says
            raise ValueError(f"--model {file} is no config that this transformers knows: {_said(error)}") from error
        _check_builds(file, config)
        return config
    if name not in PRESETS:
        raise ValueError(
            f"there is no model {name!r}: neither a path nor one of {', '.join(PRESETS)}{nearest(name, PRESETS)}"
        )
    kind, settings = PRESETS[name]
    return CONFIG_MAPPING[kind](**settings)


def _said(error: Exception) -> str:
    """In one line, and what kind of error it is where that says more than its text."""
    said = " ".join(str(error).split("\n\n")[0].split())
    return said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"


def _check_builds(file: Path, config: Any) -> None:
    """ValueError where no model can be made of a config; transformers makes some of sizes that mean nothing."""
    from ..models.config import KEY_VALUE_HEADS, LAYERS, QUERY_HEADS, first_int, parts

    leasts = {**dict.fromkeys((*LAYERS, "encoder_layers", "decoder_layers"), 0), "vocab_size": 1}
    for part in parts(config):
        for setting, least in leasts.items():
            value = getattr(part, setting, None)
            if isinstance(value, int) and value < least:
                raise ValueError(f"--model {file}: {setting}={value} must be at least {least}")
        heads, groups = first_int(part, QUERY_HEADS), first_int(part, KEY_VALUE_HEADS)
        if heads is not None and groups is not None and heads % groups:
            raise ValueError(
                f"--model {file}: {groups} heads of keys and values do not divide the {heads} of queries, which share "
                "them evenly"
            )
    try:
        _lazy(config)
    except Exception as error:  # of what the file says
        kind = type(config).__name__
        raise ValueError(f"--model {file}: no model can be made of this {kind}: {_said(error)}") from error


def _build(config: Any) -> Any:
    """The class that the config names, else the family's language model."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found(config)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise ValueError(
        f'no model class is known for a {type(config).__name__}; name one under "architectures" in its config.json'
    )
