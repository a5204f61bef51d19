"""How fast each ring gets on, and so what it should still take of an epoch that is about to end.

At the end of an epoch all rings meet. Who begins with a ticket that it finishes long after the others lets all of them
wait; who has a slow link needs time even after its last sample, until its last push has arrived. So what is left is
given out such that all rings come to rest at the same time, and a ring that could not be in time gets nothing more.
"""

import math
from collections import deque
from dataclasses import dataclass, field

_LATEST = 4
"""Rounds that a ring's pace is read off: few, since speeds change."""
_LATEST_ENDS = 3
"""Ends of passes that its lingering is the mean of."""


@dataclass(slots=True)
class _Ring:
    epoch: int | None = None
    """The pass that it is in; None while it rests, or knows that there is nothing more for it."""
    taken: int = 0
    """Samples that it has taken and not pushed."""
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_LATEST + 1))
    """(when, samples) of its last pushes in this pass, the begin of the pass as one of none."""
    samples_per_s: float = 0.0
    last: tuple[float, int] | None = None
    """When it took its last ticket, and how many samples are on it."""
    lingered_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST_ENDS))

    @property
    def linger_s(self) -> float:
        """Seconds from its last sample until it rests: the last push, and what was under way before it."""
        return sum(self.lingered_s) / len(self.lingered_s) if self.lingered_s else 0.0

    def free_s(self, now_s: float) -> float:
        """When it will probably have pushed what it has taken."""
        return max(now_s, self.marks[-1][0] + self.taken / self.samples_per_s)


class Pace:
    """Knows the pace of each ring of a job by its pushes; one thread at a time."""

    def __init__(self, num_rings: int) -> None:
        """Nothing is known of any ring."""
        self._rings = [_Ring() for _ in range(num_rings)]

    def take(self, ring: int, epoch: int, num_samples: int, now_s: float) -> None:
        """The ring has a ticket of so many samples of that epoch; none ends its pass."""
        state = self._rings[ring]
        if not num_samples:
            state.epoch = None
            return
        if state.epoch != epoch:
            state.epoch, state.taken = epoch, 0
            state.marks.clear()
            state.marks.append((now_s, 0))
        state.taken += num_samples
        state.last = (now_s, num_samples)

    def push(self, ring: int, num_samples: int, now_s: float) -> None:
        """A push of so many samples has come."""
        state = self._rings[ring]
        state.taken = max(0, state.taken - num_samples)
        if not state.marks:  # it goes on in a pass that another server has seen the begin of
            state.marks.append((now_s, 0))
            return
        state.marks.append((now_s, num_samples))
        seconds = now_s - state.marks[0][0]
        if seconds > 0:
            state.samples_per_s = sum(samples for _, samples in list(state.marks)[1:]) / seconds

    def rest(self, ring: int, now_s: float) -> None:
        """The ring computes nothing until it takes a ticket of another epoch."""
        state = self._rings[ring]
        if state.last and state.samples_per_s:
            took_s, samples = state.last
            state.lingered_s.append(max(0.0, now_s - took_s - samples / state.samples_per_s))
        elif state.lingered_s:  # it was given nothing in this pass: it shall be tried again
            state.lingered_s.popleft()
        state.epoch, state.last = None, None

    def away(self, ring: int) -> None:
        """The ring has lost a member: it is counted in again with its next ticket."""
        self._rings[ring].epoch = None

    def part(self, ring: int, epoch: int, left: int, now_s: float) -> float | None:
        """What the ring should still take of what is left, for all to come to rest at once; None if that is not known.

        Only rings count beside it that will ask again: they have taken samples of this epoch, and nobody has told them
        that there are no more. Where there is no other one, there is no end to what the ring should take.
        """
        own = self._rings[ring]
        others = [each for each in self._rings if each is not own and each.epoch == epoch]
        if not others:
            return math.inf
        if not all(each.samples_per_s for each in (own, *others)):
            return None
        starts = [(now_s + own.linger_s, own.samples_per_s)]
        starts += [(each.free_s(now_s) + each.linger_s, each.samples_per_s) for each in others]
        return max(0.0, _end_s(starts, left) - starts[0][0]) * own.samples_per_s


def _end_s(starts: list[tuple[float, float]], left: float) -> float:
    """When so many samples are done by those who begin at these times at these rates."""
    speed, done, at_s = 0.0, 0.0, 0.0
    for begin_s, samples_per_s in sorted(starts):
        if speed and done + speed * (begin_s - at_s) >= left:
            break
        done, at_s = done + speed * (begin_s - at_s), begin_s
        speed += samples_per_s
    return at_s + (left - done) / speed
