"""A member's side of silence: whether its coordinator still answers."""

from ringweave.membership.rules.progress import Progress
from ringweave.membership.rules.rhythm import ANSWERS, BEAT_S, Delays, Rhythm
from ringweave.membership.rules.signs import Beat


class Contact:
    """Learns from answers to heartbeats when the next one is overdue; who is late itself blames nobody."""

    def __init__(self, now_s: float) -> None:
        self._answers, self._delays = Rhythm(ANSWERS, now_s), Delays(now_s, BEAT_S)
        self._progress = Progress(now_s)
        self._heard_s = now_s
        self._is_starting = False

    def look(self, beat: Beat, now_s: float) -> Beat:
        """Note how late this process looks, and what it gets done; its beat, with what follows from that."""
        if self._is_starting and not beat.is_starting:
            self._answers.forget()
            self._delays.forget()
        self._delays.observe(now_s)  # how late this look is counts, whatever is forgotten
        self._is_starting = beat.is_starting
        return self._progress.look(beat, now_s, self._delays.grace_s)

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
