"""`shardwright plan --search`: which layout to use, before a device is paid for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planner.machines import Machine

# torch, and what imports it, is imported in functions, so that `--help` answers at once.

_TOKENS = 4 * 2**20  # of a step, where no batch is given
_LENGTH = 4096
_GPU = "h100"
_DEVICE = (
    "calibration",
    "gpu",
    "gpu_memory",
    "gpus_per_node",
    "inside_bandwidth",
    "between_bandwidth",
)  # of --html, too
# Of one layout, beside the arguments of the plugin.
_OF_A_LAYOUT = (
    "batch_size",
    "target_len",
    "config",
    "check",
    "peak",
    "html",
    "device",
    "dp_inside",
    "recompute",
    "selective",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("searching", "for the fastest layout that fits, in place of checking one")
    group.add_argument("--search", action="store_true", help="try all layouts on --world-size devices")
    group.add_argument("--gpu", metavar="NAME", help="kind of device, for its published peaks, else h100")
    group.add_argument(
        "--calibration",
        metavar="FILE",
        help="what shardwright calibrate has measured, in place of published peaks",
    )
    group.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a device, else that of --gpu")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="devices of a node, else 8")
    group.add_argument("--inside-bandwidth", type=float, metavar="GB/S", help="that a device sends within its node")
    group.add_argument("--between-bandwidth", type=float, metavar="GB/S", help="that a device sends to other nodes")
    group.add_argument(
        "--global-batch-size", type=int, metavar="N", help="samples of a step on all ranks, else of about 4 M tokens"
    )


def without_effect(args: argparse.Namespace, of_plugin: Iterable[str]) -> str:
    """Says which options were given that nothing would look at; empty where there are none. `of_plugin` are names of
    the plugin's arguments that the search finds by itself.
    """
    names = (*_OF_A_LAYOUT, *of_plugin) if args.search else ("global_batch_size", *(_DEVICE if not args.html else ()))
    given = [name for name in names if not any(getattr(args, name, None) is none for none in (None, False))]
    if not given:
        return ""
    options = ", ".join("--" + name.replace("_", "-") for name in given)
    if args.search:
        return (
            f"{options} with --search: the search decides on the layout itself, for --global-batch-size samples on all "
            "ranks; leave them out, or check the one layout without --search"
        )
    if args.html:
        return f"{options} with --html: it draws one layout; give --batch-size, samples of one data-parallel rank"
    return (
        f"{options} without --search: only the search, and the page of --html, ask for devices; add one of them, or "
        "leave this out"
    )


def device(args: argparse.Namespace) -> Machine:
    """What the options say; ValueError where there is none such."""
    from ..planner.devices import device_of

    return device_of(
        args.calibration,
        _GPU if args.gpu is None and args.calibration is None else args.gpu,
        _precision(args),
        args.world_size,
        memory=args.gpu_memory,
        per_node=args.gpus_per_node,
        inside=args.inside_bandwidth,
        between=args.between_bandwidth,
    )


def _precision(args: argparse.Namespace) -> str:
    return getattr(args, "precision", "bf16")


def run(args: argparse.Namespace, build: Callable[[], Any], optimizer: Callable[[Any], Any]) -> int:
    """0 where something fits, else 1."""
    from ..planner.answer import as_data, as_text
    from ..planner.remade import remade
    from ..planner.search import Question, check_precision, search
    from ..plugins.data.input_limits import InputLimits

    try:
        check_precision(_precision(args))
        machine = device(args)
        length = args.seq_len or min(_LENGTH, InputLimits(build()).longest or _LENGTH)
        if args.optimizer == "none":
            raise ValueError("--optimizer none: the search is for training; give adamw, sgd or muon")
        batch = args.global_batch_size
        if batch is None:
            batch = max(_TOKENS // length // args.world_size, 1) * args.world_size
        sizes = args.world_size, batch, length
        names = args.model, args.optimizer
        question = Question(remade(build), optimizer, machine, *sizes, _precision(args), *names)
        found = search(question)
    except ValueError as error:
        print(f"No layout was found: {error}")
        return 1
    print(json.dumps(as_data(found, question), indent=1) if args.json else as_text(found, question))
    return 0
