"""The host library's connections of a lane: when they are made, and when they are cut."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ringweave.comm.adapting import hosting
from ringweave.comm.adapting.hosting import Hosts
from ringweave.comm.members import Member, Members, Place
from ringweave.comm.transport.seam import TransferFailedError

RANKS = tuple(Member(rank, Place(f"n{rank}", "127.0.0.1"), ()) for rank in range(2))


class Gloo:
    """Stands in for torch's."""

    def __init__(self) -> None:
        self.cut_from: list[int] = []

    def recv(self, tensors: object, peer: int, tag: int) -> Any:
        self.cut_from.append(peer)
        return SimpleNamespace(wait=lambda limit: None)


def hosts(timeout: timedelta = timedelta(seconds=10)) -> Hosts:
    store: Any = SimpleNamespace(clone=HashStore)
    return Hosts(store, Members(RANKS, 0, b""), timeout, cut_own=lambda: None)


def test_what_is_made_while_the_group_is_cut_is_cut_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made, under = Gloo(), hosts()

    def make(*_: object) -> Gloo:
        under.cut()
        return made

    monkeypatch.setattr(hosting, "ProcessGroupGloo", make)
    with pytest.raises(TransferFailedError, match="the connections of this group were cut"):
        under.prepare(0, lambda: None)
    assert made.cut_from == [1]


@pytest.mark.parametrize(("limit_s", "waited_s"), [(1800, 30), (10, 10)])
def test_a_peer_that_stops_before_it_connects_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, limit_s: int, waited_s: int
) -> None:
    """Nobody can end the constructor."""
    limits: list[timedelta] = []
    monkeypatch.setattr(hosting, "ProcessGroupGloo", lambda store, rank, size, limit: limits.append(limit))
    hosts(timedelta(seconds=limit_s)).prepare(0, lambda: None)
    assert limits == [timedelta(seconds=waited_s)]


def test_all_ranks_are_there_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(hosting, "ProcessGroupGloo", lambda *_: done.append("made"))
    under = hosts()
    for lane in (0, 0, 1):
        under.prepare(lane, lambda: done.append("met"))
    assert done == ["met", "made"] * 2
