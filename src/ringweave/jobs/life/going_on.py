"""When the others of an elastic job go on though a node was lost, and when such a job is through. Pure."""

from collections.abc import Iterator, Mapping

from ringweave.jobs.life import hanging
from ringweave.jobs.life.observing import Cause, Group, Observed, Phase
from ringweave.jobs.life.records import Job, Record

SAME_S = 60.0
"""A replacement that came since another script failed has not shown yet that it can train."""
Groups = Mapping[tuple[int, int], Group]


def can_go_on(job: Job, record: Record, observed: Observed, groups: Groups) -> bool:
    """Enough workers train on in this round, and nobody who ended it has to be called back to the gate.

    Args:
        job: Any job; of one that is not elastic nobody can.
        record: With the ends of those that were just judged.
        observed: What its place holds; before the gate was open nobody trains.
        groups: The same groups, by node and attempt.
    """
    if job.request.elastic is None or observed.gate < record.round:
        return False
    current = list(_current(job, record, groups))
    if any(group.phase is Phase.INTERRUPTED for group in current):
        return False
    left = sum(job.counts[group.node] for group in current if group.phase is Phase.RUNNING and not group.leaving)
    return left >= job.request.elastic.min


def is_mistake(job: Job, record: Record, observed: Observed, groups: Groups, now: float) -> bool:
    """Whether a script that has failed on some nodes is taken to be wrong, rather than a device of theirs to be broken.

    A device that fails raises an exception, as a mistake does; but a mistake ends the script on all nodes, and soon.

    Args:
        job: Any job; in one that is not elastic nobody trains on.
        record: With the ends of those that were just judged.
        observed: What its place holds; before the gate was open nobody trains.
        groups: The same groups, by node and attempt.
        now: On the clock of the record's loss.
    """
    if job.request.elastic is None or observed.gate < record.round or is_through(job, record, groups):
        return True
    loss = record.loss
    failed_too = loss.scripts if loss is not None and now - loss.at_s < SAME_S else ()
    current = [group for group in _current(job, record, groups) if group.node not in failed_too]
    return not any(group.phase is Phase.RUNNING and not group.leaving for group in current)


def is_through(job: Job, record: Record, groups: Groups) -> bool:
    """A node of an elastic job has finished this round: its workers have what all have, so nobody is replaced now."""
    if job.request.elastic is None:
        return False
    return any(group.phase is Phase.SUCCEEDED for group in _current(job, record, groups))


def ends_s(job: Job, record: Record, groups: Groups, now: float) -> list[float]:
    """When each node of an elastic job that is through has finished; empty while others still train.

    Also where one has failed by its script, which no other node can make good. One that hangs is not waited for.
    """
    current = list(_current(job, record, groups))
    hung = hanging.hung(job, record, groups, now)
    if not is_through(job, record, groups) or any(
        (group.phase is Phase.RUNNING and group.node not in hung) or group.cause is Cause.PROGRAM for group in current
    ):
        return []
    return [now if each.ended_s is None else each.ended_s for each in current if each.phase is Phase.SUCCEEDED]


def _current(job: Job, record: Record, groups: Groups) -> Iterator[Group]:
    """The groups of this round whose attempts are not over."""
    for node in job.used_nodes:
        known = record.nodes[node]
        group = groups.get((node, known.attempt))
        if group is not None and known.ended is None and group.round == record.round:
            yield group
