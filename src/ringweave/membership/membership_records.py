"""Value objects of the membership (generations, member status, directives), rules of quorum and of one member. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

GenerationId = tuple[int, int]
"""(term, number) of a proposal or a generation; later ones compare as greater. A number is used once in a term."""

NO_GENERATION: GenerationId = (0, 0)
"""Id of a member that has never been in a generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """Status of a member that waits for a generation to begin; it stays so until a directive says how to go on."""

    member: str
    """Name `SLOT.INCARNATION`, such as `3.0`; a restarted process is another member."""
    has_state: bool = False
    """It has the job's parameters. A newcomer does not before it has read them and caught up."""
    is_recovering: bool = False
    """It has joined and is catching up: it contributes zeros to every reduction and keeps the results to catch up with.
    Until then it has no full state, but misses nothing: it stays through membership changes that newcomers wait for."""
    committed: int = 0
    """Number of the last reduction of gradients whose result it has committed."""
    is_prepared: bool = False
    """It has every result of the next reduction, and every member's row, but does not know that all members have
    them."""
    at_step_boundary: bool = True
    """It is between two train steps; otherwise it retains gradients that are not reduced yet."""
    is_leaving: bool = False
    """It wants to leave."""
    address: str = ""
    """`HOST PORT` at which it listens for other members; empty if it does not."""
    note: str = ""
    """Text for the other members; the coordinator forwards it unread."""
    layout: str = ""
    """Text that newcomers need to take part. All members with the state send the same; only the first one's is
    forwarded."""
    num_drawn: int = 0
    """Batches that its script has drawn."""
    batch_shares: str = ""
    """Assignment of the samples of batches that are drawn and not committed. All members that drew a batch report the
    same; the others have to draw it so, as they may not have been in the generation that drew it. Only one is
    forwarded: that of the member that has drawn the most, even if it is recovering."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Generation of a membership: its members, and the status of each when it began."""

    generation_id: GenerationId
    statuses: tuple[MemberStatus, ...]
    """Status of each member, in rank order."""
    finished: tuple[MemberStatus, ...] = ()
    """Status of members that had finished; their commits count."""
    unconfirmed_predecessors: tuple[tuple[str, ...], ...] = ()
    """Members that may still be alive, for each earlier generation in which members may be that know nothing of this
    one.

    A member of this generation may never hear of it, and go on from an earlier one with others. So until all members
    are
    known to have entered this one, those that go on from it must outnumber the rest of each of these too.
    """

    departed: tuple[str, ...] = ()
    """Last member of each slot that had one and has none now."""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(status.member for status in self.statuses)

    @property
    def least_incarnations(self) -> dict[int, int]:
        """Slot -> least incarnation whose certificate counts: that of its member, or the one after its last member."""
        after_last = {slot: incarnation + 1 for slot, incarnation in map(parse_member_name, self.departed)}
        return after_last | dict(map(parse_member_name, self.members))

    def revokes(self, member: str) -> bool:
        """Return whether a process's certificate counts no more: it was a member, or its slot has a later one."""
        if not all(part.isdecimal() for part in member.split(".")) or member.count(".") != 1:
            return True  # no member's name
        slot, incarnation = parse_member_name(member)
        return incarnation < self.least_incarnations.get(slot, 0)

    @property
    def state_owners(self) -> tuple[str, ...]:
        """Members that have the job's state; none at the start of a job, where the first member's becomes it."""
        return tuple(status.member for status in self.statuses if status.has_state)

    @property
    def primary(self) -> str:
        """Member that reports for all: the first with the job's state. A recovering member commits later, or never."""
        return next(iter(self.state_owners), self.members[0])

    @property
    def last_committed(self) -> int:
        """Number of the last committed reduction: one member has committed it, or all participants have its results.

        A member outside this generation may have committed it too, but no member commits a later one: a member commits
        only after all have said that they have every result.
        """
        highest = max(status.committed for status in (*self.statuses, *self.finished))
        participants = [status for status in self.statuses if status.has_state or status.is_recovering]
        is_agreed = participants and all(each.is_prepared and each.committed == highest for each in participants)
        return highest + 1 if is_agreed else highest


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationProposal:
    """Generation that is being formed."""

    generation_id: GenerationId
    is_urgent: bool
    """Interrupt the step and report the status; otherwise all pause together at the next step boundary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberDirective:
    """Directive for a member: a state, not a message. It may be sent any number of times, or only in its last form."""

    generation_id: GenerationId = NO_GENERATION
    """Greatest id in it."""
    membership: Membership | None = None
    """Newest generation that includes this member."""
    proposal: GenerationProposal | None = None
    """Proposal to pause for."""
    is_evicted: bool = False
    """It is evicted: it changes nothing and ends."""
    is_end: bool = False
    """The job is over."""
    reason: str = ""
    """Reason of the eviction or of the end of the job, in words."""
    final_checkpoint_owner: str = ""
    """Member that saves the final checkpoint of a job that is over; empty if no remaining member has the state."""


def strip_duplicates(statuses: Sequence[MemberStatus]) -> tuple[MemberStatus, ...]:
    """Return the statuses with one copy of long texts that several members send alike."""
    first = next((each for each in statuses if each.has_state), None)
    furthest = furthest_status(statuses)
    return tuple(
        replace(
            each,
            layout=each.layout if each is first else "",
            batch_shares=each.batch_shares if each is furthest else "",
        )
        for each in statuses
    )


def furthest_status(statuses: Sequence[MemberStatus]) -> MemberStatus:
    """Return the status that has drawn the most batches, among members that train; among all if none does yet.

    A recovering member may wait for a step whose batch the members with the state have not drawn. Of several that have
    drawn as many, one with the state is returned.
    """
    training = [each for each in statuses if each.has_state or each.is_recovering]
    return max(training or statuses, key=lambda each: (each.num_drawn, each.has_state))


KEPT_INCARNATIONS = 8
"""Incarnations of a slot that are remembered one by one: of a job that loses members for weeks, the newest ones."""


def parse_member_name(member: str) -> tuple[int, int]:
    """Return (slot, incarnation) of a member's name, the order of members."""
    slot, _, incarnation = member.partition(".")
    return int(slot), int(incarnation)


