"""Nodes that look alive to their place, and stand still for all that the others can tell. Pure.

A machine that hangs, an agent or workers that were stopped: nothing of them ends, and nobody says that they have. Two
things tell it all the same. In an elastic job the others put workers that stand still out of the membership; who is put
out and lives hears so within seconds, and ends. And who is called back to the gate comes, or says why not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ringweave.jobs.life.observing import Group, Phase
from ringweave.jobs.life.records import Job, Record

Groups = Mapping[tuple[int, int], Group]


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """Why a node is waited for that may hang, and how long."""

    limit_s: float
    """After so long it counts as lost."""
    text: str
    """What is said of it then."""


PUT_OUT = Silence(
    limit_s=60.0,  # twice what a member that is cut off looks for a coordinator before it ends by itself
    text="its workers were put out by the others a minute ago and have not ended: it stands still, or is cut off",
)
CALLED = Silence(
    limit_s=300.0,  # an agent may need half a minute to end its workers, and two to reach the operator's desk
    text="it was called back to the gate five minutes ago and has not answered: it stands still, or is cut off",
)


def silent(job: Job, record: Record, groups: Groups) -> dict[int, Silence]:
    """Nodes that may hang, as far as this look tells."""
    current = list(_current(job, record, groups))
    called = {group.node: CALLED for group in current if group.round < record.round}
    here = [group for group in current if group.round == record.round]
    newest = max((group.epoch for group in here), default=(0, 0))
    out = {name for group in here if group.epoch == newest for name in group.out}
    running = [group for group in here if group.phase is Phase.RUNNING]
    return called | {group.node: PUT_OUT for group in running if not out.isdisjoint(group.members)}


def hung(job: Job, record: Record, groups: Groups, now: float) -> dict[int, str]:
    """Nodes that have been silent for too long, and what is to be said of them."""
    found = silent(job, record, groups)
    return {node: why.text for node, why in found.items() if now - _since_s(record, node, now) >= why.limit_s}


def hangs_at_s(job: Job, record: Record, groups: Groups, now: float) -> float | None:
    """When the next one counts as hanging, if nothing happens; None where none is silent."""
    found = silent(job, record, groups)
    return min((_since_s(record, node, now) + why.limit_s for node, why in found.items()), default=None)


def _since_s(record: Record, node: int, now: float) -> float:
    known = record.nodes[node].silent_since_s
    return now if known is None else known


def _current(job: Job, record: Record, groups: Groups) -> Iterator[Group]:
    """Groups that live and are wanted; also those that have finished, for what they know of the others."""
    for node in job.used_nodes:
        known = record.nodes[node]
        group = groups.get((node, known.attempt))
        if group is None or known.ended is not None:
            continue
        if group.phase.is_alive or group.round == record.round:
            yield group
