"""What one member fetches for all: once for each first member, and nobody's before it counts."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import DisagreementError, TrainingError
from ringweave.training.elastic import kept
from ringweave.training.elastic.kept import Said, Spread
from ringweave.training.elastic.rows import Commit

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
    monkeypatch.setattr(kept, "dist", group)
    return group


def test_the_first_member_fetches_and_the_others_have_the_same_once_it_counts(
    first: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed = torch.zeros(3)

    def fetch() -> Said:
        landed.fill_(7.0)
        return {"version": 4}

    own = Spread(1, fetch, [landed], lambda: 0)
    own.start()
    own.wait()
    assert own.said == {}, "it may not count"
    own.resolve(COUNTS, is_mean=True)
    assert own.said == {"version": 4}
    other = Group(1, first.told)
    monkeypatch.setattr(kept, "dist", other)
    arrived = torch.zeros(3)
    theirs = Spread(1, pytest.fail, [arrived], lambda: 0)
    theirs.start()
    theirs.wait()
    theirs.resolve(COUNTS, is_mean=True)
    assert (theirs.said, arrived.tolist()) == ({"version": 4}, [7.0] * 3)


def test_what_is_under_way_when_an_epoch_ends_is_used_in_the_next_one(first: Group) -> None:
    may_end, generation, num_fetched = threading.Event(), [0], []

    def fetch() -> Said:
        num_fetched.append(1)
        assert may_end.wait(60)
        return {"version": 9}

    spread = Spread(1, fetch, [], lambda: generation[0])
    spread.start()
    generation[0] = 1
    with pytest.raises(RuntimeError, match="the epoch is over"):
        spread.wait()
    assert first.told == [], "nobody has heard anything"
    may_end.set()
    spread.start()
    spread.wait()
    spread.resolve(COUNTS, is_mean=True)
    assert (spread.said, len(num_fetched)) == ({"version": 9}, 1)


def test_a_member_that_becomes_the_first_fetches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "dist", Group(1))
    spread = Spread(1, lambda: {"version": 5}, [], lambda: 0)
    spread.start()
    monkeypatch.setattr(kept, "dist", Group(0))
    spread.start()
    spread.wait()
    spread.resolve(COUNTS, is_mean=True)
    assert spread.said == {"version": 5}


def test_what_cannot_be_fetched_is_told_where_it_is_waited_for(first: Group) -> None:
    def fetch() -> Said:
        raise TrainingError("push 3 of ring 0: out of its order")

    spread = Spread(1, fetch, [], lambda: 0)
    spread.start()
    with pytest.raises(TrainingError, match="push 3 of ring 0"):
        spread.wait()
    assert first.told == []


@pytest.mark.parametrize("said", [b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_what_is_none_is_a_disagreement(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [torch.tensor([len(said)]), torch.frombuffer(bytearray(said), dtype=torch.uint8)]
    monkeypatch.setattr(kept, "dist", Group(1, told))
    spread = Spread(1, pytest.fail, [], lambda: 0)
    spread.start()
    with pytest.raises(DisagreementError, match=r"what the first member has fetched: .*, expected a JSON object"):
        spread.wait()


@pytest.mark.parametrize("length", [-1, 0, 2**40])
def test_a_length_that_is_none_takes_no_memory(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "dist", Group(1, [torch.tensor([length])]))
    spread = Spread(1, pytest.fail, [], lambda: 0)
    spread.start()
    with pytest.raises(DisagreementError, match=rf"'{length} bytes', expected 1 to 16777216 bytes"):
        spread.wait()