def newest_of_slots(members: Collection[str]) -> frozenset[str]:
    """Return the members without those of which so many later ones of their slots are among them."""
    newest = dict(sorted(map(parse_member_name, members)))
    kept = [each for each in map(parse_member_name, members) if each[1] > newest[each[0]] - KEPT_INCARNATIONS]
    return frozenset(f"{slot}.{incarnation}" for slot, incarnation in kept)


def departed_members(previous: Membership | None, members: Collection[str]) -> tuple[str, ...]:
    """Return `Membership.departed` of the members that follow."""
    before = () if previous is None else (*previous.departed, *previous.members)
    last = dict(sorted(map(parse_member_name, before)))
    for slot, _ in map(parse_member_name, members):
        last.pop(slot, None)
    return tuple(f"{slot}.{incarnation}" for slot, incarnation in last.items())


def is_state_lost(previous: Membership | None, statuses: Sequence[MemberStatus]) -> bool:
    """Return whether no member that reports for the next generation has the job's state any more.

    At the start none has, and the first member's becomes it: no step was done without the others.
    """
    if previous is None or any(each.has_state for each in statuses):
        return False
    return bool(previous.state_owners) or not {each.member for each in statuses} & set(previous.members)


def outnumbers_silent(
    previous_members: Collection[str], holders: Sequence[MemberStatus], silent: Collection[str]
) -> bool:
    """Return whether the members that go on outnumber those that may go on elsewhere.

    Of two halves, the one with the first member goes on.

    Args:
        previous_members: Members of the previous generation.
        holders: Status of those of them that go on.
        silent: Members that missed their deadline and may be alive. A member that is known to be gone does not count,
            nor does one whose slot another process has by now.
    """
    present = {each.member for each in holders} & set(previous_members)
    absent = set(previous_members) & set(silent) - present
    if len(present) != len(absent):
        return len(present) > len(absent)
    return not present or min(present | absent, key=parse_member_name) in present


def was_entered_by_all(membership: Membership, statuses: Sequence[MemberStatus]) -> bool:
    """Return whether all members have entered that generation, by these statuses; else none commits a step in it."""
    return any(each.member in membership.members and each.committed > membership.last_committed for each in statuses)


def unconfirmed_predecessors(
    previous: Membership | None,
    statuses: Sequence[MemberStatus],
    staying: Collection[str],
    may_live: Callable[[str], bool],
) -> tuple[tuple[str, ...], ...]:
    """Return the `Membership.forerunners` of a generation of the staying members that follows on these statuses.

    A predecessor with exactly the same members adds nothing and is left out.
    """
    if previous is None:
        return ()
    generations = (
        previous.members,
        *(() if was_entered_by_all(previous, statuses) else previous.unconfirmed_predecessors),
    )
    living = dict.fromkeys(tuple(filter(may_live, each)) for each in generations)
    return tuple(each for each in living if each and set(each) != set(staying))


