"""SLURM: an sbatch file."""

from __future__ import annotations

import argparse
import re
import shlex

from ..._version import __version__
from .job import Job, LaunchError, at_least

HELP = "an sbatch file: torchrun on every node, a checkpoint before the time is over, and another turn"
START = "sbatch {file}"

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_TEXT = {
    "partition": "partition",
    "account": "account that is charged",
    "qos": "quality of service",
    "constraint": "features that nodes must have",
    "mem": "memory of a node, such as 512G; 0: all of it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--time", default="24:00:00", metavar="D-HH:MM:SS", help="longest time of one turn")
    for name, doc in _TEXT.items():
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=doc)
    parser.add_argument("--cpus-per-node", type=int, default=argparse.SUPPRESS, metavar="N", help="cores of a node")
    parser.add_argument(
        "--max-turns", type=int, default=100, metavar="N", help="turns of a run that is not finished; 1: no requeue"
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=argparse.SUPPRESS,
        metavar="OPTION",
        help="another option of sbatch, such as exclusive",
    )


def text(job: Job, args: argparse.Namespace) -> str:
    at_least(args, "max_turns", 1)
    if _seconds(args.time) <= job.grace:
        raise LaunchError(
            f"--time {args.time} is not longer than --grace {job.grace}, in which the checkpoint is written"
        )
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        **({"gpus-per-node": job.gpus} if job.gpus else {}),
        **({"cpus-per-task": _cpus(args)} if hasattr(args, "cpus_per_node") else {}),
        "time": args.time,
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{job.grace}",
        **{name: _word(name, getattr(args, name)) for name in _TEXT if hasattr(args, name)},
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    lines.append("#SBATCH --requeue" if args.max_turns > 1 else "#SBATCH --no-requeue")
    lines += [f"#SBATCH --{_word('sbatch', one).lstrip('-')}" for one in getattr(args, "sbatch", ())]
    torchrun = " ".join(
        [
            f"torchrun --nnodes={job.nodes} --nproc-per-node={job.ranks} --rdzv-backend=c10d",
            '--rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
            shlex.join(job.command),
        ]
    )
    traces = ['export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$PWD/nccl-$SLURM_JOB_ID-rank-"'] if job.gpus else []
    head = "\n".join([*lines, f"# Written by shardwright {__version__} launch slurm."])
    # environments are often entered by scripts that read variables which are not set
    before = "\n".join([*job.setup, "set -uo pipefail", *job.exports, *traces])
    # srun does not take it from sbatch, and would leave all ranks of a node one core
    cores = f" --cpus-per-task={_cpus(args)}" if hasattr(args, "cpus_per_node") else ""
    return f"""#!/bin/bash
{head}
{before}

# Ranks meet at the first node; the port is one of the job's own.
head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
port=$((20000 + SLURM_JOB_ID % 20000))

# A node that has ended waits for the others, which may still write their parts of the checkpoint.
srun --wait={job.grace}{cores} {torchrun} &
ranks=$!

# {job.grace} s before the time is over SLURM sends USR1 to this shell alone. Ranks that get TERM save at the end of
# their step.
over=0
trap 'over=1; kill -TERM "$ranks"' USR1
while wait "$ranks"; kill -0 "$ranks" 2> /dev/null; do :; done # a signal ends `wait`, too
wait "$ranks"
status=$?
if [ "$over" = 1 ] && [ "$status" != 0 ] && [ $((${{SLURM_RESTART_COUNT:-0}} + 1)) -lt {args.max_turns} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def _seconds(time: str) -> int:
    """Of SLURM's forms M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise LaunchError(f"--time {time!r} is no time of SLURM, such as 24:00:00 or 2-12:00:00")
    days, *rest = (None if part is None else int(part) for part in found.groups())
    parts = [part for part in rest if part is not None]
    if days is None:
        parts = [0] * (2 - len(parts)) + parts if len(parts) == 3 else [0, *parts] if len(parts) == 2 else [0, parts[0]]
    hours, minutes, seconds = (parts + [0, 0])[:3]
    return ((24 * (days or 0) + hours) * 60 + minutes) * 60 + seconds


def _word(option: str, value: str) -> str:
    if not value.strip() or "\n" in value:
        raise LaunchError(f"--{option} {value!r} must be one line of text")
    return value


def _cpus(args: argparse.Namespace) -> int:
    at_least(args, "cpus_per_node", 1)
    return int(args.cpus_per_node)
