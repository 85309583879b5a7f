"""Ray: a script for a cluster that is up. One task per node runs torchrun."""

from __future__ import annotations

import argparse

from ..._version import __version__
from .job import Job, at_least

HELP = "a Python file that starts torchrun on nodes of a Ray cluster"
START = "ray job submit --working-dir . -- python {file}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpus-per-node", type=int, default=argparse.SUPPRESS, metavar="N", help="cores of a node")
    parser.add_argument("--max-turns", type=int, default=10, metavar="N", help="times that a job is started that fails")


def text(job: Job, args: argparse.Namespace) -> str:
    at_least(args, "max_turns", 1)
    if hasattr(args, "cpus_per_node"):
        at_least(args, "cpus_per_node", 1)
    cpus = getattr(args, "cpus_per_node", job.ranks)
    bundle = {"CPU": float(cpus), **({"GPU": float(job.gpus)} if job.gpus else {})}
    arguments = job.torchrun("--rdzv-backend=c10d")
    return f'''"""Written by shardwright {__version__} launch ray. On a Ray cluster: {START.format(file="FILE")}"""

import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {job.nodes}
BUNDLE = {bundle!r}
SETUP = {list(job.setup)!r}
ENVIRONMENT = {job.environment!r}
OPTIONS = {arguments[: -len(job.command)]!r}
COMMAND = {list(job.command)!r}
TURNS = {args.max_turns}


@ray.remote
def meeting_point():
    """Address and a free port of the first node."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{{ray.util.get_node_ip_address()}}:{{free.getsockname()[1]}}"


@ray.remote(max_retries=0)
def node(endpoint, turn):
    """torchrun, with the GPUs that Ray has given to this task."""
    for line in SETUP:
        subprocess.run(line, shell=True, check=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *OPTIONS]
    meet = [f"--rdzv-endpoint={{endpoint}}", f"--rdzv-id={job.name}-{{turn}}"]
    subprocess.run([*torchrun, *meet, *COMMAND], check=True, env=os.environ | ENVIRONMENT)


ray.init()
group = placement_group([BUNDLE] * NODES, strategy="STRICT_SPREAD" if NODES > 1 else "PACK")
ray.get(group.ready())


def on_node(index, task, **resources):
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return task.options(scheduling_strategy=place, **resources)


for turn in range(1, TURNS + 1):
    endpoint = ray.get(on_node(0, meeting_point, num_cpus=0).remote())
    own = {{"num_cpus": BUNDLE["CPU"], "num_gpus": BUNDLE.get("GPU", 0)}}
    nodes = [on_node(index, node, **own).remote(endpoint, turn) for index in range(NODES)]
    try:
        ray.get(nodes)
        break
    except ray.exceptions.RayError as error:
        if turn == TURNS:
            raise
        print(f"turn {{turn}} of {{TURNS}} failed, the next one goes on from its checkpoint: {{error}}", flush=True)
        for running in nodes:
            ray.cancel(running, force=True)
'''