def next_term(term: int, *, is_even: bool) -> int:
    """Return the next term; coordinator 1 has even ones and coordinator 0 odd ones, so that no two share a term."""
    return term + 1 + ((term + 1) % 2 != (0 if is_even else 1))


REASON_ALL_DONE = "all workers are done"
REASON_STATE_LOST = "no worker is left that has the parameters: go on from the last checkpoint"
REASON_ALL_LEFT = "all workers have left"
REASON_REPLACED = "its slot was given to another process"
REASON_FINISHED = "it has finished"
"""Reason in the event for a member that left because it has finished."""
REASON_LEFT = "it has left"
REASON_EXCLUDED = "the others went on without it"
REASON_SILENT = "no heartbeat came in time"


ReductionOutcome = Literal["nothing", "commit", "repeat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseTraining:
    """Pause for a proposal: at once, or together with all others at the next step boundary."""

    generation_id: GenerationId
    is_urgent: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginGeneration:
    """Continue as a member of this generation."""

    membership: Membership


@dataclass(frozen=True, kw_only=True, slots=True)
class StopTraining:
    """Change no state any more."""

    reason: str
    is_end: bool
    """The job is over, without fault of this member; otherwise the member is evicted."""
    final_checkpoint_owner: str = ""
    """Member that saves the final checkpoint, if any; as in `records.MemberDirective`."""


MemberAction = PauseTraining | BeginGeneration | StopTraining


class MemberRules:
    """Follows directives of the greatest id that it has received, each at most once, and no older one."""

    def __init__(self, member: str) -> None:
        self.member = member
        self.generation_id: GenerationId = NO_GENERATION
        """Its present generation."""
        self.promised_id: GenerationId = NO_GENERATION
        """Greatest id that it has paused for, or is about to; it ignores coordinators that know less."""
        self.is_stopped = False

    def apply_directive(self, directive: MemberDirective) -> list[MemberAction]:
        """Return the actions for a directive, in order; none if it is outdated or has nothing new."""
        if self.is_stopped or directive.generation_id < max(self.generation_id, self.promised_id):
            return []
        if directive.is_evicted or directive.is_end:
            self.is_stopped = True
            return [
                StopTraining(
                    reason=directive.reason,
                    is_end=directive.is_end,
                    final_checkpoint_owner=directive.final_checkpoint_owner,
                )
            ]
        actions: list[MemberAction] = []
        proposal = directive.proposal
        is_cut_off = proposal is not None and proposal.is_urgent
        if directive.membership is not None and not is_cut_off and self._may_enter(directive.membership):
            self.generation_id = directive.membership.generation_id
            actions.append(BeginGeneration(membership=directive.membership))
        if proposal is not None and proposal.generation_id > max(self.promised_id, self.generation_id):
            self.promised_id = proposal.generation_id
            actions.append(PauseTraining(generation_id=proposal.generation_id, is_urgent=proposal.is_urgent))
        return actions

    def forget_coordinator(self) -> None:
        """Ignore the previous coordinator from now on, because the member asks another one to take over.

        A member that has never been in a generation joins as a newcomer and owes its promise to no coordinator. The
        term of the next coordinator may be an earlier one, and all would wait forever for a directive that it never
        obeys.
        """
        is_new = self.generation_id == NO_GENERATION
        self.promised_id = NO_GENERATION if is_new else max(self.promised_id, (self.promised_id[0] + 1, 0))

    def _may_enter(self, membership: Membership) -> bool:
        """Return whether it may enter: only the generation that it paused for last.

        It may have gone on since it paused for any other. Exception: a member that has never been in a generation, and
        forgot its promise when its connection broke.
        """
        is_new = self.generation_id == self.promised_id == NO_GENERATION
        is_its_own = membership.generation_id == self.promised_id or is_new
        return membership.generation_id > self.generation_id and is_its_own and self.member in membership.members


def resolve_reduction(own: MemberStatus, membership: Membership) -> ReductionOutcome:
    """Decide what happens to the reduction for which `own` retains gradients when a new generation begins.

    A member commits a result only when all members of its generation have said that they have every result. So if one
    of them has committed it, whether it remains or not, all remaining members have it: they commit it where all of them
    have it. If one of them lacks it, no member has committed it, and they reduce the retained gradients again, among
    themselves.

    Returns:
        `nothing`: there is none. `commit`: commit the results. `repeat`: reduce again.
    """
    if own.committed < membership.last_committed and (own.has_state or own.is_recovering):
        assert own.is_prepared, "a reduction is committed only when all members have its results"
        return "commit"
    return "nothing" if own.at_step_boundary else "repeat"
