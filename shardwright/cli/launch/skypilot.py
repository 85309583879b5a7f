"""SkyPilot: a task file."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any

import yaml

from ..._version import __version__
from .job import Job, LaunchError

HELP = "a task file of SkyPilot: torchrun on the nodes that it finds in some cloud"
START = "sky jobs launch {file}"

_PORT = 29500
_ACCELERATOR = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--accelerator", default="H100", metavar="NAME", help="kind of GPU, without a number")
    parser.add_argument("--infra", default=argparse.SUPPRESS, help="where, such as aws, gcp/us-central1 or k8s")
    parser.add_argument("--spot", action="store_true", help="instances that may be taken away")
    parser.add_argument("--image", default=argparse.SUPPRESS, metavar="NAME", help="docker image that it runs in")
    parser.add_argument(
        "--mount",
        action="append",
        default=argparse.SUPPRESS,
        metavar="PATH=BUCKET",
        help="bucket for checkpoints and data, as /out=s3://mine; a run on other machines goes on from it",
    )


def text(job: Job, args: argparse.Namespace) -> str:
    if job.gpus and not _ACCELERATOR.fullmatch(args.accelerator):
        raise LaunchError(
            f"--accelerator {args.accelerator!r} is a name such as H100; how many is said by --gpus-per-node"
        )
    resources: dict[str, Any] = (
        {"accelerators": f"{args.accelerator}:{job.gpus}"} if job.gpus else {"cpus": f"{job.ranks}+"}
    )
    for option, key, form in (("infra", "infra", "{}"), ("image", "image_id", "docker:{}")):
        if hasattr(args, option):
            resources[key] = form.format(getattr(args, option))
    if args.spot:
        resources["use_spot"] = True
    torchrun = [
        *(f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks}", '--node-rank="$SKYPILOT_NODE_RANK"'),
        *('--master-addr="$head"', f"--master-port={_PORT}", shlex.join(job.command)),
    ]
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": resources,
        "envs": job.environment,
        "file_mounts": dict(_mount(one) for one in getattr(args, "mount", ())),
        "setup": "\n".join(job.setup or ("pip install shardwright",)) + "\n",
        "run": f'head="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"\ntorchrun {" ".join(torchrun)}\n',
    }
    told = {key: value for key, value in task.items() if value != {}}
    body = yaml.dump(told, Dumper=_Blocks, sort_keys=False, width=1000)
    return f"# Written by shardwright {__version__} launch skypilot; start it with: {START.format(file='FILE')}\n{body}"


class _Blocks(yaml.SafeDumper):
    """Lines of shell as lines."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Blocks.add_representer(str, _text)


def _mount(given: str) -> tuple[str, dict[str, str]]:
    path, _, bucket = given.partition("=")
    if not path.startswith("/") or "://" not in bucket:
        raise LaunchError(f"--mount {given!r} is not PATH=BUCKET, such as /out=s3://my-bucket")
    return path, {"source": bucket, "mode": "MOUNT"}
