"""One cell on the ranks of a world: the model on its layout against the same model in this process."""

from __future__ import annotations

import copy
import importlib
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...booster import Booster
from ...lazy import LazyInitContext
from ...models.dry_run import call_model
from ...ops import layer_graphs
from ...plugins import HybridParallelPlugin
from ...shardformer.policies.auto import has_policy
from ...spec import get_spec
from ..compare import TOLERANCES, compare_models
from ..exact import keep_float64
from ..train import adamw
from .axes import Axis, not_applicable
from .subject import Built

TOLERANCE = 1e-8  # of float64; some models cast to single precision in ways that keep_float64 does not see
_VOCABULARY_MULTIPLE = 8
_WHOLE_FROM = 0.01  # share of the parameters from which a part that is not sharded is named
_PACKAGE = str(Path(__file__).parents[2])
Result = dict[str, Any]


def run_cell(built: Built, axis: Axis) -> Result:
    """`outcome` and what belongs to it. Raises what the model or the layout raises, other than wrong numbers."""
    reason = not_applicable(axis, built.model)
    if reason:
        return {"outcome": "not applicable", "why": reason}
    layer_graphs.backend = "aot_eager"  # code that inductor makes takes a minute to compile, and is not what is tried
    with keep_float64():
        return KINDS[axis.kind](built, axis)


