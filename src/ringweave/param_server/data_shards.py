"""Dispatcher of data shards: all rings take samples from one queue for each epoch, as fast as they are. Pure.

With fixed shares the samples of fast rings would count more often. Here a sample belongs to the ring that takes its
shard, and every sample of an epoch is in exactly one shard. The last shards of an epoch are smaller, so that all
rings end at the same time.

Every push names its samples, so the parameters and their data position always match: samples that are in shards, or
computed and not pushed, are in no position, and are drawn again after a restart.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ringweave.errors import TrainingError

Span = tuple[int, int]
"""(place of the first sample in the order of its epoch, number of consecutive samples)."""
Spans = tuple[Span, ...]
"""Spans of one epoch; those of a position are sorted, and do not touch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """Position of a job in its data."""

    pass_number: int = 0
    """Number of the pass over the data, which distinguishes repeated passes over one epoch."""
    epoch: int = 0
    done: Spans = ()
    """Samples of that epoch whose gradients are applied."""

    @property
    def num_done(self) -> int:
        return sum(count for _, count in self.done)

    def after_push(self, pass_number: int, epoch: int, spans: Iterable[Span]) -> "DataPosition":
        """Return the position after a push of these samples; a late push of a past pass changes nothing."""
        if pass_number < self.pass_number:
            return self
        is_same = (pass_number, epoch) == (self.pass_number, self.epoch)
        done = merge_spans((*(self.done if is_same else ()), *spans))
        return DataPosition(pass_number=pass_number, epoch=epoch, done=done)

    def after_pass(self, pass_number: int, epoch: int) -> "DataPosition":
        """Return the position after the pass over that epoch; samples missing in it stay missing."""
        if pass_number < self.pass_number:
            return self
        return DataPosition(pass_number=pass_number + 1, epoch=epoch + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Point from which a job resumes."""

    train_step: int
    """Train steps of all rings before it."""
    check: str
    """Checksum of the checkpoint."""
    seed: int
    """Seed of the orders of all epochs."""
    position: DataPosition


def merge_spans(spans: Iterable[Span]) -> Spans:
    """Return the same samples, sorted and in as few spans as possible; empty spans are dropped."""
    merged: list[Span] = []
    for first, count in sorted(spans):
        if not count:
            continue
        last_first, last_count = merged[-1] if merged else (0, 0)
        if merged and first <= last_first + last_count:
            merged[-1] = (last_first, max(last_first + last_count, first + count) - last_first)
        else:
            merged.append((first, count))
    return tuple(merged)


def remaining_spans(done: Spans, total: int) -> Spans:
    """Return the samples of an epoch of so many that are not done."""
    found, at = [], 0
    for first, count in (*done, (total, 0)):
        if first > at:
            found.append((at, min(first, total) - at))
        at = max(at, first + count)
    return tuple(span for span in found if span[1] > 0)


def spans_in_epoch(done: Spans, first: int, count: int) -> Spans:
    """Map consecutive samples in the order of the rest of an epoch to spans in the order of the epoch."""
    found, at = [], first
    for gap_first, gap_count in done:
        if gap_first > at:
            here = min(count, gap_first - at)
            found.append((at, here))
            at, count = at + here, count - here
        if not count:
            break
        at += gap_count
    return merge_spans((*found, (at, count)))


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


MAX_SHARD_SPLIT = 4
"""Smallest part of a whole shard at the end of an epoch: every push costs time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataShard:
    """Samples `first` to `first + num_samples - 1` in the order of the epoch; none once the epoch is used up."""

    ring: int
    number: int
    """Number among the ring's shards, from 1."""
    epoch: int
    first: int
    num_samples: int
    ended_epoch: int | None = None
    """Epoch of an aborted pass; no worker computes these samples."""


class ShardDispatcher:
    """Dispatches the samples of every epoch, each once; not thread-safe."""

    def __init__(
        self,
        num_rings: int,
        last: Iterable[DataShard] = (),
        taken: Mapping[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`last` and `taken` are those of another dispatcher, to go on from there; `clock` returns seconds."""
        self._throughput, self._clock = RingThroughput(num_rings), clock
        self._last: list[DataShard | None] = [None] * num_rings
        self._taken: dict[int, int] = dict(taken or {})
        self._requested: dict[int, int] = {}
        """Number of samples that each ring asked for last."""
        self._min_samples: dict[int, int] = {}
        """Smallest shard of each ring."""
        for shard in last:
            self._last[shard.ring] = shard

    @property
    def last(self) -> list[DataShard]:
        """Last shard of each ring that has taken one."""
        return [shard for shard in self._last if shard]

    @property
    def dispatched(self) -> dict[int, int]:
        """Epoch -> samples of it that are dispatched."""
        return dict(self._taken)

    def record_shard(self, shard: DataShard) -> None:
        """Record a shard that another dispatcher has given out, and this one follows; idempotent."""
        if self._last[shard.ring] != shard:
            self._throughput.note_shard(shard.ring, shard.epoch, shard.num_samples, self._clock())
        self._last[shard.ring] = shard
        self._taken[shard.epoch] = max(self._taken.get(shard.epoch, 0), shard.first + shard.num_samples)

    def next_shard(
        self,
        ring: int,
        number: int,
        epoch: int,
        num_samples: int,
        epoch_samples: int,
        min_samples: int = 1,
        ended_epoch: int | None = None,
    ) -> DataShard:
        """Return the ring's next shard; the same again if it asks for the last one again.

        Args:
            ring: Ring that asks.
            number: Number of the shard among the ring's.
            epoch: Epoch of the ring; rings may be in different ones.
            num_samples: Samples that it wants; it gets fewer at the end of the epoch, except if it wants the whole
                epoch.
            epoch_samples: Samples of the epoch.
            min_samples: Minimum for the ring, if so many are left.
            ended_epoch: Epoch of an aborted pass, as in `DataShard`.

        Raises:
            TrainingError: Shards are requested out of order.
        """
        last = self._last[ring]
        if last is not None and last.number == number and last.epoch == epoch:
            return last
        expected = last.number + 1 if last else 1
        if number != expected or num_samples < 1 or (last is not None and epoch < last.epoch):
            raise TrainingError(
                f"data shard of ring {ring}",
                got=(number, epoch, num_samples),
                expected=f"number {expected}, at least one sample, and no epoch that is over",
                do="Iterate over the loader that prepare returned, from one epoch to the next",
            )
        first = self._taken.get(epoch, 0)
        num_left = max(0, epoch_samples - first)
        self._requested[ring] = num_samples
        self._min_samples[ring] = min(num_samples, max(min_samples, -(-num_samples // MAX_SHARD_SPLIT)))
        fitting_samples = num_samples if num_samples >= epoch_samples else self._fitting_samples(ring, epoch, num_left)
        shard = DataShard(
            ring=ring,
            number=number,
            epoch=epoch,
            first=first,
            num_samples=min(fitting_samples, num_left),
            ended_epoch=ended_epoch,
        )
        self._throughput.note_shard(ring, epoch, shard.num_samples, self._clock())
        self._taken[epoch] = first + shard.num_samples
        self._last[ring] = shard
        return shard

    def _fitting_samples(self, ring: int, epoch: int, num_left: int) -> int:
        """Return the ring's part of the rest, once that is less than it wants; 0 where the rest is for others.

        No rest is left that is smaller than any ring's smallest shard. A single ring takes the batches of synchronous
        training.
        """
        requested = self._requested[ring]
        if len(self._last) == 1:
            return requested
        min_samples, smallest = self._min_samples[ring], max(self._min_samples.values())
        part = self._throughput.fair_part(ring, epoch, num_left, self._clock())
        if part is None:
            num_samples = max(-(-requested * num_left // sum(self._requested.values())), min_samples)
        elif part < min(min_samples, num_left) / 2:
            return 0
        else:
            num_samples = math.ceil(max(part, min_samples)) if math.isfinite(part) else requested
        num_samples = min(num_samples, requested, num_left)
        rest = num_left - num_samples
        if rest == 0 or rest >= smallest:
            return num_samples
        return num_left if num_left <= requested else max(min_samples, num_left - smallest)

    def note_push(self, ring: int, num_samples: int) -> None:
        """Note that the ring has computed and pushed so many more samples."""
        self._throughput.note_push(ring, num_samples, self._clock())

    def note_idle(self, ring: int) -> None:
        """Note that the ring takes no more shards of the epoch."""
        self._throughput.note_idle(ring, self._clock())

    def note_away(self, ring: int) -> None:
        """Note that the ring may not take a shard again: the rest is for the others."""
        self._throughput.note_away(ring)
