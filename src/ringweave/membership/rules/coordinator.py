"""The coordinator, pure: what it hears goes in, and for every member there is an order that holds until the next.

It keeps nothing that its members do not know, so that another one can take its place from what they tell it.
"""

# Longer than a file should be: every event of the one state machine is here, read beside what others do to it.

import math
from collections.abc import Sequence
from dataclasses import replace

from ringweave.membership.rules import quorum, reasons
from ringweave.membership.rules.electing import Election, Rejoining
from ringweave.membership.rules.presence import Presence
from ringweave.membership.rules.records import Ballot, Decree, Order, Proposal, Standing, as_passed_on, slot_of
from ringweave.membership.rules.rhythm import ANSWERS, WAITS, Delays
from ringweave.membership.rules.settings import Settings
from ringweave.membership.rules.signs import MAY_GO_S, SURE_AFTER_S, Beat

_STOPPED_S = 0.5
"""Between two ticks: more means that this process itself was stopped or starved."""
_STILL_S = 0.5
"""A training that stands still for so long while all wait may be broken."""
_REST_S = 1.2
"""After a coordinator was lost: so long who has not asked the other one is waited for while training stands still."""
_RETURN_S = 0.5
"""After one that was silent has come back: so long others that are silent are waited for, as they may be back too."""
_FIRST_FACTOR = 2.0
"""Times its own patience: so long a member that has asked another coordinator may say nothing at first."""
_FACTOR_ELSEWHERE = 2.0
"""Times a job's patience: so long members of a part stand still that may not go on, before they are put out."""
_MOST_ACCUSATIONS = 3
"""Without a reduction in between."""


