"""Which samples of the data are in the server's parameters: what a training goes on from that begins again. Pure.

Every push says which samples it is of. So the parameters after it and their position are the same moment's, whatever
rings have under way: samples that are on tickets, or computed and not pushed, are in no position, and are drawn again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[int, int]
"""(place of the first sample in the order of its epoch, how many follow each other with it)."""
Spans = tuple[Span, ...]
"""Of one epoch; those of a position are in order, and do not touch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where the data of a job stand."""

    pass_number: int = 0
    """Of the pass over the data, by which rings tell it from another pass over the same epoch."""
    epoch: int = 0
    done: Spans = ()
    """Samples of that epoch whose gradients count."""

    @property
    def num_done(self) -> int:
        """How many."""
        return sum(count for _, count in self.done)

    def pushed(self, pass_number: int, epoch: int, spans: Iterable[Span]) -> "Position":
        """After a push of these samples. One of a pass that is over, by a ring that comes late, is in no epoch's."""
        if pass_number < self.pass_number:
            return self
        is_same = (pass_number, epoch) == (self.pass_number, self.epoch)
        done = united((*(self.done if is_same else ()), *spans))
        return Position(pass_number=pass_number, epoch=epoch, done=done)

    def ended(self, pass_number: int, epoch: int) -> "Position":
        """The pass is over, which was of that epoch: what is not in it never will be."""
        if pass_number < self.pass_number:
            return self
        return Position(pass_number=pass_number + 1, epoch=epoch + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What a job goes on from."""

    train_step: int
    """After so many of all rings."""
    check: str
    """Of the checkpoint."""
    seed: int
    """Of the orders of all epochs."""
    position: Position


def united(spans: Iterable[Span]) -> Spans:
    """The same samples in order, in as few spans as there can be; empty ones are left out."""
    found: list[Span] = []
    for first, count in sorted(spans):
        if not count:
            continue
        last_first, last_count = found[-1] if found else (0, 0)
        if found and first <= last_first + last_count:
            found[-1] = (last_first, max(last_first + last_count, first + count) - last_first)
        else:
            found.append((first, count))
    return tuple(found)


def left(done: Spans, total: int) -> Spans:
    """The samples of an epoch of so many that are not done."""
    found, at = [], 0
    for first, count in (*done, (total, 0)):
        if first > at:
            found.append((at, min(first, total) - at))
        at = max(at, first + count)
    return tuple(span for span in found if span[1] > 0)


def lifted(done: Spans, first: int, count: int) -> Spans:
    """Where samples lie in the order of the epoch that follow each other in the order of what was left of it."""
    found, at = [], first
    for gap_first, gap_count in done:
        if gap_first > at:
            here = min(count, gap_first - at)
            found.append((at, here))
            at, count = at + here, count - here
        if not count:
            break
        at += gap_count
    return united((*found, (at, count)))
