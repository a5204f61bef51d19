"""When a coordinator or a parameter server that died is started again, and when it is given up. Pure."""

_BY_SIGNAL = 128
"""And its number: the exit code of a shell whose program a signal has ended."""


class Respawns:
    """What happened to one of them so far."""

    def __init__(
        self, *, most_quick: int = 10, quick_s: float = 60.0, killed_s: float = 10.0, longest_delay_s: float = 30.0
    ) -> None:
        """Nothing has happened yet.

        Args:
            most_quick: One that died so often in a row, each time soon, will again: it is given up. That takes two to
                three minutes with these delays, as for a worker (`Restarts`): what a machine lacks for longer somebody
                has to mend.
            quick_s: Who has lived longer was of use, and its deaths before are forgotten.
            killed_s: The same where a signal has ended it: that says nothing of the next one, and while that waits
                members that come or go may have nobody to turn to.
            longest_delay_s: Before one that dies soon, again and again. The first time it is started again at once.
        """
        self._most, self._quick_s, self._killed_s = most_quick, quick_s, killed_s
        self._longest_delay_s = longest_delay_s
        self._quick = 0
        self._begun_s: float | None = None
        self._due_s: float | None = None

    @property
    def has_given_up(self) -> bool:
        """It is not started again."""
        return self._quick >= self._most

    @property
    def num_quick(self) -> int:
        """Deaths in a row, each of them soon."""
        return self._quick

    def note_start(self, now_s: float) -> None:
        """It was started."""
        self._begun_s = now_s

    def note_end(self, now_s: float, exit_code: int) -> bool:
        """It is seen to have died; True, and a death, once for each time that it was started.

        `exit_code` is negative, or above 128 as shells have it, where a signal has ended it.
        """
        if self._begun_s is None:
            return False
        begun_s, self._begun_s = self._begun_s, None
        self.note_death(now_s - begun_s, now_s, was_killed=exit_code < 0 or exit_code > _BY_SIGNAL)
        return True

    def note_death(self, lived_s: float, now_s: float, *, was_killed: bool = False) -> None:
        """It died, or could not be started; called once for each."""
        is_quick = lived_s < (self._killed_s if was_killed else self._quick_s)
        self._quick = self._quick + 1 if is_quick else 1
        delay_s = 0.0 if self._quick == 1 else min(self._longest_delay_s, 2.0 ** (self._quick - 2))
        self._due_s = now_s + delay_s

    def take_due(self, now_s: float) -> bool:
        """It is to be started now; True once for each death."""
        if self._due_s is None or now_s < self._due_s or self.has_given_up:
            return False
        self._due_s = None
        return True
