from dataclasses import replace

import pytest

from ringweave.membership.rules import quorum
from ringweave.membership.rules.coordinator import Coordinator
from ringweave.membership.rules.electing import Rejoining
from ringweave.membership.rules.follower import Follower, Form, Freeze, Out, resolve
from ringweave.membership.rules.presence import Presence
from ringweave.membership.rules.records import Decree, Order, Proposal, Standing
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.rules.signs import Beat


def holder(member: str, **fields: object) -> Standing:
    return replace(Standing(member=member, has_state=True, committed=5), **fields)


class Table:
    """A coordinator and members that answer at once."""

    def __init__(
        self, num_members: int, *, least: int = 1, most: int = 16, index: int = 0, is_standby: bool = False
    ) -> None:
        wanted = Settings(bounds=Bounds(least=least, most=most), expected=num_members, patience_s=20.0)
        self.now_s = 0.0
        self.coordinator = Coordinator(wanted, now_s=0.0, index=index, is_standby=is_standby)

    def begin(self, *members: str) -> Decree:
        for member in members:
            self.coordinator.join(member, self.now_s)
        self.stand(*(Standing(member=member) for member in members))
        assert self.coordinator.decree is not None
        return self.coordinator.decree

    def stand(self, *standings: Standing) -> None:
        for standing in standings:
            proposal = self.coordinator.order_for(standing.member).proposal
            if proposal is not None:
                self.coordinator.stand(proposal.ballot, standing, self.now_s)

    def pass_time(self, seconds: float, *beating: str) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now_s += 0.1
            for member in beating:
                self.coordinator.beat(member, Beat(progress=int(self.now_s * 10)), self.now_s)
            self.coordinator.tick(self.now_s)


def test_the_first_epoch_waits_for_all_that_are_expected() -> None:
    table = Table(3)
    table.coordinator.join("0.0", 0.0)
    table.coordinator.join("1.0", 0.0)
    assert table.coordinator.order_for("0.0") == Order()
    assert table.begin("2.0", "0.0", "1.0").members == ("0.0", "1.0", "2.0"), "by slot"


def test_fewer_will_do_when_patience_has_run_out_and_too_few_end_the_job() -> None:
    table = Table(3, least=2)
    table.coordinator.join("0.0", 0.0)
    table.coordinator.join("1.0", 0.0)
    table.pass_time(20.2, "0.0", "1.0")
    assert table.coordinator.order_for("0.0").proposal is not None
    alone = Table(3, least=2)
    alone.coordinator.join("0.0", 0.0)
    alone.pass_time(20.2, "0.0")
    assert alone.coordinator.order_for("0.0").is_end
    assert alone.coordinator.ended == "1 workers came, expected at least 2"


def test_a_death_is_an_urgent_proposal_to_those_who_are_left() -> None:
    table = Table(3)
    first = table.begin("0.0", "1.0", "2.0")
    table.coordinator.lose("1.0", 1.0)
    order = table.coordinator.order_for("0.0")
    assert order.proposal is not None
    assert order.proposal.is_urgent
    assert order.decree == first
    table.stand(holder("0.0", at_border=False), holder("2.0", at_border=False, is_prepared=True))
    assert table.coordinator.decree is not None
    assert table.coordinator.decree.members == ("0.0", "2.0")
    assert table.coordinator.order_for("1.0").is_out


def test_a_newcomer_waits_for_the_border_of_all_others() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.lose("1.0", 1.0)
    table.coordinator.join("1.1", 1.0)
    table.stand(holder("0.0", at_border=False), Standing(member="1.1"))
    assert table.coordinator.decree is not None
    assert table.coordinator.decree.members == ("0.0",), "in the midst of a step"
    proposal = table.coordinator.order_for("0.0").proposal
    assert proposal is not None
    assert not proposal.is_urgent
    table.stand(Standing(member="1.1"), holder("0.0"))
    assert table.coordinator.decree.members == ("0.0", "1.1")
    assert table.coordinator.decree.holders == ("0.0",)


def test_more_than_the_most_are_not_let_in() -> None:
    table = Table(2, most=2)
    table.begin("0.0", "1.0")
    table.coordinator.join("2.0", 1.0)
    assert table.coordinator.order_for("0.0").proposal is None
    table.coordinator.lose("1.0", 1.0)
    table.stand(holder("0.0"), Standing(member="2.0"))
    table.stand(holder("0.0"), Standing(member="2.0"))
    assert table.coordinator.decree is not None
    assert table.coordinator.decree.members == ("0.0", "2.0")


