"""Everything that a recipe names, made: tokenizer, data, model, optimizer, schedule, trainer."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from ..booster import Booster
from ..optim import HybridAdam
from ..pipeline.checkpointing import PipelineGradientCheckpointConfig
from ..plugins import HybridParallelPlugin
from ..utils.errors import counted
from . import layout as layouts
from . import trackers
from .datasets import Collate, Evened, EvenedSampler, Packed, Samples, SampleStream, Windows, placed
from .errors import RecipeError
from .facts import RunFacts
from .heads import Answered, ClassifiedText, Classifier, HeadTrainer, Labels, MaskedText, TaggedWords
from .models import build_model, first_line, head_of, load_config, prepare_head
from .progress import JsonLines, Listener, Log
from .questions import Answering, Questions, windows_of
from .reading import to_plain
from .recipe import Data, Recipe
from .regression import Regression, ScoredText
from .samples import Encoder
from .sources import place_of, rows_of
from .tasks import TASKS
from .tokenizer import load_tokenizer
from .trainer import Every, Trainer

_LONGEST = 2048  # where a recipe does not say
_TRIED = 64  # rows that are encoded before ranks start


@dataclass
class Parts:
    """What can be made without ranks.

    rows        of `data` and `eval_data`
    use_cache   what the model's config says. While it trains there is no cache: with one, transformers does not look
                where packed samples begin
    """

    recipe: Recipe
    config: Any
    tokenizer: Any
    max_length: int
    rows: dict[str, Any]
    use_cache: bool

    @property
    def padding(self) -> int:
        """The token behind the end of a sequence; it is masked, so any will do."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    def collate(self, key: str) -> Collate:
        """What makes batches of samples of `data` or `eval_data`."""
        # The answer is one of all places, padding too: were it of as many as the longest window beside it has, the loss
        # would follow from who shares a batch, and so from the layout.
        filled = self.recipe.task == "question-answering"
        return Collate(self.padding, self.max_length_of(key) if filled else 0)

    def dataset(self, key: str) -> Any:
        """A Dataset or IterableDataset of `data` or `eval_data`."""
        data: Data = getattr(self.recipe, key)
        encoder = self.encoder(key)
        streaming = (data.mix[0] if data.mix else data).streaming
        if streaming:
            return SampleStream(self.rows[key], encoder, self.padding, data.packing)
        if data.packing:
            return Packed(self.rows[key], encoder, self.padding)
        if isinstance(encoder, Questions):
            return Windows(self.rows[key], encoder)
        return Samples(self.rows[key], encoder)

    def encoder(self, key: str) -> Any:
        """What makes samples of the rows of `data` or `eval_data`."""
        recipe, length = self.recipe, self.max_length_of(key)
        if recipe.task == "causal-lm":
            return Encoder(self.tokenizer, length)
        types = "token_type_ids" in inspect.signature(head_of(recipe, self.config).forward).parameters
        if recipe.task == "masked-lm":
            share = 0.15 if recipe.mlm_probability is None else recipe.mlm_probability
            return MaskedText(self.tokenizer, length, types, share, recipe.seed, len(self.tokenizer))
        if recipe.task == "seq2seq-lm":
            return Answered(self.tokenizer, length, types)
        if recipe.task == "sequence-regression":
            return ScoredText(self.tokenizer, length, types)
        if recipe.task == "question-answering":
            return Questions(self.tokenizer, length, types, getattr(recipe, key).stride)
        kind = ClassifiedText if recipe.task == "sequence-classification" else TaggedWords
        return kind(self.tokenizer, length, types, Labels(self.config))

    def max_length_of(self, key: str) -> int:
        return getattr(self.recipe, key).max_length or self.max_length

    def identity(self, dataset: Any) -> dict[str, Any]:
        """What a position in `dataset`, which is that of `data`, means: it holds for no other samples or order."""
        data = self.recipe.data
        assert data is not None
        streaming = isinstance(dataset, SampleStream)
        known = {
            "seed": self.recipe.seed,
            "data.packing": data.packing,
            "data.max_length": self.max_length_of("data"),
            "data.streaming": streaming,
            **({} if data.stride is None else {"data.stride": data.stride}),
            "data.mix weights": [source.weight for source in data.mix or ()],
        }
        if streaming:
            first = next(iter(dataset), None)
            return {**known, "first sample": None if first is None else digest([first])}
        middle = [dataset[len(dataset) * part // 4] for part in range(4)]
        return {**known, "number of sequences": len(dataset), "samples": digest([*middle, dataset[len(dataset) - 1]])}


def prepare(recipe: Recipe) -> Parts:
    """Tokenizer, config and rows of a recipe, looked at as far as one process can; RecipeError says what is wrong."""
    trackers.wanted(recipe.report_to, recipe.run_name)
    config = load_config(recipe)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model, recipe.chat_template)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise RecipeError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's vocabulary {vocabulary}: its last tokens would "
            f"have no embedding; give the model a vocab_size of at least {len(tokenizer)}, or another tokenizer"
        )
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and longest < 2:
        longest = None
    for key in ("data", "eval_data"):
        asked = getattr(recipe, key) and getattr(recipe, key).max_length
        if asked and longest and asked > longest:
            raise RecipeError(
                f"{key}.max_length={asked} is longer than the {longest} positions of the model; give at most {longest}"
            )
    rows = {
        key: rows_of(getattr(recipe, key), key, recipe.seed, TASKS[recipe.task])
        for key in ("data", "eval_data")
        if getattr(recipe, key) is not None
    }
    use_cache = getattr(config, "use_cache", True)
    config.use_cache = False
    parts = Parts(recipe, config, tokenizer, min(longest or _LONGEST, _LONGEST), rows, use_cache)
    prepare_head(recipe, config, parts.padding)
    for key in rows:
        _try_rows(parts, key)
    return parts


