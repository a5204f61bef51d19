import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ringweave.membership.membership_records import parse_member_name
from tests import effort
from tests.membership.members import Member
from tests.membership.world import TICK_S, World

# Longer than a file should be: one machine of random faults, and the histories that it was taught.


pytestmark = pytest.mark.timeout(1200)

_LONG_S = 120.0
"""Nobody waits for so long here until a script that hangs is missed."""
_LATE_S = 10.0
"""What is least and what is added for a coordinator that was late itself, together."""


class RandomWorld(RuleBasedStateMachine):
    """Letters are lost, late, out of order and doubled; members and coordinators die, pause and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.least = 1
        self.hangs = False
        """The script of one of those who are left hangs at last."""
        self.world = World(3, least=self.least)

    @initialize(num_members=st.integers(1, 5), data=st.data(), has_begun=st.booleans(), is_kept_elsewhere=st.booleans())
    def begin(self, num_members: int, data: st.DataObject, has_begun: bool, is_kept_elsewhere: bool) -> None:
        self.hangs = data.draw(st.booleans())
        self.least = 1 if is_kept_elsewhere else data.draw(st.sampled_from([1, num_members]))
        self.world = World(num_members, least=self.least, is_kept_elsewhere=is_kept_elsewhere)
        if has_begun:
            self._go_on(30)

    def _member(self, data: st.DataObject) -> Member:
        return data.draw(
            st.sampled_from(sorted(self.world.members.values(), key=lambda each: parse_member_name(each.name)))
        )

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule(num=st.integers(1, 30), data=st.data())
    def deliver(self, num: int, data: st.DataObject) -> None:
        for _ in range(min(num, len(self.world.letters))):
            index = data.draw(st.integers(0, len(self.world.letters) - 1))
            fate = data.draw(st.sampled_from(["deliver", "deliver", "deliver", "double", "lose"]))
            letter = self.world.letters[index]
            if fate != "double":
                del self.world.letters[index]
            if fate != "lose":
                letter()
            self.world.check()

    @rule(data=st.data(), num=st.integers(1, 6))
    def work(self, data: st.DataObject, num: int) -> None:
        for _ in range(num):
            self.world.work(self._member(data))
            self.world.check()

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.world.kill(self._member(data))

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self._member(data).is_paused = True

    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        self.world.wake(self._member(data))

    @rule(data=st.data(), index=st.integers(0, 1))
    def cut(self, data: st.DataObject, index: int) -> None:
        self.world.cut.add((self._member(data).name, index))

    @rule(data=st.data(), index=st.integers(0, 1), is_mute=st.booleans())
    def cut_one_way(self, data: st.DataObject, index: int, is_mute: bool) -> None:
        (self.world.mute if is_mute else self.world.deaf).add((self._member(data).name, index))

    @rule()
    def mend(self) -> None:
        self.world.mend()

    @rule(data=st.data(), num=st.integers(0, 60))
    def divide(self, data: st.DataObject, num: int) -> None:
        """Into two parts, each with a coordinator, for a while or longer."""
        self._divide(data)
        self._go_on(num)

    def _divide(self, data: st.DataObject) -> None:
        names = list(self.world.members)
        is_other = data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
        self.world.divide([name for name, other in zip(names, is_other, strict=True) if other])

    @rule(data=st.data(), num=st.integers(0, 60))
    def divide_as_an_epoch_begins(self, data: st.DataObject, num: int) -> None:
        """Into two parts, and into others just when one of those begins an epoch, which some then hear nothing of."""
        self._divide(data)
        self._go_on_until_an_epoch_begins()
        self._divide(data)
        self._go_on(num)

    def _go_on_until_an_epoch_begins(self) -> None:
        begun = len(self.world.memberships)
        self._go_on(40, until=lambda: len(self.world.memberships) > begun)

    @rule(data=st.data(), is_stuck=st.booleans())
    def hang(self, data: st.DataObject, is_stuck: bool) -> None:
        self._member(data).is_stuck = is_stuck

    @rule(data=st.data())
    def report_failure(self, data: st.DataObject) -> None:
        """Rightly or wrongly: who hears that a connection broke does not know why."""
        member = self._member(data)
        others = sorted(set(member.membership.members if member.membership else ()) - {member.name})
        self.world.report_failure(member, data.draw(st.lists(st.sampled_from(others), unique=True)) if others else [])

    @rule(data=st.data())
    def accuse_together(self, data: st.DataObject) -> None:
        """Nobody can reach one of them."""
        suspect = self._member(data)
        for member in self.world.members.values():
            if member is not suspect and suspect.name in (member.membership.members if member.membership else ()):
                self.world.report_failure(member, [suspect.name])

    @rule(num=st.integers(5, 60))
    def calm(self, num: int) -> None:
        """Nothing new fails for a while, and what can arrive does."""
        self._go_on(num)

    @rule()
    def lose_coordinator(self) -> None:
        """The one that decides is out of reach; its members ask the other one."""
        world = self.world
        for index in (0, 1):
            if world.coordinators[index].is_active and not any(world.is_down):
                world.is_down[index] = True
                for member in world.members.values():
                    if member.at == index and member.can_act:
                        world.rejoin(member)
                return

    @rule(data=st.data(), index=st.integers(0, 1), has_ended=st.booleans())
    def fail_to_reach(self, data: st.DataObject, index: int, *, has_ended: bool) -> None:
        """A coordinator that has taken over looks for a member where it listens, rightly or wrongly in vain."""
        if not self.world.is_down[index]:
            name, now_s = self._member(data).name, self.world.now_s
            self.world.coordinators[index].note_unreachable(name, now_s, has_ended=has_ended)
            self.world.note_decrees()

    @rule(more=st.integers(1, 3))
    def end_training(self, more: int) -> None:
        """The script has so many train steps, as it turns out: no member has begun with more."""
        world = self.world
        if world.limit is None and world.members:
            world.limit = more + max(map(world.done_by, world.members.values()))

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        slot, _ = parse_member_name(self._member(data).name)
        incarnation = sum(1 for name in self.world.members if parse_member_name(name)[0] == slot)
        if (
            incarnation < 3 and not self.world.is_over and not self.world.unheard
        ):  # a launcher starts another process of a slot only when the one before has ended
            self.world.members[f"{slot}.{incarnation - 1}"].is_dead = True
            self.world.enter(f"{slot}.{incarnation}")

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = self._member(data)
        if member.can_act and member.status.has_state:
            self.world.leave(member)

    @rule(data=st.data())
    def start_over(self, data: st.DataObject) -> None:
        self.world.start_over(self._member(data))

    @rule(data=st.data(), is_other=st.booleans())
    def rejoin(self, data: st.DataObject, is_other: bool) -> None:
        member = self._member(data)
        if member.can_act:
            self.world.rejoin(member, is_other=is_other)

    @rule(index=st.integers(0, 1))
    def hear(self, index: int) -> None:
        self.world.hear(index)

    @rule(index=st.integers(0, 1), is_down=st.booleans())
    def stop_coordinator(self, index: int, is_down: bool) -> None:
        self.world.is_down[index] = is_down

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Once nothing fails any more but scripts that hang, those are put out, and all others get on, if any are left.

        Who is gone by then has a reason, which was judged when it went.
        """
        self.world.heal(mends_scripts=False)
        self._go_on(400)
        self._check_liveness()

    def _check_liveness(self) -> None:
        world = self.world
        if world.wanted.has_external_state:  # there who may not go on waits for twice as long, and is put out then
            self._go_on(round(world.wanted.member_wait_s / TICK_S))
        training = [each for each in world.members.values() if each.can_act and each.status.has_state]
        if self.hangs and len(training) > 1:
            training[-1].is_stuck = True
        self._go_on(self._mend_scripts_unless_they_are_missed())
        hung = [each for each in world.members.values() if each.can_act and each.is_stuck]
        left = [each for each in world.members.values() if each.can_act and not each.is_stuck]
        assert not (hung and left), f"who hangs is put out where others wait for it:\n{world.describe()}"
        if hung:  # nobody waits for it
            world.heal()
            self._go_on(100)
            left = [each for each in world.members.values() if each.can_act]
        if world.limit is not None:
            assert not left, f"all are through, or know that there is no more to do:\n{world.describe()}"
            return
        before = {each.name: each.status.committed for each in left}
        self._go_on(40)
        if left:
            told = world.describe()
            assert any(each.is_active for each in world.coordinators), f"one decides:\n{told}"
            assert len(world.live_epochs) == 1, f"one epoch takes steps:\n{told}"
            members = set(world.memberships[world.live_epochs[0]].members)
            assert {each.name for each in left} == members, f"all are in it:\n{told}"
            assert all(each.status.committed > before[each.name] for each in left), f"all get on:\n{told}"
            assert len(left) >= self.least, f"no fewer go on than there ought to be:\n{told}"

    def _mend_scripts_unless_they_are_missed(self) -> int:
        """How many rounds it may take until those that hang are put out; those hang no longer that may for longer.

        Eight times the longest time that it took a member to get on is not unusual for it, and an hour for one that is
        not known to have got on eight times.
        """
        is_any = any(each.is_stuck for each in self.world.members.values())
        most_s = self.world.wanted.member_wait_s + _LATE_S if is_any else 0.0
        for member in self.world.members.values():
            usual_s = 8 * member.longest_s if member.num_gaps > 8 else math.inf
            if member.is_stuck and member.can_act:
                member.is_stuck = usual_s < _LONG_S
                most_s = max(
                    most_s, 2 * self.world.wanted.member_wait_s + _LATE_S + (usual_s if member.is_stuck else 0.0)
                )
        return round(most_s / TICK_S)

    def _go_on(self, num_rounds: int, until: Callable[[], bool] = lambda: False) -> None:
        """Nothing fails any more, and everything is delivered in order; until that is so, after any letter."""
        for number in range(num_rounds):
            self.world.tick()
            self.world.look_around()
            for member in self.world.members.values():
                slot, _ = parse_member_name(
                    member.name
                )  # if all went to and fro in the same rhythm some would never meet
                if number % (20 + 3 * slot) == 0 and member.can_act and not self.world.is_led(member):
                    self.world.rejoin(member)
            for index in (0, 1):
                self.world.hear(index)
            letters, self.world.letters = self.world.letters, []
            for index, letter in enumerate(letters):
                letter()
                if until():
                    self.world.letters = letters[index + 1 :] + self.world.letters
                    return
            for member in self.world.members.values():
                self.world.work(member)
            self.world.check()


