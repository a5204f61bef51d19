"""Who has been a member of an elastic run, and who has come to train in it, as the event log says."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ringweave.membership.rules.reasons import FINISHED, LEFT
from ringweave.telemetry import Event, Tail


@dataclass(frozen=True, kw_only=True, slots=True)
class Roll:
    """Names of processes, `SLOT.INCARNATION`."""

    members: frozenset[str] = frozenset()
    """All that have been members so far, if only for a moment."""
    trained: frozenset[str] = frozenset()
    """Those of them that had part in a train step, or began with what others had of theirs."""


def roll(events: Iterable[Event]) -> Roll:
    """What the events of one attempt say. In the first epoch of a job or a ring all are newcomers, and begin it."""
    members, trained = set[str](), set[str]()
    for event in events:
        if event["kind"] == "epoch_begun":
            named, new = set(event["members"]), set(event["newcomers"])
            members |= named
            trained |= named if named == new else named - new
        elif event["kind"] == "members_level":
            trained |= set(event["members"])
    return Roll(members=frozenset(members), trained=frozenset(trained))


class PutOut:
    """Whom the others have put out, as the event log tells it: a process that lives hears so and ends by itself."""

    def __init__(self, path: Path) -> None:
        """What the log has by now is of attempts before."""
        self._tail, self._names = Tail(path), set[str]()
        self._tail.new()

    def look(self) -> frozenset[str]:
        """Names of processes; returns at once."""
        for event in self._tail.new():
            if event["kind"] == "member_lost" and event["reason"] not in {FINISHED, LEFT}:
                self._names.add(event["member"])
            elif event["kind"] == "epoch_begun":  # of a coordinator that had not heard of it
                self._names -= set(event["members"])
        return frozenset(self._names)
