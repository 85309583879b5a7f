"""`shardwright train RECIPE.yaml [key=value ...]`: a training run without a script.

A recipe is looked at in one process first: what is wrong with it is one sentence and exit status 2, before ranks
start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..utils.errors import counted
from .relaunch import inside_launcher, most_cpu_ranks, relaunch

HELP = "train or fine-tune a language model as a recipe says, on the ranks of this machine or of a launcher"

_CHECKED = "SHARDWRIGHT_RECIPE_CHECKED"  # set for ranks that this command starts itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="YAML or JSON file; docs/recipes.md lists the keys")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys on top of the file's, as data.path=a.jsonl"
    )
    parser.add_argument("--nproc", type=int, default=argparse.SUPPRESS, metavar="N", help="ranks to start")
    parser.add_argument(
        "--profile",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="record N steps with torch's profiler: Chrome traces of every rank and of all, in OUTPUT_DIR/profile",
    )
    parser.add_argument("--print-config", action="store_true", help="print the whole recipe and where each key is from")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of recipes, for editors")
    parser.set_defaults(takes_rest=True)
    parser.add_argument("--check", action="store_true", help="look at the recipe, train nothing")


def run(args: argparse.Namespace) -> int:
    from ..trainer import RecipeError, read_recipe
    from ..trainer.errors import RowError
    from ..trainer.reading import schema, to_yaml

    if args.schema:
        print(json.dumps(schema(), indent=2))
        return 0
    if args.recipe is None or ("=" in args.recipe and not Path(args.recipe).exists()):
        args.fail("give a recipe, before keys: shardwright train RECIPE.yaml; docs/recipes.md has one to start from")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        read = read_recipe(args.recipe, [*args.overrides, *args.rest])
        if args.print_config:
            print(to_yaml(read), end="")
            return 0
        if hasattr(args, "nproc"):
            if args.nproc < 1:
                raise RecipeError(f"--nproc={args.nproc} is too small: at least 1")
            read.recipe.nproc = args.nproc
        if hasattr(args, "profile"):
            if args.profile < 1:
                raise RecipeError(f"--profile={args.profile} is too small: at least 1 step")
            read.recipe.profile_steps = args.profile
        return _train(args, read.recipe)
    except RecipeError as error:
        if not error.told if isinstance(error, RowError) else int(os.environ.get("RANK", 0)) == 0:
            said = str(error).strip().rpartition("RowError: ")[2]  # a worker puts its traceback in front of it
            print(f"shardwright train: {said}", file=sys.stderr, flush=True)
        return 2


def _train(args: argparse.Namespace, recipe: Any) -> int:
    from ..trainer.hub import take_from_cache_without_hub

    joins = inside_launcher()
    warning = take_from_cache_without_hub(recipe)
    if warning and int(os.environ.get("RANK", 0)) == 0:
        print(f"shardwright train: {warning}", file=sys.stderr, flush=True)
    from ..trainer.run import check, train

    world_size = _world_size_of_launcher(recipe) if joins else _world_size(recipe)
    if _CHECKED not in os.environ:
        check(recipe, world_size)
    if args.check:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"This recipe works on {counted(world_size, 'rank')}.")
        return 0
    if joins:
        return train(recipe)
    os.environ[_CHECKED] = "1"
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        resolved = Path(folder) / "recipe.json"
        resolved.write_text(_as_json(recipe))
        print(f"Starting {counted(world_size, 'rank')} ...", flush=True)
        return relaunch(["train", str(resolved)], world_size)


def _as_json(recipe: Any) -> str:
    from ..trainer.reading import to_plain

    return json.dumps(to_plain(recipe))


def _world_size_of_launcher(recipe: Any) -> int:
    from ..trainer import RecipeError

    started = int(os.environ["WORLD_SIZE"])
    if recipe.nproc not in (None, started, int(os.environ.get("LOCAL_WORLD_SIZE", started))):
        raise RecipeError(f"nproc={recipe.nproc}, and the launcher has started {started} ranks; leave nproc out")
    return started


def _world_size(recipe: Any) -> int:
    """What the recipe says, else all GPUs, else as few ranks as the layout takes."""
    import torch

    from ..trainer import RecipeError
    from ..trainer.layout import ranks_of_one_replica

    gpus, least = torch.cuda.device_count(), ranks_of_one_replica(recipe)
    asked: int | None = recipe.nproc
    if asked is not None and gpus and asked > gpus:
        raise RecipeError(f"nproc={asked} needs as many GPUs, there are {gpus}; ask for at most {gpus}")
    world_size = asked or gpus or least
    if not asked and not gpus and least > most_cpu_ranks():
        raise RecipeError(
            f"layout takes {least} ranks (tp_size x pp_size x sp_size), and the CPU of this machine at most "
            f"{most_cpu_ranks()}; make it smaller, or set nproc={least} to start them all the same"
        )
    if world_size % least:
        raise RecipeError(
            f"layout needs a multiple of {least} ranks (tp_size x pp_size x sp_size), and there are {world_size}; "
            "set nproc or make the layout smaller"
        )
    return world_size
