"""Coordinator state machine, pure: events go in, each member gets a directive that holds until the next one.

It stores nothing that its members do not know, so another coordinator can take over from their reports.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from ringweave.membership import membership_records
from ringweave.membership.election import Election, Rejoin
from ringweave.membership.failure_detector import (
    ANSWER_TIMEOUT,
    MAY_HAVE_SWITCHED_S,
    REDUCTION_TIMEOUT,
    SURE_AFTER_SILENCE_S,
    FailureDetector,
    Heartbeat,
    SchedulingDelay,
)
from ringweave.membership.membership_records import (
    GenerationId,
    GenerationProposal,
    MemberDirective,
    Membership,
    MemberStatus,
    parse_member_name,
    strip_duplicates,
)
from ringweave.membership.settings import MembershipSettings

_COORDINATOR_STALL_S = 0.5
"""Time between two ticks above which this process itself was stopped or starved."""
_STANDSTILL_S = 0.5
"""A training that makes no progress for so long while all members wait may be broken."""
_REMAINING_VOTERS_S = 1.2
"""After a coordinator was lost, members that have not asked the other one are awaited for so long while training
pauses."""
_RETURN_WINDOW_S = 0.5
"""After a silent member has returned, other silent members are awaited for so long, as they may return too."""
_FIRST_HEARTBEAT_FACTOR = 2.0
"""A member that switched coordinators may be silent at first for so many times its own answer timeout."""
_EXTERNAL_STATE_FACTOR = 2.0
"""Members of a part that may not go on are paused for so many times the job's wait time before they are evicted."""
_MAX_FAILURE_REPORTS = 3
"""Maximum of failure reports against one member without a committed reduction in between."""