def is_refusal(error: BaseException) -> bool:
    """Whether it is a ValueError that this package raised itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and frames[-1].filename.startswith(_PACKAGE)


class Side:
    """The boosted model and its plugin."""

    def __init__(self, axis: Axis, model: nn.Module, built: Built) -> None:
        settings = {
            "precision": "fp32",
            "make_vocab_size_divisible_by": _VOCABULARY_MULTIPLE,
            **axis.plugin,
            **({"example_inputs": built.batch} if built.given else {}),
            **({"custom_policy": "auto"} if built.given and not has_policy(model) else {}),
        }
        if settings.get("pp_size", 1) > 1 and not built.separable:
            settings["num_microbatches"] = 1
        self.built = built
        self.plugin = HybridParallelPlugin(**settings)
        self.booster = Booster(plugin=self.plugin)
        self.model: Any = model
        self.optimizer: Any = None

    def boost(self) -> None:
        self.model, self.optimizer, *_ = self.booster.boost(self.model, adamw(_trained(self.model)))

    def backward(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """The loss, None on stages that do not have it."""
        torch.manual_seed(7)
        if self.plugin.mesh.size("pp") > 1:
            criterion: Any = None if self.built.own_loss else self.built.criterion
            found = self.booster.execute_pipeline(iter([batch]), self.model, criterion, self.optimizer)
            loss: torch.Tensor | None = found["loss"]
            return loss
        loss = self.built.criterion(call_model(self.model, batch))
        self.booster.backward(loss, self.optimizer)
        return loss.detach()


def train(built: Built, axis: Axis, reference: nn.Module | None = None, side: Side | None = None) -> Result:
    """One step on both sides: loss, every gradient, every weight after it."""
    dtype = getattr(torch, axis.dtype)
    plain: Any = (copy.deepcopy(built.model) if reference is None else reference).to(dtype)
    batch = {key: _of(value, dtype) for key, value in built.batch.items()}
    if side is None:
        side = Side(axis, copy.deepcopy(built.model).to(dtype), built)
        side.boost()
    result = {**(_shares(side.model) if axis.name == "tp2" else {}), **_says_microbatches(side)}
    try:
        loss = side.backward(batch)
    except ValueError as error:
        if "counts positions by the mask" not in str(error):
            raise
        # Both sides are told the positions that the model would count.
        batch = {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}
        loss = side.backward(batch)
    torch.manual_seed(7)
    expected = built.criterion(call_model(plain, batch))
    expected.backward()
    losses = None if loss is None else (expected.detach().reshape(1), loss.reshape(1))
    tolerance = TOLERANCE if dtype is torch.float64 else TOLERANCES[dtype]
    coordinate = side.plugin.mesh.coordinate
    report = compare_models(
        plain,
        side.model,
        coordinate=coordinate,
        losses=losses,
        gradients=side.optimizer.gradients(),
        weights=False,
        tolerance=tolerance,
        check=False,
    )
    wrong = _problem(report.check)
    side.optimizer.step()
    adamw(_trained(plain)).step()
    after = compare_models(plain, side.model, coordinate=coordinate, gradients=False, tolerance=tolerance, check=False)
    wrong = wrong or _problem(after.check) or _missing(plain, report.held)
    return {"outcome": "wrong", "why": wrong, **result} if wrong else {"outcome": "verified", **result}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _problem(check: Callable[[], Any]) -> str:
    try:
        check()
    except AssertionError as error:
        return " ".join(str(error).split())[:400]
    return ""


def _missing(plain: nn.Module, held: set[str]) -> str:
    """Names that no rank has. Collective."""
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    missing = {name for name, _ in plain.named_parameters(remove_duplicate=False)}.difference(*everywhere)
    return f"held by no rank: {', '.join(sorted(missing))[:300]}" if missing else ""


def _of(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _says_microbatches(side: Side) -> Result:
    return {} if side.built.separable or side.plugin.mesh.size("pp") == 1 else {"note": "one microbatch"}


def _shares(model: Any) -> Result:
    """Of the parameters here, how many are sharded, and which parts are not."""
    sizes: Counter[str] = Counter()
    total = 0
    for name, param in model.unwrap().named_parameters():
        spec = get_spec(param)
        size = param.numel() if spec is None else torch.Size(spec.full_shape).numel()
        total += size
        if spec is None or not spec.is_sharded:
            sizes[re.sub(r"\b\d+\b", "*", name)] += size
    if not total:
        return {}
    whole = [name for name, size in sizes.most_common() if size >= _WHOLE_FROM * total]
    return {"share": round(1 - sum(sizes.values()) / total, 3), "whole": whole[:8]}


# --- other uses ---


def _lora(built: Built, axis: Axis) -> Result:
    peft: Any = importlib.import_module("peft")
    side = Side(axis, copy.deepcopy(built.model), built)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", lora_dropout=0.0)
    side.model = side.booster.enable_lora(side.model, lora_config=config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # B starts at zero, and then A has no gradient
        for param in side.model.parameters():
            if param.requires_grad:
                param.copy_(0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    side.model.train(built.model.training)
    reference = copy.deepcopy(side.model)
    side.boost()
    return train(built, axis, reference, side)


def _lazy(built: Built, axis: Axis) -> Result:
    """Files of transformers, read lazily by every rank, then trained."""
    with _shared_folder() as folder:
        if dist.get_rank() == 0:
            copy.deepcopy(built.model).save_pretrained(folder)  # type: ignore[operator]
        dist.barrier()
        with LazyInitContext():
            model: Any = type(built.model).from_pretrained(folder, dtype=torch.float64)  # type: ignore[attr-defined]
        _settle(model.double(), built)  # tables of positions, too
        side = Side(axis, model, built)
        side.boost()
        side.model.train(built.model.training)
        return train(built, axis, None, side)


def _settle(model: nn.Module, built: Built) -> None:
    """What files of weights do not say."""
    for module, own in zip(model.modules(), built.model.modules(), strict=True):
        if isinstance(own, nn.Dropout):
            module.p = own.p  # type: ignore[assignment]
        config: Any = getattr(module, "config", None)
        known: Any = getattr(own, "config", None)
        if config is not None and hasattr(known, "_experts_implementation"):
            config._experts_implementation = known._experts_implementation


def _round_trip(built: Built, axis: Axis) -> Result:
    side = Side(axis, copy.deepcopy(built.model), built)
    side.boost()
    with _shared_folder() as folder:
        side.booster.save_model(side.model, folder / "model", shard=True, size_per_shard=1)
        dist.barrier()
        back = type(built.model).from_pretrained(folder / "model", dtype=torch.float64)  # type: ignore[attr-defined]
    found = dict(back.named_parameters(remove_duplicate=False))
    wrong = [
        name
        for name, param in built.model.named_parameters(remove_duplicate=False)
        if name not in found or not torch.equal(param, found[name])
    ]
    return {"outcome": "wrong", "why": f"other weights: {', '.join(wrong)[:300]}"} if wrong else {"outcome": "verified"}


def _generate(built: Built, axis: Axis) -> Result:
    side = Side(axis, copy.deepcopy(built.model), built)
    side.boost()
    plain: Any = copy.deepcopy(built.model).eval()
    side.model.eval()
    asked = {key: value for key, value in built.batch.items() if not key.startswith(("labels", "decoder_", "mc_"))}
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 1}
    expected = plain.generate(**asked, **options)
    found = side.model.generate(**asked, **options)
    if torch.equal(expected, found):
        return {"outcome": "verified"}
    return {"outcome": "wrong", "why": f"one process generates {expected.tolist()[0]}, the ranks {found.tolist()[0]}"}


class _shared_folder:
    """A temporary folder that all ranks know. Collective."""

    def __enter__(self) -> Path:
        names = [tempfile.mkdtemp(prefix="shardwright-matrix-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(names)
        self._folder = Path(names[0])
        return self._folder

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


KINDS: dict[str, Callable[[Built, Axis], Result]] = {
    "train": train,
    "lora": _lora,
    "lazy": _lazy,
    "round_trip": _round_trip,
    "generate": _generate,
}
