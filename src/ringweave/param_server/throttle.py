"""Throughput and link speed of each ring, measured from its shards and pushes. Pure."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

_NUM_RATE_PUSHES = 4
"""Rounds that give a ring's rate: few, since speeds change."""
_NUM_PASS_ENDS = 3
"""Ends of passes that the drain time is averaged over."""


@dataclass(slots=True)
class _RingRate:
    epoch: int | None = None
    """Epoch of its pass; None while it is idle, or has learnt that no samples are left for it."""
    taken: int = 0
    """Samples that it has taken and not pushed."""
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_NUM_RATE_PUSHES + 1))
    """(time, samples) of its last pushes in this pass; the start of the pass counts as one of none."""
    samples_per_s: float = 0.0
    last_shard: tuple[float, int] | None = None
    """(time, samples) of its last shard."""
    drain_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_PASS_ENDS))

    @property
    def drain_s(self) -> float:
        """Seconds from its last sample until it is idle: the last push, and earlier ones in flight."""
        return sum(self.drain_times_s) / len(self.drain_times_s) if self.drain_times_s else 0.0

    def free_s(self, now_s: float) -> float:
        """Return the estimated time at which it will have pushed its taken samples."""
        return max(now_s, self.marks[-1][0] + self.taken / self.samples_per_s)


class RingThroughput:
    """Throughput of each ring of a job, measured from its pushes; not thread-safe."""

    def __init__(self, num_rings: int) -> None:
        """Start with nothing known of any ring."""
        self._rings = [_RingRate() for _ in range(num_rings)]

    def note_shard(self, ring: int, epoch: int, num_samples: int, now_s: float) -> None:
        """Note a shard of so many samples of that epoch; an empty one ends the ring's pass."""
        state = self._rings[ring]
        if not num_samples:
            state.epoch = None
            return
        if state.epoch != epoch:
            state.epoch, state.taken = epoch, 0
            state.marks.clear()
            state.marks.append((now_s, 0))
        state.taken += num_samples
        state.last_shard = (now_s, num_samples)

    def note_push(self, ring: int, num_samples: int, now_s: float) -> None:
        state = self._rings[ring]
        state.taken = max(0, state.taken - num_samples)
        if not state.marks:  # the pass began at another server
            state.marks.append((now_s, 0))
            return
        state.marks.append((now_s, num_samples))
        seconds = now_s - state.marks[0][0]
        if seconds > 0:
            state.samples_per_s = sum(samples for _, samples in list(state.marks)[1:]) / seconds

    def note_idle(self, ring: int, now_s: float) -> None:
        """Note that the ring is idle until it takes a shard of another epoch."""
        state = self._rings[ring]
        if state.last_shard and state.samples_per_s:
            took_s, samples = state.last_shard
            state.drain_times_s.append(max(0.0, now_s - took_s - samples / state.samples_per_s))
        elif state.drain_times_s:  # it got nothing in this pass: try it again in the next
            state.drain_times_s.popleft()
        state.epoch, state.last_shard = None, None

    def note_away(self, ring: int) -> None:
        """Note that the ring has lost a member: it counts again from its next shard."""
        self._rings[ring].epoch = None

    def fair_part(self, ring: int, epoch: int, num_left: int, now_s: float) -> float | None:
        """Return the samples of the rest for the ring, so that all rings end at once; None if that is unknown.

        Only other rings count that will ask again: they have taken samples of this epoch, and have not learnt that
        no more are left. Without another ring the result is infinite.
        """
        own = self._rings[ring]
        others = [each for each in self._rings if each is not own and each.epoch == epoch]
        if not others:
            return math.inf
        if not all(each.samples_per_s for each in (own, *others)):
            return None
        starts = [(now_s + own.drain_s, own.samples_per_s)]
        starts += [(each.free_s(now_s) + each.drain_s, each.samples_per_s) for each in others]
        return max(0.0, _finish_time_s(starts, num_left) - starts[0][0]) * own.samples_per_s


def _finish_time_s(starts: list[tuple[float, float]], num_left: float) -> float:
    """Return the time when so many samples are done by rings with these start times and rates."""
    speed, done, at_s = 0.0, 0.0, 0.0
    for begin_s, samples_per_s in sorted(starts):
        if speed and done + speed * (begin_s - at_s) >= num_left:
            break
        done, at_s = done + speed * (begin_s - at_s), begin_s
        speed += samples_per_s
    return at_s + (num_left - done) / speed


_SLOW_FACTOR = 3.0
"""A ring is slow at so many times the median of all rings."""
_NUM_RECENT_PUSHES = 3
_MIN_PUSHES = 2
"""Pushes that are considered, and that are needed. One push takes long when others share the link; on a slow link all
do, so the shortest of them counts."""
_STALLED_PUSH_FACTOR = 5.0
_MIN_PUSH_TIMEOUT_S = 2.0
_FIRST_PUSH_TIMEOUT_S = 10.0
"""A push that takes so many times the usual, and at least the minimum, has stalled; the last value applies while
nothing is known."""


class LinkSpeed:
    """Link speed of each ring, by the durations of its last pushes."""

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        self._durations_s: dict[int, deque[float]] = {}
        self.push_timeout_s = _FIRST_PUSH_TIMEOUT_S
        """Timeout after which others do not wait for a push any more; any thread may read it."""

    def push_began(self, ring: int, now_s: float) -> None:
        """Note the first bytes of a push."""
        self._begun_s[ring] = now_s

    def push_ended(self, ring: int, now_s: float) -> None:
        """Note the last bytes of a push."""
        begun_s = self._begun_s.pop(ring, None)
        if begun_s is not None:
            self._durations_s.setdefault(ring, deque(maxlen=_NUM_RECENT_PUSHES)).append(now_s - begun_s)
            usual_s = statistics.median_high(min(took_s) for took_s in self._durations_s.values())
            self.push_timeout_s = max(_MIN_PUSH_TIMEOUT_S, _STALLED_PUSH_FACTOR * usual_s)

    def is_slow(self, ring: int) -> bool:
        """Return whether its pushes take much longer than those of most rings; of two rings the lower median counts.

        The shortest of its own pushes is compared with the median of each other ring, not with their shortest: a push
        that waited for its turn has mostly arrived meanwhile, so that its rest may take no time at all.
        """
        known = {each: took_s for each, took_s in self._durations_s.items() if len(took_s) >= _MIN_PUSHES}
        usual_s = [statistics.median_low(took_s) for took_s in known.values()]
        return ring in known and min(known[ring]) > _SLOW_FACTOR * statistics.median_low(usual_s)
