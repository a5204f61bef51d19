"""The host library as a candidate: its allreduce at the turn of a lane, over connections of the lane's own.

The group's own host library is called in the order of the script's calls. What a lane runs comes at another time on
each rank, so it must not get into that order: Gloo would take one collective for another.
"""

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ringweave.comm.asking import in_time
from ringweave.comm.members import Members
from ringweave.comm.transport.seam import TransferFailedError

_ABORT_TAG = 2**31 - 1
"""A tag that no message carries."""
_CUT = "the connections of this group were cut"
_CONNECT_LIMIT = timedelta(seconds=30)
"""All ranks have just met, so none is far. Gloo may wait for a multiple of it."""

_LOOK, _NUM_LOOKS = timedelta(milliseconds=100), 10
"""Once connections are cut, whoever is woken by that is through after so many looks: a millisecond does, where it gets
a processor. They are counted, and not timed: a process that was stopped in between has got none."""


class StuckError(RuntimeError):
    """A work that will not end, though its connections are closed."""


def wait(work: Work, is_cut: Callable[[], bool], timeout: timedelta | None = None) -> bool:
    """Wait for a collective of Gloo's on the processor, but not for one that nobody wakes once its group was cut.

    When a connection closes, Gloo wakes whoever waits for a turn on it, but not who waits for a message that has come
    in part (torch 2.13: `Pair::signalException` of its TCP transport leaves out the operation under way). That one
    would wait as long as the collective may take: in an elastic job a day. Who is given up does not touch its tensors
    any more: the rest of the message will not come, and all that had come was dealt with.

    Args:
        work: What is waited for.
        is_cut: Whether connections were cut.
        timeout: How long at most; None or 0 is as long as the collective may take.

    Raises:
        StuckError: It will not end: its tensors and the library are to be left as they are, see `leave_behind`.
        RuntimeError: The library gave up, or it takes longer.
    """
    deadline_s = time.monotonic() + timeout.total_seconds() if timeout else math.inf
    num_left = _NUM_LOOKS
    while time.monotonic() < deadline_s:
        with contextlib.suppress(RuntimeError):
            return work.wait(_LOOK)
        if work.is_completed():  # it has failed, or ended just now
            break
        num_left -= is_cut()
        if num_left < 0:
            raise StuckError(f"{_CUT}, in the middle of a message")
    return work.wait(timedelta(milliseconds=1))


def leave_behind(library: Any) -> None:
    """Never let it be destroyed: its end waits for all of its threads, one of which will never wake up."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(library))


def failure_of(cause: RuntimeError) -> TransferFailedError:
    """What the host library's error says; it does not say which peer."""
    text = str(cause).strip().partition("\n")[0] or type(cause).__name__
    return TransferFailedError(None, text, hung="imed out" in text or "imeout" in text)


def cut_gloo(gloo: Any, members: Members) -> None:
    """Close Gloo's connections: what is in flight fails, here and at the peers.

    Gloo's own abort leaves them open (torch 2.13), and they stay open while any message is pending. But a wait that
    times out closes the pair that it waits on, so we wait for a message that never comes, from each peer.
    """
    for peer in range(members.group_size):
        if peer != members.group_rank:
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


class Hosts:
    """The host library under a group: once for each lane, made when a lane first needs it."""

    def __init__(
        self,
        store: Store,
        members: Members,
        timeout: timedelta,
        cut_own: Callable[[], None],
        let_go_own: Callable[[], None] = lambda: None,
    ) -> None:
        """`cut_own` cuts the one that the group calls itself, `let_go_own` is called before that may be destroyed."""
        self._cut_own, self._let_go_own = cut_own, let_go_own
        self._store = store
        self._members = members
        self._timeout = timeout
        self._lock = threading.Lock()
        self._by_lane: dict[int, Any] = {}
        self._is_cut = False

    def prepare(self, lane: int, meet: Callable[[], object]) -> None:
        """Make it for a lane; all ranks do so in the same collective.

        Args:
            lane: Its number.
            meet: Blocks until all ranks are here, for a rank may come to this collective as much later than another as
                a collective may take; to make the connections then takes no longer than to form a group.

        Raises:
            TransferFailedError: A rank did not come.
        """
        if lane not in self._by_lane:
            meet()
            self._attempt(lambda: self._make(lane))

    def allreduce(self, lane: int, message: Tensor, op: Any, timeout_s: float) -> None:
        """Reduce a contiguous tensor in place; blocks.

        Raises:
            TransferFailedError: The library gave up.
        """
        options = AllreduceOptions()
        options.reduceOp = op
        options.timeout = timedelta(seconds=timeout_s)
        self._attempt(lambda: self._wait(self._by_lane[lane], self._by_lane[lane].allreduce([message], options)))

    def cut(self) -> None:
        """Let all that is in flight fail, from any thread."""
        with self._lock:
            self._is_cut = True
            made = list(self._by_lane.values())
        self._cut_own()
        for gloo in made:
            cut_gloo(gloo, self._members)

    def close(self) -> None:
        """Let go of all of them, and of their threads."""
        self._let_go_own()
        with self._lock:
            self._by_lane.clear()

    def _make(self, lane: int) -> None:
        if self._is_cut:
            raise RuntimeError(_CUT)
        place = (self._members.group_rank, self._members.group_size)
        limit = min(self._timeout, _CONNECT_LIMIT)

        def connect() -> Any:
            """Nobody can end the search for a store that has gone meanwhile, nor the wait for a peer that has."""
            # A connection to the store of our own: whoever waits for a key keeps all other users of its connection
            # waiting, and ranks that are at different groups would wait for each other.
            own: Any = self._store  # torch's stubs lack `clone`
            return ProcessGroupGloo(PrefixStore(f"lane-host/{lane}/", own.clone()), *place, limit)

        try:
            gloo = in_time(connect, math.inf, lambda: self._is_cut, "ringweave host")
        except TimeoutError as cause:
            raise RuntimeError(_CUT) from cause
        with self._lock:
            self._by_lane[lane] = gloo
            is_cut = self._is_cut
        if is_cut:  # meanwhile: whoever cut it did not find this one
            cut_gloo(gloo, self._members)
            raise RuntimeError(_CUT)

    def _wait(self, gloo: Any, work: Work) -> None:
        try:
            wait(work, lambda: self._is_cut)
        except StuckError:
            leave_behind(gloo)
            raise

    @staticmethod
    def _attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as cause:
            raise failure_of(cause) from cause
