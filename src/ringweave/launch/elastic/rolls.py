"""Who has been a member of an elastic run, and who has come to train in it: the event log says, or the coordinators."""

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ringweave.membership.rules.reasons import FINISHED, LEFT
from ringweave.telemetry import Event, Tail, read_last_attempt


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


class Rolls:
    """The roll of one attempt. Whom the event log does not know the coordinators are asked about.

    A full disk takes no events. Without them the first death would look like one before any worker has called
    `prepare`, and end the others.
    """

    def __init__(self, path: Path, ask: Callable[[Collection[str]], Collection[str]]) -> None:
        """Asks nobody yet.

        Args:
            path: Of the event log.
            ask: Who is a member now, as the coordinators say, of these names above all.
        """
        self._path, self._ask = path, ask
        self._found, self._told = Roll(), set[str]()

    def look(self, names: Collection[str] = ()) -> Roll:
        """Who has been a member so far, of these names above all.

        Of those that only the coordinators know they do not say who is still a newcomer: they count as having trained.
        """
        with contextlib.suppress(OSError):  # of the log; what it has said before still holds
            self._found = roll(read_last_attempt(self._path))
        found = self._found
        if not found.members.union(self._told).issuperset(names):
            self._told.update(self._ask(names))
        return Roll(members=found.members | self._told, trained=found.trained | (self._told - found.members))


class PutOut:
    """Whom the others have put out, as the event log tells it: a process that lives hears so and ends by itself."""

    def __init__(self, path: Path) -> None:
        """What the log has by now is of attempts before."""
        self._tail, self._names = Tail(path), set[str]()
        self._terms: dict[str, int] = {}
        """Of the newest coordinator that each has begun an epoch with, or gone on in one."""
        self._tail.new()

    def look(self) -> frozenset[str]:
        """Names of processes; returns at once."""
        with contextlib.suppress(OSError):  # of the log: what it says is read later
            self._take(self._tail.new())
        return frozenset(self._names)

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if event["kind"] in {"member_lost", "member_back"}:
                member = event["member"]
                if event["term"] < self._terms.get(member, 0):  # a coordinator that was left behind says so
                    continue
                if event["kind"] == "member_back":
                    self._names.discard(member)
                elif event["reason"] not in {FINISHED, LEFT}:
                    self._names.add(member)
            elif event["kind"] == "epoch_begun":  # of a coordinator that had not heard of it
                self._names -= set(event["members"])
                self._terms |= {each: max(event["said_in"], self._terms.get(each, 0)) for each in event["members"]}
