"""What a ring pushes is counted by what is in it, also when a member was gone before it counted."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ringweave.membership.rules.records import Decree, Standing
from ringweave.params.rules.positions import united
from ringweave.planning.balancing import Account
from ringweave.training.elastic.books import Books, part_of
from ringweave.training.elastic.loader import Place
from ringweave.training.elastic.rosters import Rosters
from ringweave.training.elastic.rows import Commit, Row
from ringweave.training.rings.elastic import accounts
from ringweave.training.rings.elastic.crew import RingCrew
from ringweave.training.rings.elastic.places import Pending, RingPlace
from ringweave.training.rings.resuming import Start

MEMBERS = ("0.0", "1.0")


@dataclass
class Inner:
    """What the crew of any elastic job does, as far as it is looked at here."""

    books: Books = field(default_factory=Books)
    place: Place = field(default_factory=Place)
    rosters: Rosters = field(default_factory=lambda: Rosters(8, is_balanced=True))
    said: list[str] = field(default_factory=list)

    @property
    def is_between_steps(self) -> bool:
        return self.place.num_since_commit == 0

    def commit(self, commit: Commit) -> None:
        self.books.commit(commit)
        self.place.num_since_commit = 0

    def check(self, *_: Any) -> None:
        self.said.append("check")

    def begin(self, *_: Any, **__: Any) -> None:
        self.said.append("begin")


def make(pausing: Any = None) -> tuple[RingCrew, Inner]:
    inner = Inner()
    inner.rosters.begin(0, MEMBERS, [None, None], [None, None], [1.0, 1.0])
    anything: Any = inner
    return RingCrew(anything, RingPlace(ring=1), pausing or (lambda _: None)), inner


def counted(crew: RingCrew, *members: str, of: int) -> Commit:
    rows = tuple(Row(account=crew.books.own(member), num_planned=of) for member in members)
    return Commit(number=1, members=members, rows=rows)


@pytest.mark.parametrize(("left", "num_samples", "share"), [(MEMBERS, 8, 0.5), (("1.0",), 4, 0.25)])
def test_a_push_counts_for_the_samples_of_those_who_are_left(
    left: tuple[str, ...], num_samples: int, share: float
) -> None:
    crew, _ = make()
    crew.draw(np.arange(8), 0.5)
    assert not crew.is_between_steps
    crew.commit(counted(crew, *left, of=8))
    samples = crew.samples
    assert (samples.num_samples, samples.batch_share, samples.mean_share) == (num_samples, share, share)
    assert crew.books.account().lost.num_samples == 8 - num_samples
    assert not crew.is_between_steps, "a newcomer would not have what is not pushed yet"
    samples.clear()
    assert crew.is_between_steps


def test_batches_that_are_reduced_together_are_one_push_of_so_many_batches() -> None:
    crew, _ = make()
    crew.draw(np.arange(8), 0.5)
    crew.draw(np.arange(8, 16), 0.5)
    crew.commit(counted(crew, *MEMBERS, of=16))
    assert (crew.samples.num_samples, crew.samples.num_batches, crew.samples.mean_share) == (16, 2, 0.5)


@pytest.mark.parametrize("size", [8, 5, 13])
def test_every_sample_of_a_ticket_is_somebody_s_whatever_its_size(size: int) -> None:
    crew, inner = make()
    crew.draw(np.arange(size), 0.5)  # larger than the shares if a member has died since it was taken
    parts = [part_of(np.arange(size), inner.rosters.latest, member) for member in MEMBERS]
    assert np.concatenate(parts).tolist() == list(range(size))
    crew.commit(counted(crew, *MEMBERS, of=size))
    account = crew.books.account()
    assert account.is_exact
    assert account.total.num_samples == size


def test_a_push_says_which_samples_it_is_of_also_where_a_member_s_part_was_lost() -> None:
    crew, inner = make()
    inner.place.epoch = 2
    crew.ring_place.start = Start(epoch=2, done=((10, 5),), seed=3)
    crew.draw(np.arange(8), 0.5, 4)
    crew.commit(counted(crew, *MEMBERS, of=8))
    assert (crew.samples.pass_number, crew.samples.epoch) == (2, 2)
    assert united(crew.samples.spans) == ((4, 6), (15, 2)), "around those that were done before"
    crew.draw(np.arange(8), 0.5, 12)
    crew.commit(counted(crew, "1.0", of=8))
    assert united(crew.samples.spans) == ((4, 6), (15, 2), (21, 4)), "those of the other one are not in it"


def test_what_is_spread_is_no_gradient() -> None:
    crew, _ = make()
    crew.draw(np.arange(8), 0.5)
    crew.is_spreading = True
    crew.commit(Commit(number=1, members=MEMBERS, rows=(Row(), Row())))
    assert (crew.samples.num_batches, crew.books.num_planned) == (0, 8)


def test_a_pass_that_is_broken_off_leaves_nothing_open() -> None:
    crew, _ = make()
    crew.draw(np.arange(8), 0.5)
    crew.drop()
    assert crew.is_between_steps
    assert crew.books.num_planned == 0
    assert crew.books.account().expected == Account()


def test_a_ring_that_begins_again_has_what_its_testament_says_of_this_epoch() -> None:
    crew, inner = make()
    old = Books()
    old.load(2, [[30, 7], [28, 5], [2, 2]])
    left = {"epoch": 2, "books": old.to_words()}
    assert "is_testament" in accounts.testament(old)
    crew.go_on([5, 9, 6, 2, 9, None, None], 2, left)
    assert (crew.ring_place.num_pushed, crew.ring_place.num_tickets, inner.place.epoch) == (5, 6, 2)
    assert (crew.books.account().total.num_samples, crew.is_whole) == (28, False)
    crew.go_on([5, 9, 6, 4, 9, None, None], 3, left)
    assert crew.books.account().total == Account(), "of another epoch"
    crew.open_epoch(4)
    assert crew.is_whole


def test_the_server_is_told_before_an_epoch_is_formed_but_for_the_first() -> None:
    told: list[Decree] = []
    crew, _ = make(told.append)
    decree = Decree(ballot=(1, 1), standings=tuple(Standing(member=member) for member in MEMBERS))
    pending = {"num_samples": 8, "batch_share": 0.5, "testament": "{}", "spans": [[4, 8]]}
    notes = [{"ring": [4, 8, 5, 2, 9, pending, {"epoch": 1, "done": [[0, 4]], "seed": 3}], "is_whole": False}] * 2
    crew.check(decree, notes)
    assert told == []
    crew.begin(decree, notes, is_newcomer=True, followers=())
    assert (crew.ring_place, crew.is_whole) == (
        RingPlace(
            ring=1,
            num_pushed=4,
            base_version=8,
            num_tickets=5,
            num_meetings=2,
            next_version=9,
            pending=Pending(num_samples=8, batch_share=0.5, testament="{}", spans=((4, 8),)),
            start=Start(epoch=1, done=((0, 4),), seed=3),
        ),
        False,
    )
    crew.check(decree, notes)
    assert told == [decree]
