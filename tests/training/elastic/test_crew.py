"""What several members that are not there come to in one epoch after another, of which not all have formed each."""

from typing import Any

import numpy as np
import torch
from torch import nn

from ringweave.membership.rules.records import Decree, Standing, as_passed_on
from ringweave.training.elastic.crew import Facts, JobCrew, Means
from ringweave.training.elastic.rosters import Roster, Rosters
from ringweave.training.elastic.state import JobState
from ringweave.training.timing import HostTimeline, StepTimer
from ringweave.wire.states import Shelf

BATCH = 12


class Quiet:
    def begun(self) -> None: ...


class Of:
    """One member's crew, which has done no step so far."""

    def __init__(self, member: str) -> None:
        model = nn.Linear(3, 2)
        self.member = member
        facts = Facts(
            member=member, state_place="127.0.0.1 9", cap=None, assumed_speed=1.0, alike={"num_prefetched": 0}
        )
        means: Any = Means(shelf=Shelf(), trust=None)  # pyrefly: ignore - nothing is read
        state = JobState(model, torch.optim.SGD(model.parameters(), 0.1), {})
        rosters = Rosters(BATCH, is_balanced=False)
        tell: Any = Quiet()
        self.crew = JobCrew(facts, rosters, StepTimer(HostTimeline()), state, means, tell)
        self.follows = False

    def draw(self) -> None:
        """As the loader does."""
        crew, place = self.crew, self.crew.place
        crew.books.draw(np.arange(BATCH), crew.rosters.of(place.num_drawn))
        place.position += BATCH
        place.num_drawn += 1
        place.num_since_commit += 1

    def standing(self) -> Standing:
        num_drawn, sharing = self.crew.drawn()
        own = Standing(member=self.member, has_state=not self.follows, is_following=self.follows)
        return Standing(**{**_fields(own), "num_drawn": num_drawn, "sharing": sharing})

    @property
    def open(self) -> Roster:
        """Who shares the batch that was drawn last."""
        return self.crew.books._open[-1][1]


def _fields(standing: Standing) -> dict[str, Any]:
    return {name: getattr(standing, name) for name in Standing.__slots__}


def begin(number: int, members: list[Of], formed_by: list[Of]) -> None:
    """An epoch of these members, formed by some of them."""
    decree = Decree(ballot=(1, number), standings=as_passed_on([each.standing() for each in members]))
    notes = [each.crew.note() for each in members]
    followers = {each.member for each in members if each.follows}
    for each in formed_by:
        each.crew.begin(decree, notes, is_newcomer=False, followers=followers)


def test_a_batch_that_a_holder_has_drawn_is_shared_by_all_as_that_one_shares_it() -> None:
    first, second, third = (Of(f"{slot}.0") for slot in range(3))
    begin(1, [first, second, third], [first, second, third])
    begin(2, [first, second], [second])
    second.draw()
    begin(3, [first, second], [first, second])
    first.draw()
    assert first.open == second.open
    assert (first.open.members, first.open.shares) == (("0.0", "1.0"), (6, 6))


def test_so_is_one_that_only_a_member_has_drawn_which_follows() -> None:
    """Its script was waiting at its border, and those of the others were not there yet."""
    first, second, third, newcomer = (Of(f"{slot}.0") for slot in range(4))
    newcomer.follows = True
    every = [first, second, third, newcomer]
    begin(1, every, every)
    begin(2, [first, second, newcomer], [first, newcomer])
    newcomer.draw()
    begin(3, [first, second, newcomer], [first, second, newcomer])
    for each in (first, second):
        each.draw()
    assert first.open == second.open == newcomer.open
    assert dict(zip(first.open.members, first.open.shares, strict=True)) == {"0.0": 6, "1.0": 6, "3.0": 0}


def test_of_several_batches_to_one_update_each_is_shared_as_whoever_drew_it_first_did() -> None:
    first, second, third = (Of(f"{slot}.0") for slot in range(3))
    begin(1, [first, second, third], [first, second, third])
    first.draw()
    second.draw()
    begin(2, [first, second], [second])
    second.draw()
    begin(3, [first, second], [first, second])
    first.draw()
    for each in (first, second):
        assert [roster.members for _, roster in each.crew.books._open] == [("0.0", "1.0", "2.0"), ("0.0", "1.0")]
        each.draw()
    assert first.open == second.open
    assert first.open.first_batch == 2
