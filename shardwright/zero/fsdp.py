"""ZeRO stage 3: torch's FSDP2 over the data-parallel axis, with the face, the norm and the state of the other stages.

FSDP2 shards each parameter along dim 0; a local tensor-parallel shard looks to it like a full parameter. It keeps parameters in
fp32 and gathers them in the working dtype, so parameters are their own masters. Everything here reads public names of
`torch.distributed.fsdp` and DTensor only (checked on torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..cluster import job
from ..cluster.mesh import ParallelMesh
from ..optim.kind import begin_state, check_supported, is_elementwise
from ..precision.grad_norm import owned_ranges
from ..precision.grad_state import GradState
from ..precision.optimizer import MixedPrecisionOptimizer
from ..precision.policy import PrecisionPolicy
from ..precision.scaler import DynamicScaler, ScalerConfig
from ..spec import ParamSpec, get_spec, set_spec
from ..utils.device import get_current_device
from ..utils.modules import separable_blocks
from ..utils.tensors import multiply_
from .entries import collect_entries
from .exchange import SharedRows
from .layout import Entry
from .sharded_reads import RefusedGradient, refuse_hooks, show_assignments, stepping_on_dtensors, through_gathered_weights
from .shards import LoadedShard, ParamShard, check_complete


def shard_model(
    model: nn.Module,
    mesh: ParallelMesh,
    precision: PrecisionPolicy,
    *,
    communication_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> dict[nn.Parameter, nn.Parameter]:
    """Shard `model` in place, its blocks one by one; returns the parameter that replaced each old one.

    The ranks of a ZeRO sub-group hold the shards; with several sub-groups they are replicas of each other (HSDP).
    """
    refuse_hooks(model)
    old = dict(model.named_parameters())
    specs = {name: get_spec(param) or ParamSpec(name, tuple(param.shape)) for name, param in old.items()}
    _share_weights(old, mesh)
    settings: dict[str, Any] = {
        "mesh": mesh.device_mesh("zero_replica", "zero") if mesh.size("zero_replica") > 1 else mesh.device_mesh("zero"),
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": _mp_policy(precision, communication_dtype, next(iter(old.values())).dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy(),
    }
    for param in old.values():
        if precision.is_half and param.dtype in (torch.float16, torch.bfloat16):
            param.data = param.data.float()  # parameters are their own masters
    if precision.is_half:
        _shard_kept(model, precision, settings)
    for block in separable_blocks(model):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    job.note_lasting("ZeRO stage 3, which is torch's FSDP2")
    new = dict(model.named_parameters())
    for name, param in new.items():
        set_spec(param, specs[name])
    return {old[name]: new[name] for name in old}


def keep_gathered(model: nn.Module) -> None:
    """Keep parameters gathered from their first use in a step until `free_gathered`.

    A pipeline needs them again within a few actions, and leaves forwards by an exception, so that FSDP2 would not gather the
    parameters outside of blocks for the backward pass.
    """
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)


def free_gathered(model: nn.Module) -> None:
    """Go back to shards, after the last action of a step; the next forward gathers what the optimizer wrote."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _shard_kept(model: nn.Module, precision: PrecisionPolicy, settings: Mapping[str, Any]) -> None:
    """Modules whose parameters stay in fp32 become groups of their own: a group of FSDP2 works in one dtype."""
    dtypes = precision.dtypes(model)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, output_dtype=precision.dtype)
    for prefix, module in list(model.named_modules()):
        own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)]
        if prefix and own and all(dtypes.get(name) == torch.float32 for name in own):
            fully_shard(module, **{**settings, "mp_policy": policy})


def _share_weights(params: Mapping[str, nn.Parameter], mesh: ParallelMesh) -> None:
    if mesh.size("dp_sp") > 1:
        for param in params.values():
            dist.broadcast(param.data, group=mesh.group("dp_sp"), group_src=0)


