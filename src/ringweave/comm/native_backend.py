"""Native backend inside a group: Gloo for CPU and NCCL for CUDA tensors, with errors that name the rank at fault.

A channel that runs an allreduce natively has a Gloo group of its own: channels run collectives in another order than
the script calls them, and Gloo would mistake one for the other.
"""

import math
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, Store, Work, distributed_c10d
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceScatterOptions,
)

from ringweave.comm.gloo import (
    ABORTED,
    StuckWorkError,
    abort_gloo,
    ends_after_abort,
    leak_backend,
    make_gloo,
    wait_for_gloo,
)
from ringweave.comm.group_info import GroupInfo
from ringweave.comm.peer_data import BackgroundCall, run_at_once
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.errors import CommunicationError

_CONNECT_TIMEOUT = timedelta(seconds=30)
"""All ranks have just called, so none is late. Gloo may wait for a multiple of it."""

_CPP_STACK = "Exception raised from"
"""Beginning of the part of torch's errors that names functions."""
_StartedT = TypeVar("_StartedT")


def transfer_failure(cause: RuntimeError) -> TransferFailedError:
    """Convert the native backend's error, which does not name a peer."""
    whole = str(cause).strip().partition(_CPP_STACK)[0]
    text = whole.partition("\n")[0] or type(cause).__name__
    return TransferFailedError(None, text, hung="imed out" in whole or "imeout" in whole)


def named_error(
    cause: RuntimeError, diagnose: Callable[[TransferFailedError], CommunicationError]
) -> CommunicationError:
    """Return the error that names the culprit of the native backend's error; its cause may be an earlier failure."""
    failure = transfer_failure(cause)
    failure.__cause__ = cause
    return diagnose(failure)


