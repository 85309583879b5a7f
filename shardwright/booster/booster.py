"""The facade a training script talks to."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..checkpoint.hf_import import LoadReport
from ..checkpoint.roll_call import roll_call
from ..cluster import job
from ..interface import LossGuard, ModelWrapper, OptimizerWrapper
from ..interface.model import is_guarded
from ..logging import get_dist_logger
from ..plugins.base import Boosted, Plugin, require_own_parameters, require_parameters, unwrapped
from ..plugins.data.first_step import FirstStep
from ..plugins.data.input_guard import CheckedBatches, InputGuard
from ..plugins.lora import add_lora, require_adapters, write_adapters
from ..plugins.memory_table import tell_of
from ..plugins.registry import make_plugin
from ..plugins.replica_check import ReplicaCheck
from ..plugins.without_effect import warn_once
from ..utils.arguments import ExplainedArguments, explained
from ..utils.device import get_current_device
from ..utils.errors import nearest
from ..utils.labels import labelled
from . import own_steps
from .anomaly import Namer, require_nameable
from .checkpoints import Checkpoints, StrPath
from .mixed_precision import AutocastModel, MixedPrecision, resolve
from .profile import Profile
from .whole_model import Counts, WholeModel

# What scripts of other frameworks call or pass here, and what to write instead.
_METHODS = {
    "prepare": "booster.boost(model, optimizer, criterion, dataloader, lr_scheduler)",
    "initialize": "booster.boost(model, optimizer, criterion, dataloader, lr_scheduler)",
    "step": "optimizer.step(), of the optimizer that boost returned",
    "zero_grad": "optimizer.zero_grad(), of the optimizer that boost returned",
    "clip_grad_norm_": "optimizer.clip_grad_by_norm(max_norm), of the optimizer that boost returned, or max_norm= of "
    "the plugin",
    "clip_grad_value_": "optimizer.clip_grad_by_value(value), of the optimizer that boost returned",
    "accumulate": "booster.no_sync(model, optimizer) around all but the last backward",
    "unwrap_model": "model.unwrap()",
    "save_state": "booster.save(path, model=model, optimizer=optimizer)",
    "load_state": "booster.load(path, model=model, optimizer=optimizer)",
    "save_checkpoint": "booster.save(path, model=model, optimizer=optimizer)",
    "load_checkpoint": "booster.load(path, model=model, optimizer=optimizer)",
    "save_pretrained": "booster.save_model(model, path)",
    "prepare_dataloader": "booster.plugin.prepare_dataloader(dataset, batch_size)",
    "is_main_process": "shardwright.cluster.DistCoordinator().is_master()",
    "wait_for_everyone": "shardwright.cluster.DistCoordinator().block_all()",
}
_ARGUMENTS = {
    "checkpoint": "it is called path here",
    "gather_dtensor": "leave it out: files are whole under every layout",
    "low_cpu_mem_mode": "leave it out: every rank reads its own slices",
    "num_threads": "leave it out: every rank reads its own slices",
    "quantize": "quantised base models are not offered; leave it out",
    "bnb_quantization_config": "quantised base models are not offered; leave it out",
}

_EVERYONE_ALONE = (
    "Booster() without a plugin in a job of {ranks} ranks: every rank trains a model of its own on what it is given. "
    "Booster(plugin=TorchDDPPlugin()) trains one"
)
_FILE_SIZE = 1024  # megabytes


class Booster(metaclass=ExplainedArguments):
    """Lays training out over processes through a plugin; without one it trains on this process alone.

    plugin           how model, optimizer and data are distributed: a plugin, or the name of one that is built without
                     arguments ("torch_ddp", or one of `shardwright.plugins.register_plugin`)
    mixed_precision  "bf16", "fp16" or a `MixedPrecision`, for plugins that do not set the number format themselves
    device           where the model goes when there is no plugin; the current CUDA device or the CPU by default
    on_nan           what a loss that is nan or inf does: "warn" says so in the log, "skip" leaves the step out and
                     "stop" raises `shardwright.interface.NonFiniteLoss`, on all ranks
    detect_anomaly   "name" says where a loss or gradient that is not finite came from, by running that step once more:
                     rank, stage, microbatch, rows, module, operator and line. With on_nan="skip" or "stop"
    check_replicas   steps after which ranks compare checksums of the parameters that several of them hold, learning
                     rates and loss scales; None never does. Plugins only
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: str | MixedPrecision | None = None,
        plugin: Plugin | str | None = None,
        on_nan: str = "warn",
        check_replicas: int | None = 100,
        detect_anomaly: str | None = None,
    ) -> None:
        if isinstance(plugin, str):
            plugin = make_plugin(plugin)
        if plugin is not None and not isinstance(plugin, Plugin):
            raise ValueError(
                f"plugin={plugin!r} is not a shardwright Plugin; for example shardwright.plugins.TorchDDPPlugin()"
            )
        if plugin is not None and plugin.control_device() and device is not None:
            raise ValueError(
                f"device={str(device)!r} with {type(plugin).__name__}: the plugin places the model "
                "itself; leave device out"
            )
        self.mixed_precision = resolve(mixed_precision)
        if plugin is not None and plugin.control_precision() and self.mixed_precision is not None:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} with {type(plugin).__name__}: the plugin sets the number format "
                "itself; pass precision= to the plugin instead (one of "
                f"{', '.join(map(repr, plugin.supported_precisions()))})"
            )
        self.plugin = plugin
        self.device = _device(device)
        self.on_nan = LossGuard(on_nan).policy
        self.check_replicas = _positive("check_replicas", check_replicas)
        if plugin is not None and on_nan == "skip" and not plugin.support_skipped_steps():
            raise ValueError(
                f"on_nan='skip' with {type(plugin).__name__}: it clears gradients in its step only; use "
                "'warn' or 'stop'"
            )
        self.detect_anomaly = require_nameable(detect_anomaly, on_nan, plugin)
        self._checkpoints = Checkpoints(plugin)
        self._boosted: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            raise AttributeError(f"Booster has no {name!r}: use {_METHODS[name]}")
        raise AttributeError(
            f"Booster has no {name!r}{nearest(name, [known for known in dir(type(self)) if not known.startswith('_')])}"
        )

    @explained({"dataloader_train": "it is called dataloader here", "scheduler": "it is called lr_scheduler here"})
    @job.heeds_failures
    @torch.inference_mode(False)  # a script that only evaluates may boost where it has turned gradients off
    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, OptimizerWrapper | None, Callable[..., Any] | None, DataLoader | None, Any]:
        """Wrap what is given; None stays None. The optimizer is built on the model's parameters before this call."""
        _require_fresh(model, optimizer, criterion)
        original, counts = optimizer, Counts.of(model)
        _require_scheduler_of(optimizer, lr_scheduler)
        guard = InputGuard(model)
        if self.plugin is not None:
            self.plugin.check_dataloader(dataloader)
            boosted = _boosted_by(self.plugin, model, optimizer, criterion, dataloader, lr_scheduler)
        else:
            require_parameters(model)
            require_own_parameters(model, optimizer)
            if optimizer is not None and dist.is_initialized() and dist.get_world_size() > 1:
                get_dist_logger().warning(_EVERYONE_ALONE.format(ranks=dist.get_world_size()), ranks=[0])
            model = ModelWrapper(model.to(self.device or get_current_device()))
            boosted = Boosted(
                model,
                OptimizerWrapper(optimizer) if optimizer is not None else None,
                criterion,
                dataloader,
                lr_scheduler,
            )
        if self.mixed_precision is not None:
            model, wrapped, criterion = self.mixed_precision.configure(
                boosted.model, boosted.optimizer, boosted.criterion
            )
            boosted = boosted._replace(model=model, optimizer=wrapped, criterion=criterion)
        first_step = None
        if self.plugin is not None:
            boosted = boosted._replace(dataloader=self.plugin.shard_dataloader(boosted.dataloader))
            settings = {
                "mixed_precision": self.mixed_precision,
                "on_nan": self.on_nan,
                "check_replicas": self.check_replicas,
            }
            first_step = FirstStep(self.plugin, boosted.model, boosted.dataloader, settings)
        guard.attach(boosted.model, first_step)
        if boosted.optimizer is not None:
            boosted.optimizer.loss_guard = guard_of_losses = LossGuard(self.on_nan)
            if self.plugin is not None and self.check_replicas is not None:
                plain = unwrapped(boosted.model)
                guard_of_losses.each_step = ReplicaCheck(self.plugin, plain, boosted.optimizer, self.check_replicas)
            if self.detect_anomaly is not None:
                guard_of_losses.witness = Namer(self.plugin, boosted.model, boosted.optimizer)
        self._checkpoints.note(boosted.model, boosted.optimizer)
        self._boosted.add(boosted.model)
        tell_of(boosted.model, boosted.optimizer, self.plugin)
        if self.plugin is not None:
            assert isinstance(boosted.model, ModelWrapper)
            whole = WholeModel(
                boosted.model, boosted.optimizer, self.plugin, counts, self._checkpoints, self.save_lora_as_pretrained
            )
            boosted.model.seal(whole)
            if self.plugin.steps_itself:
                own_steps.watch_model(boosted.model)
        if original is not None:
            own_steps.take(original, boosted.optimizer)
            if self.plugin is not None and not self.plugin.can_unfreeze:
                own_steps.keep_frozen(original, boosted.model)
        return tuple(boosted)  # type: ignore[return-value]

    @explained({})
    @job.heeds_failures
    @labelled("backward")
    def backward(self, loss: torch.Tensor, optimizer: OptimizerWrapper) -> None:
        """Backward through the optimizer wrapper, which scales the loss where the number format needs it."""
        if not isinstance(optimizer, OptimizerWrapper):
            raise ValueError(f"backward needs the optimizer that boost returned, not a bare {type(optimizer).__name__}")
        if optimizer.check_loss is not None:
            optimizer.check_loss(loss)
        job.count_backward()
        optimizer.backward(loss)

    @explained({})
    @job.heeds_failures
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """One batch from `data_iter` through the pipeline: forward, and backward when an optimizer is given.

        Returns {"loss": tensor or None, "outputs": outputs or None}. The loss is that of the global batch and lives on
        the last stage; without a criterion it is the model's own. Without an optimizer the model is evaluated, and
        nothing is recorded for a backward pass.
        """
        if self.plugin is None:
            raise ValueError(
                "execute_pipeline without a plugin: use Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=1)), "
                "whose execute_pipeline works for every size, or write the step out: loss = criterion(model(**batch), "
                "batch); booster.backward(loss, optimizer)"
            )
        # it has no pipeline, and says what to do instead
        if type(self.plugin).execute_pipeline is Plugin.execute_pipeline:
            return self.plugin.execute_pipeline(data_iter, model, criterion, optimizer, return_loss, return_outputs)
        model = self._require_boosted(model, "execute_pipeline")
        if optimizer is not None:
            self._require_optimizer_of(model, optimizer, "execute_pipeline")
            if not torch.is_grad_enabled():
                raise ValueError(
                    "execute_pipeline with an optimizer under torch.no_grad(): there would be no gradients for it to "
                    "step on. Leave the optimizer out to evaluate, or call it outside of no_grad to train"
                )
        plugin, batches = self.plugin, CheckedBatches(data_iter, model, training=optimizer is not None)

        def run(batches: Any) -> dict[str, Any]:
            return plugin.execute_pipeline(batches, model, criterion, optimizer, return_loss, return_outputs)

        witness = optimizer.loss_guard.witness if optimizer is not None and optimizer.loss_guard is not None else None
        return witness.pipeline(run, batches) if isinstance(witness, Namer) else run(batches)

    def _require_boosted(self, model: nn.Module, what: str) -> nn.Module:
        """The model that boost returned; torch.compile around it is looked through."""
        model = getattr(model, "_orig_mod", model)
        if model in self._boosted:
            return model
        if isinstance(model, ModelWrapper):
            raise ValueError(
                f"{what} of a {type(model).__name__} that another Booster boosted: call it on the booster that boosted "
                "the model"
            )
        raise ValueError(
            f"{what} needs the model that boost returned, not a bare {type(model).__name__}: model, optimizer, *_ = "
            "booster.boost(model, optimizer)"
        )

    def _require_optimizer_of(self, model: nn.Module, optimizer: Any, what: str) -> None:
        if not isinstance(optimizer, OptimizerWrapper):
            raise ValueError(
                f"{what} needs the optimizer that boost returned, not a bare {type(optimizer).__name__}: build it "
                "before boost and take what boost returns: model, optimizer, *_ = booster.boost(model, optimizer)"
            )
        if not self._checkpoints.trains(optimizer, model):
            raise ValueError(
                f"{what} with the optimizer of another model: pass the one that boost returned with this model"
            )

    @explained({"active": "it is called steps here"})
    def profile(
        self, directory: StrPath, steps: int = 3, wait: int = 1, warmup: int = 1, memory: bool = False
    ) -> Profile:
        """Record `steps` training steps behind `wait + warmup` others; all ranks call it:

            with booster.profile("traces") as profile:
                for batch in dataloader:
                    ...
                    optimizer.step()
                    optimizer.zero_grad()
                    profile.step()

        Every rank writes a Chrome trace, rank 0 one of all of them with the ranks named by their coordinates
        (merged.json), for ui.perfetto.dev. Warm-up steps run under the profiler and are thrown away. With `memory`
        traces have what every operator allocates, too.
        """
        return Profile(directory, steps, wait, warmup, memory)

    @explained(_ARGUMENTS)
    def enable_lora(self, model: nn.Module, pretrained_dir: str | None = None, lora_config: Any = None) -> nn.Module:
        """`model` with LoRA adapters, before `boost`: new ones by `lora_config` (a peft.LoraConfig), or those in
        `pretrained_dir`.

        The model's own weights are frozen: build the optimizer on the parameters of the result that require gradients.
        """
        if self.plugin is not None and not self.plugin.support_lora():
            raise ValueError(
                f"enable_lora: {type(self.plugin).__name__} cannot train adapters; use HybridParallelPlugin(tp_size=1, "
                "pp_size=1)"
            )
        return add_lora(model, pretrained_dir, lora_config)

    @explained(_ARGUMENTS)
    @job.heeds_failures
    def save_lora_as_pretrained(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write the adapters of a boosted model as `peft.PeftModel.from_pretrained(base_model, path)` reads them.
        All ranks call it.
        """
        plain = unwrapped(_without_autocast(model))
        require_adapters(plain)
        roll_call("booster.save_lora_as_pretrained")
        state = self.plugin.adapter_state(_without_autocast(model)) if self.plugin is not None else plain.state_dict()
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_adapters(plain, state, path)
        if dist.is_initialized():
            dist.barrier()

    @explained({})
    def no_sync(
        self, model: nn.Module | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Accumulate gradients locally inside the context; the first backward after it reduces the sum."""
        if self.plugin is None:
            return nullcontext()
        if not self.plugin.support_no_sync():
            raise ValueError(
                f"no_sync: {type(self.plugin).__name__} reduces gradients in every backward and "
                "accumulates the reduced ones"
            )
        if model is None:
            raise ValueError("no_sync needs the model that boost returned: booster.no_sync(model, optimizer)")
        model = self._require_boosted(model, "no_sync")
        if optimizer is not None:
            self._require_optimizer_of(model, optimizer, "no_sync")
        return self.plugin.no_sync(_without_autocast(model), optimizer)

    # Checkpoints. All ranks must call.

    @explained(_ARGUMENTS)
    @job.heeds_failures
    def save(
        self,
        path: StrPath,
        model: nn.Module | None = None,
        optimizer: OptimizerWrapper | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        step: SupportsIndex | None = None,
        extra: dict[str, Any] | None = None,
        use_async: bool = False,
        keep_last: int | None = None,
    ) -> None:
        """One resumable directory: weights, fp32 masters, optimizer and scheduler state, loss scale, random generators,
        data position.

        It does not depend on the layout: `load` takes it at any number of ranks. Every rank writes what it owns; the
        directory appears under its name when it is complete.

        extra      plain data of your own (numbers, strings, lists, tuples, dicts)
        use_async  return once tensors are copied to host memory; errors of the writing are raised by the next call or
                   by `wait`
        keep_last  keep this many of the newest checkpoints in the directory that `path` lies in, and remove older ones
        """
        self._checkpoints.save(path, model, optimizer, lr_scheduler, dataloader, step, extra, use_async, keep_last)

    @explained(_ARGUMENTS)
    @job.heeds_failures
    def load(
        self,
        path_or_run_dir: StrPath,
        model: nn.Module | None = None,
        optimizer: OptimizerWrapper | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Resume from a checkpoint, or from a directory of checkpoints of which the newest whole one is taken. The
        optimizer's gradients are dropped, as those of other weights.

        verify  compare checksums of all files before; False compares sizes only

        Returns {"step", "extra", "path" of the checkpoint taken, "skipped": why newer ones were not}.
        """
        return self._checkpoints.load(path_or_run_dir, model, optimizer, lr_scheduler, dataloader, verify)

    @job.heeds_failures
    def wait(self) -> None:
        """Until the last asynchronous save is on disk; raises what went wrong there."""
        self._checkpoints.wait()

    @explained(_ARGUMENTS)
    @job.heeds_failures
    def save_model(
        self,
        model: nn.Module,
        path: StrPath,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: float = _FILE_SIZE,
        use_safetensors: bool = True,
        use_async: bool = False,
        masters: bool = False,
    ) -> None:
        """The working weights as transformers stores them: `AutoModel...from_pretrained(path)` gives them back bit by
        bit.

        path            a directory, which also gets the configs; or with shard=False one file named *.safetensors
        shard           several files with an index, written by all ranks, instead of one file
        prefix          goes into the file names: what transformers calls the variant
        size_per_shard  megabytes of a file
        masters         in place of weights of half precision the fp32 masters that the optimizer steps on
        """
        _say_unused_size(shard, size_per_shard)
        self._checkpoints.save_model(model, path, shard, prefix, size_per_shard, use_safetensors, use_async, masters)

    @explained(_ARGUMENTS)
    @job.heeds_failures
    def load_model(self, model: nn.Module, path: StrPath, strict: bool = True) -> LoadReport:
        """Weights from a directory or file of safetensors, as transformers or `save_model` wrote it, or from a
        checkpoint of `save`.

        Every rank reads its own slices. The masters of the model's optimizer follow. With `strict`, names or shapes
        that differ raise CheckpointMismatch and change nothing; without, what fits is loaded. Returns `missing`,
        `unexpected` and `mismatched`.
        """
        return self._checkpoints.load_model(model, path, strict)

    @explained(_ARGUMENTS)
    @job.heeds_failures
    def save_optimizer(
        self,
        optimizer: OptimizerWrapper,
        path: StrPath,
        shard: bool = False,
        size_per_shard: float = _FILE_SIZE,
        use_async: bool = False,
    ) -> None:
        """Masters, states and hyperparameters, for `load_optimizer` at any layout.

        shard  whether ranks split what they write into files of at most `size_per_shard` megabytes
        """
        _say_unused_size(shard, size_per_shard)
        self._checkpoints.save_optimizer(optimizer, path, shard, size_per_shard, use_async)

    @explained(_ARGUMENTS)
    @job.heeds_failures
    def load_optimizer(self, optimizer: OptimizerWrapper, path: StrPath) -> None:
        """Masters too, and with them the weights that they are the masters of: call it after `load_model`."""
        self._checkpoints.load_optimizer(optimizer, path)

    @explained(_ARGUMENTS)
    def save_lr_scheduler(self, lr_scheduler: Any, path: StrPath) -> None:
        self._checkpoints.save_lr_scheduler(lr_scheduler, path)

    @explained(_ARGUMENTS)
    def load_lr_scheduler(self, lr_scheduler: Any, path: StrPath) -> None:
        self._checkpoints.load_lr_scheduler(lr_scheduler, path)


def _device(device: str | torch.device | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device={device!r} is no device of torch's: 'cpu', 'cuda', 'cuda:1' or a torch.device"
        ) from None


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ValueError(f"{name}={value} must be a number of steps of at least 1, or None for never")
    return value


def _say_unused_size(shard: bool, size_per_shard: float) -> None:
    if not shard and size_per_shard != _FILE_SIZE and (not dist.is_initialized() or dist.get_rank() == 0):
        warn_once(
            f"without effect here: size_per_shard={size_per_shard} (shard=False splits no files; shard=True does)"
        )


def _require_fresh(model: Any, optimizer: Any, criterion: Any) -> None:
    """Refuse what was boosted before, and what boosting could not see through."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={type(model).__name__} is not a torch.nn.Module; boost takes the model, then the optimizer"
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "boost of a torch.compile'd model: the layout is chosen by the names and classes of its modules, which are "
            "hidden now. Boost the model itself"
        )
    if isinstance(model, ModelWrapper) or is_guarded(model):
        name = type(unwrapped(model)).__name__.removeprefix("FSDP")
        raise ValueError(
            f"this {name} was boosted before: boost takes the plain model once, with everything that trains it "
            "(several rates: param groups of one optimizer); use what the first call returned"
        )
    if isinstance(optimizer, Optimizer) and own_steps.is_taken(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} was boosted before: build one for this model, on its parameters"
        )
    trainable = (
        [name for name, param in criterion.named_parameters() if param.requires_grad]
        if isinstance(criterion, nn.Module)
        else []
    )
    if trainable:
        raise ValueError(
            f"criterion={type(criterion).__name__} has parameters that require gradients ({trainable[0]}), which no "
            "plugin reduces over ranks: make them part of the model, or freeze them with "
            "criterion.requires_grad_(False)"
        )


