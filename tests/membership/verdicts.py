"""Whether the world gives the reason for which a job ends, or for which a member is put out or gives up.

In words of its own, from what was done to whom, and what of it has arrived where. Coordinators are asked only for what
their members hear of them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ringweave.membership.coordinator import Coordinator
from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import NO_GENERATION, GenerationId, MemberStatus, parse_member_name
from ringweave.membership.settings import MembershipSettings
from tests.membership.members import Member

# Longer than a file should be: each reason is judged beside the others, so that none is forgotten.


SILENT_S = 0.9
"""Whoever was heard of within it is not put out for its silence."""
STILL_S = 5.0
"""Nor for standing still whoever got on within that."""
AWAY_S = 0.5
"""A coordinator that did not run for so long counts silence from then on."""
FOUND_S = 12.0
"""In it whoever looks for a coordinator has asked both, several times."""
_EPSILON_S = 1e-6
_TOO_FEW = re.compile(r"workers left: (\d+), expected at least (\d+), and no other came within 20 s")
_NOBODY_CAME = re.compile(r"(\d+) workers came, expected at least (\d+)")


@dataclass(frozen=True)
class Accusation:
    """What a member says of an epoch that is broken for it."""

    generation_id: GenerationId
    suspects: tuple[str, ...]


@dataclass(frozen=True)
class Stand:
    """Where a member says that it stands still."""

    generation_id: GenerationId
    status: MemberStatus


@dataclass(frozen=True)
class Join:
    """A newcomer asks to be let in."""


@dataclass(frozen=True)
class Part:
    """A member takes its leave of a connection."""


Said = Accusation | Stand | Join | Part | Rejoin | Heartbeat | None
"""What a letter says; None is what nothing follows from here."""


@dataclass
class Heard:
    """Of one member, by one coordinator."""

    at_s: float
    """A sign of life, the last one."""
    last: Heartbeat = field(default_factory=Heartbeat)
    """The last one that it has sent, of those that have come."""
    stood: Stand | None = None
    accused_in: set[GenerationId] = field(default_factory=set)
    """Epochs in which somebody accused it, or it somebody."""

    def observe(self, heartbeat: Heartbeat, now_s: float) -> None:
        """A heartbeat has come."""
        self.at_s = now_s
        self.last = max(self.last, heartbeat, key=lambda each: each.number)


@dataclass
class Side:
    """What one coordinator process knows since it came, or lost what it knew."""

    heard: dict[str, Heard] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)
    """Whom it has put out -> why."""
    was_silent: dict[str, bool] = field(default_factory=dict)
    """Who is not there any more -> it had been silent for long enough when that was so first."""
    woken_s: float = 0.0
    looked_s: float = 0.0
    first_s: float = 0.0
    """When somebody first came."""
    lost_s: float = 0.0
    """When the last of its voters last heard of another one."""
    lacks_since_s: float | None = None
    """Since when those who are there have stood still, and may not go on."""
    epoch: GenerationId = NO_GENERATION
    proposal: GenerationId = NO_GENERATION
    is_over: bool = False
    was_active: bool = False
    term: int = 0


class Verdicts:
    """Of both coordinators. Each judgement fails the test when the world has no such reason."""

    def __init__(self, members: dict[str, Member], coordinators: list[Coordinator], wanted: MembershipSettings) -> None:
        self._members, self._coordinators, self._wanted = members, coordinators, wanted
        self._sides = [Side(), Side()]

    def restart(self, index: int, now_s: float) -> None:
        """Another process is in the place of that coordinator."""
        self._sides[index] = Side(woken_s=now_s, looked_s=now_s)

    def look(self, index: int, now_s: float) -> None:
        """That coordinator runs."""
        side = self._sides[index]
        away_s = now_s - side.looked_s
        if away_s > AWAY_S:
            side.woken_s = now_s
            side.first_s += away_s
            side.lacks_since_s = None if side.lacks_since_s is None else side.lacks_since_s + away_s
        side.looked_s = now_s

    def note(self, index: int, member: str, said: Said, now_s: float) -> None:
        """A member's letter has arrived at that coordinator, which has done what it does about it."""
        later = (
            said.membership.generation_id if isinstance(said, Rejoin) and said.membership is not None else NO_GENERATION
        )
        side, is_active = self._side(index, later), self._coordinators[index].is_active
        heard = side.heard.get(member)
        match said:
            case Join() if heard is None and is_active:
                self._come(side, member, now_s)
            case Rejoin():
                self._come(side, member, now_s).observe(said.heartbeat, now_s)
                side.lost_s = max(side.lost_s, now_s - said.lost_s)
            case Part() if not is_active:
                side.heard.pop(member, None)
            case Heartbeat() if heard is not None:
                heard.observe(said, now_s)
            case Stand() if heard is not None:
                heard.stood = said
            case Accusation() if heard is not None:
                for each in (member, *said.suspects):
                    if each in side.heard:
                        side.heard[each].accused_in.add(said.generation_id)

    def _side(self, index: int, later: GenerationId = NO_GENERATION) -> Side:
        """What it knows: nothing of before, if it has heard that another one decides, or began that later epoch."""
        side, coordinator = self._sides[index], self._coordinators[index]
        is_later = later[0] > side.term or (side.epoch != NO_GENERATION and later > side.epoch)
        if side.was_active and (not coordinator.is_active or is_later):
            side = self._sides[index] = Side(woken_s=side.woken_s, looked_s=side.looked_s)
        side.was_active, side.term = coordinator.is_active, coordinator.term
        return side

    def judge(self, now_s: float) -> None:
        """See what coordinators have decided by now, and whether they had to."""
        for index, coordinator in enumerate(self._coordinators):
            side = self._side(index)
            if not coordinator.is_active or side.is_over:
                continue
            if coordinator.membership is not None and coordinator.membership.generation_id != side.epoch:
                side.epoch, side.lacks_since_s = coordinator.membership.generation_id, None
            if coordinator.end_reason:
                side.is_over = True
                self._judge_end(index, coordinator.end_reason, now_s)
                continue
            self._note_away(side, coordinator.present, now_s)
            for name in self._members:
                order = coordinator.directive_for(name)
                if order.is_evicted and name not in side.out:
                    side.out[name] = order.reason
                    reasons = self._reasons(index, name, now_s) | self._in_vain(index, order.reason, now_s)
                    reason = reasons.get(order.reason)
                    assert reason is not None, f"{name} is out for an unknown reason: {order.reason}"
                    told = (
                        f"by {index} at {now_s:g} s, woken at {side.woken_s:g} s, having heard {side.heard.get(name)}"
                    )
                    assert reason, f"{name} is put out without a reason: {order.reason}, {told}"
            self._see_lack(index, now_s)

    def judge_search(self, member: Member, healed_s: float, now_s: float) -> None:
        """It gives up, since it has found no coordinator.

        Once nothing has failed for so long that all have asked both, there is none only where most of the members of
        the newest epoch are gone.
        """
        if now_s - healed_s < FOUND_S:
            return
        assert not any(each.is_active for each in self._coordinators), f"{member.name} gives up beside a coordinator"
        living = {each.name for each in self._members.values() if each.can_act}
        epochs = [each.membership for each in self._members.values() if each.can_act and each.membership is not None]
        newest = max(epochs, key=lambda each: each.generation_id, default=None)
        if newest is not None:
            left = living & set(newest.members)
            is_half = 2 * len(left) == len(newest.members) and newest.members[0] in left
            assert 2 * len(left) < len(newest.members) or (2 * len(left) == len(newest.members) and not is_half), (
                f"{member.name} gives up though most of {newest.generation_id} are there: {sorted(left)}"
            )

    def _come(self, side: Side, member: str, now_s: float) -> Heard:
        if not side.heard:
            side.first_s = now_s
        return side.heard.setdefault(member, Heard(now_s))

    # Who is put out.

    def _reasons(self, index: int, name: str, now_s: float) -> dict[str, bool]:
        """What a coordinator may say to whom it puts out -> whether that is so."""
        member, side = self._members[name], self._sides[index]
        membership, heard = self._coordinators[index].membership, side.heard.get(name)
        slot, incarnation = parse_member_name(name)
        is_member = membership is not None and name in membership.members
        is_followed = any(
            parse_member_name(each)[0] == slot and parse_member_name(each)[1] > incarnation for each in self._members
        )
        patience_s = self._wanted.member_wait_s if self._is_last(index, name) else 0.0
        return {
            "its slot was given to another process": is_followed,
            "it has left": member.status.is_leaving,
            "its connection to the coordinator broke": member.is_dead,
            "no heartbeat came in time": side.was_silent.get(name, False)
            or self._silent_s(side, heard, now_s) >= max(SILENT_S, patience_s),
            "it made no progress while others waited for it": heard is not None
            and member.idle_s.get(heard.last.number, 0.0) + _EPSILON_S >= STILL_S + patience_s,
            "the others cannot reach it": heard is not None and len(heard.accused_in) >= 3 and not patience_s,
            "the others went on without it": not is_member
            or is_followed
            or (heard is None and now_s - side.lost_s + _EPSILON_S >= max(SILENT_S, patience_s)),
            "it lost its connection to the coordinator, and the others went on": not is_member,
        }

    def _in_vain(self, index: int, said: str, now_s: float) -> dict[str, bool]:
        """Likewise, where the state is kept elsewhere: too few have waited twice as long as a job does."""
        patience_s, side = 2 * self._wanted.member_wait_s, self._sides[index]
        what, _, others = said.partition(", and no other came within ")
        if not self._wanted.has_external_state or others != f"{patience_s:g} s":
            return {}
        is_told = what == "most of the workers do not answer" or what.startswith("workers left: ")
        lacks_s = now_s - side.lacks_since_s if side.lacks_since_s is not None else 0.0
        return {said: is_told and lacks_s + _EPSILON_S >= patience_s}

    def _note_away(self, side: Side, present: Iterable[str], now_s: float) -> None:
        """Who was given up is told so later, when an epoch begins without it; whether it had to be is seen at once."""
        there = set(present)
        side.was_silent = {name: each for name, each in side.was_silent.items() if name not in there}
        for name in side.heard.keys() - there - side.was_silent.keys():
            side.was_silent[name] = self._silent_s(side, side.heard[name], now_s) >= SILENT_S

    def _silent_s(self, side: Side, heard: Heard | None, now_s: float) -> float:
        return now_s - max(heard.at_s, side.woken_s) + _EPSILON_S if heard is not None else float("inf")

    def _is_last(self, index: int, name: str) -> bool:
        """It has the job's state, and nobody who is there has it, or may for all that is known there."""
        coordinator, membership = self._coordinators[index], self._coordinators[index].membership
        if self._wanted.has_external_state or membership is None or not self._members[name].status.has_state:
            return False
        known = membership.state_owners or membership.members
        others = set(coordinator.present) - {name}
        return not any(each in known or self._members[each].status.has_state for each in others)

    # How a job ends.

    def _judge_end(self, index: int, reason: str, now_s: float) -> None:
        side, least = self._sides[index], self._wanted.bounds.min_members
        counted = self._counted(index)
        is_through = any(each.through_s is not None for each in self._members.values())
        final_checkpoint_owner = self._coordinators[index].directive_for("").final_checkpoint_owner
        if reason in ("all workers are done", _NOBODY_LEFT):
            assert not final_checkpoint_owner, "nobody who is left has the state"
            assert reason == _NOBODY_LEFT or is_through, "nobody is through"
            assert reason != _NOBODY_LEFT or self._could_be_lost(index), "anybody may begin with what there is"
            self._judge_nobody_left(index, now_s)
            return
        if found := _NOBODY_CAME.fullmatch(reason):
            assert self._coordinators[index].membership is None, "workers came, and began"
            assert int(found[1]) == len(self._coordinators[index].present) < least == int(found[2]), reason
            assert now_s - side.first_s + _EPSILON_S >= self._wanted.member_wait_s, "too early to give up"
            return
        self._judge_heir(counted.values(), final_checkpoint_owner)
        if reason == "all workers have left":
            assert counted, reason
            assert all(self._members[name].status.is_leaving for name in counted), "not all wanted to leave"
            return
        lacks_since_s = side.first_s if self._coordinators[index].membership is None else side.lacks_since_s
        since_s = now_s if lacks_since_s is None else lacks_since_s
        assert now_s - since_s + _EPSILON_S >= self._wanted.member_wait_s, f"{reason}: only for {now_s - since_s:g} s"
        if found := _TOO_FEW.fullmatch(reason):
            assert int(found[1]) == len(counted) < least == int(found[2]), f"{reason}: {sorted(counted)}"
        else:
            assert reason == "most of the workers do not answer, and no other came within 20 s", reason
            assert not self._do_most_answer(index, counted), f"most answer: {sorted(counted)} {side.out}"

    def _could_be_lost(self, index: int) -> bool:
        """There is a state, with members alone; before any has it, it is that of any member of the first epoch."""
        coordinator, membership = self._coordinators[index], self._coordinators[index].membership
        if self._wanted.has_external_state:
            return False
        if membership is None:  # it has heard of newcomers alone, some of which are in the place of others
            is_any_followed = any(parse_member_name(each)[1] for each in self._members)
            return is_any_followed and all(each.membership is None for each in self._members.values() if each.can_act)
        return bool(membership.state_owners) or not set(coordinator.present) & set(membership.members)

    def _judge_nobody_left(self, index: int, now_s: float) -> None:
        """Who has the state, of those that this coordinator can know of, is gone, or out for a reason."""
        coordinator, side = self._coordinators[index], self._sides[index]
        known = {*side.heard, *(coordinator.membership.members if coordinator.membership else ())}
        for name in known:
            member = self._members[name]
            is_gone = member.is_dead or member.follower.is_stopped or member.through_s is not None or name in side.out
            if member.status.has_state and not is_gone:
                assert name not in coordinator.present, f"{name} has the state"
                assert any(self._reasons(index, name, now_s).values()), f"{name} has the state, and ought to be there"

    def _judge_heir(self, statuses: Iterable[MemberStatus], final_checkpoint_owner: str) -> None:
        """Of those who have the state one that is furthest saves it."""
        holders = {each.member: each.committed for each in statuses if each.has_state}
        assert holders.get(final_checkpoint_owner) == max(holders.values(), default=None), (
            f"{final_checkpoint_owner!r} saves the state of {holders}"
        )

    def _counted(self, index: int) -> dict[str, MemberStatus]:
        """Those who are there and have said where they stand, since all were last asked to."""
        coordinator, side = self._coordinators[index], self._sides[index]
        order = coordinator.directive_for("")
        side.proposal = order.proposal.generation_id if order.proposal is not None else side.proposal
        stood = {name: side.heard[name].stood for name in coordinator.present if name in side.heard}
        return {
            name: each.status
            for name, each in stood.items()
            if each is not None and each.generation_id == side.proposal
        }

    def _do_most_answer(self, index: int, counted: dict[str, MemberStatus]) -> bool:
        """Of the epoch's members that are not known to have ended, most do; of two halves, who has the first.

        And of those of epochs before, as long as none that is there has done a reduction in this one.
        """
        membership = self._coordinators[index].membership
        assert membership is not None, "there are members"
        done = [each.committed for name, each in counted.items() if name in membership.members]
        before = () if max(done, default=0) > membership.last_committed else membership.unconfirmed_predecessors
        return all(self._most_of(index, each, counted) for each in (membership.members, *before))

    def _most_of(self, index: int, names: Iterable[str], counted: dict[str, MemberStatus]) -> bool:
        side = self._sides[index]

        def may_live(name: str) -> bool:
            slot, incarnation = parse_member_name(name)
            is_followed = any(
                parse_member_name(each)[0] == slot and parse_member_name(each)[1] > incarnation for each in side.heard
            )
            leaves = name in counted and counted[name].is_leaving and counted[name].at_step_boundary
            return side.out.get(name) not in _ENDED and not is_followed and not leaves

        able = [name for name, each in counted.items() if each.has_state] or list(counted)
        living = sorted(filter(may_live, names), key=parse_member_name)
        answer = set(able) & set(living)
        return 2 * len(answer) > len(living) or (2 * len(answer) == len(living) and {*living[:1]} <= answer)

    def _see_lack(self, index: int, now_s: float) -> None:
        """Note since when those who are there stand still and may not go on; another epoch ends that."""
        side, coordinator = self._sides[index], self._coordinators[index]
        counted, membership = self._counted(index), coordinator.membership
        if membership is None or side.lacks_since_s is not None or coordinator.directive_for("").proposal is None:
            return
        heard = {name for name, each in side.heard.items() if self._silent_s(side, each, now_s) < SILENT_S}
        is_whole = all(name in counted for name in coordinator.present if name in membership.members and name in heard)
        if is_whole and (len(counted) < self._wanted.bounds.min_members or not self._do_most_answer(index, counted)):
            side.lacks_since_s = now_s


_NOBODY_LEFT = "no worker is left that has the parameters: go on from the last checkpoint"
_ENDED = ("its connection to the coordinator broke", "its slot was given to another process", "it has left")