def _mp_policy(precision: PrecisionPolicy, communication_dtype: torch.dtype | None, original: torch.dtype) -> MixedPrecisionPolicy:
    if precision.is_half:
        return MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=communication_dtype or torch.float32)
    return MixedPrecisionPolicy(reduce_dtype=communication_dtype)


class FsdpOptimizer(MixedPrecisionOptimizer):
    """Steps an optimizer on the local shards of a model that `shard_model` sharded.

    Element-wise optimizers step on plain local tensors (a DTensor costs several times the step); others get the DTensors, whose
    matrix operations communicate.
    """

    def __init__(
        self,
        optim: Optimizer,
        model: nn.Module,
        mesh: ParallelMesh,
        replaced: Mapping[nn.Parameter, nn.Parameter],
        *,
        precision: PrecisionPolicy,
        scaler: ScalerConfig | None = None,
        max_norm: float = 0.0,
        tied_groups: Mapping[str, dist.ProcessGroup] | None = None,
        gradient_divisor: float | None = None,
    ) -> None:
        check_supported(optim)
        elementwise = is_elementwise(optim)
        for group in optim.param_groups:
            group["params"] = [replaced[param] for param in group["params"]]
        entries = collect_entries(optim, model, None, whole=not elementwise, part=mesh.size("pp") > 1)
        device = get_current_device()
        # FSDP2 averages over all ranks that hold the parameters.
        divisor = float(mesh.size("dp")) if gradient_divisor is None else gradient_divisor
        super().__init__(
            optim,
            device=device,
            max_norm=max_norm,
            scaler=DynamicScaler(scaler or ScalerConfig(), device) if precision.needs_scaler else None,
            norm_group=dist.group.WORLD,
            divisor=divisor / mesh.size("dp_sp"),
        )
        assert isinstance(model, FSDPModule)
        self.model = model
        self.mesh = mesh
        self.tied_groups = dict(tied_groups or {})
        self._elementwise = elementwise
        self._entries = entries
        self._params: list[Any] = [entry.param for entry in entries]
        self._stepped: list[torch.Tensor] = [param.to_local().detach() if elementwise else param for param in self._params]
        with self._installed():
            begin_state(optim)
        self._shared = self._shared_rows()
        self._sharded = list(model.parameters())
        self._frozen = [param for param in model.parameters() if not param.requires_grad]
        self._syncs = True
        self._unsynced = False  # whether FSDP2 holds gradients that no_sync has accumulated
        show_assignments(self._sharded, True)
        self._carry: dict[int, Any] = {}  # entry -> reduced gradient (a DTensor) that was set aside
        self._known: list[tuple[Any, Any]] = []  # parameters and their gradients as they were finished
        self._inside = 0  # contexts of `plain_parameters`
        self._zeroed = False  # whether the gradients are those that zero_grad(set_to_none=False) left
        self._backwards_before = self.backwards  # of all optimizers, at the last zero_grad

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold what it steps on; outside, the script's parameters, whose gradients are DTensors."""
        groups = self.optim.param_groups
        shown = [group["params"] for group in groups]
        for number, group in enumerate(groups):
            group["params"] = [tensor for tensor, entry in zip(self._stepped, self._entries, strict=True) if entry.group == number]
        try:
            yield
        finally:
            for group, params in zip(groups, shown, strict=True):
                group["params"] = params

    def _step_wrapped(self) -> Any:
        with self._installed(), stepping_on_dtensors(self.optim):
            return super()._step_wrapped()

    def _rows(self, entry: Entry) -> tuple[int, int]:
        """[start, stop) of dim 0 that this rank holds: torch deals rows like `torch.chunk`."""
        rows, ranks = entry.param.shape[0], self.mesh.size("zero")
        share = -(-rows // ranks)
        start = min(self.mesh.coordinate("zero") * share, rows)
        return start, min(start + share, rows)

    def _range(self, entry: Entry) -> tuple[int, int]:
        """The rows of `_rows` as a flat range of the local tensor."""
        inner = math.prod(entry.param.shape[1:])
        start, stop = self._rows(entry)
        return start * inner, stop * inner

    def _shared_rows(self) -> dict[str, tuple[SharedRows, list[Entry]]]:
        """Per axis, the exchange of rows that several of its ranks hold; their parts lie on different data-parallel ranks."""
        result = {}
        for axis in sorted({entry.family.shared for entry in self._entries if entry.family.shared}):
            entries = [entry for entry in self._entries if entry.family.shared == axis]
            members = [(entry.index, entry.spec, self.mesh.coordinate(axis)) for entry in entries]
            rows = {entry.index: self._rows(entry) for entry in entries}
            result[axis] = (SharedRows(members, self.mesh.group("zero", axis), rows), entries)
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on every rank; the first backward outside reduces them."""
        before = self._syncs
        self._set_syncs(False)
        try:
            yield
        finally:
            self._set_syncs(before)

    def _set_syncs(self, value: bool) -> None:
        self._syncs = value
        self.model.set_requires_gradient_sync(value)

    @contextmanager
    def plain_parameters(self) -> Iterator[None]:
        """Inside, the model or the step runs; outside, what DTensor would get wrong is made right or refused (`sharded_reads`)."""
        self._inside += 1
        if self._inside == 1:
            show_assignments(self._sharded, False)
            self._refuse_reads(False)
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._refuse_reads(self._has_gradients or not self._zeroed)
                show_assignments(self._sharded, True)

    def _refuse_reads(self, wanted: bool) -> None:
        if not self._readable:
            for param in self._params:
                if param.grad is not None:
                    param.grad.__class__ = RefusedGradient if wanted else DTensor

    @property
    def _readable(self) -> bool:
        """Whether the DTensors that FSDP2 leaves in .grad are the gradients of the step."""
        return self.scaler is None and all(self.mesh.size(axis) == 1 for axis in ("tp", "pp", "sp"))

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        norm = super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        if self._readable and self._inside == 0:
            self._apply_factor()  # a script may look at .grad next; within a step the kernel does it
        return norm

    @contextmanager
    def _running_backward(self) -> Iterator[None]:
        with self.plain_parameters(), through_gathered_weights(), super()._running_backward():
            yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        with self.plain_parameters():
            return super().step(closure)

    def _before_backward(self) -> None:
        if self._known and all(param.grad is None for param in self._params):
            self.zero_grad()  # by hand
        self._check_replaced()
        if self.scaler is not None:
            self._require_scaled()
        super()._before_backward()
        self._known.clear()
        self._unsynced = not self._syncs

    def _require_synced(self) -> None:
        """FSDP2 reduces in backward only, and forgets what it has accumulated only when it reduces."""
        if self._unsynced:
            raise ValueError(
                "the last backward was under no_sync, and at ZeRO stage 3 gradients are reduced in a backward only: run the last backward "
                "of a step outside of no_sync (afterwards optimizer.zero_grad() can drop them), or use stage 1 or 2"
            )

    @torch.no_grad()
    def _set_aside(self, scale: float | torch.Tensor) -> None:
        """Take finished gradients from the parameters: what was summed over model axes must not be summed again with what follows."""
        if not self.grad_state.is_reduced:
            return
        for entry, param in zip(self._entries, self._params, strict=True):
            if param.grad is not None:
                self._carry[entry.index] = param.grad
                multiply_([param.grad.to_local()], scale)
                param.grad = None

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        self._require_synced()
        self._check_replaced()
        if self.grad_state.is_reduced:
            return
        for param in self._frozen:
            if param.requires_grad:
                raise ValueError("a parameter that was frozen when the optimizer was boosted requires gradients now; unfreeze before boost")
        self._require_scaled()
        self._fill_tied()
        grads = {}
        for entry, param, stepped in zip(self._entries, self._params, self._stepped, strict=True):
            if param.grad is None:
                stepped.grad = None
                if entry.index not in self._carry:
                    continue
                param.grad = torch.zeros_like(self._carry[entry.index])
            grads[entry.index] = param.grad.to_local()
            if stepped is not param:
                local = param.to_local().detach()
                if local.data_ptr() != stepped.data_ptr():  # FSDP2 moved its storage (first forward, loaded weights)
                    stepped.data = local
                stepped.grad = grads[entry.index] if local.numel() else None
        for shared, entries in self._shared.values():
            shared.sum_({entry.index: grads[entry.index] for entry in entries})
        for entry in self._entries:
            if entry.index in grads:
                for group in self._extra_groups(entry):
                    dist.all_reduce(grads[entry.index], group=group)
        for index, carry in self._carry.items():
            grads[index].add_(carry.to_local())
        self._carry.clear()
        self.grad_state = GradState.FINAL
        self._known = [(param, param.grad) for param in self._params if param.grad is not None]

    def _require_scaled(self) -> None:
        """Gradients are from backwards of this optimizer, or of others that scale no more than it does."""
        if self._has_gradients or all(param.grad is None for param in self._params) or self._zeroed:
            return
        if self.scaler is not None or self._backwards_before == self.backwards:
            raise ValueError(
                "gradients from a backward that the optimizer did not start, so that they are not scaled as the step needs: write "
                "booster.backward(loss, optimizer) instead of loss.backward(), after optimizer.zero_grad(); under fp16 models that train "
                "on one loss go into one nn.Module with one optimizer (a param group each)"
            )
        self._has_gradients = True

    def _fill_tied(self) -> None:
        """Zeros for a copy without a gradient where another stage's copy has one (an embedding past which inputs_embeds went)."""
        places = {entry.spec.tied: place for place, entry in enumerate(self._entries) if entry.spec.tied in self.tied_groups}
        for name in sorted(filter(None, places)):
            param = self._params[places[name]]
            has_gradient = torch.tensor(param.grad is not None, dtype=torch.uint8, device=self.device)
            dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=self.tied_groups[name])
            if param.grad is None and bool(has_gradient):  # read where a gradient is missing, and nowhere else
                param.grad = torch.zeros_like(param)

    def _check_replaced(self) -> None:
        """The step would use the gradients that were finished, whatever .grad points to by now."""
        if any(param.grad is not grad for param, grad in self._known):
            raise ValueError(
                "param.grad was assigned to after the gradients of the step had been read: call optimizer.zero_grad() to drop all of them; "
                "to leave parameters out of a step set requires_grad_(False) on them before its backward"
            )

    def _extra_groups(self, entry: Entry) -> list[dist.ProcessGroup]:
        groups = [self.mesh.group(axis) for axis in entry.spec.partial if self.mesh.size(axis) > 1]
        tied = self.tied_groups.get(entry.spec.tied or "")
        return groups if tied is None else [*groups, tied]

    def _local_grads(self) -> list[tuple[Entry, torch.Tensor]]:
        pairs = zip(self._entries, self._params, strict=True)
        return [(entry, param.grad.to_local()) for entry, param in pairs if param.grad is not None]

    def _stepped_gradients(self) -> list[torch.Tensor]:
        return [grad for _, grad in self._local_grads() if grad.numel()]

    def _owned_gradients(self) -> list[torch.Tensor]:
        owned = []
        for entry, grad in self._local_grads():
            if not self._counts_replica(entry):
                continue
            low, high = self._range(entry)
            for start, stop in owned_ranges(entry.spec, self.mesh.coordinate(entry.spec.axis)):
                if max(start, low) < min(stop, high):
                    owned.append(grad.flatten()[max(start, low) - low : min(stop, high) - low])
        return owned

    def _counts_replica(self, entry: Entry) -> bool:
        tied = self.tied_groups.get(entry.spec.tied or "")
        return self.mesh.coordinate("zero_replica") == 0 and (tied is None or dist.get_rank(tied) == 0)

    def _publish(self) -> None:
        pass  # the optimizer stepped on the storage that FSDP2 gathers from

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._require_synced()
        super().zero_grad(set_to_none)
        with self.plain_parameters():
            for param, stepped in zip(self._params, self._stepped, strict=True):
                stepped.grad = None
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.to_local().zero_()
        self._zeroed = not set_to_none
        self._backwards_before = self.backwards
        self._carry.clear()
        self._known.clear()

    def gradients(self) -> dict[str, torch.Tensor]:
        """As `ZeroOptimizer.gradients`."""
        with self.plain_parameters():
            self._finish_gradients()
            factor = self._factor()
            return {
                entry.name: param.grad.full_tensor() * factor
                for entry, param in zip(self._entries, self._params, strict=True)
                if param.grad is not None
            }

    # State.

    def trained(self) -> dict[str, int]:
        """Number of the param group of every parameter, by the name that checkpoints use."""
        return {entry.spec.name: entry.group for entry in self._entries}

    def shards(self) -> list[ParamShard]:
        """What this rank owns of every parameter (see `zero.shards`); parameters of which it holds no rows are left out."""
        result = []
        for entry, param, stepped in zip(self._entries, self._params, self._stepped, strict=True):
            start, stop = self._range(entry)
            state = self.optim.state.get(stepped, {})
            flat = {key: _local(value).flatten() for key, value in state.items() if self._is_elementwise(value, stepped)}
            extra = {key: _full(value) for key, value in state.items() if key not in flat}
            if start == stop:
                continue
            result.append(
                ParamShard(
                    name=entry.spec.name,
                    spec=entry.spec,
                    local_shape=tuple(param.shape),
                    start=start,
                    stop=stop,
                    group=entry.group,
                    master=param.to_local().detach().flatten(),
                    state=flat,
                    extra=extra,
                    is_writer=self._counts_replica(entry) and (entry.spec.is_sharded or self.mesh.coordinate(entry.spec.axis) == 0),
                )
            )
        return result

    @staticmethod
    def _is_elementwise(value: Any, stepped: torch.Tensor) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == stepped.shape

    @torch.no_grad()
    def load_shards(self, loaded: Mapping[str, LoadedShard]) -> None:
        """Take masters and states for exactly the ranges that `shards` lists."""
        if not self._elementwise and any(shard.state or shard.extra for shard in loaded.values()):
            raise ValueError(
                f"optimizer={type(self.optim).__name__} at stage 3 keeps its state in DTensors, which cannot be loaded; use stage 1 or 2"
            )
        held = [entry for entry in self._entries if self._range(entry)[0] < self._range(entry)[1]]
        check_complete({entry.spec.name for entry in held}, set(loaded))
        self.optim.state.clear()
        for entry in held:
            shard, stepped, local = loaded[entry.spec.name], self._stepped[entry.index], self._params[entry.index].to_local()
            if shard.master is not None:
                local.copy_(shard.master.view(local.shape))
            state: dict[str, Any] = {key: value.detach().clone().view(local.shape).to(local.device) for key, value in shard.state.items()}
            state |= {
                key: value.detach().clone().to(local.device if self._fused or value.ndim else "cpu") for key, value in shard.extra.items()
            }
            if state:
                self.optim.state[stepped] = state

    def publish_masters(self) -> None:
        """Nothing to do: the parameters are their own masters."""

    def refresh_masters(self) -> None:
        """Nothing to do: the parameters are their own masters."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's masters, states, hyperparameters and loss scale, by parameter name; for the same layout only."""
        shards = {shard.name: {"master": shard.master, "state": shard.state, "extra": shard.extra} for shard in self.shards()}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"shards": shards, "param_groups": groups, "scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        if self.scaler is not None and state_dict["scaler"] is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
        self.load_shards({name: LoadedShard(**parts) for name, parts in state_dict["shards"].items()})


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
