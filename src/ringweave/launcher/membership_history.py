"""Membership history of an elastic run, read from its event log: past members, and evicted ones."""

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ringweave.membership.membership_records import REASON_FINISHED, REASON_LEFT
from ringweave.telemetry import Event, EventTail


@dataclass(frozen=True, kw_only=True, slots=True)
class PastMembers:
    """Names of past members, `SLOT.INCARNATION`."""

    members: frozenset[str] = frozenset()
    """All processes that have ever been members."""
    trained: frozenset[str] = frozenset()
    """Members that took part in a train step, or began with the state of one that did."""


def read_past_members(events: Iterable[Event], earlier: PastMembers = PastMembers()) -> PastMembers:
    """Return the past members of the last attempt in these events, which come after those of `earlier`.

    The first generation of a job or a ring has only newcomers, which start it.
    """
    members, trained = set(earlier.members), set(earlier.trained)
    for event in events:
        if event["kind"] == "run_started":
            members.clear()
            trained.clear()
        elif event["kind"] == "generation_begun":
            members_of_event, new = set(event["members"]), set(event["newcomers"])
            members |= members_of_event
            trained |= members_of_event if members_of_event == new else members_of_event - new
        elif event["kind"] == "members_caught_up":
            trained |= set(event["members"])
    return PastMembers(members=frozenset(members), trained=frozenset(trained))


class MembershipHistory:
    """Past members of one attempt, from the event log; the coordinators are queried about names that it lacks.

    A full disk takes no events. Without them the first failure would look like one before any worker has called
    `prepare`, and end the others.
    """

    def __init__(self, path: Path, query_coordinators: Callable[[Collection[str]], Collection[str]]) -> None:
        """Create the object; queries no coordinator yet.

        Args:
            path: Path of the event log.
            query_coordinators: Queries the coordinators for the current members, in particular for these names.
        """
        self._tail, self._query_coordinators = EventTail(path), query_coordinators
        self._from_events, self._from_coordinators = PastMembers(), set[str]()

    def read(self, names: Collection[str] = ()) -> PastMembers:
        """Return the past members; the coordinators are queried if the event log lacks one of these names.

        The coordinators do not say which members are newcomers: members that only they know count as having trained.
        """
        with contextlib.suppress(OSError):  # of the log; earlier events still hold
            self._from_events = read_past_members(self._tail.read_new(), self._from_events)
        found = self._from_events
        if not found.members.union(self._from_coordinators).issuperset(names):
            self._from_coordinators.update(self._query_coordinators(names))
        return PastMembers(
            members=found.members | self._from_coordinators,
            trained=found.trained | (self._from_coordinators - found.members),
        )


class EvictionWatcher:
    """Reads from the event log which members were evicted.

    A live evicted process hears of it and ends by itself.
    """

    def __init__(self, path: Path) -> None:
        """Skip the present content of the log, which belongs to earlier attempts."""
        self._tail, self._names = EventTail(path), set[str]()
        self._terms: dict[str, int] = {}
        """Member -> newest term of a coordinator whose generation it was in."""
        self._tail.read_new()

    def evicted_members(self) -> frozenset[str]:
        """Return the names of evicted members without waiting."""
        with contextlib.suppress(OSError):  # of the log: its events are read later
            self._apply_events(self._tail.read_new())
        return frozenset(self._names)

    def _apply_events(self, events: Iterable[Event]) -> None:
        for event in events:
            if event["kind"] in {"member_lost", "member_returned"}:
                member = event["member"]
                if event["term"] < self._terms.get(member, 0):  # from a superseded coordinator
                    continue
                if event["kind"] == "member_returned":
                    self._names.discard(member)
                elif event["reason"] not in {REASON_FINISHED, REASON_LEFT}:
                    self._names.add(member)
            elif event["kind"] == "generation_begun":  # of a coordinator that did not know of the loss
                self._names -= set(event["members"])
                self._terms |= {
                    each: max(event["reported_in_term"], self._terms.get(each, 0)) for each in event["members"]
                }
