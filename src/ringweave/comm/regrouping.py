"""The default process group, made anew for every epoch of an elastic job's membership.

The members of an epoch meet in a store that its first member holds. Each member keeps one ready, so that whoever comes
to be the first has said where it is before the epoch begins; no store outlives its epoch, and none is needed by two.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d

from ringweave.comm.adapting.starting import APART, EPOCH
from ringweave.comm.asking import in_time
from ringweave.comm.backend import RingweaveProcessGroup
from ringweave.errors import PeerError

FORM_S = 10.0
"""How long the members of an epoch may take to meet, at first; all of them have just said that they are there. Twice as
long after each time that this was too short: a machine that is too busy for it once will be so again."""
_MOST_FORM_S = 640.0
_CALL_PART = 0.2
"""Of the limit: the first member may take so long to answer a call."""
_GRACE_S = 1.0
WAIT = timedelta(days=1)
"""Of a collective: what ends it when a member is gone is the membership and not a time-out."""
_Found = TypeVar("_Found")


class EpochGroups:
    """Forms the default group of one epoch after another; `form` and `leave` in one thread, `abort` in any."""

    def __init__(self, address: str, *, form_s: float = FORM_S, clock: Callable[[], float] = time.monotonic) -> None:
        """`address` is where the others reach this process; `form_s` is how long they may take to meet at first."""
        self._address, self._clock = address, clock
        self._lock = threading.Lock()
        self._ready = self._open()
        self._held: TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._apart: dist.ProcessGroup | None = None
        self._num_aborts = 0
        self._first_limit_s = self._limit_s = form_s

    @property
    def store_place(self) -> str:
        """`address port` of the store that the members of the next epoch meet in if this one is its first."""
        return f"{self._address} {self._ready.port}"

    @property
    def num_aborts(self) -> int:
        """How often `abort` was called: what `form` is told of the moment when its epoch was ordered."""
        return self._num_aborts

    @property
    def reducing(self) -> dist.ProcessGroup | None:
        """The group that gradients are summed in; None is the default one."""
        return self._apart

    def exchange(self, own: Tensor) -> Tensor:
        """(num_members, width): what each member says, (width,), once all have said it; among those that reduce.

        What was begun before may be under way meanwhile.

        Raises:
            RuntimeError: The group is broken.
        """
        group = self._apart or dist.group.WORLD
        assert isinstance(group, RingweaveProcessGroup), "made here"
        return group.exchange(own)

    def vote(self, *, is_for: bool) -> bool:
        """Whether all members are for it, once all have said so or not.

        Raises:
            RuntimeError: The group is broken.
        """
        return bool(self.exchange(torch.tensor([is_for], dtype=torch.uint8)).all())

    def form(
        self, store_place: str, name: str, rank: int, world_size: int, num_aborts: int, *, is_apart: bool = False
    ) -> None:
        """Make the default group, in the place of the one before.

        The script may ask for its rank at any moment, so there is a default group at any moment: the one before, which
        does nothing any more, until the next one stands.

        Args:
            store_place: Of the first member.
            name: Of the epoch; no two have the same.
            rank: Of this member.
            world_size: Number of members.
            num_aborts: As it was when the epoch was ordered.
            is_apart: Gradients are summed in a group of their own, since not all members' scripts are at the same
                step: what they do in the default group would come in another order on each.

        Raises:
            PeerError: The members did not meet, or `abort` was called since the epoch was ordered.
        """
        self._cut()
        with self._lock:
            if num_aborts != self._num_aborts:
                raise _aborted(name)
            if rank == 0:  # the others hold on to it as long as this process does, and no longer
                self._held, self._ready = self._ready, self._open()
        host, port = store_place.split()
        limit, began_s = timedelta(seconds=self._limit_s), self._clock()

        def make(prefix: str, group_name: str, what: str) -> RingweaveProcessGroup:
            """A group whose plan is there too, so that nobody waits for it who has to do something else."""
            group = _make(PrefixStore(f"{prefix}/{name}/", store), group_name, what, rank, world_size, limit)
            group.settle()
            if num_aborts != self._num_aborts:  # nobody waits for it any more
                group.abort()
            return group

        try:
            store = self._reach(host, int(port), name, num_aborts)
            group = self._ask(lambda: make("epoch", f"{EPOCH}{name}", "default_pg"), name, num_aborts)
            _make_default(group)
            groups: list[dist.ProcessGroup] = [group]
            if is_apart:
                groups.append(self._ask(lambda: make("apart", f"{APART}{name}", "sums"), name, num_aborts))
        except (RuntimeError, OSError) as cause:
            if self._clock() - began_s > _CALL_PART * self._limit_s and num_aborts == self._num_aborts:
                self._limit_s = min(2 * self._limit_s, _MOST_FORM_S)
            raise PeerError(
                f"group of epoch {name}: {str(cause).partition(chr(10))[0]}, expected all of {world_size} members. "
                "Look into the logs of the others."
            ) from cause
        self._limit_s = self._first_limit_s
        for each in groups:
            distributed_c10d._set_pg_timeout(WAIT, each)
        with self._lock:
            self._group, self._apart = groups[0], groups[1] if is_apart else None
            is_late = self._num_aborts != num_aborts
        if is_late:
            self._cut()
            raise _aborted(name)

    def _reach(self, host: str, port: int, name: str, num_aborts: int) -> TCPStore:
        """The store of the first member, unless that does not answer in time."""
        # It listens before the epoch is ordered: who finds nobody there need not search for it, as torch would.
        socket.create_connection((host, port), timeout=_CALL_PART * self._limit_s).close()
        limit = timedelta(seconds=self._limit_s)
        return self._ask(lambda: TCPStore(host, port, is_master=False, timeout=limit), name, num_aborts)

    def _ask(self, call: Callable[[], _Found], name: str, num_aborts: int) -> _Found:
        """What comes of a call that needs the first member; of one that is stopped nothing would ever come.

        Raises:
            PeerError: `abort` was called meanwhile.
            TimeoutError: It did not answer in time.
        """
        try:
            limit_s = self._limit_s + _GRACE_S  # what is asked has the limit itself, and says more of who did not come
            return in_time(call, limit_s, lambda: num_aborts != self._num_aborts, "ringweave meeting")
        except TimeoutError as cause:
            if num_aborts != self._num_aborts:
                raise _aborted(name) from cause
            raise TimeoutError(f"the first member did not answer within {self._limit_s:g} s") from cause

    def abort(self) -> None:
        """End every wait in the group at once, or in its being formed; from any thread."""
        with self._lock:
            self._num_aborts += 1
            groups, self._held = (self._apart, self._group), None
        _abort(groups)

    def leave(self) -> None:
        """Let go of the group that there is."""
        self._cut()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def _cut(self) -> None:
        with self._lock:
            groups, self._group, self._apart = (self._apart, self._group), None, None
        _abort(groups)

    def _open(self) -> TCPStore:
        return TCPStore(self._address, 0, is_master=True, wait_for_workers=False)


def _make_default(group: dist.ProcessGroup) -> None:
    """Make it the default group, and let go of the one before and of all that the script made beside it.

    torch has no call for it: `init_process_group` wants that there is none, and between its end and the next begin
    every `get_rank` of the script would raise. So this does what that function does, with the group at hand.
    """
    distributed_c10d._update_default_pg(group)
    for other in [each for each in distributed_c10d._world.pg_map if each is not group]:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(other)


def _make(store: Store, name: str, what: str, rank: int, world_size: int, limit: timedelta) -> RingweaveProcessGroup:
    """A group of all members, of which torch knows."""
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend("ringweave"),
        store,
        distributed_c10d.GroupName(name),
        timeout=limit,
        group_desc=what,
    )
    assert isinstance(group, RingweaveProcessGroup), "this process is a member"
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


def _abort(groups: Iterable[dist.ProcessGroup | None]) -> None:
    for group in groups:
        if group is not None:
            group.abort()


def is_of_an_epoch() -> bool:
    """Whether the default group is that of an epoch of an elastic job: it may be another one at any border."""
    group = dist.group.WORLD
    return group is not None and str(group.group_name).startswith(EPOCH)


def _aborted(name: str) -> PeerError:
    return PeerError(f"group of epoch {name}: aborted while it was formed. Form the next one.")


def own_address() -> str:
    """Where the other members reach this process."""
    from ringweave.comm import members
    from ringweave.environment import WorkerEnvironment

    return members.own_place(WorkerEnvironment.from_environ(os.environ), os.environ).address
