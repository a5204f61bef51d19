"""What can be heard of what coordinators decide."""

from ringweave.membership.rules.records import Ballot, Decree


class Notes:
    """Hears of nothing; a class made from it overrides what it wants to hear of. Called with a lock held: be short.

    `part` is the part of the job, `term` that of the coordinator.
    """

    def begun(self, part: str, decree: Decree, term: int) -> None:
        """An epoch has begun, or goes on with another coordinator."""

    def lost(self, part: str, member: str, reason: str, term: int) -> None:
        """Somebody is put out, or about to be."""

    def back(self, part: str, member: str, term: int) -> None:
        """One that was lost since nothing was heard of it is back, before an epoch has begun without it."""

    def woken(self, part: str, ballot: Ballot) -> None:
        """In this epoch all waited for each other in vain, and another one follows."""
