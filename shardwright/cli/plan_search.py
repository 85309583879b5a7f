"""`shardwright plan --search`: which layout to use, before a device is paid for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from typing import Any

# torch, and what imports it, is imported in functions, so that `--help` answers at once.

_TOKENS = 4 * 2**20  # of a step, where no batch is given
_LENGTH = 4096
_GPU = "h100"
_OWN = ("gpu", "gpu_memory", "gpus_per_node", "inside_bandwidth", "between_bandwidth", "global_batch_size")
# Of one layout, beside the arguments of the plugin.
_OF_A_LAYOUT = ("batch_size", "config", "check", "peak", "device", "dp_inside", "recompute", "selective")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("searching", "for the fastest layout that fits, in place of checking one")
    group.add_argument("--search", action="store_true", help="try all layouts on --world-size devices")
    group.add_argument("--gpu", metavar="NAME", help="kind of device, for its published peaks, else h100")
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
    names = (*_OF_A_LAYOUT, *of_plugin) if args.search else _OWN
    given = [name for name in names if not any(getattr(args, name, None) is none for none in (None, False))]
    if not given:
        return ""
    options = ", ".join("--" + name.replace("_", "-") for name in given)
    if args.search:
        return (
            f"{options} with --search: the search decides on the layout itself, for --global-batch-size samples on all "
            "ranks; leave them out, or check the one layout without --search"
        )
    return f"{options} without --search: only the search asks for devices; add --search, or leave them out"


def run(args: argparse.Namespace, build: Callable[[], Any], optimizer: Callable[[Any], Any]) -> int:
    """0 where something fits, else 1."""
    from ..planner.answer import as_data, as_text
    from ..planner.machines import machine
    from ..planner.remade import remade
    from ..planner.search import Question, search

    try:
        precision = getattr(args, "precision", "bf16")
        links = args.inside_bandwidth, args.between_bandwidth
        device = machine(args.gpu or _GPU, args.gpu_memory, args.gpus_per_node, *links, precision)
        length = args.seq_len or _LENGTH
        if args.optimizer == "none":
            raise ValueError("--optimizer none: the search is for training; give adamw or sgd")
        batch = args.global_batch_size
        if batch is None:
            batch = max(_TOKENS // length // args.world_size, 1) * args.world_size
        question = Question(remade(build), optimizer, device, args.world_size, batch, length, precision)
        found = search(question)
    except ValueError as error:
        print(f"No layout was found: {error}")
        return 1
    print(json.dumps(as_data(found, question), indent=1) if args.json else as_text(found, question))
    return 0
