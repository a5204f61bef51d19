"""Backend "ringweave" of torch.distributed: a process group whose allreduce runs by verified schedules.

CUDA tensors take part through the bridge. Every other collective goes to the native backend inside the group: Gloo for
CPU tensors, and NCCL, or Gloo where NCCL is not allowed, for CUDA tensors.
"""

import atexit
import functools
import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ReduceOp, Store, Work

from ringweave.comm import group_info, plan_choice
from ringweave.comm.bridge import DeviceBridge
from ringweave.comm.counters import CollectiveCounters
from ringweave.comm.engine import reductions
from ringweave.comm.engine.engine import NUM_CHANNELS, CollectiveEngine
from ringweave.comm.failure_registry import FailureRegistry
from ringweave.comm.native_backend import NativeBackends, NativeProcessGroup
from ringweave.comm.probing import lookup, measure
from ringweave.comm.transport.connect import ChannelListener, open_listeners
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.comm.transport.sockets import SPIN_S, SocketTransport
from ringweave.comm.tuning.selector import CollectiveRequest, GroupEventLog, make_selector
from ringweave.environment import WorkerEnvironment
from ringweave.errors import CommunicationError
from ringweave.schedules import NATIVE
from ringweave.telemetry.events import EventLog

BACKEND_NAME = "ringweave"

_EXIT_TIMEOUT_S = 0.5
"""Limit on waiting for each channel of a group that was not destroyed, at process exit."""
_RELEASE_S = 0.1
"""Time for Gloo's threads to release the last collective, which needs the interpreter: a thread that asks for it later
aborts the process. A group that DDP has used outlives `destroy_process_group`, and so do its threads."""


