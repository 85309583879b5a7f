"""A process-group backend with which several ranks share one GPU, where NCCL wants a device for each.

    register()
    torch.distributed.init_process_group("staged", store=store, rank=rank, world_size=world_size)

What is sent goes through pinned host memory and gloo; what a program can see is as with NCCL:

- A collective reads and writes on a stream of its own that begins behind what the current stream was given before the
  call. The call returns at once.
- `Work.wait()` makes the current stream wait for it, and no other stream. The host waits, too, until the ranks have
  met, which NCCL's host does not. What a program forgets to wait for is as unordered as with NCCL.
- Collectives of a group run in the order of their calls; of different groups, side by side. Messages between a pair of
  ranks have an order for each direction.

Tensors of the CPU are sent from a copy that the call makes. It is for tests: nothing about it is fast.

[Note: two groups] gloo tells operations of a group apart by how many there were before. Calls with tensors of the CPU
and of a device have threads of their own, which may begin in another order on each rank, and so groups of their own, as
"cpu:gloo,cuda:nccl" has them.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future

NAME = "staged"
_COLLECTIVES = "collectives"
_GRACE = 10.0  # seconds that a lane gets for what it still has to do
_BYTES = {torch.float8_e4m3fn, torch.float8_e5m2}  # which gloo does not know

Host = Callable[[Tensor], Tensor]
Meet = Callable[[Any, Host], Any]
_ProcessGroup: Any = dist.ProcessGroup  # whose stubs know other names of arguments
_Work: Any = distributed_c10d.Work

_groups: weakref.WeakSet[StagedGroup] = weakref.WeakSet()


def register() -> None:
    """Make `backend="staged"` known to `torch.distributed`; more than once does nothing."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
        atexit.register(_end_all)


def _end_all() -> None:
    """Threads must not outlive the interpreter, nor gloo's outlive them."""
    for group in list(_groups):
        group.shutdown()
        del group._gloo, group._gloo_of_devices


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return StagedGroup(dist.PrefixStore("staged", store), rank, size, timeout)