def test_who_leaves_is_out_after_the_step() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.leave(holder("1.0"), 1.0, is_finished=False)
    table.stand(holder("0.0"), holder("1.0", is_leaving=True))
    assert table.coordinator.decree is not None
    assert table.coordinator.decree.members == ("0.0",)
    assert table.coordinator.order_for("1.0").reason == "it has left"


def test_who_has_finished_disturbs_nobody_and_the_last_one_ends_the_job() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.leave(holder("1.0", committed=6), 1.0, is_finished=True)
    assert table.coordinator.order_for("0.0").proposal is None
    table.coordinator.leave(holder("0.0", committed=6), 1.0, is_finished=True)
    assert table.coordinator.ended == "all workers are done"


def test_who_finishes_before_the_others_is_waited_for_no_longer() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.leave(holder("1.0"), 0.0, is_finished=True)
    table.pass_time(3.5, "0.0")
    table.stand(holder("0.0", at_border=False))
    assert table.coordinator.decree is not None
    assert table.coordinator.decree.members == ("0.0",)


def test_what_one_has_taken_over_counts_even_if_it_has_finished() -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    table.coordinator.leave(holder("2.0", committed=6), 1.0, is_finished=True)
    table.coordinator.lose("1.0", 1.0)
    own = holder("0.0", is_prepared=True, at_border=False)
    table.stand(own)
    assert table.coordinator.decree is not None
    assert resolve(own, table.coordinator.decree) == "take"


def test_silence_counts_as_gone_but_the_silent_may_live_so_a_minority_waits() -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    table.pass_time(2.0, "2.0")
    table.stand(holder("2.0"))
    assert table.coordinator.decree is not None
    assert len(table.coordinator.decree.members) == 3, "one of three does not go on alone"
    table.pass_time(21.0, "2.0")
    assert table.coordinator.ended == "most of the workers do not answer, and no other came within 20 s"


def test_whose_slot_has_another_process_is_silent_no_longer() -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    table.pass_time(2.0, "2.0")
    table.stand(holder("2.0"))
    table.coordinator.join("0.1", table.now_s)
    table.stand(holder("2.0"))
    assert table.coordinator.decree is not None
    assert len(table.coordinator.decree.members) == 3, "1.0 may live, and comes first"
    table.coordinator.join("1.1", table.now_s)
    assert table.coordinator.decree.members == ("2.0",), "both have ended, or there were no others of their slots"
    table.stand(holder("2.0"), Standing(member="0.1"), Standing(member="1.1"))
    assert table.coordinator.decree.members == ("0.1", "1.1", "2.0")
    assert table.coordinator.decree.holders == ("2.0",)


def test_who_is_missed_after_its_slot_was_given_to_another_is_not_silent() -> None:
    presence = Presence()
    presence.enter("1.1", 0.0)
    presence.lose("1.0", is_silent=True)
    presence.lose("1.1", is_silent=True)
    presence.lose("2.0", is_silent=True)
    assert presence.silent == {"1.1", "2.0"}
    presence.enter("1.0", 1.0)
    presence.enter("1.1", 1.0)
    assert presence.silent == {"1.1", "2.0"}, "no later one came"
    presence.enter("1.2", 1.0)
    assert presence.silent == {"2.0"}
    assert presence.is_gone("1.1")


def test_too_few_wait_for_others_and_then_end() -> None:
    table = Table(3, least=2)
    table.begin("0.0", "1.0", "2.0")
    table.coordinator.lose("1.0", 0.0)
    table.coordinator.lose("2.0", 0.0)
    table.stand(holder("0.0"))
    table.pass_time(21.0, "0.0")
    assert table.coordinator.ended == "1 workers are left, expected at least 2, and no other came within 20 s"


def test_without_the_state_there_is_nothing_to_go_on_with() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.lose("0.0", 1.0)
    table.stand(holder("1.0"))
    table.coordinator.lose("1.0", 2.0)
    table.coordinator.join("0.1", 2.0)
    table.stand(Standing(member="0.1"))
    assert table.coordinator.ended == "no worker is left that has the parameters: go on from the last checkpoint"


