"""Default process group of an elastic job, made anew for every generation of the membership.

The members of a generation rendezvous in a store that its first member holds. Every member keeps a store ready, so its
address is known before the generation begins. No store outlives its generation, and no two generations share one.
"""

import contextlib
import functools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d

from ringweave import ports
from ringweave.comm.backend import RingweaveProcessGroup
from ringweave.comm.group_info import GENERATION_GROUP_PREFIX, REDUCE_GROUP_PREFIX
from ringweave.comm.peer_data import BackgroundCall, run_at_once
from ringweave.environment import WorkerEnvironment, ports_of_environ
from ringweave.errors import PeerError

if TYPE_CHECKING:
    from ringweave.comm.transport.tunnel import Forwarder, Tunnel
    from ringweave.planning.plans import Plan

FORM_TIMEOUT_S = 10.0
"""Initial limit on forming a generation's group; all members have just reported. It doubles each time it was too short:
a machine that was too busy once will be so again."""
_MAX_FORM_TIMEOUT_S = 640.0
_CALL_FRACTION = 0.2
"""Fraction of the limit that the first member may take to answer a call."""
_GRACE_S = 1.0
COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Timeout of collectives: the membership ends them when a member dies, not a timeout."""
_set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
"""torch's function for the timeout of a group; its public name is of torch 2.14."""
_STORE_BACKLOG = 1024
_LOOPBACK = "127.0.0.1"
_NUM_HELD_STORES = 2
"""Stores that a member holds: that of a generation in which it is the first member, and that of the next one."""
_MAX_TREE_BYTES = 4096
"""Longest row that goes through the tree of `allgather_small`, whose root sends all rows to each of its branches."""
_SETUP_THREAD = "ringweave group setup"
_caller = threading.local()
_AnswerT = TypeVar("_AnswerT")