class StagedWork(_Work):
    """What a call returns.

    Its tensors are kept until it has ended, and marked as used by the stream that it runs on.
    """

    def __init__(self, results: list[Tensor], devices: list[Any]) -> None:
        super().__init__()
        self._met = threading.Event()  # the ranks have met, and what remains is on the stream
        self._error: BaseException | None = None
        self._done: torch.cuda.Event | None = None
        self._results = results
        self._future: Future[list[Tensor]] = Future(devices=devices)

    def end(self, done: torch.cuda.Event | None = None, error: BaseException | None = None) -> None:
        self._done, self._error = done, error
        self._met.set()
        if error is None:
            self._future.set_result(self._results)
        elif isinstance(error, Exception):
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta() else None
        if not self._met.wait(seconds):
            raise RuntimeError(f"{NAME}: the ranks have not met within {seconds:g} s")
        if self._error is not None:
            raise RuntimeError(f"{NAME}: {self._error}") from self._error
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._met.is_set() and (self._done is None or self._done.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> Future[list[Tensor]]:
        return self._future


@dataclass
class _Call:
    """What a lane has to do: meet the other ranks once the inputs have arrived at the host."""

    work: StagedWork
    gloo: Any
    meet: Meet
    hosts: dict[int, Tensor]
    writes: list[Tensor]
    arrived: torch.cuda.Event | None


@dataclass
class _Lane:
    """A thread that runs calls in their order, and the stream of their copies."""

    stream: torch.cuda.Stream | None
    calls: queue.SimpleQueue[_Call | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            with self._on_stream():  # which who waits for the future is ordered behind, too
                try:
                    call.work.end(self._carry_out(call))
                except BaseException as error:  # whoever waits is told
                    call.work.end(error=error)

    def _on_stream(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _carry_out(self, call: _Call) -> torch.cuda.Event | None:
        if call.arrived is not None:
            call.arrived.synchronize()
        work = call.meet(call.gloo, lambda tensor: call.hosts[id(tensor)])
        if work is not None:
            work.wait()
        if self.stream is None or call.arrived is None:
            for tensor in call.writes:
                tensor.copy_(_like_bytes(tensor, call.hosts[id(tensor)]))
            return None
        for tensor in call.writes:
            tensor.copy_(_like_bytes(tensor, call.hosts[id(tensor)]), non_blocking=True)
        done = torch.cuda.Event()
        done.record(self.stream)
        return done


def _like_bytes(tensor: Tensor, host: Tensor) -> Tensor:
    return host.view(tensor.dtype) if tensor.dtype in _BYTES else host


class StagedGroup(_ProcessGroup):
    """See the top of the file. The methods are those that `torch.distributed` calls, by the names of every version."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo_of_devices: Any = None
        if torch.cuda.is_available():  # see [Note: two groups]
            self._gloo_of_devices = dist.ProcessGroupGloo(dist.PrefixStore("devices", store), rank, size, timeout)
        self._lanes: dict[Hashable, _Lane] = {}
        self._lock = threading.Lock()
        _groups.add(self)

    # What torch asks a group about itself.

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:  # torch keeps it in a backend of C++, and there is none
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # The way of every call.

    def _issue(self, lane: Hashable, reads: Sequence[Tensor], writes: Sequence[Tensor], meet: Meet) -> StagedWork:
        """Copies `reads` to the host, lets the ranks meet there, copies `writes` back.

        meet    given a group of gloo and what finds the host's copy of a tensor, starts an operation
        """
        tensors = [*reads, *writes]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        assert len(devices) <= 1, "tensors of a call are on one device"
        stream = next(iter(devices), None)
        own = self._lane(lane, stream)
        work = StagedWork(list(writes), sorted(devices, key=str))
        hosts: dict[int, Tensor] = {}
        arrived = None
        for tensor in tensors:
            shape, dtype = tensor.shape, torch.uint8 if tensor.dtype in _BYTES else tensor.dtype
            if id(tensor) not in hosts:
                hosts[id(tensor)] = torch.empty(shape, dtype=dtype, pin_memory=tensor.is_cuda)
        if own.stream is not None:
            own.stream.wait_stream(torch.cuda.current_stream(stream))
            with torch.cuda.stream(own.stream):
                self._copy_to(hosts, reads)
                arrived = torch.cuda.Event()
                arrived.record(own.stream)
            for tensor in tensors:
                tensor.record_stream(own.stream)
        else:
            self._copy_to(hosts, reads)
        own.calls.put(_Call(work, self._gloo_of(stream), meet, hosts, list(writes), arrived))
        return work

    def _gloo_of(self, device: torch.device | None) -> Any:
        return self._gloo if device is None else self._gloo_of_devices

    @staticmethod
    def _copy_to(hosts: dict[int, Tensor], reads: Sequence[Tensor]) -> None:
        for tensor in reads:
            source = tensor.detach()
            source = source.contiguous().view(torch.uint8) if tensor.dtype in _BYTES else source
            hosts[id(tensor)].copy_(source, non_blocking=True)

    def _lane(self, key: Hashable, device: torch.device | None) -> _Lane:
        with self._lock:
            whole = (key, device)
            if whole not in self._lanes:
                self._lanes[whole] = _Lane(None if device is None else torch.cuda.Stream(device))
            return self._lanes[whole]

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StagedWork:
        opts, mean = _without_mean(opts or distributed_c10d.AllreduceOptions())
        return self._reduced(
            tensors, tensors, mean, lambda gloo, host: gloo.allreduce([host(each) for each in tensors], opts)
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> StagedWork:
        opts, mean = _without_mean(opts or distributed_c10d.AllreduceCoalescedOptions())

        def meet(gloo: Any, host: Host) -> None:
            for each in tensors:
                one = distributed_c10d.AllreduceOptions()
                one.reduceOp = opts.reduceOp
                gloo.allreduce([host(each)], one).wait()

        return self._reduced(tensors, tensors, mean, meet)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> StagedWork:
        opts, mean = _without_mean(opts or distributed_c10d.ReduceOptions())
        return self._reduced(
            tensors, tensors, mean, lambda gloo, host: gloo.reduce([host(each) for each in tensors], opts)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> StagedWork:
        opts = opts or distributed_c10d.BroadcastOptions()
        return self._issue(
            _COLLECTIVES, tensors, tensors, lambda gloo, host: gloo.broadcast([host(each) for each in tensors], opts)
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> StagedWork:
        opts = opts or distributed_c10d.AllgatherOptions()
        return self._issue(
            _COLLECTIVES,
            inputs,
            [each for row in outputs for each in row],
            lambda gloo, host: gloo.allgather(_on_host(host, outputs), [host(each) for each in inputs], opts),
        )

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> StagedWork:
        opts = opts or distributed_c10d.AllgatherOptions()
        return self._issue(
            _COLLECTIVES,
            [given],
            [output],
            lambda gloo, host: gloo._allgather_base(host(output), host(given), opts),
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> StagedWork:
        opts = opts or distributed_c10d.AllgatherOptions()

        def meet(gloo: Any, host: Host) -> None:
            for output, given in zip(outputs, inputs, strict=True):
                gloo._allgather_base(host(output), host(given), opts).wait()

        return self._issue(_COLLECTIVES, inputs, outputs, meet)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> StagedWork:
        opts, mean = _without_mean(opts or distributed_c10d.ReduceScatterOptions())
        return self._reduced(
            [each for row in inputs for each in row],
            outputs,
            mean,
            lambda gloo, host: gloo.reduce_scatter([host(each) for each in outputs], _on_host(host, inputs), opts),
        )

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> StagedWork:
        opts, mean = _without_mean(opts or distributed_c10d.ReduceScatterOptions())
        return self._reduced(
            [given], [output], mean, lambda gloo, host: gloo._reduce_scatter_base(host(output), host(given), opts)
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> StagedWork:
        opts, mean = _without_mean(opts or distributed_c10d.ReduceScatterOptions())

        def meet(gloo: Any, host: Host) -> None:
            for output, given in zip(outputs, inputs, strict=True):
                gloo._reduce_scatter_base(host(output), host(given), opts).wait()

        return self._reduced(inputs, outputs, mean, meet)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> StagedWork:
        opts = opts or distributed_c10d.AllToAllOptions()
        return self._issue(
            _COLLECTIVES,
            [given],
            [output],
            lambda gloo, host: gloo.alltoall_base(
                host(output), host(given), list(output_sizes or []), list(input_sizes or []), opts
            ),
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> StagedWork:
        def meet(gloo: Any, host: Host) -> None:
            sent = torch.cat([host(each).flatten() for each in inputs])
            taken = sent.new_empty(sum(each.numel() for each in outputs))
            sizes = [each.numel() for each in outputs], [each.numel() for each in inputs]
            gloo.alltoall_base(taken, sent, *sizes, distributed_c10d.AllToAllOptions()).wait()
            for each, part in zip(outputs, taken.split(sizes[0]), strict=True):
                host(each).copy_(part.view_as(host(each)))

        return self._issue(_COLLECTIVES, inputs, outputs, meet)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> StagedWork:
        opts = opts or distributed_c10d.GatherOptions()
        return self._issue(
            _COLLECTIVES,
            inputs,
            [each for row in outputs for each in row],
            lambda gloo, host: gloo.gather(_on_host(host, outputs), [host(each) for each in inputs], opts),
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> StagedWork:
        opts = opts or distributed_c10d.ScatterOptions()
        return self._issue(
            _COLLECTIVES,
            [each for row in inputs for each in row],
            outputs,
            lambda gloo, host: gloo.scatter([host(each) for each in outputs], _on_host(host, inputs), opts),
        )

    def barrier(self, opts: Any = None) -> StagedWork:
        return self._issue(_COLLECTIVES, [], [], lambda gloo, host: gloo.barrier(distributed_c10d.BarrierOptions()))

    # The names of torch 2.13 and later.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _reduced(self, reads: Sequence[Tensor], writes: Sequence[Tensor], mean: bool, meet: Meet) -> StagedWork:
        if not mean:
            return self._issue(_COLLECTIVES, reads, writes, meet)

        def average(gloo: Any, host: Host) -> None:
            work = meet(gloo, host)
            if work is not None:
                work.wait()
            for each in writes:
                host(each).div_(self._size)

        return self._issue(_COLLECTIVES, reads, writes, average)

    # Messages.

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> StagedWork:
        return self._issue(
            ("to", to, tag), tensors, [], lambda gloo, host: gloo.send([host(each) for each in tensors], to, tag)
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> StagedWork:
        return self._issue(
            ("from", source, tag),
            [],
            tensors,
            lambda gloo, host: gloo.recv([host(each) for each in tensors], source, tag),
        )

    # The end.

    def shutdown(self) -> None:
        """What was called before ends first."""
        with self._lock:
            for lane in self._lanes.values():
                lane.calls.put(None)
            for lane in self._lanes.values():
                lane.thread.join(_GRACE)
            self._lanes.clear()

    def abort(self) -> None:
        self.shutdown()


def _on_host(host: Host, rows: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[host(each) for each in row] for row in rows]


def _without_mean(opts: Any) -> tuple[Any, bool]:
    """gloo has no mean: options that ask for the sum, and whether to divide it."""
    if opts.reduceOp != dist.ReduceOp.AVG:
        return opts, False
    sums = type(opts)()
    sums.reduceOp = dist.ReduceOp.SUM
    for name in ("rootRank", "rootTensor"):
        if hasattr(opts, name):
            setattr(sums, name, getattr(opts, name))
    return sums, True
