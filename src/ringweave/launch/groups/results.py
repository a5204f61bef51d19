"""How far the workers of a round are, and who is a member of an elastic job, from their event log as it grows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave import telemetry
from ringweave.membership.rules.reasons import FINISHED
from ringweave.telemetry import Event

_KINDS = (b'"iterations_done"', b'"epoch_begun"', b'"member_lost"', b'"member_back"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A node's own iteration result, and what is known of the membership of an elastic job."""

    iterations: int | None = None
    """Training steps done; None where the script reports none."""
    last_loss: float | None = None
    """The loss of the last one; None likewise."""
    members: tuple[str, ...] = ()
    """Names of this node's workers as members, `RANK.LIFE`; none where the job is not elastic."""
    epoch: tuple[int, int] = (0, 0)
    """Term and number of the newest epoch that this node's coordinator has told of; zeros where it has told of none."""
    out: tuple[str, ...] = ()
    """Who was a member before, and is none in that epoch though it has not finished, as far as that is known here."""


class Results:
    """Reads what was appended to the event log since the last look, and no more."""

    def __init__(self, path: Path, members: Sequence[str] = ()) -> None:
        """`members` are the names of this node's workers, if the job is elastic."""
        self._lines = telemetry.Lines(path)
        self._result = Result(members=tuple(members))
        self._known: set[str] = set()
        self._present: set[str] = set()
        self._finished: set[str] = set()
        self._lost: set[str] = set()

    def look(self) -> Result:
        """The newest result; returns at once."""
        for line in self._lines.new():
            event = telemetry.parse(line) if any(kind in line for kind in _KINDS) else None
            if event is not None:
                self._take(event)
        return self._result

    def _take(self, event: Event) -> None:
        try:
            if event["kind"] == "iterations_done":
                self._result = replace(self._result, iterations=event["iterations"], last_loss=event["loss"])
            elif event["kind"] == "epoch_begun":
                self._begin_epoch(event)
            elif event["kind"] == "member_back" and event["term"] >= self._result.epoch[0]:
                self._lost.discard(event["member"])
                self._result = replace(self._result, out=self._out())
            elif event["kind"] == "member_lost":
                (self._finished if event["reason"] == FINISHED else self._lost).add(event["member"])
                self._result = replace(self._result, out=self._out())
        except (KeyError, TypeError):  # somebody else's line
            return

    def _begin_epoch(self, event: Event) -> None:
        epoch = (event["term"], event["number"])
        if epoch < self._result.epoch:
            return
        self._present = set(event["members"])
        self._known |= self._present
        self._result = replace(self._result, epoch=epoch)
        self._result = replace(self._result, out=self._out())

    def _out(self) -> tuple[str, ...]:
        """Those whom an epoch began without. Where nobody is left to begin one, those that were lost before the end."""
        gone = self._known - self._present
        if self._present <= self._lost | self._finished:
            gone |= self._lost
        slots = {member.partition(".")[0] for member in self._present - self._lost}
        return tuple(sorted(each for each in gone - self._finished if each.partition(".")[0] not in slots))
