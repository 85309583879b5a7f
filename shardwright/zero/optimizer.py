"""The optimizer of all ZeRO stages: mixed precision, gradient reduction and sharded steps behind one wrapper.

    stage 0   every rank holds all masters and states; gradients are all-reduced
    stage 1   masters and states are sharded over the sub-group, gradients are reduced once per step
    stage 2   as 1, and between microbatches only the shards of gradients are kept
    stage 3   as 2, and working parameters exist only while their unit runs (see `unit_gatherer`)

What to reduce over which axis is read from each parameter's `ParamSpec` and the mesh. Bytes per parameter and rank in
bf16 with AdamW, for a sub-group of k: stage 0: 2 + 4 + 12, stage 1: 2 + 4 + 12/k, stage 2: 2 + (4 + 12)/k, stage 3: (4
+ 12)/k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..cluster.mesh import ParallelMesh
from ..comm.compat import gradient_hooks, has_backward_hooks, without_torch_function
from ..interface.shards import LoadedShard, ParamShard
from ..precision.grad_norm import power_sum
from ..precision.grad_state import GradState
from ..precision.optimizer import MixedPrecisionOptimizer
from ..precision.policy import PrecisionPolicy
from ..precision.scaler import DynamicScaler, ScalerConfig
from ..spec import ParamSpec
from ..utils.device import get_current_device
from ..utils.streams import has_streams, streams_of
from .agreement import Agreement
from .bucket import Bucket
from .counting import counted_ranges
from .data_writes import DataWrites
from .entries import Job, check_job, collect_entries
from .gather import ParamGatherer
from .grad_dtypes import GradDtypes
from .groups import zero_groups
from .layout import BucketPlan, plan_buckets
from .one_pass import OnePass
from .other_backwards import OtherBackwards
from .param_guard import ParamGuard
from .reducer import GradReducer
from .script_reads import ScriptReads
from .segments import Segments
from .settings import ZeroSettings
from .sharding import shard_units
from .shards import list_shards, load_shards
from .shared_rows import SharedRows
from .unit_gatherer import UnitGatherer
from .untrained import settle_rest


class ZeroOptimizer(MixedPrecisionOptimizer):
    """Wraps `optim`, whose parameters become views of flat buffers; param groups and lr schedulers keep working on
    `optim`.

    optim                 any optimizer over parameters of `model`, not stepped yet
    model                 the module
    mesh                  which ranks share parameters
    settings              stage, buckets, clipping, what overlaps
    precision             working dtypes; default: leave the model's
    scaler                settings of the loss scaler, for fp16
    job                   what `check_job` found; default: it is asked here
    launch_in_backward    every backward outside of `no_sync` reduces; False for runtimes, which say when gradients of
                          which part come (`expect_gradients`, `reduce_grad`)
    sections              for such runtimes: the part of the model that a parameter belongs to, or `layout.SHARED`;
                          default: part 0
    tied_groups           group of the ranks with a copy, per tied name
    make                  stage 3: called with parameters just before their values are read, to make what does not exist
                          yet
    gradient_divisor      gradients are summed over all ranks that hold the parameters and divided by this; default: the
                          number of these ranks, data and sequence parallel
    """

    def __init__(
        self,
        optim: Optimizer,
        model: nn.Module,
        mesh: ParallelMesh,
        settings: ZeroSettings | None = None,
        *,
        precision: PrecisionPolicy | None = None,
        scaler: ScalerConfig | None = None,
        job: Job | None = None,
        launch_in_backward: bool = True,
        sections: Mapping[nn.Parameter, int] | None = None,
        tied_groups: Mapping[str, dist.ProcessGroup] | None = None,
        make: Callable[[Sequence[nn.Parameter]], Any] | None = None,
        gradient_divisor: float | None = None,
    ) -> None:
        settings = settings or ZeroSettings()
        if job is None:
            job = check_job(optim, model, precision, placed=settings.stage < 3, part=sections is not None)
        entries = collect_entries(optim, model, job, sections)
        device = entries[0].param.device if entries and settings.stage < 3 else get_current_device()
        divisor = float(mesh.size("dp_sp")) if gradient_divisor is None else gradient_divisor
        super().__init__(
            optim,
            device=device,
            max_norm=settings.max_norm,
            scaler=DynamicScaler(scaler or ScalerConfig(), device)
            if precision is not None and precision.needs_scaler
            else None,
            norm_group=dist.group.WORLD,
            divisor=divisor,
        )
        self.settings = settings
        self.stage = stage = settings.stage
        self.mesh = mesh
        self.model = model
        self.groups = zero_groups(mesh, stage, tied_groups or {}, quantised=settings.quantises)
        self._frozen = [param for param in model.parameters() if not param.requires_grad]
        self._data = DataWrites()
        size = settings.bucket_numel(device.type)
        self.units: UnitGatherer | None = None
        self.buckets: list[Bucket]
        if stage < 3:
            plans = plan_buckets(entries, self.groups.shards, size, whole=not job.elementwise)
            self.buckets = [self._filled_bucket(plan, index, 2 * size) for index, plan in enumerate(plans)]
            settle_rest(model, precision, job.dtypes, {entry.param for entry in entries}, self.groups)
        else:
            self.units = shard_units(
                model,
                entries,
                self.groups,
                device,
                self._data,
                settings,
                job,
                precision=precision,
                sections=sections,
                hooks=launch_in_backward,
                make=make,
            )
            self.buckets = [bucket for bucket in self.units.buckets if bucket.is_trained]
            plans = [bucket.plan for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.make_gradients(full=stage < 2, preset=not launch_in_backward)
        self.segments = Segments(self.buckets, optim)
        self._one_pass = OnePass(optim, self.buckets, settings.compiles)
        self._counted = {
            bucket.index: counted_ranges(bucket, mesh) if self._counts_replica(bucket) else []
            for bucket in self.buckets
        }
        self._others = OtherBackwards(self)
        self.reducer = GradReducer(
            self.buckets,
            self.groups,
            device,
            keep_full=stage < 2,
            overlap=settings.overlap_communication,
            wire_dtype=settings.communication_dtype,
            ranks=mesh.size("dp_sp"),
            scratch_numel=2 * size,
            launch_in_backward=launch_in_backward,
            peers_exchange=self.groups.experts is not None or mesh.size("sp") > 1,
            shared_rows=self._shared_rows(plans),
            on_final=self._bucket_is_final,
            on_outside=self._others.arrived,
            is_watched=partial(self._is_watched, list(model.modules())),
        )
        self.gatherer: ParamGatherer | UnitGatherer
        self.gatherer = self.units or ParamGatherer(
            self.buckets, self.groups, model, device, settings.overlap_allgather
        )
        self._entries = entries
        self._norm_parts: dict[int, torch.Tensor] = {}  # power sums of buckets, taken while others are on their way
        self._agreed = False  # whether the ranks have agreed on which parameters got a gradient
        self._agreement = Agreement(entries, self.groups, device)
        self._inside = 0  # contexts of `plain_parameters`
        self._reads = ScriptReads(self)
        copied = {slot.entry.param for bucket in self.buckets if bucket.has_copies for slot in bucket.plan.slots}
        guarded = [entry.param for entry in entries]
        if self.units is not None:
            guarded, copied = self.units.params, set(self.units.params)
        self.guard = ParamGuard(guarded, copied, self._reads, self.gatherer, self._data)
        self.guard.show(asks=False, watches=True)
        self.gatherer.begin(self.guard)
        half = [
            slot.entry.param
            for bucket in self.buckets
            if bucket.dtype != bucket.master_dtype
            for slot in bucket.plan.slots
        ]
        # in a runtime whole gradients accumulate over the microbatches of a step at stage 2, too
        self._grad_dtypes = GradDtypes(half, torch.float32, wide=stage < 2 or not launch_in_backward)

    def _is_watched(self, modules: Collection[nn.Module]) -> bool:
        """Whether a script has hooks that run before a gradient is there, and may look at what is summed so far."""
        if has_backward_hooks(modules):
            return True
        narrow = [bucket for bucket in self.buckets if bucket.dtype != bucket.master_dtype]
        with without_torch_function():  # nobody is asked about hooks
            return any(len(gradient_hooks(slot.entry.param)) > 1 for bucket in narrow for slot in bucket.plan.slots)

    def _filled_bucket(self, plan: BucketPlan, index: int, most: int) -> Bucket:
        groups = self.groups.of(plan.family)
        bucket = Bucket(
            plan,
            index,
            groups.shard_rank,
            device=self.device,
            master_weights=self.settings.master_weights,
            offload=self.settings.cpu_offload,
        )
        bucket.adopt(groups.everyone, most)
        return bucket

    def _shared_rows(self, plans: Sequence[BucketPlan]) -> dict[int, SharedRows]:
        result = {}
        for index, plan in enumerate(plans):
            axis = plan.family.shared
            if axis is not None:
                members = [(slot.entry.index, slot.entry.spec, self.mesh.coordinate(axis)) for slot in plan.slots]
                result[index] = SharedRows(members, self.groups.axes[axis])
        return result

    # Backward.

    @property
    def require_sync(self) -> bool:
        """Whether backward reduces gradients; False while microbatches before the last accumulate."""
        return self.reducer.require_sync

    @require_sync.setter
    def require_sync(self, value: bool) -> None:
        self.reducer.require_sync = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing over data-parallel ranks. Stage 2 still reduces within the sub-group: it keeps
        only shards.
        """
        before, self.require_sync = self.require_sync, False
        try:
            yield
        finally:
            self.require_sync = before

    @contextmanager
    def plain_parameters(self) -> Iterator[None]:
        """Inside, the model runs: nothing that is done to parameters is watched (see `param_guard`)."""
        self._inside += 1
        if self._inside == 1:
            self.guard.show(asks=False, watches=False)
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self.guard.show(asks=self._has_gradients, watches=True)

    @contextmanager
    def _running_backward(self, roots: Sequence[torch.Tensor]) -> Iterator[None]:
        if not self.reducer.launch_in_backward:
            with super()._running_backward(roots):
                yield
            return
        self._grad_dtypes.look_at(roots)
        with self.plain_parameters():
            try:
                with super()._running_backward(roots):
                    yield
            finally:
                self.reducer.in_backward = False

    def _before_backward(self) -> None:
        if self.reducer.launch_in_backward or self.grad_state is not GradState.ACCUMULATING:
            self._reads.refuse_dropped()
            super()._before_backward()
        self.reducer.begin_backward()

    def require_cleared(self) -> None:
        super().require_cleared()
        self._others.require_unspoiled()

    @property
    def takes_gradients(self) -> bool:
        """Whether gradients that are added now would be reduced in the step."""
        return not self._has_stepped and self.grad_state is GradState.ACCUMULATING and self.reducer.takes_gradients

    def note_backward(self) -> None:
        """A backward of another optimizer brings gradients, which the step will reduce as it does after no_sync."""
        self._has_gradients = True
        self._grad_norm = None
        self.reducer.expect()

    def _set_aside(self, scale: float | torch.Tensor) -> None:
        self.reducer.set_aside(scale)
        self._agreed = False
        self._norm_parts.clear()

    def reopen(self) -> None:
        """For runtimes: more backwards follow, perhaps without a zero_grad since the last reduction."""
        self._reads.refuse_dropped()
        super()._before_backward()

    def note_step(self) -> None:
        """For runtimes: the pipeline has gradients, also where no backward ran because all of this rank's parameters
        are frozen.
        """
        self._has_gradients = True

    def _after_backward(self) -> None:
        self.reducer.end_backward()
        if self.units is not None and self.reducer.launch_in_backward:
            self.units.end_backward()

    def expect_gradients(
        self, section: int | Collection[int], last: bool, of: Collection[nn.Parameter] | None = None
    ) -> None:
        """For runtimes: the gradients of one microbatch are about to come; see `GradReducer.open`."""
        self.reducer.open([section] if isinstance(section, int) else section, last, of)

    def reduce_grad(self, section: int | Collection[int], last: bool = True) -> None:
        """For runtimes: the gradients of a section are there, or of several; see `GradReducer.reduce`."""
        self._agreed = False
        self.reducer.reduce([section] if isinstance(section, int) else section, last)

    # What the step template asks for.

    def _finish_gradients(self) -> None:
        self._others.require_unspoiled()
        if not self._has_gradients and any(bucket.assigned() for bucket in self.buckets):
            self._take_assigned()
        self._reads.refuse_dropped()  # also what was dropped behind a norm or a clip
        if self._agreed:
            return
        for param in self._frozen:
            if param.requires_grad:
                raise ValueError(
                    "a parameter that was frozen when the optimizer was boosted requires gradients now; "
                    "unfreeze before boost"
                )
        # In this order on all ranks: which reductions are still to be started may differ between them, and the
        # agreement runs on the same communicator.
        self.reducer.launch_rest()
        self._agreement.start(self.reducer.touched)
        self.reducer.settle()
        self.segments.set_touched(self._agreement.end())
        streams = streams_of(self.device)
        if self.settings.cpu_offload and streams is not None:
            streams.current_stream().synchronize()  # the copies that `_bucket_is_final` started
        self._agreed = True
        if self.grad_state is GradState.ACCUMULATING:
            self.grad_state = GradState.FINAL

    def _take_assigned(self) -> None:
        """A script has assigned .grad of some parameters, and there was no backward: those are the gradients."""
        if self.grad_state is not GradState.ACCUMULATING:
            raise ValueError(
                "param.grad = tensor after a step, without zero_grad in between: call optimizer.zero_grad() first"
            )
        if self.scaler is not None:
            raise ValueError(
                "param.grad = tensor without a backward under fp16: the step would divide it by the loss scale, which "
                "only booster.backward applies; train in bf16, or call booster.backward on a loss"
            )
        with self.plain_parameters():
            self.note_backward()

    def _stepped_gradients(self) -> list[torch.Tensor]:
        return [bucket.step_grad for bucket in self.buckets]

    def _consume(self) -> None:
        super()._consume()
        for bucket in self.buckets:
            bucket.state = GradState.CONSUMED

    def _owned_gradients(self) -> list[torch.Tensor]:
        return [view for bucket in self.buckets for view in self._views_to_count(bucket, bucket.step_grad)]

    def _bucket_is_final(self, bucket: Bucket) -> None:
        """Take the bucket's norm, and start its way to the host, while others are still on theirs."""
        if self.settings.cpu_offload:
            bucket.step_grad.copy_(bucket.shard_grad, non_blocking=True)
        if (self.max_norm > 0 or self.scaler is not None) and (
            self.settings.cpu_offload or not has_streams(self.device)
        ):
            # On devices one kernel over all buckets costs less than the launches of many.
            self._norm_parts[bucket.index] = power_sum(self._views_to_count(bucket, bucket.shard_grad), self.device)

    def _power_sum(self, norm_type: float) -> torch.Tensor:
        if norm_type == 2.0 and self.grad_state is GradState.FINAL and len(self._norm_parts) == len(self.buckets) > 0:
            return torch.stack([self._norm_parts[bucket.index] for bucket in self.buckets]).sum()
        return super()._power_sum(norm_type)

    def _views_to_count(self, bucket: Bucket, grad: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the bucket's gradient shard `grad` that this rank counts in the norm."""
        return [grad[low:high] for low, high in self._counted[bucket.index]]

    def _counts_replica(self, bucket: Bucket) -> bool:
        """Whether this rank is the one that counts for all ranks with the same shard."""
        replica = self.groups.of(bucket.plan.family).replica
        if replica is not None and dist.get_rank(replica) != 0:
            return False
        tied = self.groups.tied.get(bucket.plan.family.tied or "")
        return tied is None or dist.get_rank(tied) == 0

    def _publish(self) -> None:
        self.gatherer.publish(exactly=False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        self._take_edits()
        return super().step(closure)

    def _step_wrapped(self) -> Any:
        with self.segments.installed():
            return super()._step_wrapped()

    def _step_at_once(self, found_inf: torch.Tensor | None) -> bool:
        kernel = self._one_pass.kernel()
        if kernel is None:
            return False
        written = self.gatherer.written_by_steps()
        self.gatherer.wait()  # gathers of the last step that nobody has used may still read the weights
        with self.segments.installed(none=True):
            super()._step_wrapped()
        device, factor = self.buckets[0].master.device, self._factor()
        on_device = self._constant(factor, device) if isinstance(factor, float) else factor.to(device)
        skip = None if found_inf is None else found_inf.to(device)
        self._one_pass.take(kernel, self.segments.items, on_device, skip, written)
        if isinstance(self.gatherer, ParamGatherer):
            self.gatherer.written = written
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.guard.show(asks=False, watches=self._inside == 0)
        self.reducer.clear(keep_zeros=not set_to_none)
        if self.units is not None:
            self.units.reset()
        self._norm_parts.clear()
        self._agreed = False
        self._reads.dropped.clear()
        self._others.forget()

    def hand_out_gradients(self) -> None:
        """Make the gradients in the buffers those of the step, for a script that reads them where this rank has them
        whole.

        Starts no collective.
        """
        self._others.require_unspoiled()
        if self.grad_state is GradState.CONSUMED:
            return
        if self.mesh.world_size == 1:
            self.reducer.launch_rest()  # reaches nobody
        self.reducer.settle()
        if self.scaler is not None:  # all ranks have the same gradients here
            found = (~power_sum(self._stepped_gradients(), self.device).isfinite()).float()
            self._overflow = found if self._overflow is None else torch.maximum(self._overflow, found)
        self._apply_factor()

    def _take_edits(self) -> None:
        """Masters follow parameters that were written to: load_state_dict, copy_, nn.init, `param.data = tensor`,
        `param.data.mul_()`.
        """
        if self.units is not None:
            self.units.take_edits()
            return
        written = self._data.take()
        for bucket in self.buckets:
            bucket.take_assigned()
            if bucket.has_copies:
                bucket.take_edits(written)

    # State.

    def trained(self) -> dict[str, int]:
        """Number of the param group of every parameter, by the name that checkpoints use."""
        return {entry.spec.name: entry.group for entry in self._entries}

    def shards(self) -> list[ParamShard]:
        """What this rank owns of every parameter (see `zero.shards`)."""
        self.gatherer.wait()
        self._take_edits()
        return list_shards(self.segments, self._is_writer)

    def _is_writer(self, bucket: Bucket, spec: ParamSpec) -> bool:
        return self._counts_replica(bucket) and (spec.is_sharded or self.mesh.coordinate(spec.axis) == 0)

    @torch.no_grad()
    def load_shards(self, loaded: Mapping[str, LoadedShard]) -> None:
        """Take masters and states, by parameter name, for exactly the ranges that `shards` lists; then publish the
        weights.
        """
        self.gatherer.wait()
        self._take_edits()
        load_shards(self.segments, self.optim, loaded, counts_on_device=self._fused)
        self.publish_masters()

    def publish_masters(self) -> None:
        """Bring masters that were written to into the working parameters of all ranks. Collective over the
        sub-group.
        """
        self.gatherer.publish()
        self.gatherer.wait()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take masters from the working parameters as they are, rounded; what a script writes to them is noticed
        without it.
        """
        self.gatherer.wait()
        self._take_edits()
        if self.units is not None:
            self.units.publish()
            return
        for bucket in self.buckets:
            if bucket.has_copies:
                bucket.master.copy_(bucket.own_flat)
                bucket.note_versions()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients of all parameters as the next step will use them (without clipping), for inspection.
        Collective, slow.
        """
        self._finish_gradients()
        factor = self._factor()
        result = {}
        for bucket in self.buckets:
            mine, groups = bucket.step_grad.to(self.device), self.groups.of(bucket.plan.family)
            whole = [torch.empty_like(mine) for _ in range(groups.num_shards)]
            if groups.shard is not None:
                dist.all_gather(whole, mine, group=groups.shard)
            else:
                whole = [mine]
            flat = torch.cat(whole) * factor
            result.update({slot.entry.name: bucket.view(flat, slot).clone() for slot in bucket.plan.slots})
        return result

    def bytes(self) -> int:
        """Bytes kept between steps for parameters, gradients, masters and optimizer states on this rank."""
        states = [
            value for state in self.optim.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        buckets = self.buckets if self.units is None else self.units.buckets
        return sum(bucket.bytes() for bucket in buckets) + sum(value.numel() * value.itemsize for value in states)

    def release(self) -> None:
        """Take hooks off the model and give its parameters storage of their own; the optimizer is of no use
        afterwards.
        """
        self.gatherer.wait()
        self.guard.show(asks=False, watches=False)
        self.reducer.remove_hooks()
        if isinstance(self.gatherer, UnitGatherer):
            self.gatherer.release()
            return
        self.gatherer.remove_hooks()
        for bucket in self.buckets:
            bucket.release()
