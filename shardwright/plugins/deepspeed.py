"""Training through DeepSpeed with an existing ds_config, so that its users can come over one step at a time.

DeepSpeed is optional and imported only here. Nothing is compiled: an optimizer named in the config becomes torch's own
AdamW unless the config says otherwise (`"torch_adam": false`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.position import Position
from ..cluster import job
from ..interface import ModelWrapper, OptimizerWrapper
from ..utils.versions import is_installed
from .base import Plugin, require_process_group

_INSTALL = "pip install deepspeed"


class DeepSpeedModel(ModelWrapper):
    """Calls the DeepSpeed engine; `unwrap` gives the module inside."""

    def unwrap(self) -> nn.Module:
        inner: nn.Module = self.module.module  # type: ignore[assignment]
        return inner


class DeepSpeedOptimizer(OptimizerWrapper):
    """Backward and step are the engine's; param groups are those of the optimizer that the engine steps."""

    measures_before_step = False

    def __init__(self, engine: Any, optim: Optimizer) -> None:
        super().__init__(optim)
        self.engine = engine

    def backward(
        self, loss: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        if inputs is not None:
            raise ValueError(
                "backward(inputs=...) is not supported by DeepSpeedPlugin: its engine reduces the "
                "gradients of all parameters"
            )
        if self.engine.gradient_accumulation_steps() == 1:
            self.engine.set_gradient_accumulation_boundary(self.require_sync)
        if self.loss_guard is not None:
            self.loss_guard.note(loss)
        self.engine.backward(loss, retain_graph=retain_graph)

    def backward_by_grad(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grads: torch.Tensor | Sequence[torch.Tensor | None] | None,
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        raise ValueError(
            "backward_by_grad is not supported by DeepSpeedPlugin: backward must start at a loss; use "
            "HybridParallelPlugin for pipelines"
        )

    @job.heeds_failures
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step: with gradient_accumulation_steps > 1 in the config it acts on every so-manieth call
        only.
        """
        if closure is not None:
            return super().step(closure)
        if self.loss_guard is not None and self.loss_guard.withholds(self):
            return None
        self.engine.step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine clears gradients in its step."""

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        raise ValueError(
            f"clip_grad_by_norm({max_norm}): DeepSpeed clips in its step; set config['gradient_clipping'] = {max_norm}"
        )

    def clip_grad_by_value(self, clip_value: float) -> None:
        raise ValueError(
            "clip_grad_by_value is not supported by DeepSpeed; set config['gradient_clipping'] to clip by norm"
        )

    def get_grad_norm(self, norm_type: float = 2.0) -> float | None:
        """The 2-norm of the last step; None before the first, and at stage 0 in fp32, where DeepSpeed keeps none."""
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} must be 2.0: it is the only norm that DeepSpeed computes")
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)


