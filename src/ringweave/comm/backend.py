"""Backend "ringweave" of torch.distributed: a process group whose allreduce runs by verified schedules.

CUDA tensors take part through the bridge. Every other collective goes to the native backend inside the group: Gloo for
CPU tensors, and NCCL, or Gloo where NCCL is not allowed, for CUDA tensors.

Planning, schedules and their engine are imported where they are first used: a group forms, and sends small messages, in
a small part of the time that these imports take.
"""

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ReduceOp, Store, Work

from ringweave.comm import group_info, plan_choice
from ringweave.comm.counters import CollectiveCounters
from ringweave.comm.engine import reductions
from ringweave.comm.failure_registry import FailureRegistry, GroupEnd
from ringweave.comm.native_backend import NativeBackends, NativeProcessGroup
from ringweave.comm.transport.connect import NUM_CHANNELS, ChannelListener, open_listeners
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.environment import NATIVE, TORCHRUN_ID, WorkerEnvironment
from ringweave.errors import CommunicationError

if TYPE_CHECKING:
    from ringweave.comm.bridge import DeviceBridge, StagedMessage
    from ringweave.comm.engine.engine import CollectiveEngine
    from ringweave.comm.probing.network_measurement import NetworkMeasurement
    from ringweave.comm.tuning.selector import ScheduleSelector
    from ringweave.telemetry.events import EventLog

BACKEND_NAME = "ringweave"

