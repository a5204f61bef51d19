"""A member's side: which orders it follows, and how the reduction that a change of epochs cut off is ended."""

from dataclasses import dataclass, replace
from typing import Literal

from ringweave.membership.rules.records import BEFORE_ALL, Ballot, Decree, Order, Standing

Resolution = Literal["nothing", "take", "again"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Freeze:
    """Stand still for a proposal: at once, or with all others at the next border."""

    ballot: Ballot
    is_urgent: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Go on as a member of this epoch."""

    decree: Decree


@dataclass(frozen=True, kw_only=True, slots=True)
class Out:
    """Change nothing any more."""

    reason: str
    is_end: bool
    """The job is over, which is nobody's fault; else this member was put out."""
    heir: str = ""
    """The member that is to save the state, if any; see `records.Order`."""


Action = Freeze | Form | Out


class Follower:
    """Follows orders of the greatest ballot that it has heard of, each at most once, and none of an older one."""

    def __init__(self, member: str) -> None:
        self.member = member
        self.epoch: Ballot = BEFORE_ALL
        """The epoch that it is in."""
        self.promised: Ballot = BEFORE_ALL
        """The greatest ballot that it has stood for, or is about to; it obeys nobody who knows less."""
        self.is_out = False

    def take(self, order: Order) -> list[Action]:
        """What to do about an order, in turn; nothing if it says nothing new, or is of the past."""
        if self.is_out or order.ballot < max(self.epoch, self.promised):
            return []
        if order.is_out or order.is_end:
            self.is_out = True
            return [Out(reason=order.reason, is_end=order.is_end, heir=order.heir)]
        actions: list[Action] = []
        proposal = order.proposal
        is_cut_off = proposal is not None and proposal.is_urgent
        if order.decree is not None and not is_cut_off and self._may_begin(order.decree):
            self.epoch = order.decree.ballot
            actions.append(Form(decree=order.decree))
        if proposal is not None and proposal.ballot > max(self.promised, self.epoch):
            self.promised = proposal.ballot
            actions.append(Freeze(ballot=proposal.ballot, is_urgent=proposal.is_urgent))
        return actions

    def forget_coordinator(self) -> None:
        """It asks another coordinator to take over: whatever the one before still says is of the past.

        Who has never been in an epoch asks to be let in, does not say what it has promised, and owes it to nobody: the
        term of the one that it comes to may be an earlier one, and all would wait for ever for what it never obeys.
        """
        is_new = self.epoch == BEFORE_ALL
        self.promised = BEFORE_ALL if is_new else max(self.promised, (self.promised[0] + 1, 0))

    def _may_begin(self, decree: Decree) -> bool:
        """Only what it stood for last: it may have gone on since it stood for anything else.

        Not so who has never been in an epoch, and has forgotten what it stood for as its connection broke.
        """
        is_new = self.epoch == self.promised == BEFORE_ALL
        is_its_own = decree.ballot == self.promised or is_new
        return decree.ballot > self.epoch and is_its_own and self.member in decree.members


def resolve(own: Standing, decree: Decree) -> Resolution:
    """What becomes of the reduction that `own` keeps gradients of, once a new epoch begins.

    A member takes a result over only when all members of its epoch have said that they have every result. So if one
    of them has taken it over, whether it is left or not, all who are left have it: they take it over where all of them
    have it. If one of them has not, nobody has taken it over, and they reduce the gradients that they kept again,
    among themselves.

    Returns:
        `nothing`: there is none. `take`: take the results over that are there. `again`: reduce again.
    """
    if own.committed < decree.committed and (own.has_state or own.is_following):
        assert own.is_prepared, "a reduction is committed only when all members have its results"
        return "take"
    return "nothing" if own.at_border else "again"


def settled(decree: Decree) -> tuple[Standing, ...]:
    """The standings as they are once what some members have committed is committed by all that hold the state."""
    most = decree.committed
    return tuple(
        replace(each, committed=most, is_prepared=False, at_border=True)
        if (each.has_state or each.is_following) and each.committed < most
        else each
        for each in decree.standings
    )