def test_whoever_cannot_be_reached_again_and_again_has_to_go() -> None:
    table = Table(3)
    decree = table.begin("0.0", "1.0", "2.0")
    for _ in range(3):
        table.coordinator.accuse("0.0", decree.ballot, ["2.0"], 1.0)
        table.stand(*(holder(member, committed=0) for member in ("0.0", "1.0", "2.0")))
        assert table.coordinator.decree is not None
        decree = table.coordinator.decree
    assert decree.members == ("0.0", "1.0")
    assert table.coordinator.order_for("2.0").reason == "the others cannot reach it"


def test_a_standby_decides_nothing_until_most_members_ask_it_to() -> None:
    decree = Table(3).begin("0.0", "1.0", "2.0")
    table = Table(3, index=1, is_standby=True)
    table.coordinator.join("3.0", 0.0)
    table.coordinator.rejoin(Rejoining(standing=holder("0.0"), decree=decree, promised=decree.ballot), 0.0)
    assert not table.coordinator.is_active
    table.coordinator.rejoin(Rejoining(standing=holder("1.0"), decree=decree, promised=decree.ballot), 0.0)
    assert (table.coordinator.is_active, table.coordinator.term) == (True, 2)
    assert table.coordinator.decree == decree, "the epoch goes on"
    table.pass_time(3.0, "0.0", "1.0")
    table.stand(holder("0.0"), holder("1.0"))
    assert table.coordinator.decree is not None
    assert table.coordinator.decree.members == ("0.0", "1.0"), "the third has not come"


def test_two_that_both_were_standbys_never_decide_in_the_same_term() -> None:
    """A coordinator that died is started again as a standby, whichever of the two it was."""
    decree = Table(3).begin("0.0", "1.0", "2.0")
    for promised, expected in [((1, 4), (3, 2)), ((2, 9), (3, 4)), ((3, 1), (5, 4))]:
        tables = [Table(3, index=index, is_standby=True) for index in (0, 1)]
        for table in tables:
            for member in ("0.0", "1.0"):
                rejoining = Rejoining(standing=holder(member), decree=decree, promised=promised)
                table.coordinator.rejoin(rejoining, 0.0)
        assert tuple(table.coordinator.term for table in tables) == expected


@pytest.mark.parametrize(
    ("here", "silent", "expected"),
    [
        ("012", "", True),
        ("01", "2", True),
        ("2", "01", False),
        ("01", "23", True),
        ("23", "01", False),
        ("0", "", True),
    ],
)
def test_at_most_one_part_goes_on(here: str, silent: str, expected: bool) -> None:
    before = Decree(ballot=(1, 1), standings=tuple(holder(f"{slot}.0") for slot in sorted({*here, *silent})))
    found = quorum.is_majority(before, [holder(f"{slot}.0") for slot in here], [f"{slot}.0" for slot in silent])
    assert found is expected


def test_a_follower_obeys_nobody_who_knows_less_than_it_has_promised() -> None:
    follower = Follower("0.0")
    proposal = Proposal(ballot=(1, 2), is_urgent=True)
    assert follower.take(Order(ballot=(1, 2), proposal=proposal)) == [Freeze(ballot=(1, 2), is_urgent=True)]
    assert follower.take(Order(ballot=(1, 2), proposal=proposal)) == [], "once"
    decree = Decree(ballot=(1, 2), standings=(holder("0.0"),))
    old = Decree(ballot=(1, 1), standings=(holder("0.0"),))
    assert follower.take(Order(ballot=(1, 1), decree=old)) == []
    assert follower.take(Order(ballot=(1, 2), decree=decree)) == [Form(decree=decree)]
    follower.forget_coordinator()
    assert follower.take(Order(ballot=(1, 9), is_out=True, reason="late")) == []
    assert follower.take(Order(ballot=(2, 1), is_out=True, reason="gone")) == [Out(reason="gone", is_end=False)]
    assert follower.take(Order(ballot=(9, 9), decree=decree)) == [], "out for good"


def test_a_result_that_one_has_taken_over_is_taken_over_by_all() -> None:
    ahead, behind = holder("0.0", committed=6), holder("1.0", is_prepared=True, at_border=False)
    decree = Decree(ballot=(1, 2), standings=(ahead, behind))
    assert resolve(behind, decree) == "take"
    assert resolve(ahead, decree) == "nothing"
    alone = Decree(ballot=(1, 2), standings=(behind,))
    assert resolve(behind, alone) == "again"