_SIDE_CHANNEL = NUM_CHANNELS
"""Channel of the native backend that no allreduce uses."""
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
        nccl_options: object = None,
    ) -> None:
        """The other members connect to this rank's channels at `listeners`; `group_name` names the group in events."""
        self._native_limit_bytes = plan_choice.native_limit_bytes(info, environment)
        info, self._measured = _use_measured_network(store, info, timeout, environment)
        allows_nccl = plan_choice.allows_nccl(info, environment)
        super().__init__(store, info, timeout, allows_nccl=allows_nccl, nccl_options=nccl_options, name=group_name)
        self._environment = environment
        self._forced = None if environment.schedule == NATIVE else environment.schedule
        self._listeners = listeners
        self._message_policies: dict[tuple[int, torch.dtype], _MessagePolicy] = {}
        self._log = _open_log(environment)
        # No reference cycles: the group must be freed when it is destroyed.
        abort_native, release_native = weakref.WeakMethod(self.abort_native), weakref.WeakMethod(self.release_native)
        self._native = NativeBackends(
            store,
            info,
            timeout,
            lambda: _call_if_alive(abort_native),
            release_group_backend=lambda: _call_if_alive(release_native),
        )
        self._counters = CollectiveCounters(self._log, info.own_info.global_rank, group_name)
        self._end = GroupEnd(info, FailureRegistry(store, info), self._native, self._counters, self._log)
        self._end.attach(self._abort_listeners)
        self._made_engine: CollectiveEngine | None = None
        self._engine_lock = threading.Lock()
        self._bridge = self._make_bridge() if plan_choice.uses_bridge(info, environment) else None
        self._log_start(group_name)
        atexit.register(_close_at_exit, weakref.ref(self._end))
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))
        if plan_choice.is_plan_shared(info, environment):
            _ = self._engine  # which makes the plan that the other ranks will wait for

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
        if len(tensors) != 1 or not tensor.is_cpu or tensor.layout != torch.strided:
            return self._allreduce_on_device(tensors, opts)
        policy = self._message_policy(opts.reduceOp, tensor.dtype)
        num_bytes = tensor.nbytes
        if num_bytes < policy.native_limit_bytes:
            self._counters.count(NATIVE, num_bytes, 0)
            return self._allreduce_natively(tensor, opts, policy.reduction)
        return self._allreduce_by_schedule(tensor, opts, policy, self._forced)

    def _allreduce_on_device(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work | None:
        """Allreduce by the bridge, whatever the size, or else natively: NCCL, sparse tensors, several in one call."""
        tensor = tensors[0]
        is_strided = tensor.layout == torch.strided
        if self._bridge is None or len(tensors) != 1 or tensor.device.type == "cpu" or not is_strided:
            self._counters.count(NATIVE, tensor.nbytes if is_strided else 0, 0)
            native: Any = self._get_backend(tensor.device)
            operation = f"allreduce on {tensor.device.type}"
            return self.wrap_work(self.start_native(lambda: native.allreduce(tensors, opts), operation), operation)
        policy = self._message_policy(opts.reduceOp, tensor.dtype)
        forced = NATIVE if tensor.nbytes < policy.native_limit_bytes else self._forced
        return self._allreduce_by_schedule(tensor, opts, policy, forced, self._bridge.open(tensor))

    def _allreduce_by_schedule(
        self,
        tensor: Tensor,
        opts: AllreduceOptions,
        policy: "_MessagePolicy",
        forced: str | None,
        staged: "StagedMessage | None" = None,
    ) -> Work:
        from ringweave.comm.tuning.selector import CollectiveRequest

        request = CollectiveRequest(num_bytes=tensor.nbytes, forced=forced, native_can=policy.native_can)
        return self._engine.allreduce(tensor, opts.reduceOp, policy.reduction, request, self._timeout_s(opts), staged)

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

    def connect_side_channel(self) -> None:
        """Connect a channel beside all others, for `allgather_aside`; all ranks call this together."""
        try:
            self._native.prepare(_SIDE_CHANNEL, lambda: None)
        except TransferFailedError as failure:
            raise self.fail(failure, "connection of the side channel") from failure

    def allgather_aside(self, row: Tensor) -> Tensor:
        """Return the row of each rank as `allgather_small` does, whatever the other channels still wait for.

        Raises:
            CommunicationError: A rank is dead or silent, or the group has failed before.
        """
        try:
            return self._native.allgather(_SIDE_CHANNEL, row, self._gloo.options._timeout.total_seconds())
        except TransferFailedError as failure:
            raise self.fail(failure, f"allgather ({row.numel()} x {row.dtype}) on the side channel") from failure

    def wait_for_plan(self) -> None:
        """Wait until this rank has the group's plan from the first rank; otherwise the first collective waits.

        Raises:
            PeerError: It did not come within the group's timeout, or before the group was aborted.
        """
        self._engine.wait_for_plan()

    def _allreduce_natively(
        self, tensor: Tensor, opts: AllreduceOptions, reduction: reductions.ReduceOperation
    ) -> Work | None:
        """Allreduce by Gloo, from a contiguous copy if needed: ranks whose layouts differ must choose alike."""

        def operation() -> str:
            return f"allreduce ({reduction.name}, {tensor.numel()} x {tensor.dtype}, {NATIVE})"

        if tensor.is_contiguous():
            return self.allreduce_by_gloo(tensor, opts, operation)
        message = tensor.detach().contiguous()
        return self.allreduce_by_gloo(message, opts, operation, after=lambda: tensor.detach().copy_(message))

    def fail(self, failure: TransferFailedError, operation: str) -> CommunicationError:
        """End the group because of a failed transfer, and return the error that names the culprit."""
        return self._end.fail(failure, operation)

    def shutdown(self) -> None:
        """Finish pending collectives within the group's timeout; `destroy_process_group` calls this."""
        if self._made_engine is not None:
            self._made_engine.close(self._timeout.total_seconds())
        self.shutdown_nccl()
        self._end.close()
        if self._bridge is not None:
            self._bridge.close()
        for door in self._listeners:
            door.close()

    def abort(self) -> None:
        """Fail everything in flight."""
        self._end.abort()

    def _abort_listeners(self) -> None:
        """Refuse the others' connections, also while this rank has no engine that waits for them."""
        for door in self._listeners:
            door.abort()

    def close_inherited(self) -> None:
        """Close this process's ends of all connections: for a forked child, which would keep its parent's alive."""
        if self._made_engine is not None:
            self._made_engine.close_inherited()
        for door in self._listeners:
            door.close()

    def count_native(self, num_bytes: int) -> None:
        self._counters.count(NATIVE, num_bytes, 0)

    def collectives_by_schedule(self) -> dict[str, dict[str, int]]:
        """Return {schedule: {collectives, bytes, messages}} of this rank so far."""
        return self._counters.snapshot()

    @property
    def _engine(self) -> "CollectiveEngine":
        """Engine of scheduled collectives, made at its first use."""
        if self._made_engine is None:
            with self._engine_lock:
                if self._made_engine is None:
                    self._made_engine = self._make_engine()
        return self._made_engine

    def _make_engine(self) -> "CollectiveEngine":
        from ringweave.comm.engine.engine import CollectiveEngine
        from ringweave.comm.transport.sockets import SPIN_S, SocketTransport

        info, listeners, timeout = self.members, self._listeners, self._timeout
        is_alone = info.num_nodes == 1
        is_crowded = plan_choice.is_oversubscribed([member.location.node for member in info.ranks])
        engine = CollectiveEngine(
            info,
            self._make_selector(),
            connect=lambda lane: SocketTransport(
                listeners[lane],
                lane,
                info,
                timeout,
                spin_s=SPIN_S if is_alone and not is_crowded else 0.0,
                allows_cross_memory=is_alone,
            ),
            native=self._native,
            end=self._end,
            counters=self._counters,
            log=self._log,
        )
        atexit.register(_close_engine_at_exit, weakref.ref(engine))
        return engine

    def _make_selector(self) -> "ScheduleSelector":
        from ringweave.comm import group_plan
        from ringweave.comm.tuning.selector import GroupEventLog, make_selector

        placement = group_plan.group_placement(self.members, self._environment, self._measured)
        event_log = GroupEventLog(self._log, self.members.own_info.global_rank, self._counters.group)
        return make_selector(self._store, self.members, self._environment, placement, self._timeout, event_log)

    def _make_bridge(self) -> "DeviceBridge":
        from ringweave.comm.bridge import DeviceBridge

        return DeviceBridge()

    def _log_start(self, group_name: str) -> None:
        if self._log is None or self.members.group_rank != 0:
            return
        _log_group(self._log, self.members, group_name)
        if self._measured is not None:
            rank = self.members.own_info.global_rank
            self._log.write("network_measured", rank=rank, group=group_name, **self._measured.summary(time.time()))

    def _message_policy(self, op: Any, dtype: torch.dtype) -> "_MessagePolicy":
        """Return the cached policy: every small message needs it. Each premultiplication factor has its own."""
        key = (hash(op), dtype)  # torch hashes an operation by its kind, in less time than it takes to return that
        policy = self._message_policies.get(key)
        if policy is None:
            policy = self._make_message_policy(op, dtype)
            if op.op != ReduceOp.PREMUL_SUM:
                self._message_policies[key] = policy
        return policy

    def _make_message_policy(self, op: Any, dtype: torch.dtype) -> "_MessagePolicy":
        reduction = reductions.reduction_for(op, dtype)
        native_can = reductions.native_supports(reduction, dtype)
        return _MessagePolicy(reduction, native_can, self._native_limit_bytes if native_can else 0)


class _MessagePolicy(NamedTuple):
    """Handling of messages of one operation and dtype."""

    reduction: reductions.ReduceOperation
    native_can: bool
    native_limit_bytes: float
    """Smaller messages go to the native backend."""


def create_group(options: Any, backend_options: object) -> RingweaveProcessGroup:
    """Make a group of this backend; torch.distributed calls this through its extended API.

    Args:
        options: torch's description of the group.
        backend_options: The script's `pg_options`. Those of NCCL are handed on to it; others have no effect.

    Raises:
        PlacementError: This process fits no node of the cluster.
        ClusterError: The cluster file is wrong.
        UsageError: No schedule has the forced name.
        PeerError: Some ranks did not come.
        DisagreementError: A rank has another version of ringweave.
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
        if os.environ.get(TORCHRUN_ID):
            from ringweave.comm import torchrun  # with run directories: a start without torchrun stays light

            environment = torchrun.join_run(store, info, environment)
        name, timeout = str(options.group_id), options.timeout
        return RingweaveProcessGroup(store, info, listeners, name, timeout, environment, backend_options)
    except BaseException:
        for door in listeners:
            door.close()
        raise


def _call_if_alive(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    alive = method()
    if alive is not None:
        alive()


def _use_measured_network(
    store: Store, info: group_info.GroupInfo, timeout: timedelta, environment: WorkerEnvironment
) -> "tuple[group_info.GroupInfo, NetworkMeasurement | None]":
    """Return the group reachable by the NICs that probing found good, and the measurement on its first rank."""
    if info.num_nodes == 1:
        return info, None
    from ringweave.comm.probing import lookup, measure

    measured = lookup.measurement_for_group(store, info, timeout, environment)
    return measure.agree_on_nics(store, info, measured, timeout), measured


def _open_log(environment: WorkerEnvironment) -> "EventLog | None":
    if environment.run_dir is None:
        return None
    from ringweave.telemetry.events import EventLog

    return EventLog(environment.run_dir / "events.jsonl")


def _log_group(log: "EventLog", info: group_info.GroupInfo, group_name: str) -> None:
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


def _close_engine_at_exit(engine: "weakref.ref[CollectiveEngine]") -> None:
    alive = engine()
    if alive is not None:
        alive.close(_EXIT_TIMEOUT_S)


def _close_at_exit(end: "weakref.ref[GroupEnd]") -> None:
    alive = end()
    if alive is not None:
        alive.close()
        time.sleep(_RELEASE_S)


def _close_in_child(group: "weakref.ref[RingweaveProcessGroup]") -> None:
    alive = group()
    if alive is not None:
        alive.close_inherited()
