"""Backend "ringweave" of torch.distributed: a process group whose large collectives run by verified schedules.

Allreduce, allgather, reduce-scatter and broadcast have schedules, CUDA tensors through the bridge. All else goes to the
native backend inside the group: Gloo for CPU tensors, and NCCL, or Gloo where NCCL is not allowed, for CUDA tensors.

Planning and the engine are imported at first use: a group forms and sends small messages in a fraction of that time.
"""

import atexit
import functools
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ReduceOp, Store, Work
from torch.distributed.distributed_c10d import AllgatherOptions, BarrierOptions, BroadcastOptions, ReduceScatterOptions

from ringweave.comm import group_info, peer_data, plan_choice, wire_scope
from ringweave.comm.counters import CollectiveCounters
from ringweave.comm.engine import reductions
from ringweave.comm.failure_registry import FailureRegistry, GroupEnd
from ringweave.comm.native_backend import COLLECTIVE_METHODS, NativeBackends, NativeProcessGroup, OrderedNccl
from ringweave.comm.transport.connect import NUM_CHANNELS, ChannelListener, open_listeners
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.comm.work import JoinedWork, PendingWork
from ringweave.environment import EXACT, NATIVE, TORCHRUN_ID, WorkerEnvironment
from ringweave.errors import CommunicationError, DisagreementError

if TYPE_CHECKING:
    from ringweave.comm.bridge import DeviceBridge
    from ringweave.comm.engine.engine import CollectiveEngine
    from ringweave.comm.engine.messages import CollectiveMessage
    from ringweave.comm.probing.network_measurement import NetworkMeasurement
    from ringweave.comm.tuning.selector import ScheduleSelector
    from ringweave.planning import Plan
    from ringweave.planning.group_planner import GroupPlacement
    from ringweave.telemetry.events import EventLog

BACKEND_NAME = "ringweave"

_CHECK_CHANNEL = NUM_CHANNELS
"""Channel of the native backend that no collective uses."""
_EXIT_TIMEOUT_S = 0.5
"""Limit on waiting for each channel of a group that was not destroyed, at process exit."""
_RELEASE_S = 0.1
"""Time for Gloo's threads to release the last collective, which needs the interpreter: a thread that asks for it later
aborts the process. A group that DDP has used outlives `destroy_process_group`, and so do its threads."""