def make_plugin(recipe: Recipe, parameters: int) -> HybridParallelPlugin:
    """The plugin of a recipe's layout for the ranks that there are."""
    given = layouts.arguments(recipe, dist.get_world_size(), parameters, _gpu_memory())
    checkpointing = given.get("gradient_checkpoint_config")
    if isinstance(checkpointing, dict):
        try:
            given["gradient_checkpoint_config"] = PipelineGradientCheckpointConfig(**checkpointing)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"layout.gradient_checkpoint_config: {first_line(error)}") from error
    try:
        return HybridParallelPlugin.from_config({}, **given)
    except ValueError as error:
        raise RecipeError(f"layout: {error}") from error


def make_optimizer(recipe: Recipe, model: Any) -> Any:
    """Over what is trained; biases and norms are not decayed."""
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trained if param.ndim > 1]
    rest = [param for param in trained if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    adam: dict[str, Any] = {"betas": (recipe.adam_beta1, recipe.adam_beta2), "eps": recipe.adam_epsilon}
    makers: dict[str, Callable[..., Any]] = {
        "adamw_torch": lambda lr: torch.optim.AdamW(groups, lr=lr, **adam),
        "adamw_torch_fused": lambda lr: torch.optim.AdamW(groups, lr=lr, fused=True, **adam),
        "hybrid_adam": lambda lr: HybridAdam(groups, lr=lr, **adam),
        "sgd": lambda lr: torch.optim.SGD(groups, lr=lr),
        # as transformers' Trainer has it: torch's takes `lr` relative to the size of weights
        "adafactor": lambda lr: transformers.Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False),
    }
    try:
        return makers[recipe.optim](lr=recipe.learning_rate)
    except ValueError as error:
        raise RecipeError(f"optim={recipe.optim}: {first_line(error)}") from error


def make_schedule(recipe: Recipe, optimizer: Any, total: int) -> Any:
    """How the learning rate goes over `total` steps."""
    try:
        return transformers.get_scheduler(
            recipe.lr_scheduler_type,
            optimizer,
            num_warmup_steps=_steps(recipe.warmup_steps, total),
            num_training_steps=total,
        )
    except ValueError as error:  # polynomial ends at 1e-7 and cannot begin below
        raise RecipeError(
            f"lr_scheduler_type={recipe.lr_scheduler_type} and learning_rate={recipe.learning_rate:g}: "
            f"{first_line(error)}"
        ) from error


