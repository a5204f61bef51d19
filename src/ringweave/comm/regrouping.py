"""The default process group, made anew for every epoch of an elastic job's membership.

The members of an epoch meet in a store that its first member holds. Each member keeps one ready, so that whoever comes
to be the first has said where it is before the epoch begins; no store outlives its epoch, and none is needed by two.
"""

import contextlib
import os
import socket
import threading
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from ringweave.errors import PeerError

FORM_S = 10.0
"""How long the members of an epoch may take to meet; all of them have just said that they are there."""
_CALL_S = 2.0
"""How long the first member may take to answer a call."""
WAIT = timedelta(days=1)
"""Of a collective: what ends it when a member is gone is the membership and not a time-out."""


class EpochGroups:
    """Forms the default group of one epoch after another; `form` and `leave` in one thread, `abort` in any."""

    def __init__(self, address: str) -> None:
        """`address` is where the others reach this process."""
        self._address = address
        self._lock = threading.Lock()
        self._ready = self._open()
        self._held: TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._num_aborts = 0

    @property
    def store_place(self) -> str:
        """`address port` of the store that the members of the next epoch meet in if this one is its first."""
        return f"{self._address} {self._ready.port}"

    @property
    def num_aborts(self) -> int:
        """How often `abort` was called: what `form` is told of the moment when its epoch was ordered."""
        return self._num_aborts

    def form(self, store_place: str, name: str, rank: int, world_size: int, num_aborts: int) -> None:
        """Make the default group; the one before is gone then.

        Args:
            store_place: Of the first member.
            name: Of the epoch; no two have the same.
            rank: Of this member.
            world_size: Number of members.
            num_aborts: As it was when the epoch was ordered.

        Raises:
            PeerError: The members did not meet, or `abort` was called since the epoch was ordered.
        """
        self.leave()
        with self._lock:
            if num_aborts != self._num_aborts:
                raise _aborted(name)
            if rank == 0:  # the others hold on to it as long as this process does, and no longer
                self._held, self._ready = self._ready, self._open()
        host, port = store_place.split()
        limit = timedelta(seconds=FORM_S)
        try:
            # It listens before the epoch is ordered: who finds nobody there need not search for it, as torch would.
            socket.create_connection((host, int(port)), timeout=_CALL_S).close()
            store = TCPStore(host, int(port), is_master=False, timeout=limit)
            own = PrefixStore(f"epoch/{name}/", store)
            dist.init_process_group("ringweave", store=own, rank=rank, world_size=world_size, timeout=limit)
        except (RuntimeError, OSError) as cause:
            raise PeerError(
                f"group of epoch {name}: {str(cause).partition(chr(10))[0]}, expected all of {world_size} members. "
                "Look into the logs of the others."
            ) from cause
        group = dist.group.WORLD
        assert group is not None
        dist.distributed_c10d._set_pg_timeout(WAIT, group)
        with self._lock:
            self._group = group
            is_late = self._num_aborts != num_aborts
        if is_late:
            group.abort()
            raise _aborted(name)

    def abort(self) -> None:
        """End every wait in the group at once, or in its being formed; from any thread."""
        with self._lock:
            self._num_aborts += 1
            group, self._held = self._group, None
        if group is not None:
            group.abort()

    def leave(self) -> None:
        """Let go of the group that there is."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.abort()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def _open(self) -> TCPStore:
        return TCPStore(self._address, 0, is_master=True, wait_for_workers=False)


def _aborted(name: str) -> PeerError:
    return PeerError(f"group of epoch {name}: aborted while it was formed. Form the next one.")


def own_address() -> str:
    """Where the other members reach this process."""
    from ringweave.comm import members
    from ringweave.environment import WorkerEnvironment

    return members.own_place(WorkerEnvironment.from_environ(os.environ), os.environ).address
