"""The backend "ringweave" of torch.distributed: a process group whose allreduce runs by verified schedules.

Everything else that DDP, FSDP2, DeviceMesh and torch.distributed.checkpoint call is done by the host library (Gloo for
CPU tensors, NCCL for CUDA tensors), which is registered inside the group under its devices.
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

from ringweave.comm import choosing, members
from ringweave.comm.adapting.directing import Asked
from ringweave.comm.adapting.hosting import Hosts
from ringweave.comm.adapting.starting import Scribe, make_director
from ringweave.comm.counters import Counters
from ringweave.comm.faults import FaultBoard
from ringweave.comm.host import HostedProcessGroup
from ringweave.comm.probing import knowing, nics
from ringweave.comm.running import reductions
from ringweave.comm.running.engine import NUM_LANES, Engine
from ringweave.comm.transport.connecting import Door, open_doors
from ringweave.comm.transport.seam import TransferFailedError
from ringweave.comm.transport.sockets import LOOK_S, SocketTransport
from ringweave.environment import WorkerEnvironment
from ringweave.errors import CommunicationError
from ringweave.schedules import HOST, check_name
from ringweave.telemetry.events import EventLog

NAME = "ringweave"

_EXIT_S = 0.5
"""How long a process that ends waits for each lane of a group that was not destroyed."""
_LET_GO_S = 0.1
"""Then Gloo's threads get so long to let go of the last collective, for which each needs the interpreter: one that asks
for it later aborts the process. A group that DDP has used lives on after `destroy_process_group`, and so do they."""


class RingweaveProcessGroup(HostedProcessGroup):
    """A process group that runs large CPU allreduces itself and leaves the rest to the host library."""

    # Longer than a constructor should be: the one place where all parts of a group are joined, each made elsewhere.
    def __init__(
        self,
        store: Store,
        own: members.Members,
        doors: list[Door],
        group: str,
        timeout: timedelta,
        environment: WorkerEnvironment,
    ) -> None:
        """`doors` are where the other members expect this rank's lanes; `group` names the group in events."""
        found = knowing.look(store, own, timeout, environment)
        own = nics.settle(store, own, found, timeout)
        super().__init__(store, own, timeout)
        self._environment = environment
        self._forced = None if environment.schedule == HOST else environment.schedule
        self._doors = doors
        self._handlings: dict[tuple[object, torch.dtype], _Handling] = {}
        log = EventLog(environment.run_dir / "events.jsonl") if environment.run_dir else None
        # No circles: the group must end when it is destroyed.
        cut_own, let_go_own = weakref.WeakMethod(self.cut_host), weakref.WeakMethod(self.let_go_of_host)
        hosts = Hosts(
            store, own, timeout, lambda: _call_if_alive(cut_own), let_go_own=lambda: _call_if_alive(let_go_own)
        )
        where = choosing.situation(own, environment, found)
        director = make_director(store, own, environment, where, timeout, Scribe(log, own.own.global_rank, group))
        nodes = [member.place.node for member in own.ranks]
        is_alone = own.num_nodes == 1
        look_s = LOOK_S if is_alone and not choosing.is_crowded(nodes) else 0.0
        self._engine = Engine(
            own,
            director,
            connect=lambda lane: SocketTransport(doors[lane], lane, own, timeout, look_s=look_s, lends=is_alone),
            hosts=hosts,
            board=FaultBoard(store, own),
            counters=Counters(log, own.own.global_rank, group),
            log=log,
        )
        if log is not None and own.group_rank == 0:
            _note_group(log, own, group)
            if found is not None:
                log.write("network_known", rank=own.own.global_rank, group=group, **found.summary(time.time()))
        atexit.register(_close_at_exit, weakref.ref(self._engine))
        os.register_at_fork(after_in_child=functools.partial(_forget_in_child, weakref.ref(self)))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """What `dist.get_backend` and DDP's log call this group."""
        return NAME

    def allreduce(  # pyrefly: ignore - one signature that takes what torch's three overloads take
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Reduce over the group, in place; takes what torch's own ProcessGroup.allreduce takes.

        Raises:
            CommunicationError: torch cannot compute this operation on this dtype.
        """
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = _options(opts, timeout)
        tensor = tensors[0]
        if len(tensors) == 1 and tensor.device.type == "cuda" and self._forced is not None:
            reduction = self._reduction(opts.reduceOp, tensor.dtype)
            return self._engine.allreduce_on_device(tensor, reduction, check_name(self._forced), self.plain)
        if len(tensors) != 1 or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            self._engine.counters.count(HOST, tensor.nbytes if tensor.layout == torch.strided else 0, 0)
            host: Any = self._get_backend(tensor.device)
            return self.named(host.allreduce(tensors, opts), f"allreduce on {tensor.device.type}")
        reduction, host_can, host_limit_bytes = self._handling(opts.reduceOp, tensor.dtype)
        if tensor.nbytes < host_limit_bytes:
            self._engine.counters.count(HOST, tensor.nbytes, 0)
            doing = f"allreduce ({reduction.name}, {tensor.numel()} x {tensor.dtype}, {HOST})"
            return self._allreduce_by_host(tensor, opts, doing)
        limit_s = opts.timeout.total_seconds()
        timeout_s = (opts.timeout if limit_s > 0 else self._gloo.options._timeout).total_seconds()
        asked = Asked(num_bytes=tensor.nbytes, forced=self._forced, host_can=host_can)
        return self._engine.allreduce(tensor, opts.reduceOp, reduction, asked, timeout_s)

    def exchange(self, own: Tensor) -> Tensor:
        """(group_size, width): what each rank says in a few words, (width,) on the processor; blocks until all have.

        A collective of our own beside torch's: two small messages for each rank, where a library's allgather takes one
        for each pair, or a hop for each rank.

        Raises:
            CommunicationError: A rank is gone or silent, or the group has failed before.
        """
        return self._engine.exchange(own, self._gloo.options._timeout.total_seconds())

    def settle(self) -> None:
        """Wait until this rank has the plan of the group, which the first one makes; else the first collective does.

        Raises:
            PeerError: It did not come within the group's time-out, or before the group was aborted.
        """
        self._engine.settle()

    def _allreduce_by_host(self, tensor: Tensor, opts: AllreduceOptions, doing: str) -> Work:
        """Gloo takes contiguous tensors only; which rank's is not must not decide who does the work."""
        if tensor.is_contiguous():
            return self.allreduce_by_gloo(tensor, opts, doing)
        message = tensor.detach().contiguous()
        return self.allreduce_by_gloo(message, opts, doing, after=lambda: tensor.detach().copy_(message))

    def fail(self, failure: TransferFailedError, doing: str) -> CommunicationError:
        """End the group because of a failed transfer, and return the error that names who is to blame."""
        return self._engine.fail(failure, doing)

    def shutdown(self) -> None:
        """What `destroy_process_group` calls: finishes what was started, within the group's time-out."""
        self._engine.close(self._timeout.total_seconds())
        for door in self._doors:
            door.close()

    def abort(self) -> None:
        """Break what is in flight."""
        self._engine.abort()

    def forget(self) -> None:
        """Close this process's ends of all connections: for a forked child, which would keep its parent's alive."""
        self._engine.forget()
        for door in self._doors:
            door.close()

    def count_host(self, num_bytes: int) -> None:
        """Note a collective that the host library does."""
        self._engine.counters.count(HOST, num_bytes, 0)

    def collectives_by_schedule(self) -> dict[str, dict[str, int]]:
        """{schedule: {collectives, bytes, messages}} that this rank has taken part in so far."""
        return self._engine.counters.snapshot()

    def _reduction(self, op: Any, dtype: torch.dtype) -> reductions.Reduction:
        return self._handling(op, dtype).reduction

    def _handling(self, op: Any, dtype: torch.dtype) -> "_Handling":
        """Looked up, since this comes before every small message; a factor makes each operation another one."""
        if op.op == ReduceOp.PREMUL_SUM:
            return self._new_handling(op, dtype)
        key = (op.op, dtype)
        if key not in self._handlings:
            self._handlings[key] = self._new_handling(op, dtype)
        return self._handlings[key]

    def _new_handling(self, op: Any, dtype: torch.dtype) -> "_Handling":
        reduction = reductions.reduction_for(op, dtype)
        host_can = reductions.host_supports(reduction, dtype)
        limit_bytes = choosing.host_limit_bytes(self.members, self._environment, host_can=host_can)
        return _Handling(reduction, host_can, limit_bytes)


class _Handling(NamedTuple):
    """What becomes of messages of one operation and dtype."""

    reduction: reductions.Reduction
    host_can: bool
    """Gloo computes it without our help."""
    host_limit_bytes: float
    """Smaller ones go to the host library."""


def create_group(options: Any, _backend_options: object) -> RingweaveProcessGroup:
    """What torch.distributed calls to make a group of this backend (its extended API).

    Raises:
        PlacementError: This process fits no node of the cluster.
        PeerError: Some ranks did not come.
    """
    environment = WorkerEnvironment.from_environ(os.environ)
    global_ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    place = members.own_place(environment, os.environ)
    doors = open_doors(place.addresses, NUM_LANES)
    try:
        # torch gives a group that is made again after destroy the same keys: every incarnation has a space of its own.
        incarnation = options.store.add(f"incarnation/{options.group_rank}", 1)
        store = PrefixStore(f"{incarnation}/", options.store)
        own = members.meet(
            store, options.group_rank, global_ranks, place, [door.entrance for door in doors], options.timeout
        )
        return RingweaveProcessGroup(store, own, doors, str(options.group_id), options.timeout, environment)
    except BaseException:
        for door in doors:
            door.close()
        raise


def _call_if_alive(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    alive = method()
    if alive is not None:
        alive()


def _note_group(log: EventLog, own: members.Members, group: str) -> None:
    ranks = [member.global_rank for member in own.ranks]
    nodes = [member.place.node for member in own.ranks]
    log.write("group_formed", rank=ranks[0], node=nodes[0], group=group, members=ranks, nodes=nodes)


def _options(opts: Any, timeout: timedelta | None) -> AllreduceOptions:
    if isinstance(opts, AllreduceOptions):
        return opts
    made = AllreduceOptions()
    if opts is not None:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _close_at_exit(engine: "weakref.ref[Engine]") -> None:
    alive = engine()
    if alive is not None:
        alive.close(_EXIT_S)
        time.sleep(_LET_GO_S)


def _forget_in_child(group: "weakref.ref[RingweaveProcessGroup]") -> None:
    alive = group()
    if alive is not None:
        alive.forget()
