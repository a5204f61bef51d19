"""Rules of one member, pure: which directives it follows, and how an interrupted reduction ends."""

from dataclasses import dataclass
from typing import Literal

from ringweave.membership.membership_records import (
    NO_GENERATION,
    GenerationId,
    MemberDirective,
    Membership,
    MemberStatus,
)

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
