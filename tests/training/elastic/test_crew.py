"""What several members that are not there come to in one epoch after another, of which not all have formed each."""

from typing import Any

import numpy as np
import torch
from torch import nn

from ringweave.membership.membership_records import Membership, MemberStatus, strip_duplicates
from ringweave.rpc.state_transfer import StateServer
from ringweave.training.elastic.share_table import BatchShares, ShareTable
from ringweave.training.elastic.trainer import MemberDescription, StateTransport, TrainerState
from ringweave.training.elastic.training_state import TrainingState
from ringweave.training.timing import HostTimeline, StepTimer

BATCH = 12


class Quiet:
    def generation_begun(self) -> None: ...


class Of:
    """One member's crew, which has done no step so far."""

    def __init__(self, member: str) -> None:
        model = nn.Linear(3, 2)
        self.member = member
        facts = MemberDescription(
            member=member,
            state_address="127.0.0.1 9",
            max_samples=None,
            assumed_speed=1.0,
            must_match={"num_prefetched": 0},
        )
        means: Any = StateTransport(state_server=StateServer(), authentication=None)  # pyrefly: ignore - nothing is read
        state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), {})
        rosters = ShareTable(BATCH, is_balanced=False)
        tell: Any = Quiet()
        self.trainer = TrainerState(facts, rosters, StepTimer(HostTimeline()), state, means, tell)
        self.follows = False

    def record_batch(self) -> None:
        """As the loader does."""
        crew, place = self.trainer, self.trainer.progress
        crew.accounting.record_batch(np.arange(BATCH), crew.share_table.shares_of_batch(place.num_drawn))
        place.position += BATCH
        place.num_drawn += 1
        place.num_since_commit += 1

    def current_status(self) -> MemberStatus:
        num_drawn, sharing = self.trainer.drawn_batches()
        own = MemberStatus(member=self.member, has_state=not self.follows, is_recovering=self.follows)
        return MemberStatus(**{**_fields(own), "num_drawn": num_drawn, "batch_shares": sharing})

    @property
    def open(self) -> BatchShares:
        """Who shares the batch that was drawn last."""
        return self.trainer.accounting._open_batches[-1].batch_shares


def _fields(status: MemberStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in MemberStatus.__slots__}


def begin(number: int, members: list[Of], formed_by: list[Of]) -> None:
    """An epoch of these members, formed by some of them."""
    membership = Membership(
        generation_id=(1, number), statuses=strip_duplicates([each.current_status() for each in members])
    )
    notes = [each.trainer.status_details() for each in members]
    followers = {each.member for each in members if each.follows}
    for each in formed_by:
        each.trainer.begin_generation(membership, notes, is_joining=False, recovering=followers)


def test_a_batch_that_a_holder_has_drawn_is_shared_by_all_as_that_one_shares_it() -> None:
    first, second, third = (Of(f"{slot}.0") for slot in range(3))
    begin(1, [first, second, third], [first, second, third])
    begin(2, [first, second], [second])
    second.record_batch()
    begin(3, [first, second], [first, second])
    first.record_batch()
    assert first.open == second.open
    assert (first.open.members, first.open.shares) == (("0.0", "1.0"), (6, 6))


def test_so_is_one_that_only_a_member_has_drawn_which_follows() -> None:
    """Its script was waiting at its border, and those of the others were not there yet."""
    first, second, third, newcomer = (Of(f"{slot}.0") for slot in range(4))
    newcomer.follows = True
    every = [first, second, third, newcomer]
    begin(1, every, every)
    begin(2, [first, second, newcomer], [first, newcomer])
    newcomer.record_batch()
    begin(3, [first, second, newcomer], [first, second, newcomer])
    for each in (first, second):
        each.record_batch()
    assert first.open == second.open == newcomer.open
    assert dict(zip(first.open.members, first.open.shares, strict=True)) == {"0.0": 6, "1.0": 6, "3.0": 0}


def test_of_several_batches_to_one_update_each_is_shared_as_whoever_drew_it_first_did() -> None:
    first, second, third = (Of(f"{slot}.0") for slot in range(3))
    begin(1, [first, second, third], [first, second, third])
    first.record_batch()
    second.record_batch()
    begin(2, [first, second], [second])
    second.record_batch()
    begin(3, [first, second], [first, second])
    first.record_batch()
    for each in (first, second):
        assert [open_.batch_shares.members for open_ in each.trainer.accounting._open_batches] == [
            ("0.0", "1.0", "2.0"),
            ("0.0", "1.0"),
        ]
        each.record_batch()
    assert first.open == second.open
    assert first.open.first_batch == 2