class GenerationGroups:
    """Forms the default group of each generation; `form_group` and `leave_group` in one thread, `abort` in any."""

    def __init__(
        self, address: str, *, form_timeout_s: float = FORM_TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The others reach this process at `address`; `form_timeout_s` is the initial limit on forming a group."""
        self._address, self._clock = address, clock
        self._lock = threading.Lock()
        self._doors: list[Forwarder] = []
        """Of the stores held for this generation and the next, if the run is encrypted."""
        self._gate: Forwarder | None = None
        """To the store of this generation."""
        self._tunnel = _find_tunnel()
        self._next_port = 0
        self._next_store = self._open_store()
        self._held_store: TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._reduce_group: dist.ProcessGroup | None = None
        self._forming: list[dist.ProcessGroup] = []
        """Groups of the next generation, while it is formed."""
        self._num_aborts = 0
        self._aborts: list[BackgroundCall[None]] = []
        """Those that may be under way."""
        self.prepare_default_group: Callable[[RingweaveProcessGroup], None] = lambda _: None
        """Called with each default group before the script sees it."""
        self.find_revoked: Callable[[str], bool] = lambda _: False
        """Behind `revokes`, once this process has a session."""
        self._first_form_timeout_s = self._form_timeout_s = form_timeout_s

    @property
    def store_address(self) -> str:
        """`address port` of the store in which the next generation forms if this member is its first."""
        return f"{self._address} {self._next_port}"

    def revokes(self, member: str) -> bool:
        """Return whether the certificate of that process of the job counts no more."""
        return self.find_revoked(member)

    @property
    def num_aborts(self) -> int:
        """Number of calls of `abort`; `form_group` takes its value at the time its generation was announced."""
        return self._num_aborts

    @property
    def reduce_group(self) -> dist.ProcessGroup | None:
        """Group in which gradients are summed; None is the default one."""
        return self._reduce_group

    def plan(self) -> "Plan":
        """Return the whole plan of the group in which gradients are summed; all members call it."""
        group = self._reduce_group or dist.group.WORLD
        assert isinstance(group, RingweaveProcessGroup), "made here"
        return group.wait_for_plan(is_whole=True)

    def allgather_small(self, row: Tensor) -> Tensor:
        """Return the row of each reducing member, (num_members, width), from (width,) of each; a barrier.

        Collectives that were started before may be under way meanwhile.

        Raises:
            RuntimeError: The group is broken.
        """
        group = self._reduce_group or dist.group.WORLD
        assert isinstance(group, RingweaveProcessGroup), "made here"
        return group.allgather_small(row)

    def allgather_rows(self, row: Tensor) -> Tensor:
        """Return the row of each member as `allgather_small` does; rows may be long.

        A reduction whose messages were started may wait for this: in a generation with a group for sums, those of a
        recovering member are all under way before the others have any.

        Raises:
            RuntimeError: The group is broken.

        Cost:
            A row of up to 4 KiB, or in a generation with a group for sums: one message up and one down for each member.
            A longer one: num_members - 1 rows.
        """
        if self._reduce_group is not None:
            assert isinstance(self._reduce_group, RingweaveProcessGroup), "made here"
            return self._reduce_group.allgather_aside(row)
        if row.nbytes <= _MAX_TREE_BYTES:
            return self.allgather_small(row)
        rows = row.new_empty((dist.get_world_size(), *row.shape))
        with direct_collectives():
            dist.all_gather_into_tensor(rows, row[None])
        return rows

    def all_agree(self, *, agrees: bool) -> bool:
        """Return True if all members agree; a barrier.

        Raises:
            RuntimeError: The group is broken.
        """
        return bool(self.allgather_small(torch.tensor([agrees], dtype=torch.uint8)).all())

    # Long with its docstring: the store, both groups and the error share one time limit and one count of aborts.
    def form_group(
        self,
        store_address: str,
        name: str,
        rank: int,
        world_size: int,
        num_aborts: int,
        *,
        has_reduce_group: bool = False,
    ) -> None:
        """Form the next default group, in place of the previous one.

        The script may ask for its rank at any moment, so there is always a default group: the previous one, which is
        aborted, until the next one is formed.

        Args:
            store_address: Store address of the first member.
            name: Unique name of the generation.
            rank: Rank of this member.
            world_size: Number of members.
            num_aborts: Its value when the generation was announced.
            has_reduce_group: Sum gradients in a separate group. Members' scripts that are at different steps would call
                        collectives of the default group in different orders.

        Raises:
            PeerError: The members did not connect, or `abort` was called since the generation was announced.
        """
        self._begin_abort(self._take_groups())
        with self._lock:
            if num_aborts != self._num_aborts:
                raise _aborted_error(name)
            self._forming.clear()
            if rank == 0:  # the other members use it exactly as long as this process does
                self._held_store, self._next_store = self._next_store, self._open_store()
        host, port = store_address.split()
        timeout, started_s = timedelta(seconds=self._form_timeout_s), self._clock()

        def make(prefix: str, group_name: str, what: str) -> RingweaveProcessGroup:
            """Make a group together with its plan, so that no collective has to wait for the plan."""
            # A wait for a key blocks all other users of the same connection to the store.
            own = store.clone() if prefix == "reduce" else store
            made = _make_group(PrefixStore(f"{prefix}/{name}/", own), group_name, what, rank, world_size, timeout)
            group = self._complete(made, num_aborts)
            if prefix == kinds[-1][0]:
                _connect_trees(group, is_apart=has_reduce_group)
            return group

        kinds = [("generation", f"{GENERATION_GROUP_PREFIX}{name}", "default_pg")]
        kinds += [("reduce", f"{REDUCE_GROUP_PREFIX}{name}", "sums")] if has_reduce_group else []
        try:
            store: Any = self._connect_store(host, int(port), name, num_aborts)  # torch's stubs lack `clone`
            calls = [BackgroundCall(functools.partial(make, *kind), _SETUP_THREAD) for kind in kinds]
            group, *others = [self._wait_for_first_member(call, name, num_aborts) for call in calls]
            self.wait_aborted(math.inf)  # nothing of the previous generation is in flight any more
            self.prepare_default_group(group)
            _set_default_group(group, others)
        except (RuntimeError, OSError) as cause:
            if self._clock() - started_s > _CALL_FRACTION * self._form_timeout_s and num_aborts == self._num_aborts:
                self._form_timeout_s = min(2 * self._form_timeout_s, _MAX_FORM_TIMEOUT_S)
            raise PeerError(
                f"group of generation {name}: {str(cause).partition(chr(10))[0]}, expected all of {world_size} "
                "members. Look into the logs of the others."
            ) from cause
        self._form_timeout_s = self._first_form_timeout_s
        for each in (group, *others):
            _set_timeout(COLLECTIVE_TIMEOUT, each)
        with self._lock:
            self._group, self._reduce_group = group, others[0] if others else None
            self._forming.clear()
            was_aborted = self._num_aborts != num_aborts
        if was_aborted:
            _abort_groups(self._take_groups())
            raise _aborted_error(name)

    def _complete(self, group: RingweaveProcessGroup, num_aborts: int) -> RingweaveProcessGroup:
        """Wait for a group's plan; abort the group if no caller waits for it any more."""
        with self._lock:
            self._forming.append(group)
        group.wait_for_plan()
        if num_aborts != self._num_aborts:
            group.abort()
        return group

    def _connect_store(self, host: str, port: int, name: str, num_aborts: int) -> TCPStore:
        """Connect to the first member's store, unless it does not answer in time."""
        # It listens before the generation is announced: a member that finds no listener need not retry, as torch would.
        socket.create_connection((host, port), timeout=_CALL_FRACTION * self._form_timeout_s).close()
        limit = timedelta(seconds=self._form_timeout_s)
        if self._tunnel is not None:
            host, port = self._replace_gate(host, port)
        call = BackgroundCall(lambda: TCPStore(host, port, is_master=False, timeout=limit), _SETUP_THREAD)
        return self._wait_for_first_member(call, name, num_aborts)

    def _wait_for_first_member(self, call: BackgroundCall[_AnswerT], name: str, num_aborts: int) -> _AnswerT:
        """Wait for a call to the first member with a timeout, since a stopped member never answers.

        Raises:
            PeerError: `abort` was called meanwhile.
            TimeoutError: The first member did not answer in time.
        """
        try:
            # The call has its own limit, and its error names the absent members.
            return call.wait_result(self._form_timeout_s + _GRACE_S, lambda: num_aborts != self._num_aborts)
        except TimeoutError as cause:
            if num_aborts != self._num_aborts:
                raise _aborted_error(name) from cause
            raise TimeoutError(f"the first member did not answer within {self._form_timeout_s:g} s") from cause

    def abort(self) -> None:
        """Let every wait in the group, or in forming it, end at once; from any thread.

        It does not wait for Gloo, which takes up to 10 ms for each peer; `wait_aborted` does.
        """
        with self._lock:
            self._num_aborts += 1
            groups, self._held_store = (self._reduce_group, self._group, *self._forming), None
        self._begin_abort(groups)

    def wait_aborted(self, timeout_s: float) -> None:
        """Wait until all is aborted, at most so long for each group: threads in native code outlive no interpreter."""
        with self._lock:
            aborts, self._aborts = self._aborts, []
        for each in aborts:
            with contextlib.suppress(TimeoutError):
                each.wait_result(timeout_s, lambda: False)

    def leave_group(self) -> None:
        """Abort the group and destroy it."""
        self._begin_abort(self._take_groups())
        self.wait_aborted(math.inf)
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def _begin_abort(self, groups: Iterable[dist.ProcessGroup | None]) -> None:
        call = BackgroundCall(functools.partial(_abort_groups, groups), "ringweave group abort")
        with self._lock:
            self._aborts.append(call)

    def _take_groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """Return the groups of this generation, which `abort` knows no more."""
        with self._lock:
            groups, self._group, self._reduce_group = (self._reduce_group, self._group), None, None
        return groups

    def _open_store(self) -> TCPStore:
        listener = ports.create_server(self._address, ports_of_environ(os.environ), backlog=_STORE_BACKLOG)
        address, self._next_port = self._address, listener.getsockname()[1]
        if self._tunnel is not None:
            door, address, listener = listener, _LOOPBACK, socket.create_server((_LOOPBACK, 0), backlog=_STORE_BACKLOG)
            target = (_LOOPBACK, listener.getsockname()[1])
            self._doors.append(self._tunnel.open_door(door, target, revokes=self.revokes))
            while len(self._doors) > _NUM_HELD_STORES:
                self._doors.pop(0).close_soon()
        port = ports.defer_accept(listener).getsockname()[1]
        return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def _replace_gate(self, host: str, port: int) -> tuple[str, int]:
        """Return where the store behind a door is reached on this node."""
        assert self._tunnel is not None, "the run is encrypted"
        if self._gate is not None:
            self._gate.close_soon()
        self._gate = self._tunnel.open_gate(socket.create_server((_LOOPBACK, 0), backlog=_STORE_BACKLOG), (host, port))
        return _LOOPBACK, self._gate.port


def _find_tunnel() -> "Tunnel | None":
    environment = WorkerEnvironment.from_environ(os.environ)
    if not environment.encrypts:
        return None
    from ringweave.comm.transport import tunnel  # with asyncio, which a plain run does without

    return tunnel.tunnel_for(environment)


def _set_default_group(group: dist.ProcessGroup, others: Sequence[dist.ProcessGroup]) -> None:
    """Make `group` the default, and destroy all groups but it and `others`: the previous ones, and those of the script.

    torch has no call for this: `init_process_group` requires that there is none, and between destroying and making one
    every `get_rank` of the script would raise. So this does the same as that function, with an existing group.
    """
    distributed_c10d._update_default_pg(group)
    kept = {group, *others}
    for each in [each for each in distributed_c10d._world.pg_map if each not in kept]:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(each)


def _make_group(
    store: Store, name: str, description: str, rank: int, world_size: int, timeout: timedelta
) -> RingweaveProcessGroup:
    """Make a group of all members and register it with torch."""
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend("ringweave"),
        store,
        distributed_c10d.GroupName(name),
        timeout=timeout,
        group_desc=description,
    )
    assert isinstance(group, RingweaveProcessGroup), "this process is a member"
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


