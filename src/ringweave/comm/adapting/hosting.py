"""The host library as a candidate: its allreduce at the turn of a lane, over connections of the lane's own.

The group's own host library is called in the order of the script's calls. What a lane runs comes at another time on
each rank, so it must not get into that order: Gloo would take one collective for another.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, Store
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ringweave.comm.members import Members
from ringweave.comm.transport.seam import TransferFailedError

_ABORT_TAG = 2**31 - 1
"""A tag that no message carries."""
_CUT = "the connections of this group were cut"
_CONNECT_LIMIT = timedelta(seconds=30)
"""All ranks have just met, so none is far. Nobody can end Gloo's constructor, which waits for one that has died."""


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

    def __init__(self, store: Store, members: Members, timeout: timedelta, cut_own: Callable[[], None]) -> None:
        """`cut_own` cuts the one that the group calls itself."""
        self._cut_own = cut_own
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
        self._attempt(lambda: self._by_lane[lane].allreduce([message], options).wait())

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
        with self._lock:
            self._by_lane.clear()

    def _make(self, lane: int) -> None:
        if self._is_cut:
            raise RuntimeError(_CUT)
        place = (self._members.group_rank, self._members.group_size)
        # A connection to the store of our own: whoever waits for a key keeps all other users of its connection waiting,
        # and ranks that are at different groups would wait for each other.
        own: Any = self._store  # torch's stubs lack `clone`
        store = PrefixStore(f"lane-host/{lane}/", own.clone())
        gloo = ProcessGroupGloo(store, *place, min(self._timeout, _CONNECT_LIMIT))
        with self._lock:
            self._by_lane[lane] = gloo
            is_cut = self._is_cut
        if is_cut:  # meanwhile: whoever cut it did not find this one
            cut_gloo(gloo, self._members)
            raise RuntimeError(_CUT)

    @staticmethod
    def _attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as cause:
            raise failure_of(cause) from cause
