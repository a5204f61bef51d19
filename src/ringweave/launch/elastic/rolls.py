"""Who has been a member of an elastic run, and who has come to train in it, as the event log says."""

from collections.abc import Iterable
from dataclasses import dataclass

from ringweave.telemetry import Event


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