class RandomNodes(RandomWorld):
    """Whole nodes are lost as well, with a coordinator and any workers, and others begin in their places at once."""

    @rule(data=st.data(), index=st.integers(0, 1))
    def lose_node(self, data: st.DataObject, index: int) -> None:
        slots = sorted({parse_member_name(name)[0] for name in self.world.members})
        gone = data.draw(st.sets(st.sampled_from(slots)))
        is_many = any(sum(1 for name in self.world.members if parse_member_name(name)[0] == slot) > 2 for slot in gone)
        if not is_many and not self.world.is_over and not self.world.unheard:
            self.world.lose_node(index, sorted(gone))

    def teardown(self) -> None:
        """Where neither coordinator knows anything members have to give up; those in their place go on, or begin."""
        world = self.world
        world.heal(mends_scripts=False)
        self._go_on(400)
        for member in list(world.members.values()):
            slot, incarnation = parse_member_name(member.name)
            if member.reason == "no coordinator" and not world.is_over:
                world.enter(f"{slot}.{incarnation + 1}")
        self._go_on(400)
        self._check_liveness()


TestRandomWorld = RandomWorld.TestCase
TestRandomWorld.settings = settings(
    max_examples=250 if effort.is_thorough() else 15,
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

TestRandomNodes = RandomNodes.TestCase
TestRandomNodes.settings = TestRandomWorld.settings


@settings(TestRandomWorld.settings, max_examples=effort.share_of(100))
@given(num_members=st.integers(2, 5), data=st.data())
def test_of_parts_that_change_again_and_again_at_most_one_goes_on(num_members: int, data: st.DataObject) -> None:
    """Where nothing else fails; among all other faults that happens too seldom."""
    random = RandomWorld()
    random.world = World(num_members)
    random._go_on(30)
    for _ in range(data.draw(st.integers(1, 6))):
        random._divide(data)
        if data.draw(st.booleans()):
            random._go_on_until_an_epoch_begins()
        else:
            random._go_on(data.draw(st.integers(0, 60)))
    random.teardown()


def test_half_of_a_job_goes_on_when_the_node_with_the_coordinator_is_lost() -> None:
    """Two of two nodes with two workers each: the first one dies, with the coordinator that decides."""
    random = RandomNodes()
    world = random.world = World(4)
    random._go_on(30)
    world.lose_node(0, [0, 1])
    random._go_on(100)
    (generation_id,) = world.live_epochs
    assert set(world.memberships[generation_id].members) == {"2.0", "3.0", "0.1", "1.1"}
    assert world.members["2.0"].status.committed > 0


def begun(num_members: int) -> RandomWorld:
    """A job whose members have done some reductions."""
    random = RandomWorld()
    random.world = World(num_members)
    random._go_on(60)
    return random


def test_who_hangs_is_put_out_and_the_others_go_on() -> None:
    random = begun(3)
    world = random.world
    world.members["1.0"].is_stuck = True
    random._go_on(120)
    assert world.members["1.0"].reason == "it made no progress while others waited for it"
    (generation_id,) = world.live_epochs
    assert world.memberships[generation_id].members == ("0.0", "2.0")


def test_who_hangs_just_when_another_coordinator_takes_over_is_put_out_as_soon() -> None:
    """What is usual of a member it knows itself: the one that takes over has heard nothing of it so far."""
    random = begun(3)
    world = random.world
    random.lose_coordinator()
    while not world.coordinators[1].is_active:
        random._go_on(1)
    world.members["1.0"].is_stuck = True
    random._go_on(120)
    assert world.members["1.0"].reason == "it made no progress while others waited for it"
    (generation_id,) = world.live_epochs
    assert world.memberships[generation_id].members == ("0.0", "2.0")


def test_whom_the_others_cannot_reach_in_three_epochs_is_put_out_though_it_beats() -> None:
    random = begun(4)
    world = random.world
    for member in world.members.values():
        member.is_stuck = True  # no reduction is done
    for name in ("0.0", "1.0", "3.0", "0.0"):  # those of the first epoch count no more: reductions were done in it
        world.report_failure(world.members[name], ["2.0"])
        random._go_on(8)
    assert world.members["2.0"].reason == "the others cannot reach it"
    world.heal()
    random._go_on(20)
    (generation_id,) = world.live_epochs
    assert world.memberships[generation_id].members == ("0.0", "1.0", "3.0")


@pytest.mark.parametrize("is_newcomer", [False, True])
@pytest.mark.parametrize("rounds", range(4))
def test_one_that_misses_what_it_has_to_do_holds_nobody_up_for_ever(rounds: int, is_newcomer: bool) -> None:
    """It beats, and says that it waits, as the others do that wait for it: they begin anew, and nobody is put out."""
    random = begun(3)
    world = random.world
    name = "3.0" if is_newcomer else "1.0"
    if is_newcomer:
        world.enter(name)
        while not (world.members[name].status.is_recovering and world.live_epochs):
            random._go_on(1)
    random._go_on(rounds)
    world.members[name].has_missed = world.members[name].follower.generation_id
    (before,) = world.live_epochs
    random._go_on(150)
    assert world.live_epochs == [before], "that may be usual"
    done = world.members["0.0"].status.committed
    random._go_on(120)
    (after,) = world.live_epochs
    assert after > before
    assert {*world.memberships[after].members} == {"0.0", "1.0", "2.0", name}
    assert all(each.status.committed > done + 5 for each in world.members.values()), world.describe()


@pytest.mark.parametrize("rounds", range(8))
def test_a_training_ends_though_the_coordinator_is_lost_while_its_members_finish(rounds: int) -> None:
    """The standby does not know who has finished."""
    random = begun(4)
    world = random.world
    world.limit = 1 + max(each.status.committed for each in world.members.values())
    random._go_on(rounds)
    random.lose_coordinator()
    random._go_on(400)
    left = [each.name for each in world.members.values() if each.can_act]
    assert not left, world.describe()
    assert all(each.has_finished for each in world.members.values()), world.describe()


def test_a_part_that_comes_back_goes_on_with_what_it_did_whatever_the_term_of_those_it_comes_to() -> None:
    """Cuts that change make the term of one coordinator a great one; the newest epoch is elsewhere."""
    random = RandomNodes()
    world = random.world = World(4)
    random._go_on(30)
    for others, rounds in [
        ("3.0", 47),
        ("", 56),
        ("0.0 1.0 2.0 3.0", 35),
        ("2.0", 8),
        ("0.0 2.0 3.0", 54),
        ("2.0 3.0", 39),
    ]:
        world.divide(others.split())
        random._go_on(rounds)
    random.teardown()
    assert [each.name for each in world.members.values() if each.can_act] == ["0.0"], "it was the first of two at last"


@pytest.mark.parametrize("later", [0, 1, 2, 3, 5, 8])
def test_of_an_epoch_that_some_of_its_members_never_hear_of_no_part_goes_on_alone(later: int) -> None:
    """Two of three begin one without the third; one of them goes back to that before it hears so, and they go on."""
    random = begun(3)
    world = random.world
    world.divide(["0.0", "1.0"])
    random._go_on(200, until=lambda: any(each.members == ("0.0", "1.0") for each in world.memberships.values()))
    for letter in world.letters[:later]:
        letter()
    del world.letters[:later]
    world.divide(["0.0"])
    random._go_on(100)
    random.teardown()
    assert world.live_epochs, world.describe()