def make_trainer(parts: Parts) -> tuple[Trainer, dict[str, Any]]:
    """The trainer of a recipe on the ranks that there are, and what listeners are told at the start."""
    recipe = parts.recipe
    model = build_model(recipe, parts.config)
    parameters = sum(param.numel() for param in model.parameters())
    plugin = make_plugin(recipe, parameters)
    booster = Booster(plugin=plugin, on_nan=recipe.on_nan)
    replicas, _ = plugin.data_parallel
    samples = layouts.samples_of_a_step(recipe)
    dataset = parts.dataset("data")
    streaming = isinstance(dataset, SampleStream)
    if isinstance(dataset, SampleStream):
        dataset.step = samples * replicas
    data: Any = plugin.prepare_dataloader(
        dataset if streaming else Evened(dataset, samples * replicas, parts.padding),
        batch_size=samples,
        shuffle=not streaming,
        seed=recipe.seed,
        drop_last=True,
        num_workers=recipe.dataloader_num_workers,
        collate_fn=parts.collate("data"),
        distributed_sampler_cls=None if streaming else EvenedSampler,
    )
    evaluation = held_out = None
    if "eval_data" in parts.rows:
        size = (recipe.per_device_eval_batch_size or recipe.per_device_train_batch_size) * (
            samples // recipe.per_device_train_batch_size
        )
        held_out = parts.dataset("eval_data")
        evaluation = plugin.prepare_dataloader(
            Evened(held_out, size * replicas, parts.padding), batch_size=size, collate_fn=parts.collate("eval_data")
        )
    total = recipe.max_steps if recipe.max_steps > 0 else math.ceil(recipe.num_train_epochs * len(data))
    optimizer = make_optimizer(recipe, model)
    schedule = make_schedule(recipe, optimizer, total)
    name = type(model).__name__
    model, optimizer, _, data, schedule = booster.boost(model, optimizer, None, data, schedule)
    directory = Path(recipe.output_dir)
    trainer = _trainer_of(recipe)(
        booster,
        model,
        optimizer,
        data,
        schedule,
        total_steps=total,
        directory=directory,
        evaluation=evaluation,
        evaluate=_every(recipe.eval_strategy, _steps(recipe.eval_steps or recipe.logging_steps, total)),
        save=_every(recipe.save_strategy, _steps(recipe.save_steps, total)),
        keep=recipe.save_total_limit,
        keep_best=recipe.keeps_best,
        patience=recipe.early_stopping_patience,
        must_match=parts.identity(dataset),
        listeners=_listeners(recipe, directory, total) if dist.get_rank() == 0 else (),
        timeline_steps=recipe.timeline_steps,
        profile_steps=recipe.profile_steps,
        rollbacks=recipe.rollbacks,
        spike_factor=recipe.spike_factor,
        on_save_error=recipe.on_save_error,
    )
    trainer.measured = held_out
    named = {} if recipe.run_name is None else {"run": recipe.run_name}
    return trainer, {**named, "model": name, "parameters": parameters, "layout": _describe(plugin, recipe)}


def _trainer_of(recipe: Recipe) -> type[Trainer]:
    if recipe.task == "causal-lm":
        return Trainer
    own: dict[str, type[Trainer]] = {"sequence-regression": Regression, "question-answering": Answering}
    if recipe.task in own:
        return own[recipe.task]
    return Classifier if TASKS[recipe.task].labelled else HeadTrainer


def _steps(given: float, total: int) -> int:
    """Steps as given, or that many of all."""
    return math.ceil(given * total) if given < 1 else int(given)


def _listeners(recipe: Recipe, directory: Path, total: int) -> list[Listener]:
    found: list[Listener] = [JsonLines(directory / "metrics.jsonl"), RunFacts(directory / "run.json")]
    found.append(Log(_steps(recipe.logging_steps, total)))
    config = to_plain(recipe)
    names = trackers.wanted(recipe.report_to)
    return found + [trackers.Tracker(name, recipe.run_name, directory, config) for name in names]


def _every(strategy: str, steps: int) -> Every:
    return Every(steps=steps if strategy == "steps" else None, epoch=strategy == "epoch")


def _try_rows(parts: Parts, key: str) -> None:
    """Encode the first rows, so that what is wrong with them is known now."""
    encoder = parts.encoder(key)
    learned = 0
    for number, row in zip(range(_TRIED), parts.rows[key], strict=False):
        try:
            learned += sum(sample.learned for sample in windows_of(encoder, row))
        except RecipeError as error:
            raise RecipeError(f"{key}: {placed(error, place_of(parts.rows[key], number))}") from None
    if not learned:
        raise RecipeError(
            f"{key}: nothing would be learned of its first rows: they are empty, have no answer of the assistant, or "
            f"their answers begin behind max_length={parts.max_length_of(key)}"
        )


def check_length(parts: Parts, needed: int) -> None:
    """RecipeError where there is nothing for a step of all ranks, which takes `needed` sequences."""
    dataset = parts.dataset("data")
    if not isinstance(dataset, SampleStream):
        if not len(dataset):
            raise RecipeError("data has no sequence of two tokens or more: there is nothing to learn")
        return
    found = sum(1 for _ in itertools.islice(dataset, needed))
    if found < needed:
        raise RecipeError(
            f"data is a stream of {counted(found, 'sequence')}, and a step of all ranks takes {needed}; give more "
            "data, or "
            "a smaller per_device_train_batch_size or gradient_accumulation_steps, or leave streaming out"
        )


def digest(items: Sequence[Mapping[str, torch.Tensor]]) -> str:
    """Of the numbers of some samples."""
    found = hashlib.blake2b(digest_size=8)
    for item in items:
        for name in sorted(item):
            found.update(item[name].numpy().tobytes())
    return found.hexdigest()


def _gpu_memory() -> int | None:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _describe(plugin: HybridParallelPlugin, recipe: Recipe) -> str:
    samples = layouts.samples_of_a_step(recipe) * plugin.data_parallel[0]
    return f"{counted(dist.get_world_size(), 'rank')}: {plugin.mesh}, {counted(samples, 'sample')} a step"