class RingweaveProcessGroup(NativeProcessGroup):
    """Process group that runs large allreduces by schedules and everything else natively.

    CUDA tensors take part in that through the bridge; their other collectives go to NCCL, or to Gloo without NCCL.
    """

    # Longer than a constructor should be: it joins all parts of a group, each made elsewhere.
    def __init__(
        self,
        store: Store,
        info: group_info.GroupInfo,
        listeners: list[ChannelListener],
        group_name: str,
        timeout: timedelta,
        environment: WorkerEnvironment,
    ) -> None:
        """The other members connect to this rank's channels at `listeners`; `group_name` names the group in events."""
        measured = lookup.measurement_for_group(store, info, timeout, environment)
        info = measure.agree_on_nics(store, info, measured, timeout)
        self._bridge = DeviceBridge() if plan_choice.uses_bridge(info, environment) else None
        super().__init__(store, info, timeout, allows_nccl=plan_choice.allows_nccl(info, environment))
        self._environment = environment
        self._forced = None if environment.schedule == NATIVE else environment.schedule
        self._listeners = listeners
        self._message_policies: dict[tuple[object, torch.dtype], _MessagePolicy] = {}
        log = EventLog(environment.run_dir / "events.jsonl") if environment.run_dir else None
        # No reference cycles: the group must be freed when it is destroyed.
        abort_native, release_native = weakref.WeakMethod(self.abort_native), weakref.WeakMethod(self.release_native)
        native = NativeBackends(
            store,
            info,
            timeout,
            lambda: _call_if_alive(abort_native),
            release_group_backend=lambda: _call_if_alive(release_native),
        )
        placement = plan_choice.group_placement(info, environment, measured)
        selector = make_selector(
            store, info, environment, placement, timeout, GroupEventLog(log, info.own_info.global_rank, group_name)
        )
        nodes = [member.location.node for member in info.ranks]
        is_alone = info.num_nodes == 1
        spin_s = SPIN_S if is_alone and not plan_choice.is_oversubscribed(nodes) else 0.0
        self._engine = CollectiveEngine(
            info,
            selector,
            connect=lambda lane: SocketTransport(
                listeners[lane], lane, info, timeout, spin_s=spin_s, allows_cross_memory=is_alone
            ),
            native=native,
            failures=FailureRegistry(store, info),
            counters=CollectiveCounters(log, info.own_info.global_rank, group_name),
            log=log,
        )
        if log is not None and info.group_rank == 0:
            _log_group(log, info, group_name)
            if measured is not None:
                log.write(
                    "network_measured",
                    rank=info.own_info.global_rank,
                    group=group_name,
                    **measured.summary(time.time()),
                )
        atexit.register(_close_at_exit, weakref.ref(self._engine))
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that `dist.get_backend` and DDP's log show."""
        return BACKEND_NAME

    def allreduce(  # pyrefly: ignore - one signature that takes what torch's three overloads take
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work | None:
        """Reduce over the group, in place; takes the arguments of torch's ProcessGroup.allreduce.

        Raises:
            CommunicationError: torch cannot compute this operation on this dtype.
        """
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = _allreduce_options(opts, timeout)
        tensor = tensors[0]
        if len(tensors) != 1 or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return self._allreduce_on_device(tensors, opts)
        reduction, native_can, native_limit_bytes = self._message_policy(opts.reduceOp, tensor.dtype)
        if tensor.nbytes < native_limit_bytes:
            self._engine.counters.count(NATIVE, tensor.nbytes, 0)
            operation = f"allreduce ({reduction.name}, {tensor.numel()} x {tensor.dtype}, {NATIVE})"
            return self._allreduce_natively(tensor, opts, operation)
        request = CollectiveRequest(num_bytes=tensor.nbytes, forced=self._forced, native_can=native_can)
        return self._engine.allreduce(tensor, opts.reduceOp, reduction, request, self._timeout_s(opts))

    def _allreduce_on_device(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work | None:
        """Allreduce by the bridge, whatever the size, or else natively: NCCL, sparse tensors, several in one call."""
        tensor = tensors[0]
        is_strided = tensor.layout == torch.strided
        if self._bridge is None or len(tensors) != 1 or tensor.device.type == "cpu" or not is_strided:
            self._engine.counters.count(NATIVE, tensor.nbytes if is_strided else 0, 0)
            native: Any = self._get_backend(tensor.device)
            return self.wrap_work(native.allreduce(tensors, opts), f"allreduce on {tensor.device.type}")
        reduction, native_can, native_limit_bytes = self._message_policy(opts.reduceOp, tensor.dtype)
        forced = NATIVE if tensor.nbytes < native_limit_bytes else self._forced
        request = CollectiveRequest(num_bytes=tensor.nbytes, forced=forced, native_can=native_can)
        staged = self._bridge.open(tensor)
        return self._engine.allreduce(tensor, opts.reduceOp, reduction, request, self._timeout_s(opts), staged)

    def _timeout_s(self, opts: AllreduceOptions) -> float:
        own: timedelta = opts.timeout if opts.timeout > timedelta() else self._gloo.options._timeout
        return own.total_seconds()

    def allgather_small(self, row: Tensor) -> Tensor:
        """Return a short row of each rank, (group_size, width), from each rank's (width,) on the CPU; a barrier.

        It is a collective of our own beside torch's: two small messages per rank, where a library's allgather takes one
        per pair, or a hop per rank.

        Raises:
            CommunicationError: A rank is dead or silent, or the group has failed before.
        """
        return self._engine.allgather_small(row, self._gloo.options._timeout.total_seconds())

    def wait_for_plan(self) -> None:
        """Wait until this rank has the group's plan from the first rank; otherwise the first collective waits.

        Raises:
            PeerError: It did not come within the group's timeout, or before the group was aborted.
        """
        self._engine.wait_for_plan()

    def _allreduce_natively(self, tensor: Tensor, opts: AllreduceOptions, operation: str) -> Work:
        """Allreduce by Gloo, from a contiguous copy if needed: ranks whose layouts differ must choose alike."""
        if tensor.is_contiguous():
            return self.allreduce_by_gloo(tensor, opts, operation)
        message = tensor.detach().contiguous()
        return self.allreduce_by_gloo(message, opts, operation, after=lambda: tensor.detach().copy_(message))

    def fail(self, failure: TransferFailedError, operation: str) -> CommunicationError:
        """End the group because of a failed transfer, and return the error that names the culprit."""
        return self._engine.fail(failure, operation)

    def shutdown(self) -> None:
        """Finish pending collectives within the group's timeout; `destroy_process_group` calls this."""
        self._engine.close(self._timeout.total_seconds())
        if self._bridge is not None:
            self._bridge.close()
        for door in self._listeners:
            door.close()

    def abort(self) -> None:
        """Fail everything in flight."""
        self._engine.abort()

    def close_inherited(self) -> None:
        """Close this process's ends of all connections: for a forked child, which would keep its parent's alive."""
        self._engine.close_inherited()
        for door in self._listeners:
            door.close()

    def count_native(self, num_bytes: int) -> None:
        self._engine.counters.count(NATIVE, num_bytes, 0)

    def collectives_by_schedule(self) -> dict[str, dict[str, int]]:
        """Return {schedule: {collectives, bytes, messages}} of this rank so far."""
        return self._engine.counters.snapshot()

    def _message_policy(self, op: Any, dtype: torch.dtype) -> "_MessagePolicy":
        """Return the cached policy: every small message needs it. Each premultiplication factor has its own."""
        if op.op == ReduceOp.PREMUL_SUM:
            return self._make_message_policy(op, dtype)
        key = (op.op, dtype)
        if key not in self._message_policies:
            self._message_policies[key] = self._make_message_policy(op, dtype)
        return self._message_policies[key]

    def _make_message_policy(self, op: Any, dtype: torch.dtype) -> "_MessagePolicy":
        reduction = reductions.reduction_for(op, dtype)
        native_can = reductions.native_supports(reduction, dtype)
        limit_bytes = plan_choice.native_limit_bytes(self.members, self._environment, native_can=native_can)
        return _MessagePolicy(reduction, native_can, limit_bytes)


class _MessagePolicy(NamedTuple):
    """Handling of messages of one operation and dtype."""

    reduction: reductions.ReduceOperation
    native_can: bool
    native_limit_bytes: float
    """Smaller messages go to the native backend."""


def create_group(options: Any, _backend_options: object) -> RingweaveProcessGroup:
    """Make a group of this backend; torch.distributed calls this through its extended API.

    Raises:
        PlacementError: This process fits no node of the cluster.
        PeerError: Some ranks did not come.
    """
    environment = WorkerEnvironment.from_environ(os.environ)
    global_ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    location = group_info.locate_process(environment, os.environ)
    listeners = open_listeners(location.addresses, NUM_CHANNELS, environment.ports)
    try:
        # torch reuses keys when a group is recreated after destroy, so every incarnation has its own key space.
        incarnation = options.store.add(f"incarnation/{options.group_rank}", 1)
        store = PrefixStore(f"{incarnation}/", options.store)
        info = group_info.exchange_group_info(
            store, options.group_rank, global_ranks, location, [door.endpoint for door in listeners], options.timeout
        )
        return RingweaveProcessGroup(store, info, listeners, str(options.group_id), options.timeout, environment)
    except BaseException:
        for door in listeners:
            door.close()
        raise


def _call_if_alive(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    alive = method()
    if alive is not None:
        alive()


def _log_group(log: EventLog, info: group_info.GroupInfo, group_name: str) -> None:
    ranks = [member.global_rank for member in info.ranks]
    nodes = [member.location.node for member in info.ranks]
    log.write("group_formed", rank=ranks[0], node=nodes[0], group=group_name, members=ranks, nodes=nodes)


def _allreduce_options(opts: Any, timeout: timedelta | None) -> AllreduceOptions:
    if isinstance(opts, AllreduceOptions):
        return opts
    made = AllreduceOptions()
    if opts is not None:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _close_at_exit(engine: "weakref.ref[CollectiveEngine]") -> None:
    alive = engine()
    if alive is not None:
        alive.close(_EXIT_TIMEOUT_S)
        time.sleep(_RELEASE_S)


def _close_in_child(group: "weakref.ref[RingweaveProcessGroup]") -> None:
    alive = group()
    if alive is not None:
        alive.close_inherited()
