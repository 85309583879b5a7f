"""The verb: options, the choice of a layout, and the relaunch on several ranks."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path

from ..relaunch import inside_launcher, most_cpu_ranks, relaunch
from .layout import nearest_worlds
from .settings import COMPARED, DEFAULT_CPU_RANKS, DemoSettings

HELP = "train a small language model on several ranks of this machine and show what happened"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_positive, default=DemoSettings.steps, help="optimizer steps")
    parser.add_argument(
        "--world-size",
        type=_positive,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"ranks to start (default: one per GPU, or {DEFAULT_CPU_RANKS} on a machine without)",
    )
    parser.add_argument(
        "--batch-size", type=_positive, default=DemoSettings.batch_size, help="sequences per step over all ranks"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes the GPUs if there are any"
    )
    parser.add_argument(
        "--seed", type=_seed, default=DemoSettings.seed, help="fixes the text, the weights and the order of batches"
    )
    for name, doc in (("tp", "share every layer"), ("pp", "hold successive layers"), ("sp", "share every sequence")):
        parser.add_argument(
            f"--{name}", type=_positive, default=argparse.SUPPRESS, metavar="N", help=f"ranks that {doc}"
        )
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=DemoSettings.zero, help="ZeRO stage")
    parser.add_argument(
        "--pp-style",
        type=_styles,
        default=argparse.SUPPRESS,
        metavar="NAME,...",
        help=f"schedules of the pipeline: the first trains, the others go {COMPARED} steps beside it (default: 1f1b)",
    )
    parser.add_argument("--output", type=Path, default=Path("demo-results"), help="directory for the results")


def run(args: argparse.Namespace) -> int:
    if inside_launcher():
        from .training import train  # imports torch, for which `--help` does not wait

        return train(_settings(args, int(os.environ["WORLD_SIZE"])))

    world_size = getattr(args, "world_size", None)
    problem = _problem_with(args.output)
    if problem is not None:
        args.fail(f"--output {args.output} {problem}")
    gpus = 0 if args.device == "cpu" else _count_gpus()
    if args.device == "cuda" and gpus == 0:
        args.fail("--device cuda, but torch sees no CUDA device here; use --device cpu, or see `shardwright doctor`")
    if gpus and world_size is not None and world_size > gpus:
        args.fail(
            f"--world-size {world_size} needs as many GPUs, there are {gpus}; ask for at most {gpus}, or add "
            "--device cpu"
        )
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    asked = world_size or _default_world_size(gpus, args)
    if not gpus and asked > most_cpu_ranks():
        args.fail(
            f"{_sizes(args) or f'--world-size {asked}'} takes {asked} ranks, and the CPU of this machine at most "
            f"{most_cpu_ranks()}; ask for smaller sizes, such as --tp 2 --pp 2"
        )
    settings = _settings(args, asked)
    if settings.is_laid_out or settings.zero != 1 or hasattr(args, "pp_style"):
        from .training import check

        try:
            check(settings)
        except ValueError as error:
            args.fail(" ".join(str(error).split()))

    # What a first run should not be about: another rank's warnings and the look for a hub.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(f"Starting {settings.world_size} rank{'s' * (settings.world_size > 1)} on {_devices(gpus)} ...", flush=True)
    return relaunch(["demo", *settings.to_arguments()], settings.world_size)


def _settings(args: argparse.Namespace, world_size: int) -> DemoSettings:
    try:
        return DemoSettings(
            steps=args.steps,
            world_size=world_size,
            batch_size=args.batch_size,
            seed=args.seed,
            output=args.output,
            zero=args.zero,
            styles=getattr(args, "pp_style", DemoSettings.styles),
            **{name: getattr(args, name) for name in ("tp", "pp", "sp") if hasattr(args, name)},
        )
    except ValueError as error:
        args.fail(str(error))
        raise


def _problem_with(output: Path) -> str | None:
    """Why results could not be written there, found out now and not when the training is over."""
    if output.exists() and not output.is_dir():
        return "is a file; name a directory, which is made if it does not exist"
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            return None
    except OSError as error:
        return f"cannot be written to ({error.strerror}); name another directory"


def _default_world_size(gpus: int, args: argparse.Namespace) -> int:
    """All GPUs, or the most of them that the batch can be split over; what a layout takes, as often as it fits."""
    least = math.prod(getattr(args, name, 1) for name in ("tp", "pp", "sp"))
    if any(hasattr(args, name) for name in ("tp", "pp", "sp")):
        return max(1, (gpus or DEFAULT_CPU_RANKS) // least) * least if gpus else least
    return nearest_worlds(args.batch_size, gpus or DEFAULT_CPU_RANKS)[0]


def _sizes(args: argparse.Namespace) -> str:
    """The sizes that were given, as they were given."""
    return " ".join(f"--{name} {getattr(args, name)}" for name in ("tp", "pp", "sp") if hasattr(args, name))


def _styles(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different schedules such as 1f1b,zb")
    return names


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _devices(gpus: int) -> str:
    return "GPUs" if gpus else f"the CPU ({os.cpu_count()} cores)"


def _seed(text: str) -> int:
    value = _positive(text) if text.strip() != "0" else 0
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"{value} is too large, seeds are below 2**32")
    return value


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small, the least is 1")
    return value