class Coordinator:
    """Decides who is in which epoch. Every method takes the time of the event, in seconds of any clock.

    An epoch is proposed to all who are present, and begins when all who still are have said where they stand; of those
    who held the job's state before, a majority must be left.
    """

    def __init__(self, settings: Settings, *, now_s: float, index: int = 0, is_standby: bool = False) -> None:
        """Of the job's two, 0 has odd terms and 1 even ones, whether it decides at first or, as a standby, later."""
        self._settings = settings
        self._term, self._has_even = 0 if is_standby else 1, index == 1
        self._reign = self._last_term = self._term
        self._delays, self._away_until_s = Delays(now_s), now_s
        self._forget()

    def _forget(self) -> None:
        """Begin with nothing: all that matters is what members will tell."""
        self._number = 0
        self._election = Election()
        self._presence = Presence(self._settings.silence)
        self._put_out: dict[str, Order] = {}
        self._unheard: dict[str, str] = {}
        """Who was given up since nothing was heard of it, and why; told so once an epoch has begun without it."""
        self._proposal: Proposal | None = None
        self._standings: dict[str, Standing] = {}
        self._level: set[str] = set()
        self._sought: dict[str, str] = {}
        self._finished: list[Standing] = []
        self._accusations: dict[str, int] = {}
        self._waiting_since_s: float | None = None
        self._begun_s, self._rest_s, self._woken_at = -math.inf, 0.0, -1
        self._back_s = -math.inf
        self._asked: dict[str, Standing] = {}
        """Who has asked this one in its present term, while it decided."""
        self.num_woken = 0
        """How often all waited for each other in vain, and were told to begin anew."""
        self.decree: Decree | None = None
        """The epoch that holds."""
        self.ended = ""
        """Why the job is over; empty while it is not."""
        self._heir = ""

    @property
    def is_active(self) -> bool:
        """It decides; a standby does not, until enough members have asked it to."""
        return self._term > 0

    @property
    def term(self) -> int:
        """Grows with every coordinator that takes over; 0 of one that has not.

        It has most of the members behind it: they have asked for it, or begun an epoch in it. Orders may be of a later
        one already, which a single member that came back has made necessary, and which proves nothing.
        """
        return self._reign

    @property
    def has_finished(self) -> bool:
        """A member has done all there was to do."""
        return self._presence.has_finished

    @property
    def present(self) -> tuple[str, ...]:
        """Members and newcomers that are connected and beat."""
        return tuple(self._presence.here)

    def knows(self, member: str) -> bool:
        """It has come to this one since it decides. Whom a coordinator had before it stepped down it has forgotten."""
        return bool(self.ended) or member in self._put_out or self._presence.knows(member)

    def reason_for(self, member: str) -> str:
        """Why it is no member any more, or is about to be none; empty if it is not put out."""
        return self._unheard.get(member) or self.order_for(member).reason

    def order_for(self, member: str) -> Order:
        """What holds for a member now."""
        if self.ended:
            return Order(ballot=(self._term, self._number + 1), is_end=True, reason=self.ended, heir=self._heir)
        if member in self._put_out:
            return self._put_out[member]
        decree = self.decree if self.decree and member in self.decree.members else None
        ballots = [each.ballot for each in (decree, self._proposal) if each is not None]
        return Order(ballot=max(ballots), decree=decree, proposal=self._proposal) if ballots else Order()

    def join(self, member: str, now_s: float) -> None:
        """A process wants to become a member. One of the same slot that was there before is gone then."""
        if not self.is_active:
            self._election.ask(member, now_s)
        elif not self._presence.knows(member):
            others = self._presence.of_slot(slot_of(member)[0])
            if any(slot_of(other) > slot_of(member) for other in others):
                self._refuse(member, reasons.FOLLOWED)
                return
            for other in others:
                self._lose(other, reasons.FOLLOWED)
            self._presence.enter(member, now_s)
            if self.decree is None and self._waiting_since_s is None:  # who is slow to start is nobody's fault
                self._waiting_since_s = now_s
            self._consider(now_s)

    def announce(self, member: str, now_s: float) -> None:
        """This process is about to be started beside this one: those that had its slot before have ended."""
        self._election.announce(member, now_s)

    def hear_idle(self, now_s: float) -> None:
        """The other coordinator decides nothing: where all who can be there ask this one, nobody goes on elsewhere.

        If none of them has ever been in an epoch, either there was none, or nobody is left of those who were: then all
        is over, unless the state is kept elsewhere. Else it is for the first coordinator of any job to begin.
        """
        self._election.hear_idle(now_s)
        if self.is_active:
            return
        if self._election.accounts_for(self._settings.expected, now_s):
            self._take_over(now_s)
            self._consider(now_s)
        elif self._election.note_who_asks(self._settings.expected, now_s):
            if self._election.has_lost and not self._settings.is_kept_elsewhere:
                self._decide()
                self._end(reasons.NOBODY_LEFT)
            elif not self._has_even:
                self._decide()

    def rejoin(self, rejoining: Rejoining, now_s: float) -> None:
        """A member has lost its coordinator, and asks this one to take over."""
        member = rejoining.standing.member
        if rejoining.decree is not None:
            self._hear_of(rejoining.decree.ballot[0], rejoining.decree.ballot)
        # How long answers may take where it runs is known to it: it need not be waited for as a process that starts.
        first_s = _FIRST_FACTOR * rejoining.patience_s if rejoining.patience_s else None
        self._take_back(member, now_s, first_s)
        is_known = self.decree is not None and member in self.decree.members and not self._presence.is_gone(member)
        if self.is_active and self._term <= rejoining.promised[0]:
            # Whoever asks follows no order of the term that it has given up.
            self._term = self._last_term = self._term_after(rejoining.promised)
            self._asked.clear()
            if self._proposal is not None:
                self._propose(is_urgent=self._proposal.is_urgent)
        if self.is_active and rejoining.decree is not None and not is_known:
            self._refuse(member, "it lost its connection to the coordinator, and the others went on")
            return
        self._presence.enter(member, now_s, first_s)
        self._presence.beat(member, rejoining.beat, now_s)
        self._note_asked(rejoining.standing)
        self._election.vote(rejoining, now_s)
        self._note_level(rejoining.standing)
        if not self.is_active and self._election.is_won:
            self._take_over(now_s)
        self._consider(now_s)

    def _note_asked(self, standing: Standing) -> None:
        """A member has asked this one while it decides. If most have, after another one was asked, its term counts."""
        if self.is_active and self.decree is not None:
            self._asked[standing.member] = standing
            if quorum.is_majority(self.decree.members, list(self._asked.values()), self.decree.members):
                self._reign = self._term

    def take_sought(self) -> dict[str, str]:
        """Where those listen who have not asked this coordinator, which has just taken over; each once."""
        sought, self._sought = self._sought, {}
        return sought

    def hear_unreachable(self, member: str, now_s: float) -> None:
        """Nothing listens where it did: its node is cut off, or it has ended, and it is not on its way to this one."""
        self._election.hear_unreachable(member)
        self._consider(now_s)

    def beat(self, member: str, beat: Beat, now_s: float) -> None:
        """A heartbeat."""
        self._take_back(member, now_s)
        self._presence.beat(member, beat, now_s)

    def _hear_of(self, term: int, ballot: Ballot) -> None:
        """Members are in that epoch, and most have followed somebody in that term. Who knows of the later epoch stays.

        Of one epoch that is who decides in the greater term; as long as this one knows of none, terms alone count. Else
        members have chosen another one while this one was away or cut off: it becomes a standby that knows nothing. A
        later epoch may be of a smaller term than this one's: members have asked for this one, and have gone to the
        other before they heard of its term. Whoever went on from the epoch that holds here would do steps once more.
        """
        known = ballot if self.decree is None else self.decree.ballot
        if self.is_active and (ballot, term) > (known, self._reign):
            self._term = self._reign = 0
            self._forget()

    def hear_active(self, term: int, ballot: Ballot) -> None:
        """The other coordinator decides, in that term, and knows of that epoch."""
        self._election.forget_announced()
        self._hear_of(term, ballot)

    def part(self, member: str) -> None:
        """It took its leave of this connection, or that broke because nothing passed: it lives, for all that is known.

        It may come back, and nothing has happened; if it does not, its heartbeats will be missed.
        """
        self._asked.pop(member, None)
        if not self.is_active:  # it looks for a coordinator that decides
            self._presence.forget(member)
            self._election.withdraw(member)

    def lose(self, member: str, now_s: float) -> None:
        """Its process has hung up without a goodbye: it has ended, for a process that lives takes its leave.

        Not so if this process was away itself, or had not heard of the member before: who could not take leave of it
        may be going on elsewhere.
        """
        is_away = now_s - self._delays.last_s > MAY_GO_S or now_s < self._away_until_s
        if not self.is_active or is_away or self._presence.may_have_gone(member, now_s):
            self.part(member)
        elif member in self._presence.here:
            self._lose(member, "its connection to the coordinator broke")
            self._consider(now_s)

    def leave(self, standing: Standing, now_s: float, *, is_finished: bool) -> None:
        """It wants to go at the next border; or, finished, has done all there is to do and takes part in no more."""
        member = standing.member
        self._take_back(member, now_s)
        if member in self._presence.here:
            self._presence.leave(member, now_s, is_finished=is_finished)
            if is_finished:
                self._finished.append(standing)
            elif member in self._standings:  # it does not say again where it stands
                self._standings[member] = replace(self._standings[member], is_leaving=True)
            self._consider(now_s)

    def give_up(self, reason: str) -> None:
        """Others have decided that the job is over; one of those who are there is to save what can be saved."""
        if self.is_active and not self.ended:
            standings = self.decree.standings if self.decree else ()
            self._end(reason, [each for each in standings if each.member in self._presence.here])

    def accuse(self, member: str, ballot: Ballot, suspects: list[str], now_s: float) -> None:
        """A member's epoch is broken: it could not reach these; none if it does not know whom.

        Of two that cannot reach each other the one that the job can do without is to blame.
        """
        is_news = self.decree is not None and ballot == self.decree.ballot and member in self._presence.here
        if not is_news or (self._proposal is not None and self._proposal.is_urgent):
            return
        for suspect in [each for each in suspects if each in self._presence.here]:
            blamed = member if self._is_last(suspect) else suspect
            self._accusations[blamed] = self._accusations.get(blamed, 0) + 1
        worst = max(self._accusations, key=lambda each: (self._accusations[each], slot_of(each)), default=None)
        if worst in self._presence.here and self._accusations[worst] >= _MOST_ACCUSATIONS:
            self._lose(worst, "the others cannot reach it", is_silent=True)
        self._propose(is_urgent=True)
        self._consider(now_s)

    def stand(self, ballot: Ballot, standing: Standing, now_s: float) -> None:
        """A member stands still for a proposal, and says where."""
        is_asked = self._proposal is not None and self._proposal.ballot == ballot
        self._take_back(standing.member, now_s)
        if is_asked and standing.member in self._presence.here:
            self._standings[standing.member] = standing
            self._note_level(standing)
            if standing.is_leaving:
                self._presence.leave(standing.member, now_s, is_finished=False)
            self._consider(now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed; called every tenth of a second or so."""
        delay_s = self._delays.observe(now_s)
        if delay_s > _STOPPED_S:  # that the others were silent meanwhile proves nothing
            self._presence.excuse(now_s)
            if self._waiting_since_s is not None:  # nor that nobody came
                self._waiting_since_s += delay_s
        if delay_s > MAY_GO_S:  # what has happened since is heard of only now
            self._away_until_s = now_s + SURE_AFTER_S
        if self.is_active:  # a standby's members are not its own yet: it could not tell them
            for member, reason in self._presence.late(now_s, self._grace_s):
                self._lose(member, reason, is_silent=True, may_return=reason == reasons.UNHEARD)
        self._ask_for_state(now_s)
        self._wake(now_s)
        self._consider(now_s)

    def _grace_s(self, member: str) -> float:
        """On a busy machine all have some; the last one with the job's state has more, for without it all is over."""
        return self._delays.grace_s + (self._settings.patience_s if self._is_last(member) else 0.0)

    def _ask_for_state(self, now_s: float) -> None:
        """The last one that has the job's state is silent: those who follow say whether they have it by now."""
        if self.ended or not self.is_active or len(self._presence.here) < 2:
            return
        grace_s = self._delays.grace_s
        if any(self._is_last(each) and self._presence.is_silent(each, now_s, grace_s) for each in self.present):
            self._wait_from(now_s)
            if self._proposal is None or not self._proposal.is_urgent:
                self._propose(is_urgent=True)

    def _wake(self, now_s: float) -> None:
        """All wait for each other, and far longer than they usually do: one of them has missed what it is to do.

        That is a fault of this system or of the network below it, and nobody is to blame. They form an epoch of the
        same members, and reduce the same gradients again. Where it is not a fault, but the network has become very
        slow, they get twice the time that was not enough, so that they do get through at last. Where the state is kept
        elsewhere they may be waiting for whoever keeps it.
        """
        is_forming = self._proposal is not None and self._proposal.is_urgent
        if self.decree is None or self.ended or is_forming or self._settings.is_kept_elsewhere:
            return
        passed_s = now_s - self._begun_s
        if self._presence.wait_in_vain(self.decree.members) and passed_s > self._rest_s:
            self._rest_s, self._woken_at = 2 * max(WAITS.least_s, passed_s), -1
            self.num_woken += 1
            self._propose(is_urgent=True)

    @property
    def _keepers(self) -> set[str]:
        """Who is known to have the job's state. At the begin nobody has, and any member's may become it.

        Where it is kept elsewhere as well, those who are there can begin with that.
        """
        if self.decree is None:
            return set()
        holders = () if self._settings.is_kept_elsewhere else self.decree.holders
        return {*(holders or self.decree.members), *self._level}

    def _is_last(self, member: str) -> bool:
        """Without it nobody is here of whom it is known that they have the job's state."""
        return self._keepers & set(self._presence.here) == {member}

    def _note_level(self, standing: Standing) -> None:
        if standing.has_state:  # from then on for good
            self._level.add(standing.member)

    def _lose(self, member: str, reason: str, *, is_silent: bool = False, may_return: bool = False) -> None:
        self._presence.lose(member, is_silent=is_silent)
        if may_return and self.decree is not None and member in self.decree.members:
            self._unheard[member] = reason
        else:
            self._refuse(member, reason)

    def _take_back(self, member: str, now_s: float, first_s: float | None = None) -> None:
        """Nothing was heard of it, and now something is: as long as no epoch has begun without it nothing has happened.

        Where this coordinator itself was cut off it has given up all others, and may begin none without them: to send
        them away would be the end of a job of which nobody is gone.
        """
        if member in self._unheard and self._presence.take_back(member, now_s, first_s):
            del self._unheard[member]
            self._back_s = now_s

    def _refuse(self, member: str, reason: str) -> None:
        self._number += 1
        self._unheard.pop(member, None)
        self._put_out[member] = Order(ballot=(self._term, self._number), is_out=True, reason=reason)

    def _consider(self, now_s: float) -> None:
        """See whether something is to be decided."""
        if self.ended or not self.is_active:
            return
        if self._is_waiting_for_rest(now_s):
            return
        for member in self._election.take_absent(self._presence.here):
            if not self._presence.knows(member):  # else it came, and has ended or finished since
                self._lose(member, reasons.WITHOUT_IT, is_silent=True, may_return=True)
        if self._election.take_unsettled():  # the coordinator before was lost in the midst of a change
            self._propose(is_urgent=True)
        is_broken = self.decree is not None and self._presence.misses(self.decree.members, now_s)
        if self._proposal is None or (is_broken and not self._proposal.is_urgent):
            self._consider_change(now_s, is_broken=is_broken)
        if self._proposal is not None:
            self._consider_begin(self._proposal, now_s)

    def _is_waiting_for_rest(self, now_s: float) -> bool:
        """Whether those who have not asked this one to take over get more time.

        Where the others get on that costs nothing, and shows that all are there. Else those who are missing are given
        up a little later than they would have been without a change of coordinators: all lost theirs in the same
        moment, but who has joined a short while ago is more patient with it, since the state that it was sent then
        delayed the coordinator's answers. Those who are there stand still meanwhile. Who cannot be reached is not on
        its way, however busy the machines are, and gets no more time than without that change.
        """
        if not self._election.is_waiting(now_s, self._settings.recovery_s, self._presence.here):
            return self._is_waiting_for_state(now_s)
        lost_s, members = self._election.lost_s(now_s), self.decree.members if self.decree else ()
        is_broken = lost_s > ANSWERS.least_s and self._presence.stand_still(members, _STILL_S)
        if (self._election.take_unsettled() or is_broken) and self._proposal is None:
            self._propose(is_urgent=True)
        is_hopeless, least_s = self._election.is_hopeless(self._presence.here), self._settings.silence.least_s
        if not is_hopeless:
            least_s = max(1.0, self._election.patience_s / ANSWERS.least_s) * max(_REST_S, least_s)
        has_rested = is_hopeless or self._election.has_rested(now_s)
        is_early = self._proposal is None or lost_s <= least_s + self._delays.grace_s or not has_rested
        return is_early or self._is_waiting_for_state(now_s)

    def _is_waiting_for_state(self, now_s: float) -> bool:
        """Whether nobody who is here has the job's state, but somebody who is missing, or was given up for its silence.

        Its node may be cut off for a moment, and without it all is over: it has the time that any member has which the
        job cannot go on without.
        """
        patience_s, keepers = self._settings.patience_s, self._keepers
        if self._settings.is_kept_elsewhere or keepers & set(self._presence.here):
            return False
        if keepers & self._election.rest(self._presence.here) and self._election.lost_s(now_s) <= patience_s:
            return True
        grace_s = self._delays.grace_s + patience_s
        unheard = keepers & self._unheard.keys()
        may_return = any(self._presence.may_return(each, now_s, grace_s) for each in unheard)
        return may_return and not self._presence.has_finished

    def _consider_change(self, now_s: float, *, is_broken: bool) -> None:
        num_here, least = len(self._presence.here), self._settings.bounds.least
        if is_broken:
            self._propose(is_urgent=True)
        elif self.decree is None:
            is_late = self._is_out_of_patience(now_s, self._settings.patience_s)
            if num_here >= self._settings.expected or (is_late and num_here >= least):
                self._propose(is_urgent=True)
            elif is_late:
                self._end(f"{num_here} workers came, expected at least {least}")
        elif not num_here and self._presence.has_finished:
            self._end(reasons.ALL_DONE)
        elif self._presence.leaving or self._newcomers():
            self._propose(is_urgent=False)

    def _newcomers(self) -> list[str]:
        return self._presence.newcomers(self.decree.members if self.decree else (), self._settings.bounds.most)

    def _propose(self, *, is_urgent: bool) -> None:
        self._number += 1
        self._standings.clear()
        self._proposal = Proposal(ballot=(self._term, self._number), is_urgent=is_urgent)

    def _consider_begin(self, proposal: Proposal, now_s: float) -> None:
        """Begin the epoch that is proposed, once all who are waited for have said where they stand."""
        newcomers, known = self._newcomers(), self.decree.members if self.decree else ()
        if proposal.is_urgent and self.decree is not None:  # who was not there before is not waited for
            newcomers = [each for each in newcomers if each in self._standings]
        wanted = sorted([*(each for each in known if each in self._presence.here), *newcomers], key=slot_of)
        if not all(member in self._standings for member in wanted):
            return
        if self._unheard and now_s - self._back_s < _RETURN_S:
            return
        standings = [self._standings[member] for member in wanted]
        holders = [each for each in standings if each.has_state]
        if quorum.is_lost(self.decree, standings) and not self._settings.is_kept_elsewhere:
            self._end(reasons.ALL_DONE if self._presence.has_finished else reasons.NOBODY_LEFT)
        elif self.decree and not self._may_go_on(self.decree, standings, holders):
            self._wait_or_end(now_s, "most of the workers do not answer", holders)
        elif not standings and self._presence.has_finished:
            self._end(reasons.ALL_DONE)
        elif self._is_too_few(len(standings)):
            if standings and all(each.is_leaving for each in standings):
                self._end(reasons.ALL_LEFT, holders)
                return
            least = self._settings.bounds.least
            self._wait_or_end(now_s, f"workers left: {len(standings)}, expected at least {least}", holders)
        else:
            self._begin(proposal, standings, holders, now_s)

    def _may_go_on(self, decree: Decree, standings: list[Standing], holders: list[Standing]) -> bool:
        """Whether nobody can be going on elsewhere: from this epoch, or from one before that some may still be in.

        Who leaves counts on neither side: it may not hear that it has left, but says so wherever it stands next.
        """
        able, standing = holders or standings, {each.member for each in standings}
        staying = [each for each in able if not _goes(each)] or able
        before = () if quorum.is_met(decree, [*standings, *self._finished]) else decree.forerunners
        return quorum.is_majority(decree.members, staying, self._presence.silent) and all(
            quorum.is_majority(each, staying, set(filter(self._may_live, each)) - standing) for each in before
        )

    def _forerunners(self, standings: list[Standing], staying: list[Standing]) -> tuple[tuple[str, ...], ...]:
        """Of an epoch of those who stay, that follows on one in which all of these stood."""
        names = {each.member for each in staying}
        leaving = {each.member for each in standings} - names
        return quorum.forerunners(
            self.decree, [*standings, *self._finished], names, lambda each: each not in leaving and self._may_live(each)
        )

    def _may_live(self, member: str) -> bool:
        return self._presence.may_live(member) and not self._election.is_followed(member)

    def _begin(self, proposal: Proposal, standings: list[Standing], holders: list[Standing], now_s: float) -> None:
        """Newcomers are let in, and leavers out, where all others are between two steps; else at the next border.

        Those who are left stand still at once where they are too few without the leavers; newcomers count as left. If
        nobody but leavers has the state, they stay until somebody else has it.
        """
        num_left = sum(not _goes(each) for each in standings)
        taking_part = [each for each in standings if each.has_state or each.is_following]
        if not all(each.at_border for each in taking_part):
            standings = taking_part
        staying = [each for each in standings if not _goes(each)]
        if not staying:
            self._end(reasons.ALL_LEFT, holders)
            return
        is_heirless = bool(holders) and not any(each.has_state for each in staying)
        if is_heirless and not self._settings.is_kept_elsewhere:
            staying, num_left = standings, len(standings)
        finished = tuple(replace(each, layout="", sharing="") for each in self._finished)
        decree = Decree(
            ballot=proposal.ballot,
            standings=as_passed_on(staying),
            finished=finished,
            forerunners=self._forerunners(standings, staying),
        )
        if self.decree is None or decree.committed > self.decree.committed:
            self._accusations.clear()
        if self._woken_at < 0:  # where they stood when they were told to begin anew
            self._woken_at = decree.committed
        elif decree.committed > self._woken_at:
            self._rest_s = 0.0
        self._begun_s = now_s
        self._asked.clear()
        self.decree = decree
        self._reign, self._proposal, self._waiting_since_s = proposal.ballot[0], None, None
        for each in standings:
            if each not in staying:
                self._lose(each.member, reasons.LEFT)
        for member, reason in list(self._unheard.items()):
            self._refuse(member, reason)
        self._presence.forget_silent({member for each in decree.forerunners for member in each})
        self._consider_change(now_s, is_broken=self._is_too_few(num_left))

    def _is_too_few(self, num_members: int) -> bool:
        """To go on; once somebody is through with the training the others end it as well, however few they are."""
        return num_members < self._settings.bounds.least and not self._presence.has_finished

    def _is_out_of_patience(self, now_s: float, patience_s: float) -> bool:
        return self._waiting_since_s is not None and now_s - self._waiting_since_s > patience_s

    def _wait_from(self, now_s: float) -> None:
        """Those who are there may not go on alone: from now on others are waited for, whatever it was before."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def _wait_or_end(self, now_s: float, reason: str, holders: Sequence[Standing]) -> None:
        """All is over if nobody comes in time; but not where the state is kept elsewhere, and others go on with it.

        There whoever stands still is put out, and may come anew; later, for whether all is over the parts of the job
        decide together, and it may have to save the state.
        """
        is_elsewhere = self._settings.is_kept_elsewhere
        patience_s = (_FACTOR_ELSEWHERE if is_elsewhere else 1.0) * self._settings.patience_s
        self._wait_from(now_s)
        if not self._is_out_of_patience(now_s, patience_s):
            return
        reason = f"{reason}, and no other came within {patience_s:g} s"
        if not is_elsewhere:
            self._end(reason, holders)
            return
        for member in self.present:
            self._lose(member, reason)
        self._waiting_since_s = None

    def _end(self, reason: str, holders: Sequence[Standing] = ()) -> None:
        """The job is over; of those who have its state the first that is furthest is to save it."""
        self.ended = reason
        self._heir = max(holders, key=lambda each: each.committed).member if holders else ""
        self._proposal = None

    def _term_after(self, ballot: Ballot) -> int:
        return quorum.term_after(max(ballot[0], self._last_term), is_even=self._has_even)

    def _decide(self) -> None:
        """From now on, in a term that is greater than any that is known here."""
        self._term, self._number = self._term_after(self._election.highest_ballot), 0
        self._reign = self._last_term = self._term

    def _take_over(self, now_s: float) -> None:
        newest = self._election.decree
        assert newest is not None, "the election was won by its members"
        self._decide()
        self.decree, self._waiting_since_s, self._begun_s = newest, None, now_s
        for stranger in set(self._presence.here) - set(newest.members):
            self._lose(stranger, reasons.WITHOUT_IT, is_silent=True)
        missing = set(newest.members) - set(self._presence.here)
        self._election.await_rest(missing)
        self._sought = {each.member: each.place for each in newest.standings if each.place and each.member in missing}
        for member in self._election.take_followed():
            self._lose(member, reasons.FOLLOWED)


def _goes(standing: Standing) -> bool:
    """It leaves with the next epoch."""
    return standing.is_leaving and standing.at_border