def _require_scheduler_of(optimizer: Any, lr_scheduler: Any) -> None:
    """Refuse a scheduler that would drive the rates of another optimizer."""
    driven = getattr(getattr(lr_scheduler, "optimizer", None), "param_groups", None)
    if optimizer is None or not driven or any(group is own for group in driven for own in optimizer.param_groups):
        return
    raise ValueError(
        f"lr_scheduler={type(lr_scheduler).__name__} was built on another optimizer than the one given to boost, whose "
        f"learning rate would never change: build it on this one, {type(lr_scheduler).__name__}(optimizer, ...), "
        "before boost or on what boost returns"
    )


def _without_autocast(model: nn.Module) -> nn.Module:
    """The plugin's own wrapper below what mixed precision put around it."""
    return model.module if isinstance(model, AutocastModel) else model


def _boosted_by(plugin: Plugin, *given: Any) -> Boosted:
    """What a plugin's `configure` returns, looked at: it may be a user's."""
    name, returned = type(plugin).__name__, plugin.configure(*given)
    if isinstance(returned, tuple) and len(returned) == len(Boosted._fields):
        boosted = Boosted(*returned)
        wrapped = boosted.optimizer is None or isinstance(boosted.optimizer, OptimizerWrapper)
        if isinstance(boosted.model, ModelWrapper) and wrapped:
            return boosted
    raise ValueError(
        f"{name}.configure returned {type(returned).__name__}; it must return Boosted(model, optimizer, criterion, "
        "dataloader, lr_scheduler) with the model in a shardwright.interface.ModelWrapper and the optimizer, if any, "
        "in "
        "an OptimizerWrapper"
    )
