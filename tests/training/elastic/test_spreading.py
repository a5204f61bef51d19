"""What one member fetches for all: once for each first member, and nobody's before it counts."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import DisagreementError, TrainingError
from ringweave.training.elastic import retained_reductions
from ringweave.training.elastic.retained_reductions import Commit, FetchedJson, FetchOnceBroadcast

COUNTS = Commit(number=1, members=("0.0",), rows=())


class Group:
    """One member's side of a group; what is broadcast is noted, or read from what another one's noted."""

    def __init__(self, rank: int, heard: list[Tensor] | None = None) -> None:
        self.rank, self.told = rank, []
        self._heard = list(heard or [])

    def get_rank(self) -> int:
        return self.rank

    def broadcast(self, tensor: Tensor, source: int, **_: Any) -> None:
        assert source == 0
        if self.rank == 0:
            self.told.append(tensor.clone())
        else:
            tensor.copy_(self._heard.pop(0))


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group(0)
    monkeypatch.setattr(retained_reductions, "dist", group)
    return group


def test_the_first_member_fetches_and_the_others_have_the_same_once_it_counts(
    first: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed = torch.zeros(3)

    def fetch() -> FetchedJson:
        landed.fill_(7.0)
        return {"version": 4}

    own = FetchOnceBroadcast(1, fetch, [landed], lambda: 0)
    own.start()
    own.wait_done()
    assert own.fetched == {}, "it may not count"
    own.deliver(COUNTS, is_mean=True)
    assert own.fetched == {"version": 4}
    other = Group(1, first.told)
    monkeypatch.setattr(retained_reductions, "dist", other)
    arrived = torch.zeros(3)
    theirs = FetchOnceBroadcast(1, pytest.fail, [arrived], lambda: 0)
    theirs.start()
    theirs.wait_done()
    theirs.deliver(COUNTS, is_mean=True)
    assert (theirs.fetched, arrived.tolist()) == ({"version": 4}, [7.0] * 3)


def test_what_is_under_way_when_an_epoch_ends_is_used_in_the_next_one(first: Group) -> None:
    may_end, generation, num_fetched = threading.Event(), [0], []

    def fetch() -> FetchedJson:
        num_fetched.append(1)
        assert may_end.wait(60)
        return {"version": 9}

    spread = FetchOnceBroadcast(1, fetch, [], lambda: generation[0])
    spread.start()
    generation[0] = 1
    with pytest.raises(RuntimeError, match="the generation is over"):
        spread.wait_done()
    assert first.told == [], "nobody has heard anything"
    may_end.set()
    spread.start()
    spread.wait_done()
    spread.deliver(COUNTS, is_mean=True)
    assert (spread.fetched, len(num_fetched)) == ({"version": 9}, 1)


def test_a_member_that_becomes_the_first_fetches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained_reductions, "dist", Group(1))
    spread = FetchOnceBroadcast(1, lambda: {"version": 5}, [], lambda: 0)
    spread.start()
    monkeypatch.setattr(retained_reductions, "dist", Group(0))
    spread.start()
    spread.wait_done()
    spread.deliver(COUNTS, is_mean=True)
    assert spread.fetched == {"version": 5}


def test_what_cannot_be_fetched_is_told_where_it_is_waited_for(first: Group) -> None:
    def fetch() -> FetchedJson:
        raise TrainingError("push 3 of ring 0: out of its order")

    spread = FetchOnceBroadcast(1, fetch, [], lambda: 0)
    spread.start()
    with pytest.raises(TrainingError, match="push 3 of ring 0"):
        spread.wait_done()
    assert first.told == []


@pytest.mark.parametrize("said", [b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_what_is_none_is_a_disagreement(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [torch.tensor([len(said)]), torch.frombuffer(bytearray(said), dtype=torch.uint8)]
    monkeypatch.setattr(retained_reductions, "dist", Group(1, told))
    spread = FetchOnceBroadcast(1, pytest.fail, [], lambda: 0)
    spread.start()
    with pytest.raises(DisagreementError, match=r"what the first member has fetched: .*, expected a JSON object"):
        spread.wait_done()


@pytest.mark.parametrize("length", [-1, 0, 2**40])
def test_a_length_that_is_none_takes_no_memory(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained_reductions, "dist", Group(1, [torch.tensor([length])]))
    spread = FetchOnceBroadcast(1, pytest.fail, [], lambda: 0)
    spread.start()
    with pytest.raises(DisagreementError, match=rf"'{length} bytes', expected 1 to 16777216 bytes"):
        spread.wait_done()