class DeepSpeedPlugin(Plugin):
    """`config` is a ds_config: a dict or the path of a json file. ZeRO 0 to 3, offload and AutoTP (`tensor_parallel`)
    are its business.

    Changes made to the config, none of which changes the numbers:
    "auto"                       train_micro_batch_size_per_gpu and gradient_accumulation_steps become 1, other "auto"
                                 entries are left to DeepSpeed's defaults
    optimizer.params.torch_adam  true where the config does not say, so that no kernel is compiled
    zero_allow_untested_optimizer, zero_force_ds_cpu_optimizer
                                 any torch optimizer given to boost is accepted, also with offload
    steps_per_print              off where the config does not say

    Give either an "optimizer" in the config or one to boost. Several microbatches per step: `booster.no_sync` around
    all but the last backward, or DeepSpeed's own way with gradient_accumulation_steps in the config and one step() per
    backward.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path) -> None:
        require_process_group("DeepSpeedPlugin")
        self.config = _normalised(_read(config))
        self._deepspeed = _import_deepspeed()

    def supported_precisions(self) -> list[str]:
        return ["fp32", "fp16", "bf16"]

    def control_precision(self) -> bool:
        return True

    def support_skipped_steps(self) -> bool:
        return False

    @property
    def data_parallel(self) -> tuple[int, int]:
        size, rank = super().data_parallel
        tp = int(self.config.get("tensor_parallel", {}).get("autotp_size", 1) or 1)
        return size // tp, rank // tp

    @property
    def split(self) -> str:
        stage = int(self.config.get("zero_optimization", {}).get("stage", 0))
        if stage == 3:
            return "zero_optimization.stage=3"
        return "tensor_parallel" if self.data_parallel[0] != super().data_parallel[0] else ""

    def position(self, model: nn.Module | None = None) -> Position:
        if self.split:
            raise ValueError(
                "booster checkpoints with DeepSpeedPlugin at ZeRO stage 3 or with tensor_parallel: the engine cuts the "
                "parameters itself; use model.module.save_checkpoint(...) and load_checkpoint(...), or "
                "HybridParallelPlugin"
            )
        return super().position(model)

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().check(model, optimizer)
        if optimizer is not None and "optimizer" in self.config:
            raise ValueError("both boost(optimizer=...) and config['optimizer'] name an optimizer: give one of them")

    def lay_out(
        self, model: nn.Module, optimizer: Optimizer | None, checked: Any
    ) -> tuple[nn.Module, OptimizerWrapper | None]:
        engine, inner, _, _ = self._deepspeed.initialize(
            model=model,
            model_parameters=[param for param in model.parameters() if param.requires_grad],
            optimizer=optimizer,
            config=copy.deepcopy(self.config),
            dist_init_required=False,
        )
        stepped = optimizer if optimizer is not None else inner
        wrapped = DeepSpeedOptimizer(engine, stepped) if stepped is not None else None
        return DeepSpeedModel(engine), wrapped

    @contextmanager
    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper | None = None) -> Iterator[None]:
        if not isinstance(optimizer, DeepSpeedOptimizer):
            raise ValueError("no_sync needs the optimizer that boost returned: booster.no_sync(model, optimizer)")
        if optimizer.engine.gradient_accumulation_steps() > 1:
            raise ValueError(
                "no_sync with gradient_accumulation_steps > 1 in the config counts microbatches twice; set it to 1 or "
                "leave no_sync out"
            )
        before, optimizer.require_sync = optimizer.require_sync, False
        try:
            yield
        finally:
            optimizer.require_sync = before


def _import_deepspeed() -> Any:
    if not is_installed("deepspeed"):
        raise ValueError(
            f"DeepSpeedPlugin needs deepspeed, which is not installed: {_INSTALL}, or use LowLevelZeroPlugin"
        )
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            f"DeepSpeedPlugin needs deepspeed, which cannot be imported ({error}): {_INSTALL}, or use "
            "LowLevelZeroPlugin"
        ) from error
    # On CPU its communication layer would compile a shared-memory all-reduce; the process group that exists does the
    # same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _read(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, str | Path):
        raise ValueError(f"config={config!r} must be a ds_config: a dict, or the path of its json file")
    path = Path(config)
    if not path.is_file():
        raise ValueError(f"config={str(config)!r} is no file; give a ds_config as a dict or the path of its json file")
    try:
        loaded = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"config={str(config)!r} is not valid json: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"config={str(config)!r} holds a {type(loaded).__name__}, a ds_config is an object")
    return loaded


def _normalised(config: dict[str, Any]) -> dict[str, Any]:
    for key in ("optimizer", "tensor_parallel", "zero_optimization", "bf16", "fp16", "scheduler"):
        if key in config and not isinstance(config[key], dict):
            raise ValueError(
                f"config[{key!r}]={config[key]!r} must be a table, as in DeepSpeed's documentation; or leave it out"
            )
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if config.get(key) == "auto":
            config[key] = 1
    config = _without_auto(config)
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    config.setdefault("steps_per_print", 10**9)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    if str(config.get("optimizer", {}).get("type", "")).lower() in ("adam", "adamw"):
        config["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)
    return config


def _without_auto(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(item) if isinstance(item, dict) else item for key, item in value.items() if item != "auto"
    }