def _connect_trees(group: RingweaveProcessGroup, *, is_apart: bool) -> None:
    """Connect the members as the rows of their first step will travel, while their scripts may still compute.

    Raises:
        RuntimeError: A member is gone.
    """
    row = torch.zeros(1, dtype=torch.uint8)
    group.allgather_small(row)
    if is_apart:
        group.allgather_aside(row)


def _abort_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    run_at_once([group.abort for group in groups if group is not None])


@contextlib.contextmanager
def direct_collectives() -> Iterator[None]:
    """Context in which this thread's collectives of the default group are ringweave's own, and not the script's."""
    was_direct, _caller.is_direct = is_direct(), True
    try:
        yield
    finally:
        _caller.is_direct = was_direct


def is_direct() -> bool:
    """Return True inside of `direct_collectives`."""
    return getattr(_caller, "is_direct", False)


def is_generation_group() -> bool:
    """Return True if the default group is a generation's, which another may replace at a step boundary."""
    group = dist.group.WORLD
    return group is not None and str(group.group_name).startswith(GENERATION_GROUP_PREFIX)


def _aborted_error(name: str) -> PeerError:
    return PeerError(f"group of generation {name}: aborted while it was formed. Form the next one.")


def own_address() -> str:
    """Return the address at which the other members reach this process."""
    from ringweave.comm import group_info

    return group_info.locate_process(WorkerEnvironment.from_environ(os.environ), os.environ).address
