"""Pieces that go from rank to rank inside a node: shown once in the sender's memory, read from there by each reader.

The places are those of the program's layout: what is shown where something was before waits until all of its readers
are through, and what is sent to the same rank after it waits as well.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ringweave.schedules.programs.staging import NO_STAGE, Stage
from ringweave.sim.events.streams import Told

_NOT_YET, _COPYING = -1.0, -2.0


class Arena:
    """What one rank shows to the others of its node."""

    def __init__(self, stages: Sequence[Stage], show: Callable[[float, Told], None]) -> None:
        """`show` takes the bytes of a piece that is copied in from now on, and tells when that is done."""
        self._stages = stages
        self._show = show
        self._shown_s = [_NOT_YET] * len(stages)
        self._unread = [stage.num_readers for stage in stages]
        self._lines: dict[int, Line] = {}

    def line(self, reader: int) -> "Line":
        """What goes to one reader."""
        return self._lines.setdefault(reader, Line())

    def send(self, reader: int, stage: int, num_bytes: float) -> int:
        """Show a piece as soon as its place is free; its number among those for this reader."""
        line = self.line(reader)
        line.waiting.append((stage, num_bytes))
        self._go_on(line)
        return len(line.arrivals) + len(line.waiting) - 1

    def read(self, stage: int) -> None:
        """A reader is through with what is shown there."""
        self._unread[stage] -= 1
        if not self._unread[stage] and self._stages[stage].is_awaited:
            for line in self._lines.values():
                self._go_on(line)

    def _go_on(self, line: "Line") -> None:
        while line.waiting:
            stage, num_bytes = line.waiting[0]
            after = self._stages[stage].after
            if self._shown_s[stage] == _NOT_YET:
                if after != NO_STAGE and self._unread[after]:
                    return
                self._shown_s[stage] = _COPYING
                self._show(num_bytes, partial(self._is_shown, stage, line))
                return
            if self._shown_s[stage] == _COPYING:
                return
            line.waiting.popleft()
            line.arrive(stage, self._shown_s[stage])

    def _is_shown(self, stage: int, line: "Line", time_s: float) -> None:
        self._shown_s[stage] = time_s
        for each in self._lines.values() if self._stages[stage].num_readers > 1 else [line]:
            self._go_on(each)


class Line:
    """Pieces for one reader, in order."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, float]] = deque()
        """Stage and bytes of what has no place yet."""
        self.arrivals: list[float] = []
        """When each piece can be read."""
        self.stages: list[int] = []
        """Where each is shown."""
        self._awaited: dict[int, list[Told]] = {}

    def when_there(self, index: int, tell: Told) -> None:
        """Tell when piece number `index` can be read; at once if that is known already."""
        if index < len(self.arrivals):
            tell(self.arrivals[index])
        else:
            self._awaited.setdefault(index, []).append(tell)

    def arrive(self, stage: int, time_s: float) -> None:
        """The next piece can be read at that time."""
        index = len(self.arrivals)
        self.arrivals.append(time_s)
        self.stages.append(stage)
        for tell in self._awaited.pop(index, ()):
            tell(time_s)
