"""Gloo groups: how they connect, how their works are waited for, and how they end."""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ringweave import relayed_address
from ringweave.comm.group_info import GroupInfo
from ringweave.relayed_address import is_relayed

_ABORT_TAG = 2**31 - 1
"""Tag that no message carries."""
ABORTED = "the connections of this group were cut"
_POLL_INTERVAL, _NUM_POLLS_AFTER_ABORT = timedelta(milliseconds=100), 10
"""After an abort, a thread that the closed connections wake has finished within this many polls: a millisecond is
enough if it is scheduled. Polls are counted instead of timed, because a stopped process gets no processor."""


class StuckWorkError(RuntimeError):
    """A work does not end although its connections are closed."""


def make_gloo(store: Store, group: GroupInfo, timeout: timedelta) -> ProcessGroupGloo:
    """Make a Gloo group, connected.

    Gloo publishes the address at which it listens, and the greater address calls (`isInitiator` of its TCP device). A
    host that others reach by relays listens at its relayed address, which all others call by the same name. So both
    ends of a pair agree.

    Raises:
        RuntimeError: Ranks cannot be reached.
        LaunchError: The relay of this host does not answer.
    """
    place, address = (group.group_rank, group.group_size), group.own_info.location.address
    if not is_relayed(address):
        return ProcessGroupGloo(store, *place, timeout)
    devices = _open_relayed_devices(address)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._timeout, options._devices, options._threads = timeout, devices, 2 * len(devices)
    made = ProcessGroupGloo(store, *place, options)
    relayed_address.keep_all_alive()
    return made


def _open_relayed_devices(address: str) -> list[Any]:
    """Return listeners of Gloo's at a relayed address, as many as the other ranks have, which all others can call."""
    count = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    taken: frozenset[int] = frozenset()
    for _ in range(relayed_address.MAX_ATTEMPTS):
        devices = [ProcessGroupGloo.create_device(hostname=address) for _ in range(count)]
        taken = relayed_address.announce_listeners(address)
        if not taken:
            return devices
        devices.clear()  # torch does not tell their ports, so they may be the taken ones
    raise relayed_address.taken_error(address, *taken)


def wait_for_gloo(work: Work, is_aborted: Callable[[], bool], timeout: timedelta | None = None) -> bool:
    """Wait for a Gloo collective on CPU tensors, but not for one that nothing wakes after an abort.

    When a connection closes, Gloo wakes threads that wait for their turn on it, but not a thread whose message has
    arrived in part (torch 2.13: `Pair::signalException` of its TCP transport leaves out the operation under way). That
    thread would wait as long as the collective may take: a day in an elastic job. It does not touch its tensors any
    more, because the rest of the message never arrives and the first part is already processed.

    Args:
        work: The work to wait for.
        is_aborted: Whether connections were closed by an abort.
        timeout: Limit; None or 0 is the limit of the collective.

    Raises:
        StuckError: It will not end. Leave its tensors and the backend as they are (`leak_backend`).
        RuntimeError: The backend failed, or the limit has passed.
    """
    deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
    num_polls_left = _NUM_POLLS_AFTER_ABORT
    while deadline_s is None or time.monotonic() < deadline_s:
        try:
            return work.wait(_POLL_INTERVAL)
        except RuntimeError:
            if work.is_completed():  # it has failed, or just finished
                break
        num_polls_left -= is_aborted()
        if num_polls_left < 0:
            raise StuckWorkError(f"{ABORTED}, in the middle of a message")
    return work.wait(timedelta(milliseconds=1))


def leak_backend(backend: Any) -> None:
    """Keep the backend from being destroyed: its destructor waits for all its threads, one of which never wakes."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def ends_after_abort(work: Work) -> bool:
    """Return True if Gloo's work ends, with or without an error, shortly after an abort."""
    try:
        wait_for_gloo(work, lambda: True)
    except StuckWorkError:
        return False
    except RuntimeError:
        pass
    return True


def abort_gloo(gloo: Any, group: GroupInfo) -> None:
    """Close Gloo's connections: collectives in flight fail, here and at the peers.

    Gloo's own abort leaves them open (torch 2.13), and they stay open while any message is pending. But a wait that
    times out closes its pair, so this function waits for a message that never comes, from each peer.
    """
    for peer in range(group.group_size):
        if peer != group.group_rank:
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
