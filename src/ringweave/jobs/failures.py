"""Failure rules of a job: hanging nodes, elastic continuation, and the node that caused a round to fail. Pure.

When one node dies, the others fail with it, often earlier and with an exit code. So a platform failure takes precedence
over a script failure, as in `launcher/outcome.py`, and a script failure counts only if no other cause appears within
`SETTLE_S`. A lost machine can look alive for a minute. So if all failed nodes blame a peer and one node has not
answered, no node is charged yet: all nodes are restarted, and the lost one is the node that does not return to the
barrier. In an elastic job the other nodes continue without a lost node. A script failure on some nodes while others
train is taken for a broken device, which raises an exception too.

Nothing of a hanging node (machine, agent or workers) ends. Two signs reveal it. In an elastic job the other members
evict workers that hang, and an evicted member that is alive learns it within seconds and exits. A group that is told to
restart reaches the barrier, or reports why not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ringweave.jobs.records import (
    AttemptEnd,
    EndCause,
    GroupPhase,
    Job,
    JobRecord,
    NodeLoss,
    ObservedGroup,
    ObservedJobState,
    PeerBlame,
)

GroupsByAttempt = Mapping[tuple[int, int], ObservedGroup]


def is_at_barrier(record: JobRecord, node: int, groups: GroupsByAttempt) -> bool:
    """Return whether a node is ready for this round. Groups beyond count: a removed config closes the barrier."""
    known = record.nodes[node]
    group = groups.get((node, known.attempt))
    return group is not None and known.ended is None and group.round == record.round and group.is_at_barrier


@dataclass(frozen=True, kw_only=True, slots=True)
class HangRule:
    """Rule by which a suspected node counts as hanging."""

    limit_s: float
    """Seconds after which the node counts as lost."""
    text: str


EVICTED_HANG = HangRule(
    limit_s=60.0,  # twice the time for which an isolated member looks for a coordinator before it exits
    text="its workers were evicted by the other members a minute ago and have not exited: it hangs, or is cut off",
)
RESTART_HANG = HangRule(
    limit_s=300.0,  # an agent may need half a minute to stop its workers, and two to reach the agent gateway
    text="it was told to restart five minutes ago and has not answered: it hangs, or is cut off",
)


def suspected_hangs(job: Job, record: JobRecord, groups: GroupsByAttempt) -> dict[int, HangRule]:
    """Return the nodes suspected to hang by this observation alone."""
    current = list(_live_groups(job, record, groups))
    restarting = {group.node: RESTART_HANG for group in current if group.round < record.round}
    in_round = [group for group in current if group.round == record.round]
    newest = max((group.generation for group in in_round), default=(0, 0))
    evicted = {name for group in in_round if group.generation == newest for name in group.evicted}
    running = [group for group in in_round if group.phase is GroupPhase.RUNNING]
    return restarting | {group.node: EVICTED_HANG for group in running if not evicted.isdisjoint(group.members)}


def hung_nodes(job: Job, record: JobRecord, groups: GroupsByAttempt, now: float) -> dict[int, str]:
    """Return the nodes suspected for longer than their rule allows, with the text of the failure."""
    suspects = suspected_hangs(job, record, groups)
    return {
        node: rule.text
        for node, rule in suspects.items()
        if now - _suspected_since_s(record, node, now) >= rule.limit_s
    }


def next_hang_s(job: Job, record: JobRecord, groups: GroupsByAttempt, now: float) -> float | None:
    """Return the time at which the next suspected node counts as hanging; None if no node is suspected."""
    suspects = suspected_hangs(job, record, groups)
    return min((_suspected_since_s(record, node, now) + rule.limit_s for node, rule in suspects.items()), default=None)


def _suspected_since_s(record: JobRecord, node: int, now: float) -> float:
    known = record.nodes[node].suspected_since_s
    return now if known is None else known


def _live_groups(job: Job, record: JobRecord, groups: GroupsByAttempt) -> Iterator[ObservedGroup]:
    """Yield groups that are alive and wanted, and finished groups for their view of the others."""
    for node in job.used_nodes:
        known = record.nodes[node]
        group = groups.get((node, known.attempt))
        if group is None or known.ended is not None:
            continue
        if group.phase.is_alive or group.round == record.round:
            yield group


SHARED_CAUSE_S = 60.0
"""A replacement that started after another script failed counts as proof of health only after this time."""


def can_continue(job: Job, record: JobRecord, observed: ObservedJobState, groups: GroupsByAttempt) -> bool:
    """Return whether enough workers train in this round and no group has to return to the barrier.

    Without a node that has a parameter server they cannot: the server's state is lost with it.

    Args:
        job: Any job; False if it is not elastic.
        record: With the attempt ends that were just judged.
        observed: The observation; no group trains before the barrier is released.
        groups: The same groups, by node and attempt.
    """
    if job.request.elastic is None or observed.released_round < record.round:
        return False
    current = list(_groups_of_round(job, record, groups))
    if any(group.phase is GroupPhase.INTERRUPTED for group in current):
        return False
    running = {group.node for group in current if group.phase is GroupPhase.RUNNING and not group.is_terminating}
    servers = job.elastic_server_nodes
    if servers and running.isdisjoint(servers):
        return False
    return sum(job.counts[node] for node in running) >= job.request.elastic.min


def is_program_error(
    job: Job, record: JobRecord, observed: ObservedJobState, groups: GroupsByAttempt, now: float
) -> bool:
    """Return whether a script failure on some nodes is taken for a program error, and not for a broken device.

    A broken device raises an exception, as a program error does. But a program error soon ends the script on all nodes.

    Args:
        job: Any job; True if it is not elastic, since no node trains on.
        record: With the attempt ends that were just judged.
        observed: The observation; no group trains before the barrier is released.
        groups: The same groups, by node and attempt.
        now: Time on the clock of the record's loss.
    """
    if job.request.elastic is None or observed.released_round < record.round or is_finishing(job, record, groups):
        return True
    loss = record.loss
    failed_too = loss.scripts if loss is not None and now - loss.at_s < SHARED_CAUSE_S else ()
    current = [group for group in _groups_of_round(job, record, groups) if group.node not in failed_too]
    return not any(group.phase is GroupPhase.RUNNING and not group.is_terminating for group in current)


def is_finishing(job: Job, record: JobRecord, groups: GroupsByAttempt) -> bool:
    """Return whether a node of an elastic job has finished this round; from then on no node is replaced."""
    if job.request.elastic is None:
        return False
    return any(group.phase is GroupPhase.SUCCEEDED for group in _groups_of_round(job, record, groups))


def finish_times_s(job: Job, record: JobRecord, groups: GroupsByAttempt, now: float) -> list[float]:
    """Return the times at which the nodes of a finishing elastic job finished; empty while others still train.

    A node whose script failed has no such time, and no replacement. A hanging node is not waited for.
    """
    current = list(_groups_of_round(job, record, groups))
    hung = hung_nodes(job, record, groups, now)
    if not is_finishing(job, record, groups) or any(
        (group.phase is GroupPhase.RUNNING and group.node not in hung) or group.cause is EndCause.PROGRAM
        for group in current
    ):
        return []
    return [now if each.ended_s is None else each.ended_s for each in current if each.phase is GroupPhase.SUCCEEDED]


def _groups_of_round(job: Job, record: JobRecord, groups: GroupsByAttempt) -> Iterator[ObservedGroup]:
    """Yield the groups of this round whose attempts have not ended."""
    for node in job.used_nodes:
        known = record.nodes[node]
        group = groups.get((node, known.attempt))
        if group is not None and known.ended is None and group.round == record.round:
            yield group


SETTLE_S = 2.0
"""Maximum delay of the first cause after its consequences; `ringweave run` waits 1.5 s for the workers of one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFailure:
    """Failed attempt that was not judged yet."""

    node: int
    attempt: int
    cause: EndCause
    text: str
    group: ObservedGroup | None
    """None if the group vanished."""

    @property
    def ended_s(self) -> float:
        """Time of the end; minus infinity if unknown, so that no decision waits for it."""
        known = self.group.ended_s if self.group else None
        return float("-inf") if known is None else known

    def to_attempt_end(self, cause: EndCause, *, charged: bool) -> AttemptEnd:
        exit_code = self.group.exit_code if self.group else None
        return AttemptEnd(attempt=self.attempt, cause=cause, charged=charged, text=self.text, exit_code=exit_code)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureVerdict:
    """Verdict on the failures of a round."""

    ends: dict[int, AttemptEnd]
    """Node -> end of its attempt, for attempts to replace and attempts that failed for good."""
    program_failed: tuple[int, ...] = ()
    """Nodes whose script failed. The job fails with them, unless it is elastic and other nodes train on."""
    blame: PeerBlame | None = None
    """Set if all failed nodes blame a peer and a possible culprit has not answered: another round, charged to no node
    yet."""
    loss: NodeLoss | None = None
    """Earlier loss that stopped members of an elastic job after all: another round, charged to no node."""
    wait_until_s: float | None = None
    """No decision is made before this time, unless more is observed."""


