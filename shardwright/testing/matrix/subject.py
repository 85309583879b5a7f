"""A class of transformers as a tiny model with a batch that one process can train."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...models.config import parts
from ...models.dry_run import call_model
from ...models.example_inputs import has_loss, loss_of, training_batches
from ...shardformer.small_copy import build_small
from ...utils.tensors import map_tensors
from .. import zoo
from ..exact import keep_float64
from ..rank_process import load_module
from .modalities import CONFIGS, OF_CLASS
from .sizes import sizes_of

Batch = dict[str, Any]
LARGEST = 20_000_000  # parameters
_PERTURBATION = 0.02
_IGNORE = -100
_SEEDS = (2, 3)  # of the halves of a batch
_LABELS = 5


class NotBuilt(Exception):
    """No tiny model of the class, or no batch that one process can train it on; the text says why."""


@dataclass(frozen=True)
class Subject:
    """What a row is about; small, so that it can be sent to rank processes.

    model_class     name of a class in `module`, or of a function in it that returns a model and a batch
    file            where the module is, for one that is not on the path
    settings        of its config, over the tiny ones
    config          directory or name on the hub of a config to make small, in place of a tiny one
    """

    model_class: str
    module: str = "transformers"
    file: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""

    @staticmethod
    def of(make: Callable[[], tuple[nn.Module, Batch]]) -> Subject:
        """`make` stands at the top level of a file; it returns a tiny model and a batch of a few samples, always the
        same ones.
        """
        module = sys.modules[make.__module__]
        return Subject(make.__name__, make.__module__, getattr(module, "__file__", None))

    def native(self) -> Any:
        load_module(self.module, self.file)
        return getattr(sys.modules[self.module], self.model_class)


@dataclass
class Built:
    """
    model       in float64, in training mode where that is not random; nothing is changed in it
    batch       four samples of different lengths and numbers of labels
    later       a batch for another step: where the model takes it, the samples in another order, without a last word
    own_loss    whether the model computes its loss itself
    separable   whether samples can be computed apart from each other
    given       whether the batch is a user's, which layouts are told as example_inputs
    """

    model: nn.Module
    batch: Batch
    later: Batch
    own_loss: bool
    separable: bool
    given: bool = False

    @property
    def rows(self) -> int:
        """Samples, 0 where not all tensors of the batch have one row for each."""
        return _rows(self.batch)

    def criterion(self, outputs: Any, inputs: Any = None) -> torch.Tensor:
        return loss_of(outputs) if self.own_loss else sample_mean(outputs)


def build(subject: Subject) -> Built:
    """Equal in every process. Raises NotBuilt."""
    native = subject.native()
    if not inspect.isclass(native):
        return _given(native)
    failures: dict[str, None] = {}
    best: Built | None = None
    with keep_float64(), torch.random.fork_rng(devices=[]):
        for make in _makers(subject):
            try:
                model = make()
            except Exception as error:  # whatever a constructor makes of an unusual config
                failures[_line(error)] = None
                continue
            for batch in _batches(subject, model):
                try:
                    built = _try(model, batch)
                except Exception as error:  # the model's own code, on a batch that was guessed
                    failures[_line(error)] = None
                    continue
                if built.own_loss:
                    return built
                best = best or built
            if best is not None:
                return best
    raise NotBuilt("; ".join(list(failures)[:3]) or "no tiny config and no batch is known")


def _given(make: Callable[[], tuple[nn.Module, Batch]]) -> Built:
    """What a function of a user returns, in float64."""
    with keep_float64(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = make()
        model = model.double()
        batch = map_tensors(lambda one: one.double() if one.is_floating_point() else one, batch)
        try:
            return replace(_try(model, batch), given=True)
        except Exception as error:
            raise NotBuilt(_line(error)) from error


# --- models ---


def _makers(subject: Subject) -> Iterator[Any]:
    """Functions that make the model, the one with the best known sizes first."""
    native = subject.native()
    if subject.config:
        transformers: Any = importlib.import_module("transformers")
        yield lambda: _made_small(native, transformers.AutoConfig.from_pretrained(subject.config))
        return
    found = next((name for name, entry in zoo.ENTRIES.items() if entry.model_class == subject.model_class), None)
    if found is not None:
        yield lambda: _finish(native, zoo.config(found, **subject.settings))
    config_class = native.config_class
    known = CONFIGS.get(config_class.__name__)
    if known is not None:
        own = copy.deepcopy(known | OF_CLASS.get(subject.model_class, {}))
        yield lambda: _finish(native, config_class(**{**own, **subject.settings}))
    yield lambda: _finish(native, config_class(**{**sizes_of(config_class), **subject.settings}))
    yield lambda: _made_small(native, config_class(**subject.settings))


def _finish(native: Any, config: Any) -> nn.Module:
    """The model in float64 and training mode without dropout, every parameter away from the zero or one that it was
    initialised with.
    """
    prepare_config(native, config)
    with torch.device("meta"):
        size = sum(param.numel() for param in native(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise NotBuilt(f"{size} parameters: a size that the tiny config does not know")
    torch.manual_seed(0)
    return _away_from_start(native(config).float())


def _made_small(native: Any, config: Any) -> nn.Module:
    prepare_config(native, config)
    with torch.device("meta"):
        size = sum(param.numel() for param in native(copy.deepcopy(config)).parameters())
    model = build_small(native, config, size, 2)
    if model is None:
        raise NotBuilt(f"{size} parameters, and no smaller model can be made of its config")
    return _away_from_start(model)


def _away_from_start(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn(param.shape), alpha=_PERTURBATION)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double().train()


def prepare_config(native: Any, config: Any) -> None:
    """What the head needs; nothing random."""
    name = native.__name__
    config.num_labels = 2 if "QuestionAnswering" in name else _LABELS
    decodes = name.endswith(("ForCausalLM", "LMHeadModel", "ModelWithLMHead")) or "DecoderFor" in name
    if decodes and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    if "MaskedLM" in name and getattr(config, "is_decoder", None) is True:
        config.is_decoder = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
    for part in parts(config):
        part._experts_implementation = "eager"  # the grouped kernels have no double precision
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in key or key in ("mask_time_prob", "mask_feature_prob")):
                setattr(part, key, 0.0)


# --- batches ---


def _batches(subject: Subject, model: nn.Module) -> Iterator[Batch]:
    """Four samples each, the fullest batch first."""
    with contextlib.suppress(ValueError):  # no class of the zoo
        yield zoo.inputs(model)
    for halves in zip(*(training_batches(model, seed) for seed in _SEEDS), strict=True):
        yield joined(*halves)


def joined(first: Batch, second: Batch) -> Batch:
    """Both one after the other, the second with shorter sequences and fewer labels."""
    second = dict(second)
    mask: Any = second.get("attention_mask")
    labels: Any = second.get("labels")
    ids = second.get("input_ids")
    is_ragged = isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor) and mask.shape == ids.shape
    if is_ragged and (mask == 0).any():
        second["attention_mask"] = mask.clone()
        second["attention_mask"][0, -5:] = 0
    is_rows = isinstance(labels, torch.Tensor) and labels.dim() == 2 and len(labels) > 1
    if is_rows and (labels == _IGNORE).any():
        second["labels"] = labels.clone()
        second["labels"][0, -5:] = second["labels"][1:2, : labels.shape[1] // 2] = _IGNORE

    def both(key: str) -> Any:
        one, other = first[key], second[key]
        is_row = key.startswith("pixel_values") and isinstance(ids, torch.Tensor) and len(one) == 1 < len(ids)
        return torch.cat([one, other], -1 if is_row else 0) if isinstance(one, torch.Tensor) else one

    return {key: both(key) for key in first if key in second}


# --- one process ---


def _try(model: nn.Module, batch: Batch) -> Built:
    """Raises where one process cannot train the model on the batch, or finds other numbers the second time."""

    def loss(mode: bool, seed: int) -> tuple[torch.Tensor, Any]:
        tried = copy.deepcopy(model).train(mode)
        torch.manual_seed(seed)
        outputs = call_model(tried, batch)
        found = loss_of(outputs) if has_loss(outputs) else sample_mean(outputs)
        found.backward()
        reached = sum(param.numel() for param in tried.parameters() if param.grad is not None)
        if not torch.isfinite(found):
            raise NotBuilt("the loss is not finite")
        if 2 * reached < sum(param.numel() for param in tried.parameters()):
            raise NotBuilt("the loss depends on less than half of the parameters")
        return found.detach(), outputs

    for mode in (True, False):
        first, outputs = loss(mode, 7)
        if torch.equal(first, loss(mode, 11)[0]):
            break
    else:
        raise NotBuilt("two runs of one process differ")
    model.train(mode)
    return Built(model, batch, _later(model, batch), has_loss(outputs), _is_separable(model, batch, outputs))


def _later(model: nn.Module, batch: Batch) -> Batch:
    """The first of what another batch may be that the model takes."""
    for other in _others(batch):
        with contextlib.suppress(Exception):  # of the model's own code, on a batch that was guessed
            outputs = call_model(copy.deepcopy(model), other)
            if torch.isfinite(loss_of(outputs) if has_loss(outputs) else sample_mean(outputs)):
                return other
    return batch


def _others(batch: Batch) -> Iterator[Batch]:
    if not _rows(batch):
        return
    turned = {key: value.flip(0) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    ids: Any = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] > 2:

        def shorter(value: Any) -> Any:
            fits = isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape
            return value[:, :-1] if fits else value

        yield {key: shorter(value) for key, value in turned.items()}
    yield turned


def _rows(batch: Batch) -> int:
    rows = {len(value) if value.ndim else 0 for value in batch.values() if isinstance(value, torch.Tensor)}
    return rows.pop() if len(rows) == 1 else 0


def _is_separable(model: nn.Module, batch: Batch, outputs: Any) -> bool:
    """Whether every half of the samples has the outputs that it has in the whole batch. Experts with a capacity and
    losses over pairs of samples look at all.
    """
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    half = _rows(batch) // 2
    if not half:
        return False
    model = copy.deepcopy(model)  # which may keep a state
    found = []
    for part in (slice(0, half), slice(half, None)):
        try:
            torch.manual_seed(7)
            found.append(call_model(model, {**batch, **{key: value[part] for key, value in tensors.items()}}))
        except Exception:  # of what cannot be cut
            return False
    for whole, one, other in zip(*map(_sample_tensors, (outputs, *found)), strict=False):
        if whole.shape[0] != len(one) + len(other) or whole.shape[1:] != one.shape[1:]:
            return False
        if not torch.allclose(whole, torch.cat([one, other])):
            return False
    return True


def _sample_tensors(outputs: Any) -> list[torch.Tensor]:
    """Floating point tensors of the outputs that have a row for every sample, without the loss."""
    items = dict(outputs) if isinstance(outputs, Mapping) else dict(enumerate(outputs))
    of_backbone = items.get("feature_maps") or ()
    maps = {f"feature_maps.{place}": value for place, value in enumerate(of_backbone)}
    return [
        value
        for key, value in (items | maps).items()
        if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point() and key != "past_key_values"
    ]


def sample_mean(outputs: Any) -> torch.Tensor:
    """For models without a loss of their own: a mean over samples, in which every element of a sample has a weight of
    its own.
    """
    if isinstance(outputs, torch.Tensor):
        outputs = (outputs,)
    found = _sample_tensors(outputs)
    if not found:
        raise NotBuilt("its outputs hold no tensor")
    total = torch.zeros((), dtype=found[0].dtype)
    for tensor in found:
        weights = torch.arange(tensor[0].numel(), dtype=torch.float64).mul_(0.7).cos_().view(tensor.shape[1:])
        total = total + (tensor * weights.to(tensor.dtype)).mean() + tensor.square().mean()
    return total


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
