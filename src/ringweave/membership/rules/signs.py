"""Signs of life of one member: its heartbeats, and whether the thread that trains gets on."""

from dataclasses import dataclass

from ringweave.membership.rules.rhythm import ANSWERS, SILENCE, Rhythm, Tolerance

MAY_GO_S = 0.75 * ANSWERS.least_s
"""After a silence that is longer, on either side, a member may be with another coordinator, its goodbye unheard."""
SURE_AFTER_S = 2.5
"""Then all has been heard of what has happened meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a heartbeat says. What is usual of a member it knows itself, whichever coordinator it tells."""

    number: int = 0
    """Grows with each."""
    progress: int = 0
    """Counts whatever the training thread gets done: batches, buckets, steps."""
    is_waiting: bool = False
    """It waits for the other members, so that it stands still is not its fault."""
    cpu_s: float = 0.0
    """Seconds that the process has computed, or wanted to. Who evaluates or saves makes no progress, but is at work."""
    still_s: float = 0.0
    """For so long it has waited for the other members without getting on."""
    stuck_s: float = 0.0
    """For so long it ought to have got on, by what is usual of it: it neither computes nor waits."""
    waits_in_vain: bool = False
    """It has waited for far longer than is usual of it."""
    is_reading: bool = False
    """It reads the job's state, or does something else that others may have to wait for."""
    num_counted: int = 0
    """Reductions that it has the results of: so often it has waited for the others, and not in vain."""
    num_epochs: int = 0
    """That it has begun: in each, whatever it waits for begins anew."""
    is_starting: bool = False
    """It imports, plans, or follows the others: how long its signs take now says nothing of later ones."""


class Signs:
    """What is known of one member's life."""

    def __init__(self, now_s: float, silence: Tolerance = SILENCE, first_s: float | None = None) -> None:
        """`first_s` is the deadline of heartbeats until their rhythm is known; None is a long one."""
        self._beats = Rhythm(silence, now_s, first_s)
        self._last = Beat()
        self._heard_s = self._sure_s = now_s

    @property
    def is_waiting(self) -> bool:
        """It said so."""
        return self._last.is_waiting

    @property
    def still_s(self) -> float:
        """For so long it had waited for the others without getting on, when it was last heard of."""
        return self._last.still_s

    @property
    def waits_in_vain(self) -> bool:
        """It has waited for the other members for far longer than it usually does, when it was last heard of."""
        return self._last.waits_in_vain

    @property
    def is_reading(self) -> bool:
        """It reads the job's state."""
        return self._last.is_reading

    def observe(self, beat: Beat, now_s: float) -> None:
        """A heartbeat has come."""
        if now_s - self._heard_s > MAY_GO_S:
            self._sure_s = now_s + SURE_AFTER_S
        self._heard_s = now_s
        self._beats.observe(now_s)
        if self._last.is_starting and not beat.is_starting:
            self._beats.forget()
        if beat.number >= self._last.number:
            self._last = beat

    def excuse(self, now_s: float) -> None:
        """The one who listens was away itself: nothing that passed meanwhile counts."""
        self._beats.excuse(now_s)

    def may_have_gone(self, now_s: float) -> bool:
        """It was not heard of for so long, a moment ago, that it may have gone to another coordinator.

        Its goodbye may be late, or lost, even where a heartbeat from before has come since.
        """
        return now_s - self._heard_s > MAY_GO_S or now_s < self._sure_s

    def is_silent(self, now_s: float, grace_s: float = 0.0) -> bool:
        """No heartbeat when one was due: the process is stopped, cut off or starved."""
        return self._beats.is_late(now_s, grace_s)

    def is_stuck(self, grace_s: float = 0.0) -> bool:
        """It beats, but neither computes nor waits nor gets on."""
        return self._last.stuck_s > grace_s