def find_failures(job: Job, record: JobRecord, groups: GroupsByAttempt, now: float) -> list[AttemptFailure]:
    """Return failed, hanging and vanished attempts that were not judged yet.

    After a node of an elastic job has finished, only script failures count, since no node is replaced any more.
    """
    failures = [failure for node in job.used_nodes if (failure := _find_failure(node, record, groups)) is not None]
    failures += _hung_failures(job, record, groups, now)
    job_is_finishing = is_finishing(job, record, groups)
    return [failure for failure in failures if failure.cause is EndCause.PROGRAM or not job_is_finishing]


def _find_failure(node: int, record: JobRecord, groups: GroupsByAttempt) -> AttemptFailure | None:
    known = record.nodes[node]
    group = groups.get((node, known.attempt))
    if known.ended is not None:
        return None
    if group is None:
        if not known.seen:
            return None
        text = "its worker group disappeared"
        return AttemptFailure(node=node, attempt=known.attempt, cause=EndCause.PLATFORM, text=text, group=None)
    if group.phase is GroupPhase.STOPPED:
        cause = EndCause.PLATFORM
    elif group.phase is GroupPhase.FAILED:
        cause = group.cause or EndCause.PLATFORM
    elif group.phase is GroupPhase.INTERRUPTED and group.round == record.round:
        cause = EndCause.PEER
    else:
        return None
    text = group.text or (f"exit code {group.exit_code}" if group.exit_code is not None else "cause unknown")
    return AttemptFailure(node=node, attempt=known.attempt, cause=cause, text=text, group=group)