class NativeBackends:
    """Native backends of a group: one Gloo group per channel, made when the channel first needs it."""

    def __init__(
        self,
        store: Store,
        group: GroupInfo,
        timeout: timedelta,
        abort_group_backend: Callable[[], None],
        release_group_backend: Callable[[], None] = lambda: None,
    ) -> None:
        """`abort_group_backend` aborts the group's own backend; `release_group_backend` precedes its end."""
        self._abort_group_backend, self._release_group_backend = abort_group_backend, release_group_backend
        self._store = store
        self._group = group
        self._timeout = timeout
        self._lock = threading.Lock()
        self._by_channel: dict[int, Any] = {}
        self._is_aborted = False
        self.ordered_nccl: OrderedNccl | None = None
        """For tensors of a device, where NCCL is allowed beside the bridge."""

    def prepare(self, channel: int, barrier: Callable[[], object]) -> None:
        """Connect the backend of a channel; all ranks do so in the same collective.

        Args:
            channel: Index of the channel.
            barrier: Blocks until all ranks are here. A rank may reach this collective as late as a
                collective may take; afterwards, connecting takes no longer than forming a group.

        Raises:
            TransferFailedError: A rank did not come.
        """
        if channel not in self._by_channel:
            barrier()
            self._convert_errors(lambda: self._connect(channel))

    def allreduce(self, channel: int, message: Tensor, op: Any, timeout_s: float) -> None:
        """Reduce a contiguous tensor in place; blocks.

        Raises:
            TransferFailedError: The backend failed.
        """
        options = AllreduceOptions()
        options.reduceOp = op
        self._run(channel, timeout_s, options, lambda gloo: gloo.allreduce([message], options))

    def allgather(self, channel: int, row: Tensor, timeout_s: float) -> Tensor:
        """Return the row of each rank, (group_size, width), from each rank's (width,) on the CPU; blocks.

        Raises:
            TransferFailedError: The backend failed.
        """
        rows = row.new_empty((self._group.group_size, *row.shape))
        self.allgather_blocks(channel, rows, row[None], timeout_s)
        return rows

    def allgather_blocks(self, channel: int, blocks: Tensor, own: Tensor, timeout_s: float) -> None:
        """Gather each rank's block, `own`, in `blocks`, contiguous and group_size times as long; blocks the thread.

        Raises:
            TransferFailedError: The backend failed.
        """
        options = AllgatherOptions()
        self._run(channel, timeout_s, options, lambda gloo: gloo._allgather_base(blocks, own, options))

    def reduce_scatter(self, channel: int, own: Tensor, blocks: Tensor, op: Any, timeout_s: float) -> None:
        """Reduce `blocks` over the ranks, and give each rank its block, `own`; both contiguous; blocks.

        Raises:
            TransferFailedError: The backend failed.
        """
        options = ReduceScatterOptions()
        options.reduceOp = op
        self._run(channel, timeout_s, options, lambda gloo: gloo._reduce_scatter_base(own, blocks, options))

    def broadcast(self, channel: int, message: Tensor, root: int, timeout_s: float) -> None:
        """Give all ranks the root's content of a contiguous tensor; blocks.

        Raises:
            TransferFailedError: The backend failed.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._run(channel, timeout_s, options, lambda gloo: gloo.broadcast([message], options))

    def abort(self) -> None:
        """Fail everything in flight, from any thread."""
        with self._lock:
            self._is_aborted = True
            backends = list(self._by_channel.values())
        if self.ordered_nccl is not None:
            end = partial(self.ordered_nccl.end, "abort")
            threading.Thread(target=end, name="ringweave NCCL abort", daemon=True).start()
        run_at_once([self._abort_group_backend, *(partial(abort_gloo, gloo, self._group) for gloo in backends)])

    def close(self) -> None:
        """Release all backends and their threads."""
        if self.ordered_nccl is not None and not self._is_aborted:
            self.ordered_nccl.end("shutdown")
        self._release_group_backend()
        with self._lock:
            self._by_channel.clear()

    def _connect(self, channel: int) -> None:
        if self._is_aborted:
            raise RuntimeError(ABORTED)
        timeout = min(self._timeout, _CONNECT_TIMEOUT)

        def connect() -> Any:
            """Connect in a thread that can be abandoned: a search for a dead store or peer cannot be interrupted."""
            # A separate connection to the store: waiting for a key blocks all other users of the same connection,
            # and ranks that form different groups would wait for each other.
            own: Any = self._store  # torch's stubs lack `clone`
            return make_gloo(PrefixStore(f"channel-native/{channel}/", own.clone()), self._group, timeout)

        try:
            gloo = BackgroundCall(connect, "ringweave native").wait_result(math.inf, lambda: self._is_aborted)
        except TimeoutError as cause:
            raise RuntimeError(ABORTED) from cause
        with self._lock:
            self._by_channel[channel] = gloo
            is_aborted = self._is_aborted
        if is_aborted:  # aborted meanwhile: the aborting thread did not see this one
            abort_gloo(gloo, self._group)
            raise RuntimeError(ABORTED)

    def _run(self, channel: int, timeout_s: float, options: Any, start: Callable[[Any], Work]) -> None:
        """Run what `start` starts on the channel's Gloo group with these options."""
        options.timeout = timedelta(seconds=timeout_s)
        gloo = self._by_channel[channel]
        self._convert_errors(lambda: self._wait(gloo, start(gloo)))

    def _wait(self, gloo: Any, work: Work) -> None:
        try:
            wait_for_gloo(work, lambda: self._is_aborted)
        except StuckWorkError:
            leak_backend(gloo)
            raise

    @staticmethod
    def _convert_errors(action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as cause:
            raise transfer_failure(cause) from cause


class OrderedNccl:
    """NCCL with its ranks in the order of a plan's ring: its own rings follow its ranks, from node to node.

    It is a candidate beside the schedules for allreduces and broadcasts of a device's tensors. One communicator per
    order, made when it is first used; its collectives must not overlap, and come in the same order on all ranks.

    Source: `ncclTopoPostset` and `connectRings` of NCCL 2.28 number nodes by their first ranks.
    """

    def __init__(self, store: Store, group: GroupInfo, timeout: timedelta) -> None:
        self._store, self._group, self._timeout = store, group, timeout
        self._lock = threading.Lock()
        self._by_order: dict[tuple[int, ...], Any] = {}
        self._is_aborted = False

    def allreduce(self, order: tuple[int, ...], tensor: Tensor, op: Any) -> None:
        """Start to reduce a contiguous tensor in place; the current stream waits for it.

        Raises:
            TransferFailedError: NCCL cannot start it, or the group was aborted.
        """
        options = AllreduceOptions()
        options.reduceOp = op
        self._run(order, lambda nccl: nccl.allreduce([tensor], options))

    def broadcast(self, order: tuple[int, ...], tensor: Tensor, root: int) -> None:
        """Start to give all ranks the content of the tensor of group rank `root`; the current stream waits for it.

        Raises:
            TransferFailedError: NCCL cannot start it, or the group was aborted.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = order.index(root), 0
        self._run(order, lambda nccl: nccl.broadcast([tensor], options))

    def end(self, method: str) -> None:
        """Call `shutdown` or `abort` of all communicators, once; none is made any more."""
        with self._lock:
            self._is_aborted = True
            made, self._by_order = list(self._by_order.values()), {}
        for nccl in made:
            getattr(nccl, method)()

    @property
    def is_aborted(self) -> bool:
        return self._is_aborted

    def _run(self, order: tuple[int, ...], start: Callable[[Any], Work | None]) -> None:
        try:
            work = start(self._communicator(order))
            if work is not None:
                work.wait()
        except RuntimeError as cause:
            raise transfer_failure(cause) from cause

    def _communicator(self, order: tuple[int, ...]) -> Any:
        with self._lock:
            if self._is_aborted:
                raise RuntimeError(ABORTED)
            if order not in self._by_order:
                self._by_order[order] = self.make(order, f"nccl-ordered/{len(self._by_order)}/")
            return self._by_order[order]

    def make(self, order: tuple[int, ...], prefix: str) -> Any:
        """Make NCCL's backend of these group ranks, by their ranks in it."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = [self._group.ranks[rank].global_rank for rank in order]
        place = (order.index(self._group.group_rank), self._group.group_size)
        return ProcessGroupNCCL(PrefixStore(prefix, self._store), *place, options)


_DELEGATED_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""Methods of torch's ProcessGroup that start a collective or a message, in torch 2.11 to 2.14, except allreduce."""
_POINT_TO_POINT = frozenset({"recv", "recv_anysource", "send"})
"""Works that cannot be polled: a wait that times out closes their connection."""
COLLECTIVE_METHODS = ("allreduce", *(name for name in _DELEGATED_METHODS if name not in _POINT_TO_POINT))
"""Methods of torch's ProcessGroup that start a collective."""


class NativeWork(Work):
    """Work of the native backend whose failure names the rank and node at fault."""

    def __init__(
        self,
        work: Work,
        diagnose: Callable[[TransferFailedError], CommunicationError],
        after: Callable[[], object] | None = None,
        wait: Callable[[timedelta | None], bool] | None = None,
    ) -> None:
        """`diagnose` finds the culprit, `after` runs on the result, `wait` replaces the work's own wait."""
        super().__init__()
        self.work = work
        self._wait = wait or (lambda timeout: work.wait() if timeout is None else work.wait(timeout))
        self._diagnose = diagnose
        self._future = work.get_future().then(lambda done: (after(), done.value())[1]) if after else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensors hold the result.

        Raises:
            PeerError: The native backend failed.
        """
        try:
            done = self._wait(timeout)
        except RuntimeError as cause:
            error = named_error(cause, self._diagnose)
            raise error from error.__cause__
        if self._future is not None:
            self._future.wait()
        return done

    def is_completed(self) -> bool:
        return self.work.is_completed() if self._future is None else self._future.done()

    def is_success(self) -> bool:
        return self.work.is_success()

    def exception(self) -> BaseException | None:
        return self.work.exception()

    def result(self) -> list[Tensor]:
        """Wait, then return the tensors."""
        self.wait()
        return self.work.result()

    def synchronize(self) -> None:
        """Wait: CPU tensors have no streams."""
        self.wait()

    def _source_rank(self) -> int:
        return self.work._source_rank()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future or self.work.get_future()


class NativeProcessGroup(dist.ProcessGroup):
    """Abstract process group whose collectives run natively unless a subclass runs them.

    The collectives go to a plain process group inside instead of `super()`: torch's trampoline for Python subclasses
    (2.13) keeps the GIL while it calls the parent, the parent waits for a lock of Gloo's, and the Gloo thread that
    holds it waits for the GIL to release a tensor. See docs/decisions/0003-native-backend-inside-the-group.md.
    """

    def __init__(
        self,
        store: Store,
        group: GroupInfo,
        timeout: timedelta,
        *,
        allows_nccl: bool = True,
        nccl_options: Any = None,
        name: str = "",
    ) -> None:
        """CUDA tensors go to NCCL where it is allowed and there, else to Gloo.

        `nccl_options` are the script's `ProcessGroupNCCL.Options`; `name` is the group's, in NCCL's own reports.
        """
        # torch's stubs lack this constructor, the one that Python subclasses have.
        super().__init__(group.group_rank, group.group_size)  # pyrefly: ignore
        self.members = group
        self._uses_nccl = allows_nccl and torch.cuda.is_available() and dist.is_nccl_available()
        self._store = store
        self._timeout = timeout
        self.native_group = dist.ProcessGroup(PrefixStore("plain/", store), group.group_rank, group.group_size)
        self._nccl: Any = self._make_nccl(nccl_options, name) if self._uses_nccl else None
        """NCCL until it is shut down or aborted; None without it."""
        self._gloo: Any = self._register_native_backends()
        self._is_native_aborted = self._is_leaked = False
        self._pending_works = weakref.WeakSet[NativeWork]()
        """Collectives on CPU tensors that may be waited for."""
        self._awaited_works = set[Work]()
        """Synchronous ones, each in the thread that called it."""

    def fail(self, failure: TransferFailedError, operation: str) -> CommunicationError:
        """End the group because of a failed transfer, and return the error that names the culprit."""
        raise NotImplementedError  # pybind11's metaclass allows no abstract methods

    def count_native(self, num_bytes: int) -> None:
        """Count a native collective of so many bytes on this rank."""
        raise NotImplementedError

    def start_native(self, start: Callable[[], _StartedT], operation: str) -> _StartedT:
        """Return what `start` does; an error of the native backend becomes one that names operation and culprit."""
        try:
            return start()
        except dist.DistError as cause:
            error = named_error(cause, lambda failure: self.fail(failure, operation))
            raise error from error.__cause__

    def wrap_work(self, work: Work | None, operation: str) -> NativeWork | None:
        """Wrap `work` so that its error names operation and culprit.

        NCCL returns no work for a synchronous collective (torch 2.7 and later); neither does this method then.
        """
        return None if work is None else NativeWork(work, lambda failure: self.fail(failure, operation))

    def allreduce_by_gloo(
        self, tensor: Tensor, opts: Any, operation: Callable[[], str], after: Callable[[], object] | None = None
    ) -> NativeWork | None:
        """Allreduce a contiguous CPU tensor by Gloo; `after` runs on the result.

        A synchronous one is done when this returns, and has no work, as with NCCL.
        """
        work = self._gloo.allreduce([tensor], opts)
        if opts.asyncOp:
            return self.wrap_gloo_work(work, operation, after)
        self._awaited_works.add(work)
        try:
            self._wait_for_gloo(work)
        except RuntimeError as cause:
            error = named_error(cause, lambda failure: self.fail(failure, operation()))
            raise error from error.__cause__
        finally:
            self._awaited_works.discard(work)
        if after is not None:
            after()
        return None

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks have called this, by Gloo; a failure ends the group, as it breaks Gloo's connections.

        Args:
            timeout: Rank 0's limit on waiting for the others, whose time is not limited; None is the group's.
            wait_all_ranks: Wait for each rank so long, and name all that do not come instead of the first.

        Raises:
            PeerError: On rank 0, ranks did not come. On the others, rank 0 gave up or died.
        """
        try:
            self._pass_monitored_barrier(self._timeout if timeout is None else timeout, wait_all_ranks)
        except RuntimeError as cause:
            failure = transfer_failure(cause)
            is_hung = failure.hung or "onnection" not in str(cause)
            named = TransferFailedError(None, str(failure), hung=is_hung)
            named.__cause__ = cause
            error = self.fail(named, "monitored_barrier")
            raise error from error.__cause__

    def _pass_monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        if timeout < timedelta(milliseconds=1) and self.rank() == 0 < self.size() - 1:  # torch takes it for 0 or 1 ms
            raise RuntimeError("Rank 0 timed out in monitoredBarrier after 0 ms")
        group: Any = self.native_group  # torch's stubs lack the method
        group.monitored_barrier(timeout, wait_all_ranks)

    def wrap_gloo_work(
        self, work: Work, operation: Callable[[], str], after: Callable[[], object] | None = None
    ) -> NativeWork:
        """Wrap a collective of Gloo's: as `wrap_work`, and its wait ends soon after an abort in any case.

        `operation` is called for the text of an error, `after` runs on the result.
        """
        wrapped = NativeWork(
            work,
            lambda failure: self.fail(failure, operation()),
            after,
            lambda timeout: self._wait_for_gloo(work, timeout),
        )
        self._pending_works.add(wrapped)
        return wrapped

    def _wait_for_gloo(self, work: Work, timeout: timedelta | None = None) -> bool:
        try:
            return wait_for_gloo(work, lambda: self._is_native_aborted, timeout)
        except StuckWorkError:
            self._leak_gloo()
            raise

    def abort_native(self) -> None:
        """Close the native backend's connections: collectives in flight fail, here and at the peers."""
        self._is_native_aborted = True
        self._abort_nccl()
        abort_gloo(self._gloo, self.members)

    def shutdown_nccl(self) -> None:
        """Finish NCCL's collectives and free its communicators; DDP keeps the group, so no destructor would.

        All ranks call it in the same order of groups, as `destroy_process_group` does.
        """
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.shutdown()

    def _abort_nccl(self) -> None:
        """Abort NCCL in a thread of its own, since it may wait for kernels of other groups (pytorch issue 119797)."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            threading.Thread(target=nccl.abort, name="ringweave NCCL abort", daemon=True).start()

    def release_native(self) -> None:
        """Leak Gloo if a work survives the abort, so that destroying the group does not block."""
        if not self._is_native_aborted:
            return
        works = [*(each.work for each in list(self._pending_works)), *list(self._awaited_works)]
        if not all(map(ends_after_abort, works)):
            self._leak_gloo()

    def _leak_gloo(self) -> None:
        if not self._is_leaked:
            self._is_leaked = True
            leak_backend(self._gloo)

    def _register_native_backends(self) -> ProcessGroupGloo:
        kinds = dist.ProcessGroup.BackendType
        gloo = make_gloo(PrefixStore("native/", self._store), self.members, self._timeout)
        gloo._set_sequence_number_for_group()
        cuda: Any = self._nccl if self._uses_nccl else gloo
        cuda_kind = kinds.NCCL if self._uses_nccl else kinds.GLOO
        for group in (self, self.native_group):
            group._set_default_backend(cuda_kind)
            group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
            if torch.cuda.is_available():
                group._register_backend(torch.device("cuda"), cuda_kind, cuda)
        return gloo

    def _make_nccl(self, options: Any, name: str) -> Any:
        """Make NCCL's backend with the script's options, where it gave some, as torch does."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = options if isinstance(options, ProcessGroupNCCL.Options) else ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = [member.global_rank for member in self.members.ranks]
        options.group_name = distributed_c10d.GroupName(name)
        nics = ",".join(self.members.own_info.location.nics) or os.environ.get("GLOO_SOCKET_IFNAME")
        if nics and self.members.num_nodes > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={nics}")  # exactly these names
        place = (self.members.group_rank, self.members.group_size)
        nccl = ProcessGroupNCCL(PrefixStore("nccl/", self._store), *place, options)
        nccl._set_sequence_number_for_group()
        return nccl


_CPU_ONLY_IN_GLOO = frozenset(
    {
        "all_gather_single_coalesced",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce_coalesced",
        *_POINT_TO_POINT,
    }
)
"""Methods for which Gloo would take a CUDA tensor's address for one in host memory (torch 2.11 to 2.13)."""


def check_gloo_supports(name: str, tensors: Any) -> None:
    """Check that Gloo runs a method on these tensors, in nested lists.

    Raises:
        CommunicationError: It runs on CPU tensors only, and one of these is elsewhere.
    """
    if name in _CPU_ONLY_IN_GLOO and _has_device_tensor(tensors):
        raise CommunicationError(
            f"{name.strip('_')} by Gloo",
            got="a tensor that is not on the CPU",
            expected="a CPU tensor, since this group does not use NCCL",
            do="Move the tensor to the CPU, or use NCCL by RINGWEAVE_DEVICE_PATH=native, if the job is not elastic",
        )


def _delegating_method(name: str) -> Callable[..., Work | None]:
    """Make a method that delegates a collective to the native backend, under torch's name."""
    operation, is_barrier = name.strip("_"), name == "barrier"

    def collective(self: NativeProcessGroup, *args: Any, **kwargs: Any) -> Work | None:
        self.count_native(_total_bytes(args[:1]))
        if is_barrier:
            args, kwargs = (host_barrier_options(*args, **kwargs),), {}
        uses_gloo = not self._uses_nccl or is_barrier or _is_on_cpu(args[:1])
        if uses_gloo:
            check_gloo_supports(name, args[:1])
        work = self.start_native(lambda: getattr(self.native_group, name)(*args, **kwargs), operation)
        if uses_gloo and name not in _POINT_TO_POINT and work is not None:
            return self.wrap_gloo_work(work, lambda: operation)
        return self.wrap_work(work, operation)

    collective.__name__ = name
    collective.__doc__ = "See torch.distributed.ProcessGroup."
    return collective


for _name in _DELEGATED_METHODS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(NativeProcessGroup, _name, _delegating_method(_name))


def host_barrier_options(opts: Any = None) -> Any:
    """Return a barrier's options with which Gloo runs it, in any group.

    NCCL's barrier would need a GPU, and guesses one; and its wait cannot be given up after an abort. As there, the
    current stream of a GPU in use has done its work on this rank before.
    """
    host: Any = opts or BarrierOptions()  # torch's stubs take it for frozen
    if host.device is not None and host.device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.current_stream(host.device).synchronize()
    host.device, host.device_ids = torch.device("cpu"), []
    return host


def group_of_batch(ops: list[Any]) -> NativeProcessGroup | None:
    """Return the group of a batch of sends and receives if it is one of ours, on a backend that groups them: NCCL."""
    if not ops or not isinstance(ops[0], dist.P2POp):
        return None
    group = ops[0].group or distributed_c10d._get_default_group()
    is_ours = isinstance(group, NativeProcessGroup)
    return group if is_ours and group._get_backend(ops[0].tensor.device).supports_coalescing else None


def start_grouped(group: NativeProcessGroup, ops: list[Any]) -> list[Work]:
    """Start sends and receives as one operation of NCCL, as `batch_isend_irecv` does in groups of torch's own class.

    torch (2.11 to 2.14) checks `type(group) is ProcessGroup`, and starts those of a subclass one by one: two ranks that
    both send before they receive would wait for each other, since a pair of ranks has one stream.
    """
    distributed_c10d._check_p2p_op_list(ops)

    def start() -> list[Work]:
        with distributed_c10d._coalescing_manager(group, ops[0].tensor.device, async_ops=True) as manager:
            for op in ops:
                peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
                op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        return manager.works

    works, name = group.start_native(start, "batch_isend_irecv"), "batch_isend_irecv"
    return [work for each in works if (work := group.wrap_work(each, name)) is not None]


def _is_on_cpu(value: Any) -> bool:
    """Return True if the nested lists hold tensors, all on the CPU; a barrier has none."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu"
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_on_cpu, value))


def _has_device_tensor(value: Any) -> bool:
    """Return True if the nested lists hold a tensor that is not on the CPU."""
    if isinstance(value, Tensor):
        return value.device.type != "cpu"
    return isinstance(value, list | tuple) and any(map(_has_device_tensor, value))


def _total_bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.nbytes if value.layout == torch.strided else 0
    return sum(_total_bytes(item) for item in value) if isinstance(value, list | tuple) else 0
