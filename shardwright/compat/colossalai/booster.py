"""`Booster` with the arguments of Colossal-AI's, and files where its scripts look for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...booster import Booster as NativeBooster
from ...checkpoint.hf_import import LoadReport
from ...interface import OptimizerWrapper
from ...plugins.without_effect import warn_once
from ...utils.arguments import explained

StrPath = str | os.PathLike[str]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class Booster(NativeBooster):
    """Checkpoints are written as safetensors whatever `use_safetensors` says, since pickles run code when they are
    read: a model that a script saves as model.pt is in model.safetensors, where `load_model("model.pt")` finds it.
    """

    @explained({})
    def save_model(  # type: ignore[override]
        self,
        model: nn.Module,
        checkpoint: StrPath,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        _require_whole(gather_dtensor)
        path = checkpoint if shard else _as_safetensors(checkpoint)
        if not use_safetensors:
            self._say(f"save_model writes safetensors files, no pickles: {path}")
        super().save_model(model, path, shard=shard, prefix=prefix, size_per_shard=size_per_shard, use_async=use_async)

    @explained({})
    def load_model(  # type: ignore[override]
        self,
        model: nn.Module,
        checkpoint: StrPath,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> LoadReport:
        self._say_unused(low_cpu_mem_mode, num_threads)
        path = _as_safetensors(checkpoint)
        if path != Path(checkpoint) and Path(checkpoint).is_file() and not path.exists():
            raise ValueError(
                f"checkpoint={os.fspath(checkpoint)!r} is a pickle, which is not read here because pickles run code: "
                "convert it where it comes from, with safetensors.torch.save_file(torch.load(path, weights_only=True), "
                f"{path.name!r})"
            )
        return super().load_model(model, path, strict)

    @explained({})
    def save_optimizer(  # type: ignore[override]
        self,
        optimizer: OptimizerWrapper,
        checkpoint: StrPath,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        _require_whole(gather_dtensor)
        if prefix is not None:
            raise ValueError(
                f"prefix={prefix!r}: files of optimizers have fixed names here; choose a checkpoint= of its own"
            )
        super().save_optimizer(optimizer, checkpoint, shard=shard, size_per_shard=size_per_shard, use_async=use_async)

    @explained({})
    def load_optimizer(  # type: ignore[override]
        self, optimizer: OptimizerWrapper, checkpoint: StrPath, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        self._say_unused(low_cpu_mem_mode, num_threads)
        super().load_optimizer(optimizer, checkpoint)

    @explained({})
    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:  # type: ignore[override]
        super().save_lr_scheduler(lr_scheduler, checkpoint)

    @explained({})
    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:  # type: ignore[override]
        super().load_lr_scheduler(lr_scheduler, checkpoint)

    @explained({})
    def enable_lora(  # type: ignore[override]
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        if quantize or bnb_quantization_config is not None:
            raise ValueError(
                f"quantize={quantize!r}, bnb_quantization_config={bnb_quantization_config!r}: quantised base models "
                "are not offered; leave both out and train adapters in bf16"
            )
        return super().enable_lora(model, pretrained_dir, lora_config)

    @explained({})
    def save_lora_as_pretrained(  # type: ignore[override]
        self, model: nn.Module, checkpoint: StrPath, use_safetensors: bool = False
    ) -> None:
        if not use_safetensors:
            self._say(f"save_lora_as_pretrained writes safetensors files, no pickles: {checkpoint}")
        super().save_lora_as_pretrained(model, checkpoint)

    def _say_unused(self, low_cpu_mem_mode: bool, num_threads: int) -> None:
        unused = [
            *([] if low_cpu_mem_mode else ["low_cpu_mem_mode=False"]),
            *([] if num_threads == 1 else [f"num_threads={num_threads}"]),
        ]
        if unused:
            self._say(f"without effect here: {', '.join(unused)} (every rank reads its own slices)")

    @staticmethod
    def _say(text: str, ranks: Sequence[int] = (0,)) -> None:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() in ranks:
            warn_once(text)


def _require_whole(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        raise ValueError(
            "gather_dtensor=False: files are whole under every layout; leave it True (every rank writes its own part "
            "of them), or use booster.save(path, model=model, optimizer=optimizer)"
        )


def _as_safetensors(checkpoint: StrPath) -> Path:
    """The path itself, but for names of pickles."""
    path = Path(checkpoint)
    return path.with_suffix(".safetensors") if path.suffix in _PICKLES else path
