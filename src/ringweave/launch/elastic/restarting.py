"""Which worker of an elastic run is started again, and when. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ringweave.launch.causes import Death
from ringweave.membership.rules import reasons

LEFT_CODE = 143
"""128 + SIGTERM: what a worker ends with that has left on request."""
MEMBERSHIP = "MembershipError: "
"""Begins what a script hears of its membership."""
OVER = f"{MEMBERSHIP}job is over"
ALL_DONE = f"{OVER}: {reasons.ALL_DONE}"
"""Who comes when the others have finished hears this."""
NOBODY_DECIDES = f"{MEMBERSHIP}this worker is no member any more: no coordinator within"
_NO_MEMBER = f"{MEMBERSHIP}this worker is no member"

Verdict = Literal["again", "rest", "fail", "give up"]
_NOBODY_ELSE: Mapping[int, bool] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a worker ended, as far as it matters here."""

    death: Death | None
    """None if it ended well."""
    lived_s: float
    was_member: bool = True
    """It came so far that it was a member of its job, if only for a moment."""
    has_trained: bool = True
    """It came so far that it had part in a train step of its job."""

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

    def __init__(
        self,
        *,
        delay_s: float = 1.0,
        most_own_failures: int = 3,
        most_fruitless: int = 10,
        longest_delay_s: float = 30.0,
        useful_s: float = 60.0,
        worthy_s: float = 20.0,
    ) -> None:
        """Nothing has happened yet.

        Args:
            delay_s: Before a worker is started again.
            most_own_failures: A worker that fails by itself so often in a row will fail again: its device is broken,
                for all that is known, since a mistake in the script ends the others as well. It is given up.
            most_fruitless: One that dies so often in a row before it is a member will never be one, whatever ends it:
                it is given up, and the others go on. Two to three minutes with these delays: what a machine lacks for
                longer somebody has to mend. Who is killed later than that may come back for ever.
            longest_delay_s: Before one that dies soon, again and again.
            useful_s: Who has trained and lived for so long was of use: failures before are none in a row with its own.
            worthy_s: Who has trained and lived for so long has not died soon: it was worth its start, and that of the
                next one does not wait for longer than the first time.
        """
        self._delay_s, self._longest_delay_s = delay_s, longest_delay_s
        self._useful_s, self._worthy_s = useful_s, worthy_s
        self._most, self._most_fruitless = most_own_failures, most_fruitless
        self._own_failures: dict[int, int] = {}
        self._fruitless: dict[int, int] = {}
        self._gone: set[int] = set()
        self._quick: dict[int, int] = {}
        self._due_s: dict[int, float] = {}
        self._is_over = False

    @property
    def pending(self) -> Mapping[int, float]:
        """Slot -> when it is to be started again."""
        return self._due_s

    def decide(self, slot: int, ended: Ended, now_s: float, others: Mapping[int, bool] = _NOBODY_ELSE) -> Verdict:
        """What becomes of a slot whose worker has ended.

        Args:
            slot: Its number.
            ended: How.
            now_s: Seconds on the clock of `take_due`.
            others: The other slots -> a worker runs there that trains: it has not met a mistake in the script yet.

        Returns:
            It is started again, left at rest, given up while the others go on, or the run fails with it.
        """
        if ended.is_finished:
            self._is_over = True  # the training is at its end: who starts now comes too late
            self._due_s.clear()
            return "rest"
        assert ended.death is not None
        said = ended.death.exception or ""
        if OVER in said:
            self._is_over = True  # for all: nobody who starts now is let in
            self._due_s.clear()
        if ended.has_left or self._is_over:
            self._gone.add(slot)
            return "rest"
        is_own = self._fails_by_itself(ended.death, said)
        before = 0 if ended.has_trained and ended.lived_s >= self._useful_s else self._own_failures.get(slot, 0)
        self._own_failures[slot] = before + 1 if is_own else 0
        if is_own and self._fail_all(others):
            return "fail"
        self._fruitless[slot] = 0 if ended.was_member else self._fruitless.get(slot, 0) + 1
        soon_s = self._worthy_s if ended.has_trained else 2 * self._longest_delay_s
        return self._begin_later(slot, now_s, is_soon=ended.lived_s < soon_s)

    def note_unstarted(self, slot: int, now_s: float) -> Verdict:
        """A slot that was due could not be started; called in the place of `decide`, with the same meaning.

        It counts as a worker that died at once: what the machine lacks may be there in a moment, or never.
        """
        self._fruitless[slot] = self._fruitless.get(slot, 0) + 1
        return self._begin_later(slot, now_s, is_soon=True)

    def _begin_later(self, slot: int, now_s: float, *, is_soon: bool) -> Verdict:
        if self._own_failures.get(slot, 0) >= self._most or self._fruitless[slot] >= self._most_fruitless:
            self._gone.add(slot)
            return "give up"
        self._quick[slot] = self._quick.get(slot, 0) + 1 if is_soon else 0
        delay_s = min(self._longest_delay_s, self._delay_s * 2 ** min(self._quick[slot], 10) / 2)
        self._due_s[slot] = now_s + max(self._delay_s, delay_s)
        return "again"

    def _fail_all(self, others: Mapping[int, bool]) -> bool:
        """Nobody trains any more, and whoever may come back has failed by itself too."""
        return not any(others.values()) and all(self._own_failures.get(each) or each in self._gone for each in others)

    def why_given_up(self, slot: int) -> str:
        """What a slot that was given up has done time after time, in words."""
        num_own = self._own_failures.get(slot, 0)
        if num_own >= self._most:
            return f"{num_own} times in a row it has failed by itself"
        return "time after time it has died before it could join the others"

    @property
    def is_over(self) -> bool:
        """Nobody is started any more."""
        return self._is_over

    def forget(self, slot: int) -> None:
        """What happened to a slot so far counts no more, and nothing of it is due."""
        for kept in (self._own_failures, self._fruitless, self._quick, self._due_s):
            kept.pop(slot, None)
        self._gone.discard(slot)

    def begin(self, slot: int, now_s: float) -> None:
        """Have a slot started at once, as if nothing had ever happened to it."""
        self.forget(slot)
        self._due_s[slot] = now_s

    def take_due(self, now_s: float) -> Sequence[int]:
        """Slots that are to be started now; each once."""
        due = sorted(slot for slot, at_s in self._due_s.items() if at_s <= now_s)
        for slot in due:
            del self._due_s[slot]
        return due

    @staticmethod
    def _fails_by_itself(death: Death, said: str) -> bool:
        return death.exit.signal_name is None and _NO_MEMBER not in said


class Attempts:
    """Whether all workers of a run are started again together, where one fails before any is a member of a job."""

    def __init__(self, *, most_own_failures: int = 3, most_quick: int = 10, quick_s: float = 60.0) -> None:
        """No attempt has ended yet.

        Args:
            most_own_failures: Attempts that ended with an exception of the script's own: the next one would too.
            most_quick: Attempts in a row, each over within `quick_s`, that were ended by a signal: so would the next.
            quick_s: Who has lived longer has done something; a script without `prepare` does not say what.
        """
        self._most_own, self._most_quick, self._quick_s = most_own_failures, most_quick, quick_s
        self._own_failures = self._quick = 0

    def why_no_other(self, first: Death, lived_s: float) -> str:
        """Why there is no use in another attempt, in words; empty where it is to be tried.

        Args:
            first: The first cause of the end of the one that is over.
            lived_s: How long that one took.
        """
        self._own_failures += first.exit.signal_name is None
        self._quick = self._quick + 1 if lived_s < self._quick_s else 0
        if self._own_failures >= self._most_own:
            return f"{self._own_failures} attempts have ended with an exception of the script's own"
        if self._quick >= self._most_quick:
            return f"{self._quick} attempts in a row were over within {self._quick_s:g} s each"
        return ""
