"""Uses of a model other than plain training steps, each against the same in one process."""

from __future__ import annotations

import copy
import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...lazy import LazyInitContext
from ...models.example_inputs import takes_more_than_text
from .axes import Axis
from .emulated_xformers import emulated_xformers
from .side import Side
from .sizes import PLACES
from .subject import Built
from .train import Result, train

_WITHOUT_EFFECT = "dt_proj"
_READ_BY_KERNELS = ["out_proj", "conv1d", _WITHOUT_EFFECT]  # peft refuses the first two


def xformers(built: Built, axis: Axis) -> Result:
    """Training with `attention_backend="xformers"`, whose kernel an emulation takes the place of."""
    with emulated_xformers():
        return train(built, axis) | {"note": "its kernel emulated: what is handed to it is compared, not the kernel"}


def lora(built: Built, axis: Axis) -> Result:
    """Training of adapters on all linears of which A and B are random; those of experts' blocks are left out, and those
    that peft refuses.
    """
    side = Side(axis, copy.deepcopy(built.model), built)
    outside = _outside_of_experts(built.model)
    names = [name for name in outside if name.rpartition(".")[2] != _WITHOUT_EFFECT]
    side.note = "adapters on linears outside of experts' blocks" if names else ""
    side.note += " but dt_proj, whose weight the model reads past them" if len(names) < len(outside) else ""
    try:
        _add_adapters(side, names)
    except ValueError as error:
        if "exclude_modules" not in str(error):
            raise
        side.model = copy.deepcopy(built.model)
        _add_adapters(side, names, exclude_modules=_READ_BY_KERNELS)
        side.note = "adapters on linears but out_proj and dt_proj, whose weights the model reads past them"
    side.model.double()  # adapters come in single precision
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # B starts at zero, and then A has no gradient
        for param in side.model.parameters():
            if param.requires_grad:
                param.copy_(0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    side.model.train(built.model.training)
    reference = copy.deepcopy(side.model)
    side.boost()
    return train(built, axis, reference, side)


def _add_adapters(side: Side, names: list[str], **options: Any) -> None:
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=names or "all-linear", lora_dropout=0.0, **options)
    side.model = side.booster.enable_lora(side.model, lora_config=config)


def _outside_of_experts(model: Any) -> list[str]:
    """Names of linears that are named otherwise than what stands in experts' blocks; none where the model has no
    experts. Those of experts and routers are one parameter, which needs adapters on the whole of it.
    """
    blocks = [name.rpartition(".")[0] for name, module in model.named_modules() if "Expert" in type(module).__name__]
    if not blocks:
        return []
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inside = {
        part for name, _ in model.named_parameters() if name.startswith(tuple(blocks)) for part in name.split(".")
    }
    outside = {part for block in blocks for part in block.split(".")}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name.rpartition(".")[2] not in inside - outside
    ]


def lazy(built: Built, axis: Axis) -> Result:
    """Files of transformers, read lazily by every rank, then trained."""
    with _shared_folder() as folder:
        if dist.get_rank() == 0:
            copy.deepcopy(built.model).save_pretrained(folder)  # type: ignore[operator]
        dist.barrier()
        with LazyInitContext():
            model = _read(built, folder)
        side = Side(axis, model, built)
        side.boost()
        side.model.train(built.model.training)
        # Constants that no file has are computed in the dtype that is read.
        return train(built, axis, _read(built, folder).train(built.model.training), side)


def _read(built: Built, folder: Path) -> Any:
    model: Any = type(built.model).from_pretrained(folder, dtype=torch.float64)  # type: ignore[attr-defined]
    _settle(model.double(), built)  # tables of positions, too
    return model


def _settle(model: nn.Module, built: Built) -> None:
    """What files of weights do not say."""
    for module, own in zip(model.modules(), built.model.modules(), strict=True):
        if isinstance(own, nn.Dropout):
            module.p = own.p  # type: ignore[assignment]
        config: Any = getattr(module, "config", None)
        known: Any = getattr(own, "config", None)
        if config is not None and hasattr(known, "_experts_implementation"):
            config._experts_implementation = known._experts_implementation


def round_trip(built: Built, axis: Axis) -> Result:
    """Saved by the ranks, read by transformers: every weight is what it was."""
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


def generate(built: Built, axis: Axis) -> Result:
    """Greedy words of the ranks and of one process."""
    side = Side(axis, copy.deepcopy(built.model), built)
    side.boost()
    plain: Any = copy.deepcopy(built.model).eval()
    side.model.eval()
    asked = {key: value for key, value in built.batch.items() if not key.startswith(("labels", "decoder_", "mc_"))}
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "num_beams": 1}
    if takes_more_than_text(plain, asked):  # a word that stands for an image has none to stand for
        options["suppress_tokens"] = [*PLACES]
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