class RingweaveProcessGroup(NativeProcessGroup):
    """Process group that runs large collectives by schedules and everything else natively.

    CUDA tensors take part through the bridge, where there is one; else NCCL has them, or Gloo without it.
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
        self._wire = wire_scope.WireScope.of_group(environment.wire)
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
        if self._bridge is not None and self._uses_nccl:
            self._native.ordered_nccl = OrderedNccl(store, info, timeout)
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
        if tensor.nbytes < policy.native_limit_bytes:
            self._counters.count(NATIVE, tensor.nbytes, 0)
            return self._allreduce_natively(tensor, opts, policy.reduction)
        return self._allreduce_by_schedule(tensor, opts, policy)

    def _allreduce_on_device(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work | None:
        """Allreduce by the bridge, whatever the size, or else natively: NCCL, sparse tensors, several in one call."""
        tensor = tensors[0]
        is_strided = tensor.layout == torch.strided
        if self._bridge is None or len(tensors) != 1 or tensor.device.type == "cpu" or not is_strided:
            self._counters.count(NATIVE, tensor.nbytes if is_strided else 0, 0)
            native: Any = self._get_backend(tensor.device)
            operation = f"allreduce on {tensor.device.type}"
            return self.wrap_work(self.start_native(lambda: native.allreduce(tensors, opts), operation), operation)
        return self._allreduce_by_schedule(tensor, opts, self._message_policy(opts.reduceOp, tensor.dtype))

    def _allreduce_by_schedule(self, tensor: Tensor, opts: AllreduceOptions, policy: "_MessagePolicy") -> Work:
        from ringweave.comm.engine.messages import ReducedTensor

        message, limit_bytes = ReducedTensor.of(tensor, opts.reduceOp, policy.reduction), policy.native_limit_bytes
        message.take_scope(wire_scope.current() or self._wire)
        return self._start(message, [tensor], opts, native_can=policy.native_can, limit_bytes=limit_bytes)

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any) -> Work | None:  # pyrefly: ignore
        """Give all ranks the root's content of a tensor; takes the arguments of torch's ProcessGroup.broadcast."""
        is_plain = isinstance(opts, BroadcastOptions) and isinstance(tensors, list) and len(tensors) == 1
        if not is_plain or not self._runs_by_schedule(tensors, self._native_limit_bytes):
            return super().broadcast(tensors, *(() if opts is None else (opts,)), *more)
        from ringweave.comm.engine.messages import BroadcastTensor

        message = BroadcastTensor.of(tensors[0], opts.rootRank, self.members.group_rank)
        return self._start(message, tensors, opts, limit_bytes=self._native_limit_bytes)

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Work | None:  # pyrefly: ignore
        """Gather each rank's tensor in a list of tensors; takes the arguments of torch's ProcessGroup.allgather."""
        is_single = isinstance(outputs, list) and len(outputs) == 1 and isinstance(outputs[0], list)
        if not is_single or len(inputs) != 1 or not self._can_gather(outputs[0], inputs[0]):
            return super().allgather(outputs, inputs, *options)
        return self._gather(outputs[0], inputs[0], *options)

    def _allgather_base(self, output: Tensor, own: Tensor, *options: Any) -> Work | None:  # pyrefly: ignore
        """Gather each rank's tensor in one tensor; takes the arguments of torch's method of that name."""
        is_plain = output.is_contiguous() and own.is_contiguous()  # torch refuses others
        if not is_plain or not self._can_gather([output], own):
            return super()._allgather_base(output, own, *options)
        return self._gather([output], own, *options)

    all_gather_single = _allgather_base  # pyrefly: ignore

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Work | None:  # pyrefly: ignore
        """Gather several tensors; takes the arguments of torch's method of that name."""
        if not self._runs_by_schedule(outputs, self._native_limit_bytes):
            return super().allgather_into_tensor_coalesced(outputs, inputs, *options)
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork([self._allgather_base(output, own, *options) for output, own in pairs], outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # pyrefly: ignore

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> Work | None:  # pyrefly: ignore
        """Reduce a list of tensors, one for each rank; takes the arguments of torch's ProcessGroup.reduce_scatter."""
        is_single = isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], list)
        if not is_single or not self._can_scatter(outputs[0], inputs[0], *options):
            return super().reduce_scatter(outputs, inputs, *options)
        return self._scatter(outputs[0], inputs[0], *options)

    def _reduce_scatter_base(self, output: Tensor, blocks: Tensor, *options: Any) -> Work | None:  # pyrefly: ignore
        """Reduce a tensor of a block for each rank; takes the arguments of torch's method of that name."""
        if not self._can_scatter(output, [blocks], *options):
            return super()._reduce_scatter_base(output, blocks, *options)
        return self._scatter(output, [blocks], *options)

    reduce_scatter_single = _reduce_scatter_base  # pyrefly: ignore

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Work | None:  # pyrefly: ignore
        """Reduce and scatter several tensors; takes the arguments of torch's method of that name."""
        if not self._runs_by_schedule(inputs, self._native_limit_bytes):
            return super().reduce_scatter_tensor_coalesced(outputs, inputs, *options)
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork([self._reduce_scatter_base(output, blocks, *options) for output, blocks in pairs], outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # pyrefly: ignore

    def _can_gather(self, outputs: list[Tensor], own: Tensor) -> bool:
        """Return True if the outputs are a block of each rank, in one tensor or in one each, and large enough."""
        limit_bytes, are_equal = self._native_limit_bytes, len({output.numel() for output in outputs}) == 1
        limit_bytes = limit_bytes if are_equal or math.isinf(limit_bytes) else 0.0  # Gloo gathers equal blocks only
        return self._runs_by_schedule([own, *outputs], self._limit_of_blocks(outputs, own, limit_bytes))

    def _limit_of_blocks(self, blocks: list[Tensor], own: Tensor, limit_bytes: float) -> float:
        """Return the size, with `own`, from which blocks run by schedules; infinite if these are no blocks of ranks."""
        size, rank, counts = self.members.group_size, self.members.group_rank, [block.numel() for block in blocks]
        are_blocks = counts == [size * own.numel()] or (len(counts) == size and counts[rank] == own.numel())
        is_possible = own.is_cpu or len(set(counts)) == 1  # the bridge has equal blocks
        are_blocks = are_blocks and is_possible and all(block.dtype == own.dtype for block in blocks)
        return own.nbytes + limit_bytes if are_blocks else math.inf

    def _gather(self, outputs: list[Tensor], own: Tensor, *options: Any) -> Work:
        from ringweave.comm.engine.messages import GatheredBlocks

        message = GatheredBlocks.of(own, outputs, self.members.group_rank)
        return self._start(message, outputs, *(options or (AllgatherOptions(),)), limit_bytes=self._native_limit_bytes)

    def _can_scatter(self, output: Tensor, blocks: list[Tensor], *options: Any) -> bool:
        """Return True if the inputs are a block of each rank, in one tensor or in one each, and large enough."""
        if not all(isinstance(each, ReduceScatterOptions) for each in options):
            return False
        op = options[0].reduceOp if options else ReduceScatterOptions().reduceOp
        limit_bytes = self._message_policy(op, output.dtype).native_limit_bytes
        return self._runs_by_schedule([output, *blocks], self._limit_of_blocks(blocks, output, limit_bytes))

    def _scatter(self, output: Tensor, blocks: list[Tensor], *options: Any) -> Work:
        from ringweave.comm.engine.messages import ScatteredBlocks

        opts = options[0] if options else ReduceScatterOptions()
        policy = self._message_policy(opts.reduceOp, output.dtype)
        message = ScatteredBlocks.of(blocks, output, opts.reduceOp, policy.reduction, self.members.group_rank)
        limit_bytes = policy.native_limit_bytes
        return self._start(message, [output], opts, native_can=policy.native_can, limit_bytes=limit_bytes)

    def _runs_by_schedule(self, tensors: Sequence[Any], limit_bytes: float) -> bool:
        """Return True if all are plain tensors on the CPU, or on a device with a bridge, and not below the limit.

        Without NCCL there is no limit for a device, since Gloo takes few collectives of its tensors.
        """
        num_bytes, is_on_cpu = 0, True
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                return False
            if tensor.is_complex() and (tensor.is_conj() or tensor.is_neg()):
                return False
            is_on_cpu = is_on_cpu and tensor.is_cpu
            num_bytes += tensor.nbytes
        if not is_on_cpu and (self._bridge is None or len({tensor.device for tensor in tensors}) > 1):
            return False
        return num_bytes >= max(1, limit_bytes if is_on_cpu or self._uses_nccl else 1)

    def _start(
        self,
        message: "CollectiveMessage",
        results: list[Tensor],
        opts: Any,
        *,
        native_can: bool = True,
        limit_bytes: float = 0,
    ) -> Work:
        """Start a collective by the environment's schedule, by one that is chosen, or natively below the limit."""
        from ringweave.comm.tuning.selector import CollectiveRequest

        if self._bridge is not None and not results[0].is_cpu:
            message.staged = self._bridge.open(results[0].device)
        is_small = message.num_bytes < limit_bytes and message.block_sizes is None  # Gloo's blocks are equal
        forced = NATIVE if is_small else self._forced
        has_nccl = message.staged is not None and self._native.ordered_nccl is not None
        request = CollectiveRequest(
            kind=message.kind,
            num_bytes=message.num_bytes,
            forced=forced,
            native_can=native_can and message.block_sizes is None,
            is_on_device=has_nccl and message.nccl_can and forced is None,
            largest_block_bytes=message.largest_block_bytes,
            wire=message.wire if forced != NATIVE else EXACT,
        )
        return self._engine.run(message, results, request, self._timeout_s(opts))

    def _timeout_s(self, opts: Any) -> float:
        own: timedelta = opts.timeout if opts.timeout > timedelta() else self._gloo.options._timeout
        return own.total_seconds()

    def barrier(  # pyrefly: ignore - one signature that takes what torch's two overloads take
        self, opts: BarrierOptions | timedelta | None = None, timeout: timedelta | None = None
    ) -> Work | None:
        """Wait for all ranks and for this rank's earlier collectives; arguments as of torch's ProcessGroup.barrier.

        Gloo's barrier waits for the collectives that Gloo runs. A synchronous barrier begins when the scheduled ones
        have finished here, so at its end they have on every rank. It raises the error of an earlier one that failed.
        """
        opts = _barrier_options(opts, timeout)
        earlier = self._unfinished_works()
        if not opts.asyncOp:
            for work in earlier:
                work.wait_on_host()
            return super().barrier(opts)
        native = super().barrier(opts)  # at once: a later start would let it meet another native collective
        return JoinedWork([*earlier, native], []) if earlier else native

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, as `NativeProcessGroup.monitored_barrier`, and then for this rank's earlier collectives.

        Raises:
            PeerError: A rank did not come.
            CommunicationError: An earlier collective failed.
        """
        super().monitored_barrier(timeout, wait_all_ranks)
        for work in self._unfinished_works():
            work.wait_on_host()

    def _unfinished_works(self) -> list[PendingWork]:
        return [] if self._made_engine is None else self._made_engine.unfinished_works()

    def allgather_small(self, row: Tensor) -> Tensor:
        """Return a short row of each rank, (group_size, width), from each rank's (width,) on the CPU; a barrier.

        It is a collective of our own beside torch's: two small messages per rank, where a library's allgather takes one
        per pair, or a hop per rank.

        Raises:
            CommunicationError: A rank is dead or silent, or the group has failed before.
        """
        return self._engine.allgather_small(row, self._gloo.options._timeout.total_seconds())

    def allgather_aside(self, row: Tensor) -> Tensor:
        """Return the row of each rank as `allgather_small` does, whatever the channels of collectives still wait for.

        Only a group for sums beside a generation's has the channel for it.

        Raises:
            CommunicationError: A rank is dead or silent, or the group has failed before.
        """
        return self._engine.allgather_small(row, self._gloo.options._timeout.total_seconds(), is_aside=True)

    def wait_for_plan(self, *, is_whole: bool = False) -> "Plan":
        """Return the group's plan, once it is there: with all collectives and wire formats if all ranks ask for these.

        Raises:
            PeerError: It did not come within the group's timeout, or before the group was aborted.
        """
        return self._engine.wait_for_plan(is_whole=is_whole)

    @property
    def measured_network(self) -> "NetworkMeasurement | None":
        """Links between the nodes, as probing measured them; the first rank alone has them, without a cluster file."""
        return self._measured

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
        from ringweave.comm import group_plan
        from ringweave.comm.engine.engine import CollectiveEngine
        from ringweave.comm.transport.sockets import SPIN_S, SocketTransport

        placement = group_plan.group_placement(self.members, self._environment, self._measured)
        info = replace(self.members, streams=group_plan.count_streams(self.members, placement))
        is_alone, nodes = info.num_nodes == 1, [member.location.node for member in info.ranks]
        engine = CollectiveEngine(
            info,
            self._make_selector(placement),
            [
                SocketTransport(
                    listener,
                    channel,
                    info,
                    self._timeout,
                    spin_s=SPIN_S if is_alone and not plan_choice.is_oversubscribed(nodes) else 0.0,
                    allows_cross_memory=is_alone,
                )
                for channel, listener in enumerate(self._listeners)
            ],
            native=self._native,
            end=self._end,
            counters=self._counters,
            log=self._log,
        )
        atexit.register(_close_engine_at_exit, weakref.ref(engine))
        return engine

    def _make_selector(self, placement: "GroupPlacement") -> "ScheduleSelector":
        from ringweave.comm.tuning.selector import GroupEventLog, make_selector

        event_log = GroupEventLog(self._log, self.members.own_info.global_rank, self._counters.group)
        return make_selector(self._store, self.members, self._environment, placement, self._timeout, event_log)

    def _make_bridge(self) -> "DeviceBridge":
        from ringweave.comm.bridge import DeviceBridge

        return DeviceBridge(orders_streams=plan_choice.may_order_streams(self._environment, os.environ))

    def _log_start(self, group_name: str) -> None:
        if self._log is None or self.members.group_rank != 0:
            return
        ranks = [member.global_rank for member in self.members.ranks]
        nodes = [member.location.node for member in self.members.ranks]
        where = {"rank": ranks[0], "node": nodes[0], "group": group_name}
        self._log.write("group_formed", **where, members=ranks, nodes=nodes)
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
    num_channels = NUM_CHANNELS + str(options.group_id).startswith(group_info.REDUCE_GROUP_PREFIX)
    listeners = open_listeners(location.addresses, num_channels, environment.ports)
    try:
        # torch reuses keys when a group is recreated after destroy, so every incarnation has its own key space.
        incarnation = options.store.add(f"incarnation/{options.group_rank}", 1)
        store = PrefixStore(f"{incarnation}/", options.store)
        entrances, encryption = [door.endpoint for door in listeners], plan_choice.load_encryption(environment)
        own = (options.group_rank, global_ranks, location, entrances)
        info = group_info.exchange_group_info(store, *own, options.timeout, encryption)
        if os.environ.get(TORCHRUN_ID):
            from ringweave.comm import torchrun  # with run directories: a start without torchrun stays light

            environment = torchrun.join_run(store, info, environment)
        is_debugging = torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL
        group_class = DebugProcessGroup if is_debugging else RingweaveProcessGroup
        name = str(options.group_id)
        return group_class(store, info, listeners, name, options.timeout, environment, backend_options)
    except BaseException:
        for door in listeners:
            door.close()
        raise


def _call_if_alive(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    if (alive := method()) is not None:
        alive()


def _use_measured_network(
    store: Store, info: group_info.GroupInfo, timeout: timedelta, environment: WorkerEnvironment
) -> "tuple[group_info.GroupInfo, NetworkMeasurement | None]":
    """Return the group reachable by the NICs that probing found good, and the measurement on its first rank."""
    if info.num_nodes == 1:
        return info, None
    from ringweave.comm.probing import measure

    measured = measure.measurement_for_group(store, info, timeout, environment)
    return measure.agree_on_nics(store, info, measured, timeout), measured


def _open_log(environment: WorkerEnvironment) -> "EventLog | None":
    if environment.run_dir is None:
        return None
    from ringweave.telemetry.events import EventLog

    return EventLog(environment.run_dir / "events.jsonl")


_COMPARED_ARGUMENTS = {
    **dict.fromkeys(("allgather", "allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter"), (0,)),
    **dict.fromkeys(("_allgather_base", "allgather_coalesced", "gather", "reduce_scatter"), (1,)),
    **dict.fromkeys(("all_gather_single", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"), (1,)),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), (0, 1)),
    **dict.fromkeys(("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), (0, 1)),
}
"""Arguments whose tensors have the same shapes on all ranks; none of a barrier, and none of an all-to-all."""


class DebugProcessGroup(RingweaveProcessGroup):
    """Ringweave's process group with a check of every call, for TORCH_DISTRIBUTED_DEBUG=DETAIL.

    torch wraps a group of Gloo or NCCL in its ProcessGroupWrapper, but none that is written in Python. Like the
    wrapper, this group passes a monitored barrier before each collective, which names a rank that does not come, and
    compares what the ranks are about to call: operation, shapes, dtypes and devices.

    Source: ProcessGroupWrapper.cpp of torch 2.13.
    """

    def __init__(self, *args: Any) -> None:
        """Arguments are those of RingweaveProcessGroup."""
        super().__init__(*args)
        self._num_calls = 0

    def check_call(self, name: str, args: tuple[Any, ...]) -> None:
        """Block until all ranks make a call, and compare it with this one; a group that has ended checks nothing.

        Raises:
            DisagreementError: Another rank makes another call. The group can go on.
            PeerError: A rank does not come within the group's timeout.
        """
        if self._end.error is not None:
            return
        self._num_calls += 1
        positions = [index for index in _COMPARED_ARGUMENTS.get(name, ()) if index < len(args)]
        tensors = list(_iterate_tensors([args[index] for index in positions]))
        own = {
            "operation": name.strip("_").upper(),
            "SequenceNumber": self._num_calls,
            "shapes": [list(tensor.shape) for tensor in tensors],
            "types": [tensor.type() for tensor in tensors],
            "devices": [tensor.device.type for tensor in tensors],
        }
        NativeProcessGroup.monitored_barrier(self, self._timeout, wait_all_ranks=True)
        try:
            calls = self._exchange_calls(own)
        except TransferFailedError as failure:
            raise self.fail(failure, f"check of {name.strip('_')}") from failure
        other = next((rank for rank, call in enumerate(calls) if call != own), None)
        if other is not None:
            raise self._disagreement(own, other, calls[other])

    def _exchange_calls(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the call of each rank."""
        timeout_s, text, what = self._timeout.total_seconds(), json.dumps(own).encode(), "call of another rank"
        self._native.prepare(_CHECK_CHANNEL, lambda: None)
        lengths = self._native.allgather(_CHECK_CHANNEL, torch.tensor([len(text)]), timeout_s)[:, 0].tolist()
        peer_data.check_length(max(lengths), what)
        row = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
        rows = [bytes(each.tolist()) for each in self._native.allgather(_CHECK_CHANNEL, row, timeout_s)]
        return [peer_data.decode_peer_data(each, what, peer_data.require_object, expected="a call") for each in rows]

    def _disagreement(self, own: dict[str, Any], other: int, call: dict[str, Any]) -> DisagreementError:
        members, differing = self.members, [name for name in own if own[name] != call.get(name)]
        return DisagreementError(
            f"{own['operation'].lower()}: {members.rank_text(members.group_rank)} is about to run {json.dumps(own)}, "
            f"but {members.rank_text(other)} {json.dumps(call)}, expected the same collective on equal tensors on "
            f"every rank. Collectives differ in the following aspects: {', '.join(differing)}. Compare what the two "
            "ranks do here."
        )


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_tensors(item)


def _checked_method(name: str) -> Callable[..., Work | None]:
    """Make a method that checks the call before the process group makes it."""

    def collective(self: DebugProcessGroup, *args: Any, **kwargs: Any) -> Work | None:
        self.check_call(name, args)
        return getattr(super(DebugProcessGroup, self), name)(*args, **kwargs)

    collective.__name__ = name
    collective.__doc__ = "See torch.distributed.ProcessGroup."
    return collective


for _name in COLLECTIVE_METHODS:
    if hasattr(RingweaveProcessGroup, _name):
        setattr(DebugProcessGroup, _name, _checked_method(_name))


def _allreduce_options(opts: Any, timeout: timedelta | None) -> AllreduceOptions:
    if isinstance(opts, AllreduceOptions):
        return opts
    made = AllreduceOptions()
    if opts is not None:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _barrier_options(opts: BarrierOptions | timedelta | None, timeout: timedelta | None) -> BarrierOptions:
    """Return the options that the arguments of torch's ProcessGroup.barrier mean."""
    if isinstance(opts, BarrierOptions):
        return opts
    made, limit = BarrierOptions(), opts if timeout is None else timeout
    if limit is not None:
        made.timeout = limit
    return made


def _close_engine_at_exit(engine: "weakref.ref[CollectiveEngine]") -> None:
    if (alive := engine()) is not None:
        alive.close(_EXIT_TIMEOUT_S)


def _close_at_exit(end: "weakref.ref[GroupEnd]") -> None:
    alive = end()
    if alive is not None:
        alive.close()
        time.sleep(_RELEASE_S)


def _close_in_child(group: "weakref.ref[RingweaveProcessGroup]") -> None:
    if (alive := group()) is not None:
        alive.close_inherited()
