"""Where the ranks' own work is done: a rank keeps its processor until it has to wait, as a thread does."""

from collections import deque

from ringweave.sim.events.clock import Action, Clock


class OwnProcessors:
    """Each rank has one for itself."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def take(self, begin: Action) -> bool:
        """Whether there is one at once; else `begin` is called when there is."""
        return True

    def give_back(self) -> None:
        """Of what was taken."""

    def work_beside(self, seconds: float, done: Action) -> None:
        """Work that the rank does not wait for."""
        self._clock.at(self._clock.now_s + seconds, done)


class SharedProcessors:
    """All ranks share a few: who asks first gets one first, and keeps it until it gives it back."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock, self._num_free = clock, count
        self._waiting: deque[Action] = deque()

    def take(self, begin: Action) -> bool:
        """Whether there is one at once; else `begin` is called when there is."""
        if self._num_free:
            self._num_free -= 1
            return True
        self._waiting.append(begin)
        return False

    def give_back(self) -> None:
        """Of what was taken: whoever waits longest has it next."""
        if self._waiting:
            self._clock.at(self._clock.now_s, self._waiting.popleft())
        else:
            self._num_free += 1

    def work_beside(self, seconds: float, done: Action) -> None:
        """Work that the rank does not wait for, on a processor of its own."""

        def end() -> None:
            self.give_back()
            done()

        def begin() -> None:
            self._clock.at(self._clock.now_s + seconds, end)

        if self.take(begin):
            begin()
