"""How a member that has joined becomes level with the others: its script does what they did; see `backlog`."""

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from ringweave.errors import TrainingError, explain
from ringweave.training.elastic.joining.backlog import Backlog, Begun, Kept
from ringweave.training.elastic.joining.entering import Entrance
from ringweave.training.elastic.kept import Reduction
from ringweave.training.elastic.rows import Commit
from ringweave.training.elastic.seams import Crew
from ringweave.wire.pacing import GivingWay, Pace

_HEAD_START_S = 2.0
"""How long the others' first step with this member may take before the state is read all the same. They have just met
anew, which costs them enough in that step, and what a link can do is seen where it is idle, between two steps."""


class Catching:
    """Of one member, from its first epoch on until it is level. With the session's lock held, but where it says so."""

    def __init__(self, member: str, crew: Crew, backlog: Backlog) -> None:
        self._member, self._crew, self._backlog = member, crew, backlog
        self._replay: Reduction | None = None
        self._ended, self._has_stepped = threading.Event(), threading.Event()
        self._is_hurried = False
        self._pace = GivingWay(
            lambda: 1.0 if self._is_hurried else backlog.num_kept / backlog.most_kept,
            self._ended,
        )
        self._reader: threading.Thread | None = None
        self._is_holding = False
        self.is_loaded = False
        """The state is there, and the script may go on."""
        self.is_counted_on = False
        """It has said in this epoch that it is level: once that counts it has samples in the next step."""

    @property
    def number(self) -> int:
        """The last reduction that the script has done."""
        return self._backlog.number

    def has_room(self) -> bool:
        """Whether one more reduction can be kept; once there was no room, only when this member is level.

        Until then the others wait: a script that is slower than they are would else hold them up in each of their
        steps, and never be level.
        """
        self._is_holding = self._is_holding or self._backlog.num_kept >= self._backlog.most_kept
        return self.is_level or not self._is_holding

    @property
    def is_level(self) -> bool:
        """The script has done all that counts, and waits for the reduction that all others wait for.

        An epoch that has begun meanwhile changes nothing in that, whether the script has been told of it or not: it
        is told when it is woken, which wakes nobody who waits for this.
        """
        return self.is_loaded and not self._backlog.num_kept and self._replay is not None and self._replay.is_whole

    def say_level(self) -> bool:
        """Whether it is level; from now on the others may count on it."""
        self.is_counted_on = self.is_level
        return self.is_counted_on

    @property
    def is_at_border(self) -> bool:
        """The script has drawn no batch whose reduction does not count yet."""
        return self._backlog.num_kept > 0 or self._crew.is_between_steps

    def present(self) -> Reduction:
        """What the script's backward pass is part of: only its shapes count."""
        self._replay = self._replay or Reduction(number=self.number + 1)
        return self._replay

    def nothing(self, number: int) -> Reduction:
        """This member's part in the next reduction."""
        return self._backlog.nothing(number)

    def keep(self, commit: Commit, reduction: Reduction, buffers: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """It counts, and the script does it later; whether that is the last one."""
        self._backlog.keep(commit, reduction, buffers)
        self._has_stepped.set()
        return self._member in commit.level

    def begin(self, begun: Begun) -> None:
        """An epoch begins, for the script after what is kept already."""
        self._is_hurried = Entrance.of(begun.decree).hurried == self._member
        self.is_counted_on = False
        self._backlog.begin(begun)

    def is_behind(self) -> bool:
        """Whether there is a reduction that the script has to do; epochs that began before it begin for it now."""
        while (begun := self._backlog.take_epoch()) is not None:
            enter(self._crew, begun)
        return bool(self._backlog)

    def take(self) -> tuple[Reduction, Kept, bool]:
        """What the script has computed, what came of it, and whether this member is level with that.

        Raises:
            TrainingError: It has other buckets than the others.
        """
        kept, replay, self._replay = self._backlog.take(), self._replay, None
        assert replay is not None, "the script has handed it in"
        own, others = ([(each.numel(), each.dtype) for each in sums] for sums in (replay.sums, kept.sums))
        if own != others:
            do = "Build the model and give prepare the same on all workers"
            raise TrainingError(explain("buckets of this worker's gradients", got=own, expected=f"{others}", do=do))
        self._crew.commit(kept.commit)
        is_last = self._member in kept.commit.level
        if is_last:
            self.is_behind()
        return replay, kept, is_last

    def give_back(self, kept: Kept) -> None:
        """Its sums are taken over."""
        self._backlog.give_back(kept)

    def read(self, pull: Callable[[Pace], None], end: Callable[[Exception | None], None]) -> None:
        """Read the state after the others' first step, or at once if that is urgent, in a thread of its own.

        `end` hears there, without the lock, what came of it.
        """

        def run() -> None:
            if not self._is_hurried:
                self._has_stepped.wait(_HEAD_START_S)
            try:
                pull(self._pace)
            except Exception as error:
                end(error)
            else:
                end(None)

        self._reader = threading.Thread(target=run, name="ringweave reading", daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """What is still to be read is not needed."""
        self._ended.set()
        self._has_stepped.set()

    def wait_stopped(self, timeout_s: float) -> None:
        """Until nothing is read any more; without the lock."""
        if self._reader is not None:
            self._reader.join(timeout_s)


def enter(crew: Crew, begun: Begun) -> None:
    """An epoch begins for the script."""
    followers = Entrance.of(begun.decree).followers
    crew.begin(begun.decree, begun.notes, is_newcomer=begun.is_newcomer, followers=followers)


def redo(replay: Reduction, kept: Kept, *, is_mean: bool) -> None:
    """What was kept becomes what the script's backward pass gives; without the lock."""
    for own, first in kept.buffers:
        own.copy_(first)
    for summed, total in zip(replay.sums, kept.sums, strict=True):
        summed.copy_(total)
    replay.resolve(kept.commit, is_mean=is_mean)