class Coordinator:
    """Decides which members are in which generation. Every method takes the time of the event, in seconds of any clock.

    The coordinator proposes a generation to all present members. It begins when all that are still present have
    reported their status. A majority of the members that held the job's state before must remain.
    """

    def __init__(self, settings: MembershipSettings, *, now_s: float, index: int = 0, is_standby: bool = False) -> None:
        """Create coordinator 0 or 1 of a job: 0 has odd terms and 1 even ones, whether active at first or a standby."""
        self._settings = settings
        self._term, self._has_even_terms = 0 if is_standby else 1, index == 1
        self._confirmed_term = self._last_term = self._term
        self._scheduling_delay, self._unsure_until_s = SchedulingDelay(now_s), now_s
        self._reset()

    def _reset(self) -> None:
        """Reset all state; only reports of members matter from now on."""
        self._proposal_number = 0
        self._election = Election()
        self._failure_detector = FailureDetector(self._settings.heartbeat_timeout)
        self.is_long_gone = self._failure_detector.is_long_gone
        self._evicted: dict[str, MemberDirective] = {}
        self._silent_reasons: dict[str, str] = {}
        """Members that were excluded for silence, and why; evicted once a generation has begun without them."""
        self._proposal: GenerationProposal | None = None
        self._statuses: dict[str, MemberStatus] = {}
        self._caught_up: set[str] = set()
        self._probe_targets: dict[str, str] = {}
        self._finished: list[MemberStatus] = []
        self._failure_reports: dict[str, int] = {}
        self._waiting_since_s: float | None = None
        self._generation_began_s, self._standstill_limit_s, self._restarted_at = -math.inf, 0.0, -1
        self._last_return_s = -math.inf
        self._votes_in_term: dict[str, MemberStatus] = {}
        """Members that asked this coordinator in its present term, while it was active."""
        self.num_standstill_restarts = 0
        """Number of times that all members waited for each other in vain, and had to begin anew."""
        self.membership: Membership | None = None
        """Present generation."""
        self.end_reason = ""
        """Reason of the end of the job; empty while it runs."""
        self._final_checkpoint_owner = ""

    @property
    def is_active(self) -> bool:
        """True for the coordinator that decides; a standby does not, until enough members have asked it to."""
        return self._term > 0

    @property
    def term(self) -> int:
        """Term that a majority has confirmed, by asking for it or by beginning a generation in it; 0 of a standby.

        It grows with every coordinator that takes over. Directives may have a later term already, which a single member
        that returned has made necessary, and which proves nothing.
        """
        return self._confirmed_term

    @property
    def has_finished(self) -> bool:
        return self._failure_detector.has_finished

    @property
    def present(self) -> tuple[str, ...]:
        """Members and newcomers that are connected and send heartbeats."""
        return tuple(self._failure_detector.present)

    def knows_member(self, member: str) -> bool:
        """Return whether the member has come to this coordinator since it is active. Stepping down forgets members."""
        return bool(self.end_reason) or member in self._evicted or self._failure_detector.knows_member(member)

    def eviction_reason(self, member: str) -> str:
        """Return why it is or will be evicted; empty if it is not."""
        return self._silent_reasons.get(member) or self.directive_for(member).reason

    def directive_for(self, member: str) -> MemberDirective:
        """Return the directive that holds for a member now."""
        if self.end_reason:
            return MemberDirective(
                generation_id=(self._term, self._proposal_number + 1),
                is_end=True,
                reason=self.end_reason,
                final_checkpoint_owner=self._final_checkpoint_owner,
            )
        if member in self._evicted or self.is_long_gone(member):
            return self._evicted.get(member) or self._eviction(membership_records.REASON_REPLACED)
        membership = self.membership if self.membership and member in self.membership.members else None
        generation_ids = [each.generation_id for each in (membership, self._proposal) if each is not None]
        if not generation_ids:
            return MemberDirective()
        return MemberDirective(generation_id=max(generation_ids), membership=membership, proposal=self._proposal)

    def join(self, member: str, now_s: float) -> None:
        """Admit a process that wants to become a member. An earlier one of the same slot is gone then."""
        if not self.is_active:
            self._election.note_newcomer(member, now_s)
        elif not self._failure_detector.knows_member(member):
            others = self._failure_detector.members_of_slot(parse_member_name(member)[0])
            if any(parse_member_name(other) > parse_member_name(member) for other in others):
                self._evict(member, membership_records.REASON_REPLACED)
                return
            for other in others:
                self._exclude(other, membership_records.REASON_REPLACED)
            self._failure_detector.add_member(member, now_s)
            self._evicted = {each: why for each, why in self._evicted.items() if not self.is_long_gone(each)}
            self._caught_up = {each for each in self._caught_up if not self.is_long_gone(each)}
            if self.membership is None and self._waiting_since_s is None:  # a slow start blames no member
                self._waiting_since_s = now_s
            self._advance(now_s)

    def announce_start(self, member: str, now_s: float) -> None:
        """Note that a process is about to be started: earlier processes of its slot have ended."""
        self._election.announce_start(member, now_s)

    def note_other_idle(self, now_s: float) -> None:
        """Note that the other coordinator is not active: if all possible members ask this one, none goes on elsewhere.

        If none of them has ever been in a generation, either there was none, or all its members are gone. In the second
        case the job is over, unless the state is kept elsewhere. In the first case the first coordinator of the job
        begins.
        """
        self._election.note_other_idle(now_s)
        if self.is_active:
            return
        if self._election.accounts_for(self._settings.expected, now_s):
            self._take_over(now_s)
            self._advance(now_s)
        elif self._election.note_only_newcomers(self._settings.expected, now_s):
            if self._election.has_replacements and not self._settings.has_external_state:
                self._become_active()
                self._end_job(membership_records.REASON_STATE_LOST)
            elif not self._has_even_terms:
                self._become_active()

    def rejoin(self, rejoin: Rejoin, now_s: float) -> None:
        """Note that a member has lost its coordinator and asks this one to take over."""
        member = rejoin.status.member
        if rejoin.membership is not None:
            self._step_down_if_superseded(rejoin.membership.generation_id[0], rejoin.membership.generation_id)
        # It knows how long answers take on its machine, so it needs no start-up timeout.
        first_s = _FIRST_HEARTBEAT_FACTOR * rejoin.patience_s if rejoin.patience_s else None
        self._readmit(member, now_s, first_s)
        is_known = (
            self.membership is not None
            and member in self.membership.members
            and not self._failure_detector.is_gone(member)
        )
        if self.is_active and self._term <= rejoin.promised[0]:
            # A member that asks follows no directive of the term that it has given up.
            self._term = self._last_term = self._next_own_term(rejoin.promised)
            self._votes_in_term.clear()
            if self._proposal is not None:
                self._propose(is_urgent=self._proposal.is_urgent)
        if self.is_active and rejoin.membership is not None and not is_known:
            self._evict(member, "it lost its connection to the coordinator, and the others went on")
            return
        self._failure_detector.add_member(member, now_s, first_s)
        self._failure_detector.record_heartbeat(member, rejoin.heartbeat, now_s)
        self._record_vote(rejoin.status)
        self._election.record_vote(rejoin, now_s)
        self._note_caught_up(rejoin.status)
        if not self.is_active and self._election.is_won:
            self._take_over(now_s)
        self._advance(now_s)

    def _record_vote(self, status: MemberStatus) -> None:
        """Note a member that asked this active coordinator. Once a majority of its members has, its term counts."""
        if self.is_active and self.membership is not None:
            self._votes_in_term[status.member] = status
            if membership_records.outnumbers_silent(
                self.membership.members, list(self._votes_in_term.values()), self.membership.members
            ):
                self._confirmed_term = self._term

    def take_probe_targets(self) -> dict[str, str]:
        """Return the addresses of members that have not asked this coordinator since it took over; each once."""
        targets, self._probe_targets = self._probe_targets, {}
        return targets

    @property
    def awaited_voters(self) -> set[str]:
        """Members that have not asked this coordinator since it took over, and may still come."""
        return set() if self.end_reason or not self.is_active else self._election.awaited_voters(self.present)

    def note_unreachable(self, member: str, now_s: float, *, has_ended: bool) -> None:
        """Note that nothing listens at the member's address: its node is cut off, or its process `has_ended`."""
        self._election.note_unreachable(member, has_ended=has_ended)
        self._advance(now_s)

    def record_heartbeat(self, member: str, heartbeat: Heartbeat, now_s: float) -> None:
        self._readmit(member, now_s)
        self._failure_detector.record_heartbeat(member, heartbeat, now_s)

    def _step_down_if_superseded(self, term: int, generation_id: GenerationId) -> None:
        """Step down if members are in a later generation, or a majority follows another one in a later term.

        In one generation the coordinator with the greater term is active; while this one knows of no generation, terms
        alone count. Otherwise members have chosen another coordinator while this one was stopped or cut off: it becomes
        a standby that knows nothing. A later generation may be of a smaller term than this one's: members asked this
        one, and went to the other before they heard of its term. Going on from the generation that holds here would
        repeat steps.
        """
        known = generation_id if self.membership is None else self.membership.generation_id
        if self.is_active and (generation_id, term) > (known, self._confirmed_term):
            self._term = self._confirmed_term = 0
            self._reset()

    def note_other_active(self, term: int, generation_id: GenerationId) -> None:
        """Note that the other coordinator is active in that term, and knows of that generation."""
        self._election.forget_announced()
        self._step_down_if_superseded(term, generation_id)

    def note_disconnect(self, member: str) -> None:
        """Note a graceful close, or a broken connection on which nothing passed: as far as known the member lives.

        It may return, and nothing has happened. If it does not, its heartbeats will be missed.
        """
        self._votes_in_term.pop(member, None)
        if not self.is_active:  # it looks for an active coordinator
            self._failure_detector.remove_member(member)
            self._election.withdraw_vote(member)

    def note_process_exit(self, member: str, now_s: float) -> None:
        """Note that the member's process closed its connection abruptly: a live process closes gracefully.

        Exception: this process was stopped itself, or had not heard from the member before. Then the member may have
        moved to another coordinator without a graceful close. It counts as silent once the others need its status.
        """
        is_away = now_s - self._scheduling_delay.last_s > MAY_HAVE_SWITCHED_S or now_s < self._unsure_until_s
        if not self.is_active or is_away or self._failure_detector.may_have_gone(member, now_s):
            self.note_disconnect(member)
            self._failure_detector.note_unsure_exit(member)
        elif member in self._failure_detector.present:
            self._exclude(member, "its connection to the coordinator broke")
        self._advance(now_s)

    def request_leave(self, status: MemberStatus, now_s: float, *, is_finished: bool) -> None:
        """Note that a member wants to leave at the next step boundary or, if finished, takes part in nothing more."""
        member = status.member
        self._readmit(member, now_s)
        if member in self._failure_detector.present:
            self._failure_detector.mark_leaving(member, now_s, is_finished=is_finished)
            if is_finished:
                self._finished.append(status)
            elif member in self._statuses:  # it does not report its status again
                self._statuses[member] = replace(self._statuses[member], is_leaving=True)
            self._advance(now_s)

    def end_job(self, reason: str) -> None:
        """End the job for a reason from outside; one of the present members saves the final checkpoint."""
        if self.is_active and not self.end_reason:
            statuses = self.membership.statuses if self.membership else ()
            self._end_job(reason, [each for each in statuses if each.member in self._failure_detector.present])

    def report_failure(self, member: str, generation_id: GenerationId, suspects: list[str], now_s: float) -> None:
        """Note that a member's generation is broken: it could not reach the suspects; an empty list if it knows none.

        Of two members that cannot reach each other the one that the job can do without is blamed.
        """
        is_current = (
            self.membership is not None
            and generation_id == self.membership.generation_id
            and member in self._failure_detector.present
        )
        if not is_current or (self._proposal is not None and self._proposal.is_urgent):
            return
        for suspect in [each for each in suspects if each in self._failure_detector.present]:
            blamed = member if self._is_last_state_owner(suspect) else suspect
            self._failure_reports[blamed] = self._failure_reports.get(blamed, 0) + 1
        most_blamed = max(
            self._failure_reports, key=lambda each: (self._failure_reports[each], parse_member_name(each)), default=None
        )
        if most_blamed in self._failure_detector.present and self._failure_reports[most_blamed] >= _MAX_FAILURE_REPORTS:
            self._exclude(most_blamed, "the others cannot reach it", is_silent=True)
        self._propose(is_urgent=True)
        self._advance(now_s)

    def report_status(self, generation_id: GenerationId, status: MemberStatus, now_s: float) -> None:
        """Note the status of a member that has paused for a proposal."""
        is_current = self._proposal is not None and self._proposal.generation_id == generation_id
        self._readmit(status.member, now_s)
        if is_current and status.member in self._failure_detector.present:
            self._statuses[status.member] = status
            self._note_caught_up(status)
            if status.is_leaving:
                self._failure_detector.mark_leaving(status.member, now_s, is_finished=False)
            self._advance(now_s)

    def tick(self, now_s: float) -> None:
        """Advance the time; called about every 0.1 s."""
        delay_s = self._scheduling_delay.observe(now_s)
        if delay_s > _COORDINATOR_STALL_S:  # the others' silence meanwhile proves nothing
            self._failure_detector.excuse_silence(now_s)
            if self._waiting_since_s is not None:  # nor does the absence of newcomers
                self._waiting_since_s += delay_s
        if delay_s > MAY_HAVE_SWITCHED_S:  # events of that time arrive only now
            self._unsure_until_s = now_s + SURE_AFTER_SILENCE_S
        if self.is_active:  # a standby has no members yet to notify
            for member, reason in self._failure_detector.overdue(now_s, self._grace_s):
                self._exclude(member, reason, is_silent=True, may_return=reason == membership_records.REASON_SILENT)
        self._query_recovering_members(now_s)
        self._restart_on_standstill(now_s)
        self._advance(now_s)

    def _grace_s(self, member: str) -> float:
        """Return the grace of a member: that of a busy machine, and more for the last member with the job's state."""
        owner_s = self._settings.member_wait_s if self._is_last_state_owner(member) else 0.0
        return self._scheduling_delay.grace_s + owner_s

    def _query_recovering_members(self, now_s: float) -> None:
        """Ask recovering members for their status if the last member with the job's state is silent."""
        if self.end_reason or not self.is_active or len(self._failure_detector.present) < 2:
            return
        grace_s = self._scheduling_delay.grace_s
        if any(
            self._is_last_state_owner(each) and self._failure_detector.is_silent(each, now_s, grace_s)
            for each in self.present
        ):
            self._start_waiting(now_s)
            if self._proposal is None or not self._proposal.is_urgent:
                self._propose(is_urgent=True)

    def _restart_on_standstill(self, now_s: float) -> None:
        """Restart the generation if all members wait for each other, far longer than usual: one missed a message.

        That is a fault of this system or of the network below it, and no member is blamed. They begin a generation of
        the same members, and reduce the same gradients again. If the network has only become very slow, they get twice
        the time that was not enough, so that they get through at last. Where the state is kept elsewhere they may be
        waiting for the process that keeps it, so nothing is restarted.
        """
        is_forming = self._proposal is not None and self._proposal.is_urgent
        if self.membership is None or self.end_reason or is_forming or self._settings.has_external_state:
            return
        since_began_s = now_s - self._generation_began_s
        if self._failure_detector.are_deadlocked(self.membership.members) and since_began_s > self._standstill_limit_s:
            self._standstill_limit_s, self._restarted_at = 2 * max(REDUCTION_TIMEOUT.min_s, since_began_s), -1
            self.num_standstill_restarts += 1
            self._propose(is_urgent=True)

    @property
    def _state_owners(self) -> set[str]:
        """Members known to have the job's state. At the start none has, and any member's may become it.

        Where the state is kept elsewhere as well, the present members can begin with that.
        """
        if self.membership is None:
            return set()
        holders = () if self._settings.has_external_state else self.membership.state_owners
        return {*(holders or self.membership.members), *self._caught_up}

    def _is_last_state_owner(self, member: str) -> bool:
        """Return whether no other present member is known to have the job's state."""
        return self._state_owners & set(self._failure_detector.present) == {member}

    def _note_caught_up(self, status: MemberStatus) -> None:
        if status.has_state:  # from then on for good
            self._caught_up.add(status.member)

    def _exclude(self, member: str, reason: str, *, is_silent: bool = False, may_return: bool = False) -> None:
        self._failure_detector.mark_gone(member, is_silent=is_silent)
        if may_return and self.membership is not None and member in self.membership.members:
            self._silent_reasons[member] = reason
        else:
            self._evict(member, reason)

    def _readmit(self, member: str, now_s: float, first_s: float | None = None) -> None:
        """Readmit a silent member that reports again: no generation has begun without it, so nothing has happened.

        A coordinator that was cut off has excluded all others, and may begin no generation without them. Evicting them
        would end a job that lost no member.
        """
        if member in self._silent_reasons and self._failure_detector.readmit(member, now_s, first_s):
            del self._silent_reasons[member]
            self._last_return_s = now_s

    def _evict(self, member: str, reason: str) -> None:
        self._proposal_number += 1
        self._silent_reasons.pop(member, None)
        self._evicted[member] = self._eviction(reason)

    def _eviction(self, reason: str) -> MemberDirective:
        return MemberDirective(generation_id=(self._term, self._proposal_number), is_evicted=True, reason=reason)

    def _advance(self, now_s: float) -> None:
        """Decide whatever can be decided now."""
        if self.end_reason or not self.is_active:
            return
        if self._awaits_remaining_voters(now_s):
            return
        for member in self._election.take_missing(self._failure_detector.present):
            if not self._failure_detector.knows_member(member):  # else it came, and has ended or finished since
                self._exclude(member, membership_records.REASON_EXCLUDED, is_silent=True, may_return=True)
        if self._election.take_unsettled():  # the previous coordinator was lost in the middle of a change
            self._propose(is_urgent=True)
        if self._proposal is not None and self._proposal.is_urgent:
            for member in sorted(self._failure_detector.unsure_exits):
                if not self._is_last_state_owner(member):
                    self._exclude(member, "its connection to the coordinator broke", is_silent=True, may_return=True)
        is_broken = self.membership is not None and self._failure_detector.is_missing_any(
            self.membership.members, now_s
        )
        if self._proposal is None or (is_broken and not self._proposal.is_urgent):
            self._maybe_propose(now_s, is_broken=is_broken)
        if self._proposal is not None:
            self._maybe_begin_generation(self._proposal, now_s)

    def _awaits_remaining_voters(self, now_s: float) -> bool:
        """Return whether members that have not asked this coordinator to take over get more time.

        While the others make progress, waiting costs nothing and shows that all are alive. Otherwise missing members
        are excluded a little later than without a change of coordinators: all lost theirs at the same moment, but a
        member that joined lately waits longer for it, since the state that it received then delayed the coordinator's
        answers. The present members are paused meanwhile. An unreachable member gets no extra time, however busy the
        machines are; one whose process has ended gets none at all, as where its connection closes.
        """
        present = self._failure_detector.present
        if self._election.have_rest_ended(present) or not self._election.awaits_voters(
            now_s, self._settings.takeover_wait_s, present
        ):
            return self._awaits_state_owner(now_s)
        lost_s, members = self._election.coordinator_lost_s(now_s), self.membership.members if self.membership else ()
        is_broken = lost_s > ANSWER_TIMEOUT.min_s and self._failure_detector.are_at_standstill(members, _STANDSTILL_S)
        if (self._election.take_unsettled() or is_broken) and self._proposal is None:
            self._propose(is_urgent=True)
        is_hopeless, least_s = self._election.are_rest_unreachable(present), self._settings.heartbeat_timeout.min_s
        if not is_hopeless:
            patience = max(1.0, self._election.longest_answer_timeout_s / ANSWER_TIMEOUT.min_s)
            least_s = patience * max(_REMAINING_VOTERS_S, least_s)
        is_settled = is_hopeless or self._election.is_settled(now_s)
        is_early = self._proposal is None or lost_s <= least_s + self._scheduling_delay.grace_s or not is_settled
        return is_early or self._awaits_state_owner(now_s)

    def _awaits_state_owner(self, now_s: float) -> bool:
        """Return whether no present member has the job's state, but a missing or silent one does.

        Its node may be cut off for a moment, and without it the job is over. It gets the time of any member that the
        job cannot go on without.
        """
        patience_s, state_owners = self._settings.member_wait_s, self._state_owners
        if self._settings.has_external_state or state_owners & set(self._failure_detector.present):
            return False
        if (
            state_owners & self._election.remaining_voters(self._failure_detector.present)
            and self._election.coordinator_lost_s(now_s) <= patience_s
        ):
            return True
        grace_s = self._scheduling_delay.grace_s + patience_s
        silent_owners = state_owners & self._silent_reasons.keys()
        may_return = any(self._failure_detector.may_return(each, now_s, grace_s) for each in silent_owners)
        return may_return and not self._failure_detector.has_finished

    def _maybe_propose(self, now_s: float, *, is_broken: bool) -> None:
        num_here, min_members = len(self._failure_detector.present), self._settings.bounds.min_members
        if is_broken:
            self._propose(is_urgent=True)
        elif self.membership is None:
            is_late = self._has_waited_longer_than(now_s, self._settings.member_wait_s)
            if num_here >= self._settings.expected or (is_late and num_here >= min_members):
                self._propose(is_urgent=True)
            elif is_late:
                self._end_job(f"{num_here} workers came, expected at least {min_members}")
        elif not num_here and self._failure_detector.has_finished:
            self._end_job(membership_records.REASON_ALL_DONE)
        elif self._failure_detector.leaving or self._newcomers():
            self._propose(is_urgent=False)

    def _newcomers(self) -> list[str]:
        return self._failure_detector.newcomers(
            self.membership.members if self.membership else (), self._settings.bounds.max_members
        )

    def _propose(self, *, is_urgent: bool) -> None:
        self._proposal_number += 1
        self._statuses.clear()
        self._proposal = GenerationProposal(generation_id=(self._term, self._proposal_number), is_urgent=is_urgent)

    def _maybe_begin_generation(self, proposal: GenerationProposal, now_s: float) -> None:
        """Begin the proposed generation once all awaited members have reported their status."""
        newcomers, known = self._newcomers(), self.membership.members if self.membership else ()
        if proposal.is_urgent and self.membership is not None:  # members of no earlier generation are not awaited
            newcomers = [each for each in newcomers if each in self._statuses]
        wanted = sorted(
            [*(each for each in known if each in self._failure_detector.present), *newcomers], key=parse_member_name
        )
        if not all(member in self._statuses for member in wanted):
            return
        if self._silent_reasons and now_s - self._last_return_s < _RETURN_WINDOW_S:
            return
        statuses = [self._statuses[member] for member in wanted]
        holders = [each for each in statuses if each.has_state]
        if membership_records.is_state_lost(self.membership, statuses) and not self._settings.has_external_state:
            self._end_job(
                membership_records.REASON_ALL_DONE
                if self._failure_detector.has_finished
                else membership_records.REASON_STATE_LOST
            )
        elif self.membership and not self._has_quorum(self.membership, statuses, holders):
            self._wait_or_end(now_s, "most of the workers do not answer", holders)
        elif not statuses and self._failure_detector.has_finished:
            self._end_job(membership_records.REASON_ALL_DONE)
        elif self._is_too_few(len(statuses)):
            if statuses and all(each.is_leaving for each in statuses):
                self._end_job(membership_records.REASON_ALL_LEFT, holders)
                return
            min_members = self._settings.bounds.min_members
            self._wait_or_end(now_s, f"workers left: {len(statuses)}, expected at least {min_members}", holders)
        else:
            self._begin_generation(proposal, statuses, holders, now_s)

    def _has_quorum(self, membership: Membership, statuses: list[MemberStatus], holders: list[MemberStatus]) -> bool:
        """Return whether no members can go on elsewhere, from this generation or from an unconfirmed predecessor.

        A leaving member counts on neither side: it may not hear that it has left, but says so wherever it reports next.
        """
        able, reporting = holders or statuses, {each.member for each in statuses}
        staying = [each for each in able if not _leaves_now(each)] or able
        predecessors = (
            ()
            if membership_records.was_entered_by_all(membership, [*statuses, *self._finished])
            else membership.unconfirmed_predecessors
        )
        return membership_records.outnumbers_silent(membership.members, staying, self._failure_detector.silent) and all(
            membership_records.outnumbers_silent(each, staying, set(filter(self._may_be_alive, each)) - reporting)
            for each in predecessors
        )

    def _unconfirmed_predecessors(
        self, statuses: list[MemberStatus], staying: list[MemberStatus]
    ) -> tuple[tuple[str, ...], ...]:
        """Return the unconfirmed predecessors of a generation of the staying ones, after these statuses."""
        names = {each.member for each in staying}
        leaving = {each.member for each in statuses} - names
        return membership_records.unconfirmed_predecessors(
            self.membership,
            [*statuses, *self._finished],
            names,
            lambda each: each not in leaving and self._may_be_alive(each),
        )

    def _may_be_alive(self, member: str) -> bool:
        return self._failure_detector.may_be_alive(member) and not self._election.is_replaced(member)

    def _begin_generation(
        self, proposal: GenerationProposal, statuses: list[MemberStatus], holders: list[MemberStatus], now_s: float
    ) -> None:
        """Begin a generation; it admits newcomers and releases leavers if all others are at a step boundary.

        Otherwise that waits for the next boundary. The remaining members pause at once if they are too few without the
        leavers; newcomers count as remaining. If only leavers have the state, they stay until another member has it.
        """
        num_left = sum(not _leaves_now(each) for each in statuses)
        taking_part = [each for each in statuses if each.has_state or each.is_recovering]
        if not all(each.at_step_boundary for each in taking_part):
            statuses = taking_part
        staying = [each for each in statuses if not _leaves_now(each)]
        if not staying:
            self._end_job(membership_records.REASON_ALL_LEFT, holders)
            return
        no_member_has_state = bool(holders) and not any(each.has_state for each in staying)
        if no_member_has_state and not self._settings.has_external_state:
            staying, num_left = statuses, len(statuses)
        finished = tuple(replace(each, layout="", batch_shares="") for each in self._finished)
        membership = Membership(
            generation_id=proposal.generation_id,
            statuses=strip_duplicates(staying),
            finished=finished,
            unconfirmed_predecessors=self._unconfirmed_predecessors(statuses, staying),
            departed=membership_records.departed_members(self.membership, [each.member for each in staying]),
        )
        if self.membership is None or membership.last_committed > self.membership.last_committed:
            self._failure_reports.clear()
        if self._restarted_at < 0:  # their position when they had to begin anew
            self._restarted_at = membership.last_committed
        elif membership.last_committed > self._restarted_at:
            self._standstill_limit_s = 0.0
        self._generation_began_s = now_s
        self._votes_in_term.clear()
        self.membership = membership
        self._confirmed_term, self._proposal, self._waiting_since_s = proposal.generation_id[0], None, None
        for each in statuses:
            if each not in staying:
                self._exclude(each.member, membership_records.REASON_LEFT)
        for member, reason in list(self._silent_reasons.items()):
            self._evict(member, reason)
        self._failure_detector.forget_silent(
            {member for each in membership.unconfirmed_predecessors for member in each}
        )
        self._maybe_propose(now_s, is_broken=self._is_too_few(num_left))

    def _is_too_few(self, num_members: int) -> bool:
        """Return whether these are too few to go on; once a member has finished, any number ends the training."""
        return num_members < self._settings.bounds.min_members and not self._failure_detector.has_finished

    def _has_waited_longer_than(self, now_s: float, patience_s: float) -> bool:
        return self._waiting_since_s is not None and now_s - self._waiting_since_s > patience_s

    def _start_waiting(self, now_s: float) -> None:
        """Start the wait for other members, because those present may not go on alone."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def _wait_or_end(self, now_s: float, reason: str, holders: Sequence[MemberStatus]) -> None:
        """End the job if no member comes in time; not where the state is kept elsewhere, since others go on with it.

        There paused members are evicted, and may join again. They wait longer, because the parts of the job together
        decide whether it is over, and a member may have to save the state.
        """
        has_external_state = self._settings.has_external_state
        patience_s = (_EXTERNAL_STATE_FACTOR if has_external_state else 1.0) * self._settings.member_wait_s
        self._start_waiting(now_s)
        if not self._has_waited_longer_than(now_s, patience_s):
            return
        reason = f"{reason}, and no other came within {patience_s:g} s"
        if not has_external_state:
            self._end_job(reason, holders)
            return
        for member in self.present:
            self._exclude(member, reason)
        self._waiting_since_s = None

    def _end_job(self, reason: str, holders: Sequence[MemberStatus] = ()) -> None:
        """End the job; the first of the most advanced members with its state saves the final checkpoint."""
        self.end_reason = reason
        self._final_checkpoint_owner = max(holders, key=lambda each: each.committed).member if holders else ""
        self._proposal = None

    def _next_own_term(self, generation_id: GenerationId) -> int:
        return membership_records.next_term(max(generation_id[0], self._last_term), is_even=self._has_even_terms)

    def _become_active(self) -> None:
        """Become active, in a term greater than any that is known here."""
        self._term, self._proposal_number = self._next_own_term(self._election.highest_generation_id), 0
        self._confirmed_term = self._last_term = self._term

    def _take_over(self, now_s: float) -> None:
        newest = self._election.membership
        assert newest is not None, "the election was won by its members"
        self._become_active()
        self.membership, self._waiting_since_s, self._generation_began_s = newest, None, now_s
        for stranger in set(self._failure_detector.present) - set(newest.members):
            self._exclude(stranger, membership_records.REASON_EXCLUDED, is_silent=True)
        missing = set(newest.members) - set(self._failure_detector.present)
        self._election.await_voters(missing)
        self._probe_targets = {
            each.member: each.address for each in newest.statuses if each.address and each.member in missing
        }
        for member in self._election.take_replaced():
            self._exclude(member, membership_records.REASON_REPLACED)


def _leaves_now(status: MemberStatus) -> bool:
    """Return whether it leaves with the next generation."""
    return status.is_leaving and status.at_step_boundary
