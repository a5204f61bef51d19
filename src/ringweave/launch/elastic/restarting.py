"""Which worker of an elastic run is started again, and when. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ringweave.launch.causes import Death

LEFT_CODE = 143
"""128 + SIGTERM: what a worker ends with that has left on request."""
_NO_MEMBER = "MembershipError: this worker is no member"
_OVER = "MembershipError: job is over"

Verdict = Literal["again", "rest", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a worker ended, as far as it matters here."""

    death: Death | None
    """None if it ended well."""
    lived_s: float

    @property
    def is_finished(self) -> bool:
        """It has done all there was to do."""
        return self.death is None

    @property
    def has_left(self) -> bool:
        """It was asked to go, and has gone."""
        return self.death is not None and self.death.exit.exit_code == LEFT_CODE


class Restarts:
    """Counts what happened to each slot and says what comes next."""

    def __init__(self, *, delay_s: float = 1.0, most_own_failures: int = 3, longest_delay_s: float = 30.0) -> None:
        """A worker that fails by itself so often in a row will fail again; who is killed may come back for ever."""
        self._delay_s, self._longest_delay_s = delay_s, longest_delay_s
        self._most = most_own_failures
        self._own_failures: dict[int, int] = {}
        self._quick: dict[int, int] = {}
        self._due_s: dict[int, float] = {}
        self._is_over = False

    @property
    def pending(self) -> Mapping[int, float]:
        """Slot -> when it is to be started again."""
        return self._due_s

    def decide(self, slot: int, ended: Ended, now_s: float) -> Verdict:
        """What becomes of a slot whose worker has ended: started again, left at rest, or given up as failing."""
        if ended.is_finished:
            self._is_over = True  # the training is at its end: who starts now comes too late
            self._due_s.clear()
            return "rest"
        assert ended.death is not None
        said = ended.death.exception or ""
        if ended.has_left or self._is_over or _OVER in said:
            return "rest"
        if self._fails_by_itself(ended.death, said):
            self._own_failures[slot] = self._own_failures.get(slot, 0) + 1
            if self._own_failures[slot] >= self._most:
                return "fail"
        else:
            self._own_failures[slot] = 0
        self._quick[slot] = self._quick.get(slot, 0) + 1 if ended.lived_s < 2 * self._longest_delay_s else 0
        delay_s = min(self._longest_delay_s, self._delay_s * 2 ** min(self._quick[slot], 10) / 2)
        self._due_s[slot] = now_s + max(self._delay_s, delay_s)
        return "again"

    def take_due(self, now_s: float) -> Sequence[int]:
        """Slots that are to be started now; each once."""
        due = sorted(slot for slot, at_s in self._due_s.items() if at_s <= now_s)
        for slot in due:
            del self._due_s[slot]
        return due

    @staticmethod
    def _fails_by_itself(death: Death, said: str) -> bool:
        return death.exit.signal_name is None and _NO_MEMBER not in said
