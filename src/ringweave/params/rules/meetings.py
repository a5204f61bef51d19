"""Where rings meet that have no group among them: the server notes who has come, and what each said. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ringweave.errors import TrainingError, explain

MEETINGS_OF_A_PASS = 2
"""Meetings that follow each: at its end, and when all have taken the same parameters."""
_KEPT = 2
"""Meetings whose answers are kept: a ring asks again for the last one only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What all hear who ask about a meeting."""

    number: int
    said: dict[int, str]
    """Ring -> what it said, or its testament."""


class Meetings:
    """Of all rings of a job, numbered from 1; one thread at a time."""

    def __init__(self, num_rings: int) -> None:
        """Nobody has come to any."""
        self._last = [0] * num_rings
        self._epochs = [0] * num_rings
        self._said: dict[int, dict[int, str]] = {}
        self._answers: dict[int, dict[int, str]] = {}
        self._answered = 0

    def to_words(self) -> dict[str, Any]:
        """All of it, for another server."""
        kept = {"said": self._said, "answers": self._answers}
        words = {name: [[number, sorted(said.items())] for number, said in each.items()] for name, each in kept.items()}
        return {"last": self._last, "epochs": self._epochs, "answered": self._answered, **words}

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> "Meetings":
        """What `to_words` gave."""
        found = cls(len(words["last"]))
        found._last, found._epochs, found._answered = list(words["last"]), list(words["epochs"]), words["answered"]
        found._said, found._answers = (
            {number: dict(said) for number, said in words[name]} for name in ("said", "answers")
        )
        return found

    def place(self, ring: int) -> tuple[int, int]:
        """(meetings of passes that the ring has completed, the epoch that comes next), where somebody begins it again.

        A ring of which nobody is left may have missed passes: it goes through them, and finds them used up.
        """
        last, epoch = self._last[ring], self._epochs[ring]
        completed = last - last % MEETINGS_OF_A_PASS
        return completed, epoch + 1 if last and last == completed else epoch

    def come(self, ring: int, number: int, said: str, epoch: int = 0) -> None:
        """The ring has come, at the end of a pass that was that epoch.

        Saying it again, as a new representative does, changes nothing.

        Raises:
            TrainingError: It has left one out.
        """
        following = self._last[ring] + 1
        if number > following:
            expected = f"{following}, the next one, or one before it again"
            do = "Take the place of the ring anew"
            raise TrainingError(explain(f"meeting of ring {ring}", got=number, expected=expected, do=do))
        if number < following:
            return
        self._last[ring], self._epochs[ring] = number, epoch
        self._said.setdefault(number, {}).setdefault(ring, said)

    def answer(
        self, number: int, gone: Collection[int], testaments: Mapping[int, str] | None = None
    ) -> dict[int, str] | None:
        """What each ring said, once all have come but for those that are gone; the same for all who ask.

        For those that are gone their testaments are in it. Of a meeting that is long over nothing is known any more.
        """
        if number <= self._answered:
            return self._answers.get(number, {})
        if any(last < number and ring not in gone for ring, last in enumerate(self._last)):
            return None
        left = {ring: said for ring, said in (testaments or {}).items() if self._last[ring] < number and said}
        self.settle(Answer(number=number, said={**left, **self._said.get(number, {})}))
        return self._answers[number]

    def settle(self, answer: Answer) -> None:
        """That is what all hear who ask about that meeting: here, or at another server, which this one follows."""
        if answer.number in self._answers or answer.number <= self._answered - _KEPT:
            return
        self._answered, self._answers[answer.number] = max(answer.number, self._answered), dict(answer.said)
        for old in [each for each in (*self._answers, *self._said) if each <= self._answered - _KEPT]:
            self._answers.pop(old, None)
            self._said.pop(old, None)
        self._said.pop(answer.number, None)
