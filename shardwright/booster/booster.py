"""The facade a training script talks to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..checkpoint.hf_import import LoadReport
from ..interface import LossGuard, ModelWrapper, OptimizerWrapper
from ..plugins.base import Boosted, Plugin, require_own_parameters, require_parameters, unwrapped
from ..plugins.first_step import FirstStep
from ..plugins.input_guard import CheckedBatches, InputGuard
from ..plugins.lora import add_lora, require_adapters, write_adapters
from ..utils.device import get_current_device
from .checkpoints import Checkpoints, StrPath
from .mixed_precision import AutocastModel, MixedPrecision, resolve


class Booster:
    """Lays training out over processes through a plugin; without one it trains on this process alone.

    plugin           how model, optimizer and data are distributed
    mixed_precision  "bf16", "fp16" or a `MixedPrecision`, for plugins that do not set the number format themselves
    device           where the model goes when there is no plugin; the current CUDA device or the CPU by default
    on_nan           what a loss that is nan or inf does: "warn" says so in the log, "skip" leaves the step out and "stop" raises
                     `shardwright.interface.NonFiniteLoss`, on all ranks
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: str | MixedPrecision | None = None,
        plugin: Plugin | None = None,
        on_nan: str = "warn",
    ) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise ValueError(f"plugin={plugin!r} is not a shardwright Plugin; for example shardwright.plugins.TorchDDPPlugin()")
        if plugin is not None and plugin.control_device() and device is not None:
            raise ValueError(f"device={str(device)!r} with {type(plugin).__name__}: the plugin places the model itself; leave device out")
        self.mixed_precision = resolve(mixed_precision)
        if plugin is not None and plugin.control_precision() and self.mixed_precision is not None:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} with {type(plugin).__name__}: the plugin sets the number format itself; "
                f"pass precision= to the plugin instead (one of {', '.join(map(repr, plugin.supported_precisions()))})"
            )
        self.plugin = plugin
        self.device = torch.device(device) if device is not None else None
        self.on_nan = LossGuard(on_nan).policy
        if plugin is not None and on_nan == "skip" and not plugin.support_skipped_steps():
            raise ValueError(f"on_nan='skip' with {type(plugin).__name__}: it clears gradients in its step only; use 'warn' or 'stop'")
        self._checkpoints = Checkpoints(plugin)

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable[..., Any] | None, DataLoader | None, Any]:
        """Wrap what is given; None stays None. The optimizer is built on the model's parameters before this call."""
        guard = InputGuard(model)
        if self.plugin is not None:
            self.plugin.check_dataloader(dataloader)
            boosted = self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)
        else:
            require_parameters(model)
            require_own_parameters(model, optimizer)
            model = ModelWrapper(model.to(self.device or get_current_device()))
            boosted = Boosted(model, OptimizerWrapper(optimizer) if optimizer is not None else None, criterion, dataloader, lr_scheduler)
        if self.mixed_precision is not None:
            model, wrapped, criterion = self.mixed_precision.configure(boosted.model, boosted.optimizer, boosted.criterion)
            boosted = boosted._replace(model=model, optimizer=wrapped, criterion=criterion)
        first_step = None
        if self.plugin is not None:
            boosted = boosted._replace(dataloader=self.plugin.shard_dataloader(boosted.dataloader))
            settings = {"mixed_precision": self.mixed_precision, "on_nan": self.on_nan}
            first_step = FirstStep(self.plugin, boosted.model, boosted.dataloader, settings)
        guard.attach(boosted.model, first_step)
        if boosted.optimizer is not None:
            boosted.optimizer.guard = LossGuard(self.on_nan)
        self._checkpoints.note(boosted.model, boosted.optimizer)
        return tuple(boosted)  # type: ignore[return-value]

    def backward(self, loss: torch.Tensor, optimizer: OptimizerWrapper) -> None:
        """Backward through the optimizer wrapper, which scales the loss where the number format needs it."""
        if not isinstance(optimizer, OptimizerWrapper):
            raise ValueError(f"backward needs the optimizer that boost returned, not a bare {type(optimizer).__name__}")
        optimizer.backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """One batch from `data_iter` through the pipeline: forward, and backward when an optimizer is given.

        Returns {"loss": tensor or None, "outputs": outputs or None}. The loss is that of the global batch and lives on the last stage.
        """
        if self.plugin is None:
            raise ValueError(
                "execute_pipeline without a plugin: use Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=1)), whose execute_pipeline "
                "works for every size, or write the step out: loss = criterion(model(**batch), batch); booster.backward(loss, optimizer)"
            )
        batches = CheckedBatches(data_iter, model, training=optimizer is not None and torch.is_grad_enabled())
        return self.plugin.execute_pipeline(batches, model, criterion, optimizer, return_loss, return_outputs)

    def enable_lora(self, model: nn.Module, pretrained_dir: str | None = None, lora_config: Any = None) -> nn.Module:
        """`model` with LoRA adapters, before `boost`: new ones by `lora_config` (a peft.LoraConfig), or those in `pretrained_dir`.

        The model's own weights are frozen: build the optimizer on the parameters of the result that require gradients.
        """
        if self.plugin is not None and not self.plugin.support_lora():
            raise ValueError(
                f"enable_lora: {type(self.plugin).__name__} cannot train adapters; use HybridParallelPlugin(tp_size=1, pp_size=1)"
            )
        return add_lora(model, pretrained_dir, lora_config)

    def save_lora_as_pretrained(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write the adapters of a boosted model as `peft.PeftModel.from_pretrained(base_model, path)` reads them. All ranks call it."""
        plain = unwrapped(_without_autocast(model))
        require_adapters(plain)
        state = self.plugin.adapter_state(_without_autocast(model)) if self.plugin is not None else plain.state_dict()
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_adapters(plain, state, path)
        if dist.is_initialized():
            dist.barrier()

    def no_sync(self, model: nn.Module | None = None, optimizer: OptimizerWrapper | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients locally inside the context; the first backward after it reduces the sum."""
        if self.plugin is None:
            return nullcontext()
        if not self.plugin.support_no_sync():
            raise ValueError(f"no_sync: {type(self.plugin).__name__} reduces gradients in every backward and accumulates the reduced ones")
        if model is None:
            raise ValueError("no_sync needs the model that boost returned: booster.no_sync(model, optimizer)")
        return self.plugin.no_sync(_without_autocast(model), optimizer)

    # Checkpoints. All ranks must call.

    def save(
        self,
        path: StrPath,
        model: nn.Module | None = None,
        optimizer: OptimizerWrapper | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        step: int | None = None,
        extra: dict[str, Any] | None = None,
        use_async: bool = False,
        keep_last: int | None = None,
    ) -> None:
        """One resumable directory: weights, fp32 masters, optimizer and scheduler state, loss scale, random generators, data position.

        It does not depend on the layout: `load` takes it at any number of ranks. Every rank writes what it owns; the directory appears
        under its name when it is complete.

        extra      plain data of your own (numbers, strings, lists, tuples, dicts)
        use_async  return once tensors are copied to host memory; errors of the writing are raised by the next call or by `wait`
        keep_last  keep this many of the newest checkpoints in the directory that `path` lies in, and remove older ones
        """
        self._checkpoints.save(path, model, optimizer, lr_scheduler, dataloader, step, extra, use_async, keep_last)

    def load(
        self,
        path_or_run_dir: StrPath,
        model: nn.Module | None = None,
        optimizer: OptimizerWrapper | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Resume from a checkpoint, or from a directory of checkpoints of which the newest whole one is taken.

        verify  compare checksums of all files before; False compares sizes only

        Returns {"step", "extra", "path" of the checkpoint taken, "skipped": why newer ones were not}.
        """
        return self._checkpoints.load(path_or_run_dir, model, optimizer, lr_scheduler, dataloader, verify)

    def wait(self) -> None:
        """Until the last asynchronous save is on disk; raises what went wrong there."""
        self._checkpoints.wait()

    def save_model(
        self,
        model: nn.Module,
        path: StrPath,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
    ) -> None:
        """The working weights as transformers stores them: `AutoModel...from_pretrained(path)` gives them back bit by bit.

        path            a directory, which also gets the configs; or with shard=False one file named *.safetensors
        shard           several files with an index, written by all ranks, instead of one file
        prefix          goes into the file names: what transformers calls the variant
        size_per_shard  megabytes of a file
        """
        self._checkpoints.save_model(model, path, shard, prefix, size_per_shard, use_safetensors, use_async)

    def load_model(self, model: nn.Module, path: StrPath, strict: bool = True) -> LoadReport:
        """Weights from a directory or file of safetensors, as transformers or `save_model` wrote it, or from a checkpoint of `save`.

        Every rank reads its own slices. The masters of the model's optimizer follow. With `strict`, names or shapes that differ raise
        CheckpointMismatch and change nothing; without, what fits is loaded. Returns `missing`, `unexpected` and `mismatched`.
        """
        return self._checkpoints.load_model(model, path, strict)

    def save_optimizer(
        self, optimizer: OptimizerWrapper, path: StrPath, shard: bool = False, size_per_shard: float = 1024, use_async: bool = False
    ) -> None:
        """Masters, states and hyperparameters, for `load_optimizer` at any layout.

        shard  whether ranks split what they write into files of at most `size_per_shard` megabytes
        """
        self._checkpoints.save_optimizer(optimizer, path, shard, size_per_shard, use_async)

    def load_optimizer(self, optimizer: OptimizerWrapper, path: StrPath) -> None:
        """Masters too, and with them the weights that they are the masters of: call it after `load_model`."""
        self._checkpoints.load_optimizer(optimizer, path)

    def save_lr_scheduler(self, lr_scheduler: Any, path: StrPath) -> None:
        self._checkpoints.save_lr_scheduler(lr_scheduler, path)

    def load_lr_scheduler(self, lr_scheduler: Any, path: StrPath) -> None:
        self._checkpoints.load_lr_scheduler(lr_scheduler, path)


def _without_autocast(model: nn.Module) -> nn.Module:
    """The plugin's own wrapper below what mixed precision put around it."""
    return model.module if isinstance(model, AutocastModel) else model
