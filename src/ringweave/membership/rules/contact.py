"""A member's side of silence: whether its coordinator still answers, and for how long training has stood still."""

from dataclasses import replace

from ringweave.membership.rules.rhythm import ANSWERS, BEAT_S, WAITS, Delays, Rhythm
from ringweave.membership.rules.signs import Beat

_FIRST_WAIT_S = 600.0
"""So long a member waits for the others in any case as long as it does not know what is usual."""


class Contact:
    """Learns from answers to heartbeats when the next one is overdue; who is late itself blames nobody."""

    def __init__(self, now_s: float) -> None:
        self._answers, self._delays = Rhythm(ANSWERS, now_s), Delays(now_s, BEAT_S)
        self._waits = Rhythm(WAITS, now_s, _FIRST_WAIT_S)
        self._heard_s = now_s
        self._progress, self._still_since_s, self._is_starting = -1, now_s, False

    def look(self, beat: Beat, now_s: float) -> Beat:
        """Note how late this process looks, and what it gets done; its beat, with how long it has stood still."""
        if self._is_starting and not beat.is_starting:
            self._answers.forget()
            self._delays.forget()
        self._delays.observe(now_s)  # how late this look is counts, whatever is forgotten
        self._is_starting = beat.is_starting
        if beat.progress != self._progress:
            self._waits.observe(now_s)
        elif not beat.is_waiting:
            self._waits.excuse(now_s)
        if beat.progress != self._progress or not beat.is_waiting:
            self._progress, self._still_since_s = beat.progress, now_s
        is_in_vain = self._waits.is_late(now_s, self._delays.grace_s)
        return replace(beat, still_s=now_s - self._still_since_s, waits_in_vain=is_in_vain)

    def begin(self, now_s: float) -> None:
        """From now on another coordinator is to answer, or the same one again."""
        self._answers.excuse(now_s)

    def note_answer(self, now_s: float, *, decides: bool) -> None:
        """An answer has come, of a coordinator that decides or of one that does not yet."""
        self._answers.observe(now_s)
        if decides:
            self._heard_s = now_s

    def lost_s(self, now_s: float) -> float:
        """Seconds since a coordinator that decides was heard of."""
        return max(0.0, now_s - self._heard_s)

    @property
    def patience_s(self) -> float:
        """For so long an answer may take; on a busy machine longer."""
        return self._answers.deadline_s + self._delays.grace_s

    def left_s(self, now_s: float) -> float:
        """Seconds until the coordinator is lost: silent beyond what is usual; 0 if it is."""
        return max(0.0, self._answers.due_s + self._delays.grace_s - now_s)
