"""`shardwright plan --search`: which layout to use, before a device is paid for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

# torch, and what imports it, is imported in functions, so that `--help` answers at once.

_TOKENS = 4 * 2**20  # of a step, where no batch is given
_LENGTH = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("searching", "for the fastest layout that fits, in place of checking one")
    group.add_argument("--search", action="store_true", help="try all layouts on --world-size devices")
    group.add_argument("--gpu", default="h100", metavar="NAME", help="kind of device, for its published peaks")
    group.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a device, else that of --gpu")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="devices of a node, else 8")
    group.add_argument("--inside-bandwidth", type=float, metavar="GB/S", help="that a device sends within its node")
    group.add_argument("--between-bandwidth", type=float, metavar="GB/S", help="that a device sends to other nodes")
    group.add_argument(
        "--global-batch-size", type=int, metavar="N", help="samples of a step on all ranks, else of about 4 M tokens"
    )


def run(args: argparse.Namespace, build: Callable[[], Any], optimizer: Callable[[Any], Any]) -> int:
    """0 where something fits, else 1."""
    from ..planner.answer import as_data, as_text
    from ..planner.machines import machine
    from ..planner.search import Question, search

    try:
        device = machine(args.gpu, args.gpu_memory, args.gpus_per_node, args.inside_bandwidth, args.between_bandwidth)
        length = args.seq_len or _LENGTH
        if args.optimizer == "none":
            raise ValueError("--optimizer none: the search is for training; give adamw or sgd")
        batch = args.global_batch_size
        if batch is None:
            batch = max(_TOKENS // length // args.world_size, 1) * args.world_size
        question = Question(
            build, optimizer, device, args.world_size, batch, length, getattr(args, "precision", "bf16")
        )
        found = search(question)
    except ValueError as error:
        print(f"No layout was found: {error}")
        return 1
    print(json.dumps(as_data(found, question), indent=1) if args.json else as_text(found, question))
    return 0
