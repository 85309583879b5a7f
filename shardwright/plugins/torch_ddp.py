"""Plain data parallelism: torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..cluster import job
from ..comm.compat import world_group_for_ddp
from ..comm.quantised_wire import check_quantisable
from ..interface import ModelWrapper, OptimizerWrapper
from ..utils.argument_types import check_arguments
from ..utils.device import get_current_device
from ..utils.labels import labelled
from ..utils.pytree import tree_leaves
from .base import Plugin, require_process_group
from .ddp_hook import quantise_gradients

# torch 2.13 renamed the argument; passing the old name warns there.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class TorchDDPModel(ModelWrapper):
    """Holds the DDP module; `unwrap` reaches through it.

    [Note: one forward, one backward] DDP gets ready to reduce in a forward, and is done with it after one backward:
    what a second backward adds (two forwards before two backwards, retain_graph) would stay this rank's own, without a
    word. So whichever backward comes through an output of the model gets DDP ready again first, unless a forward has
    done so since the last.
    """

    module: DistributedDataParallel

    def __init__(self, module: nn.Module, quantises: bool = False, **settings: Any) -> None:
        self._settings, self._quantises = settings, quantises
        self._generation = job.generation()
        super().__init__(_wrapped(module, settings, quantises))
        self._ready = False  # whether DDP awaits a backward
        self._backward = -1  # number of the last one that came through an output

    @job.heeds_failures
    @labelled("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # after a recovery: DDP would wait for the gradients of the failed step
        if self._generation != job.generation():
            self._generation = job.generation()
            # past the guard against modules that come after boost
            self._modules["module"] = _wrapped(self.module.module, self._settings, self._quantises)
            self._ready = False
        outputs = super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self._ready = self._ready or self.module.require_backward_grad_sync
            begin = partial(_begin_backward, weakref.ref(self))
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(begin)
        return outputs

    def get_ready(self) -> None:
        """A backward begins, or goes on, whose gradients are still to come."""
        number = torch._C._current_graph_task_id()  # checked on torch 2.11 and 2.13
        if number == self._backward:
            return
        if not self._ready and self.module.require_backward_grad_sync:
            if self.module.find_unused_parameters or self.module.static_graph:
                raise ValueError(
                    "a second backward since the last forward (two forwards before two backwards, or "
                    "retain_graph=True), whose gradients torch's DistributedDataParallel would not reduce with "
                    "find_unused_parameters=True or static_graph=True: call backward after each forward, add the "
                    "losses and call it once, or leave both arguments False"
                )
            # what a forward does; the order of buckets may change after the first backward
            self.module.reducer._rebuild_buckets()
            self.module.reducer.prepare_for_backward([])
        self._ready, self._backward = False, number

    def unwrap(self) -> nn.Module:
        inner: nn.Module = self.module.module
        return inner.unwrap() if isinstance(inner, ModelWrapper) else inner


def _wrapped(module: nn.Module, settings: dict[str, Any], quantises: bool) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(module, process_group=world_group_for_ddp(), **settings)
    if quantises:
        quantise_gradients(wrapped)
    return wrapped


class TorchDDPPlugin(Plugin):
    """Every rank holds the whole model; gradients are averaged while backward runs.

    The arguments are DistributedDataParallel's, and fp8_communication: gradients travel in 8 bits per element, and are
    added in fp32. The gradient is the mean of the ranks' gradients, so a loss that is a mean over unequally many tokens
    per rank weighs ranks, not tokens; `HybridParallelPlugin.execute_pipeline` weighs tokens.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        check_arguments(TorchDDPPlugin.__init__, locals())
        require_process_group("TorchDDPPlugin")
        if check_reduction:
            raise ValueError(
                "check_reduction=True was withdrawn by torch's DistributedDataParallel, which ignores it; "
                "leave it False"
            )
        if not 0 < bucket_cap_mb < 2**40:
            raise ValueError(
                f"TorchDDPPlugin(bucket_cap_mb={bucket_cap_mb}) must be more than 0 and less than 2**40; torch's "
                "default is 25"
            )
        self.settings: dict[str, Any] = {
            _BUFFERS: broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        self.fp8_communication = fp8_communication
        job.set_place(f"dp={self.data_parallel[1]}")

    def supported_precisions(self) -> list[str]:
        return ["fp32", "fp16", "bf16"]

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().check(model, optimizer)
        if self.fp8_communication:
            check_quantisable(model)

    def lay_out(
        self, model: nn.Module, optimizer: Optimizer | None, checked: Any
    ) -> tuple[nn.Module, OptimizerWrapper | None]:
        model = model.to(get_current_device())
        if any(param.requires_grad for param in model.parameters()):
            model = TorchDDPModel(model, self.fp8_communication, **self.settings)
        else:
            model = ModelWrapper(model)  # DDP refuses a model with nothing to reduce; evaluating one is fine
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = OptimizerWrapper(optimizer)
        return model, optimizer

    @contextmanager
    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper | None = None) -> Iterator[None]:
        if isinstance(model, TorchDDPModel):
            with model.module.no_sync():
                yield
        else:
            yield


def _begin_backward(model: weakref.ref[TorchDDPModel], _: torch.Tensor) -> None:
    here = model()
    if here is not None:
        here.get_ready()
