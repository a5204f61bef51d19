"""What a member knows of its own training: whether it gets on, computes, waits or hangs, and what is usual of it."""

from dataclasses import replace

from ringweave.membership.rules.rhythm import BEAT_S, STANDSTILL, WAITS, Rhythm
from ringweave.membership.rules.signs import Beat

_IDLE_FRACTION = 0.1
"""Of a processor: below it a process does nothing but beat."""
_STOPPED_S = 0.5
"""Between two looks: more means that this process itself was stopped or starved, and its training with it."""
_FIRST_WAIT_S = 600.0
"""So long a member waits for the others in any case as long as it does not know what is usual."""


class Progress:
    """Learns from the signs of the thread that trains. With another coordinator nothing has to be learnt anew."""

    def __init__(self, now_s: float) -> None:
        self._steps, self._waits = Rhythm(STANDSTILL, now_s), Rhythm(WAITS, now_s, _FIRST_WAIT_S)
        self._last, self._looked_s = Beat(progress=-1), now_s
        self._still_since_s = now_s

    def look(self, beat: Beat, now_s: float, grace_s: float) -> Beat:
        """The next beat, with what it tells of what is usual; a busy machine's process gets this grace."""
        passed_s = now_s - self._looked_s
        if passed_s > _STOPPED_S:
            self._steps.shift(passed_s - BEAT_S)
            self._waits.shift(passed_s - BEAT_S)
        gets_on = beat.progress != self._last.progress
        computes = beat.cpu_s - self._last.cpu_s > _IDLE_FRACTION * passed_s
        if gets_on:
            self._steps.observe(now_s)
        elif beat.is_waiting or computes:
            self._steps.excuse(now_s)
        if beat.num_counted != self._last.num_counted:
            self._waits.observe(now_s)
        elif gets_on or not beat.is_waiting or beat.num_epochs != self._last.num_epochs:
            self._waits.excuse(now_s)
        if gets_on or not beat.is_waiting:
            self._still_since_s = now_s
        number = self._last.number + 1
        self._last, self._looked_s = replace(beat, number=number), now_s
        return replace(
            self._last,
            still_s=now_s - self._still_since_s,
            stuck_s=0.0 if beat.is_waiting else self._steps.late_s(now_s, grace_s),
            waits_in_vain=beat.is_waiting and self._waits.is_late(now_s, grace_s),
        )