def _hung_failures(job: Job, record: JobRecord, groups: GroupsByAttempt, now: float) -> Iterator[AttemptFailure]:
    for node, text in hung_nodes(job, record, groups, now).items():
        attempt = record.nodes[node].attempt
        group = groups[node, attempt]
        if group.phase is not GroupPhase.INTERRUPTED or group.round < record.round:
            yield AttemptFailure(node=node, attempt=attempt, cause=EndCause.PLATFORM, text=text, group=group)


def judge_failures(
    failures: list[AttemptFailure], record: JobRecord, observed: ObservedJobState, now: float
) -> FailureVerdict:
    """Decide which failures are a node's own, and which follow from another node's failure.

    Args:
        failures: Failed attempts that were not judged yet.
        record: The job's record. A failure in an earlier round than the record's follows from the end of that round.
        observed: The observation; groups that still run may turn out to be the first cause.
        now: Time on the clock of the groups' `ended_s`.
    """
    own = [failure for failure in failures if failure.cause is EndCause.PLATFORM]
    ends = {failure.node: failure.to_attempt_end(EndCause.PLATFORM, charged=True) for failure in own}
    late = [
        failure for failure in failures if failure.node not in ends and _failure_round(failure, record) < record.round
    ]
    fresh = [failure for failure in failures if failure.node not in ends and failure not in late]
    loss_related = [failure for failure in fresh if _is_caused_by_loss(failure, record)]
    fresh = [failure for failure in fresh if failure not in loss_related]
    ends |= _follower_ends(late) | _follower_ends(loss_related)
    if any(end.charged for end in ends.values()):
        return FailureVerdict(ends=ends | _follower_ends(fresh))
    if not fresh:
        return FailureVerdict(ends=ends)
    decide_at_s = min(failure.ended_s for failure in fresh) + SETTLE_S
    if now < decide_at_s and _may_reveal_cause(observed):
        return FailureVerdict(ends=ends, wait_until_s=decide_at_s)
    programs = [failure for failure in fresh if failure.cause is EndCause.PROGRAM]
    if programs:
        ends |= {failure.node: failure.to_attempt_end(EndCause.PROGRAM, charged=False) for failure in programs}
        return FailureVerdict(ends=ends, program_failed=tuple(failure.node for failure in programs))
    if record.loss is not None:
        return FailureVerdict(ends=ends | _follower_ends(fresh), loss=record.loss)
    first = min(fresh, key=lambda failure: (failure.ended_s, failure.node))
    if _has_unheard_node(record, observed):
        return FailureVerdict(ends=ends | _follower_ends(fresh), blame=PeerBlame(node=first.node, text=first.text))
    # All blame a peer, and no other failed: charge the first, so that this cannot repeat for ever.
    ends[first.node] = first.to_attempt_end(EndCause.PLATFORM, charged=True)
    return FailureVerdict(ends=ends | _follower_ends([failure for failure in fresh if failure is not first]))


def _follower_ends(failures: list[AttemptFailure]) -> dict[int, AttemptEnd]:
    """Return the ends of followers whose group has ended. Interrupted groups keep their attempt."""
    over = [failure for failure in failures if failure.group and not failure.group.phase.is_alive]
    return {failure.node: failure.to_attempt_end(EndCause.PEER, charged=False) for failure in over}


def _is_caused_by_loss(failure: AttemptFailure, record: JobRecord) -> bool:
    """Return whether a script failed within moments of the loss of a node that the others continue without."""
    loss = record.loss
    if failure.cause is not EndCause.PROGRAM or loss is None or loss.scripts:
        return False
    return abs(failure.ended_s - loss.at_s) < SETTLE_S


def _failure_round(failure: AttemptFailure, record: JobRecord) -> int:
    return failure.group.round if failure.group else record.round


def _has_unheard_node(record: JobRecord, observed: ObservedJobState) -> bool:
    """Return whether a current group is still active in this round, or is being removed, while others have ended."""
    active_phases = (
        (GroupPhase.READY, GroupPhase.RUNNING) if observed.released_round >= record.round else (GroupPhase.RUNNING,)
    )
    return any(
        (group.phase in active_phases or (group.is_terminating and group.phase.is_alive))
        and group.round == record.round
        and group.attempt == record.nodes[group.node].attempt
        and record.nodes[group.node].ended is None
        for group in observed.groups
        if group.node < len(record.nodes)
    )


def _may_reveal_cause(observed: ObservedJobState) -> bool:
    return any(group.phase in (GroupPhase.PENDING, GroupPhase.READY, GroupPhase.RUNNING) for group in observed.groups)
