"""The native backend's connections of a lane: when they are made, and when they are cut."""

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from ringweave.comm import gloo as gloo_groups
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.native_backend import NativeBackends
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.testing.ranks import Ranks
from tests.comm import fault_functions

RANKS = tuple(RankInfo(rank, RankLocation(f"n{rank}", "127.0.0.1"), ()) for rank in range(2))


class Gloo:
    """Stands in for torch's."""

    def __init__(self) -> None:
        self.cut_from: list[int] = []

    def recv(self, tensors: object, peer: int, tag: int) -> Any:
        self.cut_from.append(peer)
        return SimpleNamespace(wait=lambda limit: None)


def hosts(timeout: timedelta = timedelta(seconds=10), clone: Callable[[], Any] = HashStore) -> NativeBackends:
    store: Any = SimpleNamespace(clone=clone)
    return NativeBackends(store, GroupInfo(RANKS, 0, b""), timeout, abort_group_backend=lambda: None)


def replace_gloo(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    """Let `make` be the constructor; it gets the options, whose limit is `_timeout`."""
    constructor: Any = functools.partial(make)
    constructor._Options, constructor.create_device = SimpleNamespace, lambda hostname: hostname
    monkeypatch.setattr(gloo_groups, "ProcessGroupGloo", constructor)


def test_what_is_made_while_the_group_is_cut_is_cut_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made, under = Gloo(), hosts()

    def make(*_: object) -> Gloo:
        under.abort()
        return made

    replace_gloo(monkeypatch, make)
    with pytest.raises(TransferFailedError, match="the connections of this group were cut"):
        under.prepare(0, lambda: None)
    assert made.cut_from == [1]


@pytest.mark.parametrize(("limit_s", "waited_s"), [(1800, 30), (10, 10)])
def test_a_peer_that_stops_before_it_connects_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, limit_s: int, waited_s: int
) -> None:
    """Nobody can end the constructor."""
    limits: list[timedelta] = []
    replace_gloo(monkeypatch, lambda store, rank, size, options: limits.append(options._timeout))
    hosts(timedelta(seconds=limit_s)).prepare(0, lambda: None)
    assert limits == [timedelta(seconds=waited_s)]


@pytest.mark.parametrize("waits_for", ["the store", "a peer"])
def test_a_lane_that_is_cut_while_it_connects_goes_on_at_once(monkeypatch: pytest.MonkeyPatch, waits_for: str) -> None:
    """A peer was stopped just before, or the one with the store is gone, for which torch looks for up to a minute.

    The next epoch's sums wait until this lane has let go of their memory.
    """
    is_stopped, is_let_go = threading.Event(), threading.Event()

    def stand_still(*_: object) -> Any:
        is_stopped.set()
        is_let_go.wait(60)
        return Gloo()

    under = hosts(clone=stand_still) if waits_for == "the store" else hosts()

    def cut() -> None:
        is_stopped.wait(60)
        under.abort()

    replace_gloo(monkeypatch, stand_still)
    threading.Thread(target=cut).start()
    with pytest.raises(TransferFailedError, match="the connections of this group were cut"):
        under.prepare(0, lambda: None)
    assert not is_let_go.is_set()
    is_let_go.set()


def test_all_ranks_are_there_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    replace_gloo(monkeypatch, lambda *_: done.append("made"))
    under = hosts()
    for lane in (0, 0, 1):
        under.prepare(lane, lambda: done.append("met"))
    assert done == ["met", "made"] * 2


@pytest.mark.distributed
def test_who_waits_for_a_message_that_has_come_in_part_is_let_go_when_the_group_is_cut() -> None:
    """Gloo wakes it as little as its destructor ends: without `comm/gloo.py` this waits for a day."""
    said: list[str] = []
    while len(said) < 8 and "stuck" not in "".join(said[-1:]):  # on a busy machine the whole message may have come
        with Ranks(fault_functions.wait_for_the_rest_of_a_message, 2, backend="gloo") as ranks:
            (outcome,) = ranks.outcomes([0])
        assert not outcome.error
        what, waited_s = outcome.value
        said.append(what)
    assert said[-1] == "stuck: the connections of this group were cut, in the middle of a message", said
    assert waited_s < 20


class Slow:
    """A work that ends in a while, or never."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.num_left, self.error = looks, error

    def wait(self, timeout: timedelta) -> bool:
        self.num_left -= 1
        time.sleep(min(0.02, timeout.total_seconds()))
        if self.num_left >= 0:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.num_left <= 0


def test_a_work_that_ends_is_waited_for_as_long_as_nobody_cuts() -> None:
    assert gloo_groups.wait_for_gloo(cast(Any, Slow(5)), lambda: False)
    with pytest.raises(RuntimeError, match="gone"):
        gloo_groups.wait_for_gloo(cast(Any, Slow(5, "gone")), lambda: False)
    with pytest.raises(RuntimeError, match="timed out"):
        gloo_groups.wait_for_gloo(cast(Any, Slow(10**9)), lambda: False, timedelta(seconds=0.1))


def test_after_a_cut_what_is_about_to_end_has_a_moment() -> None:
    assert gloo_groups.wait_for_gloo(cast(Any, Slow(3)), lambda: True)
    with pytest.raises(gloo_groups.StuckWorkError):
        gloo_groups.wait_for_gloo(cast(Any, Slow(10**9)), lambda: True)
