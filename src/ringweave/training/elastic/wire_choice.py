"""Wire format of the gradients of an elastic job: named, or chosen in each generation.

A choice holds for reductions, not for generations: when a generation begins, some members may have encoded messages of
the next reduction that others have not begun yet. So it takes effect one reduction later, which nobody can have begun.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringweave.environment import EXACT
from ringweave.planning.plans import Plan

_MAX_ROWS = 4
"""Choices that are kept: those of reductions that are not committed yet, and a few earlier ones."""
Propose = Callable[[Plan, Sequence[Mapping[str, Any]], str], tuple[str, str]]
"""(plan of a generation's group, details of its members, present format): format and reason."""


class WireChoice:
    """Wire format of each reduction of this member. Called with the session's lock held, unless noted."""

    def __init__(self, wire: str = EXACT, propose: Propose | None = None, trial_s: float | None = None) -> None:
        """Create the choice: it begins with `wire`, and stays so without `propose`.

        `trial_s` has the seconds of a sample on this member, which count until its speed in training is known.
        """
        self._propose, self._trial_s, self._rows = propose, trial_s, [(0, wire)]
        self.reason = ""
        """Reason of the latest choice, as the end of a sentence; empty if the format is named."""

    @property
    def is_open(self) -> bool:
        """The format is chosen in each generation."""
        return self._propose is not None

    @property
    def latest(self) -> str:
        return self._rows[-1][1]

    @property
    def may_encode(self) -> bool:
        """Some reduction may be encoded, and leave a residual."""
        return self.is_open or self.latest != EXACT

    def of_reduction(self, number: int) -> str:
        """Return the format of a reduction."""
        return next((wire for first, wire in reversed(self._rows) if first <= number), self._rows[0][1])

    def propose(self, plan: Plan, members: Sequence[Mapping[str, Any]]) -> str:
        """Return the format that this member would choose for a generation; without the lock."""
        assert self._propose is not None, "asked only if the choice is open"
        wire, self.reason = self._propose(plan, members, self.latest)
        return wire

    def change_from(self, number: int, wire: str) -> bool:
        """Take a format from a reduction on that no member has begun; return whether it is another one."""
        self._rows = [row for row in self._rows if row[0] < number]
        if self.latest == wire:
            return False
        self._rows = [*self._rows, (number, wire)][-_MAX_ROWS:]
        return True

    def status_details(self) -> dict[str, Any]:
        """Return what the other members need for the next choice, and joining ones to follow the earlier ones."""
        return {"wires": self._rows, "trial_s": self._trial_s} if self.is_open else {}

    def adopt(self, details: Mapping[str, Any]) -> None:
        """Adopt the formats of a member that has the state."""
        self._rows = [(first, wire) for first, wire in details["wires"]]
