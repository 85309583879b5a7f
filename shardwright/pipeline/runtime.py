"""Executes the action list of this rank: the one runtime that all schedules share.

[Note: what is held, and until when]
    received tensors   from the post of their receive to the backward (they are leaves whose gradients go back)
    output tensors     until they have been received, at the latest when their gradients come back; the backward needs
                       only their place in the graph (`GradientEdge`)
    the graph          from F to B or I, in host memory meanwhile between OFFLOAD and RELOAD; then the weight-gradient
                       store holds what W needs (FB and the B behind it run as one action, see `two_at_once`)
    gradients to send  until they have been sent
So memory follows the activations in flight, which the schedule bounds, and never the number of microbatches.

[Note: when another rank fails]
A rank that raises names rank, stage, chunk, microbatch and action. In a job started by `launch` all others hear of it
within a second and their groups are closed, so that they stop waiting; they raise that rank's story
(`cluster.job.step`). Without `launch` the others learn of it when the connections close with the process of the rank,
on NCCL only by the timeout of the group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..cluster import job
from ..cluster.heart import heart
from ..comm.in_flight import Receive, Sent
from ..comm.p2p import PipeComm
from ..comm.payload import Header, TensorMeta, put_together, take_apart
from ..comm.shape_rules import MessageKey, split_sizes
from ..ops.weight_grad import WeightGradStore
from ..utils.labels import is_profiling
from .offload import ActivationOffload
from .planning.actions import COMPUTE, Kind, table
from .planning.placement import Placement
from .saved_bytes import measure
from .schedules import Schedule
from .silent import SilentTensors
from .timeline import Labels, Recorder
from .two_at_once import TwoAtOnce


class StageProgram(Protocol):
    """What one stage computes for one microbatch.

    forward  receives what the stage before returned for this microbatch (None on the first stage) and returns what the
             next stage receives: nested dicts, lists and tuples of tensors, None and plain constants (str, int, float,
             bool). Received floating-point tensors require grad where they did on the sending stage, as leaves of this
             stage's graph. The last stage returns the loss of the microbatch, a scalar already weighted so that the
             loss of the step is the sum over microbatches; in a forward-only step it may return None. Outputs that the
             user wants to see are kept by the program itself.

    A program reads the microbatch's own inputs (token ids, masks, labels) by its index; only boundary tensors travel.
    On the last stage, where the loss waits for microbatches that come later (slices of a sequence), it returns
    `Unfinished`.
    """

    def forward(self, received: Any, microbatch: int) -> Any: ...


class Unfinished(NamedTuple):
    """Outputs of a microbatch, and what returns gradients of those that require them, asked for when its backward
    runs.
    """

    outputs: Sequence[Tensor]
    gradients: Callable[[], list[Tensor]]


class BackwardByGrad(Protocol):
    """Backward from outputs with given gradients. Outputs are `GradientEdge`s, which torch.autograd.backward takes
    like tensors.
    """

    def __call__(self, tensors: Sequence[GradientEdge], grads: Sequence[Tensor], /) -> None: ...


class Part(Enum):
    """Of a chunk's parameters, by when their gradients are made: PROMPT ones always in B or I, in which they are
    complete; the OTHERS, of which some may wait, are complete after B or W.
    """

    PROMPT = 0
    OTHERS = 1


class Reduction(Protocol):
    """Reduces the weight gradients of this rank's chunks over its data-parallel peers.

    prompt  whose gradients do not wait where others do (`Part.PROMPT`)
    begin   a microbatch's gradients of some parts are about to be made: those of all their parameters, or of the given
            ones only; others are there. With `last` they are the last of the step
    end     they are made, before others are begun. With `last` this is the action REDUCE, but for prompt ones of I
    finish  those of all chunks are made
    """

    prompt: Collection[torch.nn.Parameter]

    def begin(
        self, chunk: int, parts: Sequence[Part], last: bool, of: Collection[torch.nn.Parameter] | None
    ) -> None: ...

    def end(self, chunk: int, parts: Sequence[Part], last: bool) -> None: ...

    def finish(self) -> None: ...


class Gathering(Protocol):
    """The weights of this rank's chunks, which data-parallel peers keep together.

    begin, end  of a step, however it ends
    gather      the chunk's weights are needed soon: start. The action GATHER
    wait        they are needed now
    free        they are not needed for a while. The action FREE
    """

    def begin(self) -> None: ...

    def gather(self, chunk: int) -> None: ...

    def wait(self, chunk: int) -> None: ...

    def free(self, chunk: int) -> None: ...

    def end(self) -> None: ...


class PipelineError(RuntimeError):
    """An action failed; the message says which, and the cause is the error it raised.

    doing  the action without the rank: "action 1F2 (stage 1, chunk 0, microbatch 2)"
    """

    def __init__(self, message: str, doing: str) -> None:
        super().__init__(message)
        self.doing = doing

    def __reduce__(self) -> tuple[Any, ...]:
        return PipelineError, (str(self), self.doing)


class StepResult(NamedTuple):
    """losses     loss of every microbatch, detached, in their order; empty on ranks without the last stage
    peak_live  most microbatches (times chunks) whose activations this rank held at once
    """

    losses: list[Tensor]
    peak_live: int


class _Live(NamedTuple):
    """What the backward of one microbatch on one stage starts from and ends at."""

    leaves: list[Tensor]  # received tensors that require grad
    outputs: list[GradientEdge]  # outputs that require grad
    metas: list[TensorMeta]  # of these outputs, and so of their gradients
    loss: Tensor | None  # on the last stage
    gradients: Callable[[], list[Tensor]] | None = None  # of its outputs, where there is no loss yet


_COMPLETES = {Kind.B: (Part.PROMPT, Part.OTHERS), Kind.I: (Part.PROMPT,), Kind.W: (Part.OTHERS,)}


class PipelineRuntime:
    """Runs schedules on this rank's stages.

    comm              messages between the ranks of the pipeline
    placement         where the stages live; schedules must have the same
    programs          this rank's stages, by chunk
    backward          of the loss of a microbatch (a loss scaler goes here); default `loss.backward()`
    backward_by_grad  of the other stages; default `torch.autograd.backward`
    reduction         told when weight gradients are made
    gathering         told when weights are needed, where they are not there all the time; schedules then have GATHER
                      and FREE
    postpone_weights  whether W actions compute weight gradients. False computes them in I
    deferred_bytes    what postponed weight gradients may hold; None: what they can hold without more memory than 1F1B
                      needs
    parameters        of the stages, which are no activations
    """

    def __init__(
        self,
        comm: PipeComm,
        placement: Placement,
        programs: Sequence[StageProgram],
        *,
        backward: Callable[[Tensor], None] | None = None,
        backward_by_grad: BackwardByGrad | None = None,
        reduction: Reduction | None = None,
        gathering: Gathering | None = None,
        postpone_weights: bool = True,
        deferred_bytes: int | None = None,
        parameters: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        if comm.size != placement.num_ranks:
            raise ValueError(f"the placement has {placement.num_ranks} ranks, the pipeline group {comm.size}")
        if len(programs) != placement.num_chunks:
            raise ValueError(f"{len(programs)} programs for {placement.num_chunks} chunks per rank; give one per chunk")
        self.comm = comm
        self.placement = placement
        self.recorder: Recorder | None = None
        self._programs = dict(zip(placement.stages_of(comm.rank), programs, strict=True))
        self._rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        self._last = placement.num_stages - 1
        self._backward = backward if backward is not None else torch.autograd.backward
        self._backward_by_grad = backward_by_grad if backward_by_grad is not None else torch.autograd.backward
        self._reduction = reduction
        self._gathering = gathering
        self._postpone_weights = postpone_weights
        self._deferred_bytes = deferred_bytes
        self._parameters = parameters
        self.weight_grads: WeightGradStore | None = None
        self._graph_bytes: dict[Hashable, int] = {}  # of one microbatch on one stage, by shape
        self.silent = SilentTensors()
        self.pairs = TwoAtOnce()
        self._handlers: dict[Kind, Callable[[int, int], None]] = {
            Kind.F: self._run_forward,
            Kind.FB: self._join_forward,
            Kind.B: self._run_backward,
            Kind.I: self._run_input_grad,
            Kind.W: self._run_weight_grad,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
            Kind.REDUCE: self._reduce,
            Kind.GATHER: self._gather,
            Kind.FREE: self._free,
            Kind.OFFLOAD: lambda stage, microbatch: self._offload.start((stage, microbatch)),
            Kind.RELOAD: lambda stage, microbatch: self._offload.fetch((stage, microbatch)),
        }
        self._offload = ActivationOffload()
        self._start_step((), False, False)

    def run(
        self, schedule: Schedule, shape_keys: Sequence[Hashable], *, overlap: bool = True, slices: int = 1
    ) -> StepResult:
        """One step.

        schedule    lowered lists of all ranks (`lowering.lower`), the same on every rank
        shape_keys  for every microbatch something that is equal exactly for microbatches whose messages have equal
                    shapes, the same on every rank (the shapes of its inputs)
        overlap     as given to `lower`; False waits for every transfer where it stands
        slices      so many microbatches, the last of which goes backward first, make one; its gradients are reduced
                    together
        """
        if schedule.placement != self.placement:
            raise ValueError(f"the schedule is for {schedule.placement}, the runtime has {self.placement}")
        actions = schedule.actions[self.comm.rank]
        kinds = {action.kind for action in actions}
        count = 1 + max(action.microbatch for action in actions)
        if len(shape_keys) != count:
            raise ValueError(
                f"{len(shape_keys)} shape keys for a schedule of {count} microbatches; give one per microbatch"
            )
        training = Kind.B in kinds or Kind.I in kinds
        if Kind.I in kinds and self._postpone_weights and self.weight_grads is None:
            # Linears postpone only what runs forward while a store exists.
            self.weight_grads = WeightGradStore(
                math.inf if self._deferred_bytes is None else self._deferred_bytes,
                self._reduction.prompt if self._reduction is not None else (),
            )
        self._start_step(shape_keys, training, overlap)
        self._slices = slices
        self._to_come = Counter(
            (action.stage, part)
            for action in actions
            if action.microbatch % slices == 0
            for part in _COMPLETES.get(action.kind, ())
        )
        self._to_leave = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.OFFLOAD}
        step = 0
        handlers, recorder = self._handlers, self.recorder or (Labels() if is_profiling() else None)
        try:
            if self._gathering is not None:
                self._gathering.begin()
            with torch.set_grad_enabled(training):
                if recorder is not None:
                    recorder.start_step()
                for heart.action in actions:
                    kind, stage, microbatch = heart.action
                    if self._to_leave and kind in COMPUTE and kind is not Kind.FB:  # which runs with the next
                        self._offload.compute_begins()
                    if recorder is None:
                        handlers[kind](stage, microbatch)
                    else:
                        with recorder.span(actions[step]):
                            handlers[kind](stage, microbatch)
                    step += 1
                if training and self._reduction is not None:
                    self._reduction.finish()
                self.comm.flush()
        except BaseException as error:
            self._abandon_step()
            if not isinstance(error, Exception):  # an interrupt, which scripts may go on after, too
                raise
            raise self._failure(schedule, step, error, slices) from error
        finally:
            if self._gathering is not None:
                self._gathering.end()
        assert not self._live, self._live.keys()
        assert not self._receives, self._receives.keys()
        assert self._offload.is_idle
        result = StepResult(self._losses, self._peak_live)
        self._start_step((), False, False)
        return result

    def _start_step(self, shape_keys: Sequence[Hashable], training: bool, overlap: bool) -> None:
        split = {key: split_sizes(key) for key in dict.fromkeys(shape_keys)}
        self._shapes = [split[key] for key in shape_keys]  # equal ones are one object
        self._keys: dict[tuple[int, int], MessageKey] = {}
        self._training = training
        self._overlap = overlap
        self._losses: list[Tensor] = []
        self._num_live = self._peak_live = 0
        self._live_bytes = self._largest = 0  # of all graphs held; most that a microbatch leaves on this rank's stages
        self._to_leave = set[tuple[int, int]]()  # whose activations wait in host memory
        self._joined: tuple[int, int] | None = None  # the forward that runs with the next action
        # microbatches whose weight gradients are still to be made
        self._to_come = Counter[tuple[int, Part]]()
        self._to_reduce: Sequence[Part] = ()  # by the next REDUCE
        self._slices = 1  # of a microbatch
        self._live: dict[tuple[int, int], _Live] = {}
        self._receives: dict[tuple[Kind, int, int], Receive] = {}
        self._sent: dict[tuple[int, int], Sent] = {}
        self._outgoing: dict[tuple[int, int], tuple[Header, list[Tensor]]] = {}
        self._outgoing_grads: dict[tuple[int, int], list[Tensor]] = {}
        # Between two chunks of this rank nothing is sent: the turn of a V.
        self._handed_over: dict[tuple[int, int], tuple[Header, list[Tensor]]] = {}
        self._handed_back: dict[tuple[int, int], list[Tensor | None]] = {}

    # Compute ---------------------------------------------------------------------------------------------------------

    def _run_forward(self, stage: int, microbatch: int) -> None:
        received: Any = None
        leaves: list[Tensor] = []
        if stage > 0:
            if self._rank_of[stage - 1] == self.comm.rank:
                header, tensors = self._handed_over.pop((stage, microbatch))
            else:
                header, tensors = self._take((Kind.F, stage, microbatch))
            leaves = [t.requires_grad_() for t, meta in zip(tensors, header.tensors, strict=True) if meta.requires_grad]
            received = put_together(header, tensors)
            del tensors
        self._wait_weights(stage)
        if self.recorder is not None:
            self.recorder.inputs_arrived()
        result = self._forward_of(stage, received, microbatch)
        del received
        if isinstance(result, Unfinished):
            if self._training:
                edges = [get_gradient_edge(tensor) for tensor in result.outputs if tensor.requires_grad]
                self._live[stage, microbatch] = _Live(leaves, edges, [], None, result.gradients)
        elif stage == self._last:
            loss = self._take_loss(result, microbatch)
            if self._training:
                self._live[stage, microbatch] = _Live(leaves, [], [], loss)
        else:
            header, tensors = take_apart(result)
            if self._rank_of[stage + 1] == self.comm.rank:
                self._handed_over[stage + 1, microbatch] = (header, [tensor.detach() for tensor in tensors])
            else:
                self._outgoing[stage, microbatch] = (header, tensors)
            if self._training:
                edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
                metas = [meta for meta in header.tensors if meta.requires_grad]
                self._live[stage, microbatch] = _Live(leaves, edges, metas, None)
        if self._training:
            self._num_live += 1
            self._peak_live = max(self._peak_live, self._num_live)
            self._live_bytes += self._bytes_of(stage, microbatch)
            self._largest = max(self._largest, sum(self._bytes_of(own, microbatch) for own in self._programs))

    def _forward_of(self, stage: int, received: Any, microbatch: int) -> Any:
        """The stage's forward; what it keeps for the backward is measured the first time that it matters and a shape
        occurs.
        """
        forward = self._programs[stage].forward
        key = self._key(stage, microbatch)
        taking = self._offload.taking((stage, microbatch)) if (stage, microbatch) in self._to_leave else nullcontext()
        if (
            not self._training
            or self.weight_grads is None
            or self._deferred_bytes is not None
            or key in self._graph_bytes
        ):
            with taking:
                return forward(received, microbatch)
        with measure(self._parameters()) as saved, taking:
            result = forward(received, microbatch)
        if len(self._graph_bytes) >= 1024:  # every length of a batch is a shape of its own
            self._graph_bytes.clear()
        self._graph_bytes[key] = saved.bytes
        return result

    def _take_loss(self, loss: Any, microbatch: int) -> Tensor | None:
        if loss is None and not self._training:
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(
                f"the last stage must return the loss of the microbatch, a scalar tensor; it returned {shape}"
            )
        if self._training and not loss.requires_grad:
            raise ValueError(
                "the loss does not require grad: every parameter of the last stages is frozen, or it was detached"
            )
        self._losses.append(loss.detach())
        return loss

    def _join_forward(self, stage: int, microbatch: int) -> None:
        self._joined = (stage, microbatch)

    def _run_backward(self, stage: int, microbatch: int) -> None:
        if self._joined is None:
            self._run_full_backward(stage, microbatch)
            return
        forward, self._joined = self._joined, None
        self.pairs.run(lambda: self._run_forward(*forward), lambda: self._run_full_backward(stage, microbatch))

    def _run_full_backward(self, stage: int, microbatch: int) -> None:
        with self._making_gradients(stage, microbatch, Kind.B):
            self._backward_of(stage, microbatch, defer=False)
        self._num_live -= 1

    def _run_input_grad(self, stage: int, microbatch: int) -> None:
        if self.weight_grads is not None and self._deferred_bytes is None:
            self.weight_grads.limit = self._room_for_weights(stage, microbatch)
        with self._making_gradients(stage, microbatch, Kind.I):
            self._backward_of(stage, microbatch, defer=True)

    def _run_weight_grad(self, stage: int, microbatch: int) -> None:
        store, key = self.weight_grads, (stage, microbatch)
        with self._making_gradients(stage, microbatch, Kind.W, store.parameters(key) if store is not None else ()):
            if store is not None:
                store.run(key)
        self._num_live -= 1

    @contextmanager
    def _making_gradients(
        self, stage: int, microbatch: int, kind: Kind, of: Collection[torch.nn.Parameter] | None = None
    ) -> Iterator[None]:
        if self._reduction is None or microbatch % self._slices:
            yield
            return
        chunk, parts = self.placement.chunk_of(stage), _COMPLETES[kind]
        self._to_come.subtract((stage, part) for part in parts)
        last = not any(self._to_come[stage, part] for part in parts)
        self._reduction.begin(chunk, parts, last, of)
        yield
        if last and kind is not Kind.I:
            self._to_reduce = parts
        else:  # behind the last I others' gradients are made before the stage's are complete
            self._reduction.end(chunk, parts, last)

    def _room_for_weights(self, stage: int, microbatch: int) -> int:
        """Bytes that 1F1B would hold at its peak, on its first rank, less those of the graphs that are held here and
        now.

        1F1B's first rank holds min(m, p) microbatches of as many layers as this rank has. The one whose input gradients
        are about to be computed gives its memory to what it postpones.
        """
        others = self._live_bytes - self._bytes_of(stage, microbatch)
        return min(len(self._shapes), self.comm.size) * self._largest - others

    def _bytes_of(self, stage: int, microbatch: int) -> int:
        return self._graph_bytes.get(self._key(stage, microbatch), 0) if self._graph_bytes else 0

    def _backward_of(self, stage: int, microbatch: int, defer: bool) -> None:
        leaves, outputs, _, loss, gradients = self._live.pop((stage, microbatch))
        self._live_bytes -= self._bytes_of(stage, microbatch)
        grads: list[Tensor | None] = [*gradients()] if gradients is not None else []
        if stage < self._last:
            if self._rank_of[stage + 1] == self.comm.rank:
                grads = self._handed_back.pop((stage, microbatch))
            else:
                _, arrived = self._take((Kind.B, stage, microbatch))
                grads = self.silent.taken(self._key(stage + 1, microbatch).kind, arrived, len(outputs))
                if self._overlap:
                    # let go of the outputs
                    self.comm.has_arrived(self._sent.pop((stage, microbatch)), self._rank_of[stage + 1])
        self._wait_weights(stage)
        self._offload.wait((stage, microbatch))
        if self.recorder is not None:
            self.recorder.inputs_arrived()
        with (
            self.weight_grads.deferring((stage, microbatch))
            if defer and self.weight_grads is not None
            else nullcontext()
        ):
            if loss is not None:
                self._backward(loss)
            else:  # without any, every parameter up to here is frozen, or what they make is not read
                read = [(edge, grad) for edge, grad in zip(outputs, grads, strict=True) if grad is not None]
                if read:
                    self._backward_by_grad([edge for edge, _ in read], [grad for _, grad in read])
        if stage > 0:
            if self._rank_of[stage - 1] == self.comm.rank:
                self._handed_back[stage - 1, microbatch] = [leaf.grad for leaf in leaves]
            else:
                back = self.silent.answer(self._key(stage, microbatch).kind, leaves, not self.comm.caches)
                self._outgoing_grads[stage, microbatch] = back

    def _reduce(self, stage: int, microbatch: int) -> None:
        if self._reduction is not None:
            self._reduction.end(self.placement.chunk_of(stage), self._to_reduce, last=True)

    def _wait_weights(self, stage: int) -> None:
        if self._gathering is not None:
            self._gathering.wait(self.placement.chunk_of(stage))

    def _gather(self, stage: int, microbatch: int) -> None:
        if self._gathering is not None:
            self._gathering.gather(self.placement.chunk_of(stage))

    def _free(self, stage: int, microbatch: int) -> None:
        if self._gathering is not None:
            self._gathering.free(self.placement.chunk_of(stage))

    # Transfers -------------------------------------------------------------------------------------------------------

    def _key(self, stage: int, microbatch: int) -> MessageKey:
        """Messages into `stage` that are alike: tensors require grad only in training."""
        shape = self._shapes[microbatch]
        key = self._keys.get((stage, id(shape)))
        if key is None:
            key = self._keys[stage, id(shape)] = MessageKey((stage, shape[0], self._training), shape[1])
        return key

    def _send_forward(self, stage: int, microbatch: int) -> None:
        header, tensors = self._outgoing.pop((stage, microbatch))
        sent = self.comm.isend_message(header, tensors, self._rank_of[stage + 1], self._key(stage + 1, microbatch))
        if not self._overlap:
            sent.wait()
        elif self._training:
            self._sent[stage, microbatch] = sent

    def _receive_forward(self, stage: int, microbatch: int) -> None:
        self._keep(self.comm.irecv(self._rank_of[stage - 1], self._key(stage, microbatch)), (Kind.F, stage, microbatch))

    def _send_backward(self, stage: int, microbatch: int) -> None:
        sent = self.comm.isend_tensors(self._outgoing_grads.pop((stage, microbatch)), self._rank_of[stage - 1])
        if not self._overlap:
            sent.wait()

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        key = self._key(stage + 1, microbatch).kind
        metas = self.silent.expected(key, self._live[stage, microbatch].metas, not self.comm.caches)
        self._keep(self.comm.irecv_tensors(metas, self._rank_of[stage + 1]), (Kind.B, stage, microbatch))

    def _take(self, key: tuple[Kind, int, int]) -> tuple[Header, list[Tensor]]:
        """What has been received, once it is here."""
        receive = self._receives[key]
        tensors = receive.wait_tensors()
        del self._receives[key]  # not before: the backend writes to its tensors until then, also where the wait fails
        return receive.header, tensors

    def _keep(self, receive: Receive, key: tuple[Kind, int, int]) -> None:
        if not self._overlap:
            receive.complete()
        self._receives[key] = receive

    # Failure ---------------------------------------------------------------------------------------------------------

    def _abandon_step(self) -> None:
        """Let go of everything but what the backend still reads and writes, so that the error does not keep
        activations alive.
        """
        self.comm.discard(self._receives.values())
        self._start_step((), False, False)
        self._offload.discard()
        if self.weight_grads is not None:
            self.weight_grads.discard()

    def _failure(self, schedule: Schedule, step: int, error: Exception, slices: int) -> PipelineError:
        actions = schedule.actions[self.comm.rank]
        step = min(step, len(actions) - 1)  # waiting for the last sends counts as part of the last action
        if step > 0 and actions[step - 1].kind is Kind.FB and self.pairs.failed_forward:
            step -= 1
        action = actions[step]
        if action.kind is Kind.FB:
            action = action._replace(kind=Kind.F)
        doing = f"action {action} (stage {action.stage}, chunk {self.placement.chunk_of(action.stage)}"
        number, place = divmod(action.microbatch, slices)
        doing += f", microbatch {number}{f', slice {place}' if slices > 1 else ''})" if action.microbatch >= 0 else ")"
        return PipelineError(
            f"{doing} failed on {job.this_rank()}: {type(error).__name__}: "
            f"{error}\n{table(schedule.actions, (self.comm.rank, step))}",
            doing,
        )
