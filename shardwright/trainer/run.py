"""A recipe from beginning to end: the look at it in one process, and what every rank does."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from transformers.utils.logging import disable_progress_bar

from ..checkpoint.directory import candidates
from ..checkpoint.lock import DirectoryTaken, claim, require_free
from ..cluster import DistCoordinator, launch, launch_from_torch
from ..comm.compat import default_store
from ..files.errors import CheckpointError
from ..interface import NonFiniteLoss
from . import layout as layouts
from .build import Parts, check_length, make_optimizer, make_plugin, make_schedule, make_trainer, prepare
from .errors import RecipeError, RowError
from .models import build_model
from .probes import check_order, check_packing
from .reading import to_plain
from .recipe import Recipe
from .spikes import LossSpike
from .trainer import Progressed, Trainer

_DIVERGED = 1
_INTERRUPTED = 143  # what a shell reports for a program that SIGTERM ended


def check(recipe: Recipe, world_size: int) -> None:
    """RecipeError for whatever one process can find out without training: files, data, model, layout."""
    _check_output(Path(recipe.output_dir), recipe)
    parts = prepare(recipe)
    launch(0, world_size, None, None, backend="fake")
    try:
        model = build_model(recipe, parts.config)
        whole = model.get_base_model() if recipe.lora is not None else model
        if recipe.task == "causal-lm":
            check_order(whole)
        if any(data is not None and data.packing for data in (recipe.data, recipe.eval_data)):
            check_packing(whole)
        optimizer = make_optimizer(recipe, model)
        make_schedule(recipe, optimizer, 1)
        samples = layouts.samples_of_a_step(recipe)
        plugin = make_plugin(recipe, sum(param.numel() for param in model.parameters()))
        try:
            plugin.preflight(model, optimizer, samples, parts.max_length_of("data"))
        except ValueError as error:
            raise RecipeError(f"layout: {error}") from error
        check_length(parts, samples * plugin.data_parallel[0])
    finally:
        dist.destroy_process_group()


def train(recipe: Recipe) -> int:
    """Train on the ranks that a launcher started; exit status."""
    launch_from_torch(seed=recipe.seed)
    try:
        return train_here(recipe)
    except RowError as error:
        with suppress(RuntimeError):  # the rank that keeps the store has ended
            error.told = default_store().add("shardwright/rows", 1) > 1
        raise
    except (NonFiniteLoss, LossSpike) as error:  # raised by all ranks alike, as the recipe has asked for
        if dist.get_rank() == 0:
            print(f"shardwright train: {error}{_way_on(recipe)}", file=sys.stderr, flush=True)
        return _DIVERGED
    finally:
        dist.destroy_process_group()


def _way_on(recipe: Recipe) -> str:
    """What can be done with a run that on_nan: stop or spike_factor has ended."""
    if not candidates(Path(recipe.output_dir) / "checkpoints")[0]:
        return "" if recipe.rollbacks else "; there is no checkpoint to go on from"  # which the error says then
    return "; resume=true goes on from the last checkpoint, and rollbacks=1 with it leaves out such data"


def train_here(recipe: Recipe) -> int:
    """Train on the ranks of the process group that there is; exit status."""
    disable_progress_bar()
    coordinator = DistCoordinator()
    parts = prepare(recipe)
    directory = Path(recipe.output_dir)
    try:
        claim(directory)
    except DirectoryTaken as error:
        raise RecipeError(f"output_dir={directory}: {error}") from None
    if coordinator.is_master():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "recipe.yaml").write_text(yaml.safe_dump(to_plain(recipe), sort_keys=False))
    trainer, facts = make_trainer(parts)
    if recipe.resume:
        try:
            trainer.resume(recipe.resume if isinstance(recipe.resume, str) else None)
        except RecipeError:
            raise
        except (ValueError, CheckpointError) as error:
            raise RecipeError(f"resume: {error}") from error
    coordinator.block_all()
    done = trainer.train(facts)
    if not trainer.interrupted:
        export(trainer, parts, directory / "model")
        coordinator.print_on_master(
            f"the model in {directory / 'model'} is that of {exported(done, recipe.keeps_best)}"
        )
    coordinator.block_all()
    return _INTERRUPTED if trainer.interrupted else 0


def exported(done: Progressed, keeps_best: bool) -> str:
    """Of which step the model is, and which was the best."""
    if not done.best_step:
        return f"step {done.step}"
    best = f"step {done.best_step}, whose eval_loss was the lowest, {done.best_loss:.4f}"
    is_best = keeps_best or done.best_step == done.step
    return best if is_best else f"step {done.step}; the best evaluation was that of {best}"


def export(trainer: Trainer, parts: Parts, directory: Path) -> None:
    """The model (of LoRA the adapters) and its tokenizer, for transformers and peft. All ranks call it."""
    if parts.recipe.lora is not None:
        trainer.booster.save_lora_as_pretrained(trainer.model, directory)
    else:
        trainer.model.unwrap().config.use_cache = parts.use_cache
        # fp32 at every precision: the weights that the optimizer steps on
        trainer.booster.save_model(trainer.model, str(directory), shard=True, masters=True)
    if dist.get_rank() == 0:
        parts.tokenizer.save_pretrained(directory)


def _check_output(directory: Path, recipe: Recipe) -> None:
    if directory.exists() and not directory.is_dir():
        raise RecipeError(f"output_dir={directory} is a file; name a directory, which is made if it does not exist")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise RecipeError(f"output_dir={directory} cannot be written to ({error.strerror}); name another one") from None
    if "WORLD_SIZE" not in os.environ:  # of ranks that a launcher has started one may have claimed it
        try:
            require_free(directory)
        except DirectoryTaken as error:
            raise RecipeError(f"output_dir={directory}: {error}") from None
    if isinstance(recipe.resume, str) and not Path(recipe.resume).is_dir():
        raise RecipeError(
            f"resume={recipe.resume}: there is no such directory; resume: true takes the newest of the run"
        )
    if isinstance(recipe.resume, str) and not candidates(Path(recipe.resume))[0]:
        raise RecipeError(f"resume={recipe.resume}: there is no whole checkpoint in this directory; name another one")
    if not recipe.resume and any((directory / "checkpoints").glob("step-*")):
        raise RecipeError(
            f"output_dir={directory} has checkpoints of a run; say resume=true to go on, or name another output_dir"
        )
    if torch.cuda.is_available() and recipe.bf16 and not torch.cuda.is_bf16_supported():
        raise RecipeError("bf16: true, which this GPU cannot compute with; say fp16: true")
