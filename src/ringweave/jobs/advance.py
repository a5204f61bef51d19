"""advance_record: a job's next record from its last record and an observation. Pure and idempotent.

The last section derives the states and reasons that people see; no decision depends on them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ringweave.files.problems import shorten_names
from ringweave.jobs import failures
from ringweave.jobs.failures import GroupsByAttempt
from ringweave.jobs.records import (
    MAX_HISTORY,
    AttemptEnd,
    EndCause,
    GroupPhase,
    Job,
    JobRecord,
    NodeLoss,
    NodeRecord,
    ObservedGroup,
    ObservedJobState,
    PeerBlame,
    PendingCause,
)
from ringweave.jobs.states import JobState, NodeState, Reason, make_reason


def advance_record(job: Job, observed: ObservedJobState, now: float) -> JobRecord:
    """Return the record after this observation.

    `observed`: observation of the platform, made after the record was read.
    """
    groups = observed.by_attempt
    record = _update_progress(job, groups, now)
    if not _should_delete(job, record, now):
        record = _decide_outcome(job, record, observed, groups, now)
    # Again: an end that is observed late may be longer ago than the TTL.
    record = replace(record, deleting=_should_delete(job, record, now))
    if not record.deleting:
        record = _start_retry(job, record, now)
    if should_run(job, record):
        record = _start_next_attempts(job, record, groups, now)
    return _update_states(job, _update_hang_timers(job, record, groups, now), observed, now)


def record_after_preemption(record: JobRecord, cause: str) -> JobRecord:
    """Return the record after the platform has preempted all groups at once and allocated again: an uncharged round."""
    if record.outcome is not None:
        return record
    return _start_next_round(record, cause)


def is_retry_pending(job: Job) -> bool:
    """Return whether a retry after a failed run is requested and has not started."""
    return _is_retry_requested(job, job.record) and job.desired.stop_run <= job.record.run


def is_finished(job: Job) -> bool:
    """Return whether the job has ended and no retry is pending."""
    return job.record.state.is_end and not is_retry_pending(job)


def with_pending_retry(job: Job, now: float) -> Job:
    """Return the job to display: a job with a pending retry is shown as active, though nothing has started yet."""
    if job.record.deleting or job.desired.delete or not is_retry_pending(job):
        return job
    return replace(job, record=advance_record(job, ObservedJobState(), now))


def should_run(job: Job, record: JobRecord) -> bool:
    """Return whether the job's worker groups should exist."""
    return not record.deleting and record.outcome is None and not job.desired.suspend


def _update_progress(job: Job, groups: GroupsByAttempt, now: float) -> JobRecord:
    nodes = list(job.record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        group = groups.get((node, known.attempt))
        if group is not None:
            iterations = known.iterations if group.iterations is None else group.iterations
            last_loss = known.last_loss if group.last_loss is None else group.last_loss
            began_s = now if known.running_since_s is None and group.phase is GroupPhase.RUNNING else None
            nodes[node] = replace(
                known,
                seen=True,
                iterations=iterations,
                last_loss=last_loss,
                running_since_s=known.running_since_s if began_s is None else began_s,
            )
    return replace(job.record, nodes=tuple(nodes))


def _update_hang_timers(job: Job, record: JobRecord, groups: GroupsByAttempt, now: float) -> JobRecord:
    """Update the time since which nodes are suspected to hang."""
    suspects = failures.suspected_hangs(job, record, groups) if should_run(job, record) else {}
    nodes = [
        replace(known, suspected_since_s=(now if known.suspected_since_s is None else known.suspected_since_s))
        if node in suspects
        else replace(known, suspected_since_s=None)
        for node, known in enumerate(record.nodes)
    ]
    return replace(record, nodes=tuple(nodes))


def _should_delete(job: Job, record: JobRecord, now: float) -> bool:
    expiry_s = ttl_expiry_s(job, record)
    return record.deleting or job.desired.delete or (expiry_s is not None and now >= expiry_s)


def ttl_expiry_s(job: Job, record: JobRecord) -> float | None:
    """Return the end of the TTL; None if the job has no outcome or is kept."""
    return record.ended_s + job.request.ttl_s if record.ended_s is not None and job.request.ttl_s is not None else None


def _decide_outcome(
    job: Job, record: JobRecord, observed: ObservedJobState, groups: GroupsByAttempt, now: float
) -> JobRecord:
    """Set the outcome if there is one; otherwise end attempts after suspension or failures."""
    if record.outcome is not None:
        return record
    finished_s = _finish_time_s(job, record, groups, now)
    if finished_s is not None:
        return _succeed_job(job, record, groups, finished_s, now)
    if job.desired.stop_run >= record.run:
        return _stop_job(job, record, now)
    if job.desired.suspend:
        return _end_all_attempts(job, record, EndCause.SUSPENDED, "the job was suspended")
    record = _handle_failures(job, record, observed, groups, now)
    finished_s = _finish_time_s(job, record, groups, now)  # again: attempts have ended just now
    if record.outcome is None and finished_s is not None:
        return _succeed_job(job, record, groups, finished_s, now)
    return record


def _succeed_job(job: Job, record: JobRecord, groups: GroupsByAttempt, finished_s: float, now: float) -> JobRecord:
    """End the job as succeeded, if necessary without hanging nodes, which are neither waited for nor charged."""
    abandoned = failures.hung_nodes(job, record, groups, now)
    if not abandoned:
        return _end_job(record, JobState.SUCCEEDED, make_reason("Completed", job=job.request.name), finished_s)
    nodes = list(record.nodes)
    for node, text in abandoned.items():
        ended = AttemptEnd(attempt=nodes[node].attempt, cause=EndCause.PLATFORM, charged=False, text=text)
        nodes[node] = replace(nodes[node], ended=ended, is_abandoned=True)
    record = replace(record, nodes=tuple(nodes))
    return _end_job(record, JobState.SUCCEEDED, finished_without_reason(job, abandoned), now)


def _stop_job(job: Job, record: JobRecord, now: float) -> JobRecord:
    return _end_job(record, JobState.STOPPED, make_reason("Stopped", job=job.request.name), now)


def fail_after_preemptions(job: Job, record: JobRecord, cause: str, count: int, now: float) -> JobRecord:
    """Return the record of a job that failed because its platform preempted it too often in a row."""
    if record.outcome is not None:
        return record
    why = make_reason("Preempted", job=job.request.name, count=count, detail=cause)
    return _end_job(record, JobState.FAILED, why, now)


def _start_next_round(record: JobRecord, cause: str, blame: PeerBlame | None = None) -> JobRecord:
    return replace(record, round=record.round + 1, round_cause=cause, blame=blame, loss=None)


def _finish_time_s(job: Job, record: JobRecord, groups: GroupsByAttempt, now: float) -> float | None:
    """Return the time at which the last group finished; None unless all have finished."""
    if job.request.elastic is not None:
        return max(failures.finish_times_s(job, record, groups, now), default=None)
    current = [groups.get((node, record.nodes[node].attempt)) for node in job.used_nodes]
    ends_s = [
        now if group.ended_s is None else group.ended_s
        for node, group in zip(job.used_nodes, current, strict=True)
        if group is not None
        and group.phase is GroupPhase.SUCCEEDED
        and group.round == record.round
        and record.nodes[node].ended is None
    ]
    return max(ends_s) if len(ends_s) == len(current) else None


def _end_job(record: JobRecord, outcome: JobState, why: Reason, at_s: float) -> JobRecord:
    return replace(record, outcome=outcome, outcome_reason=why, ended_s=at_s)


def _end_all_attempts(job: Job, record: JobRecord, cause: EndCause, text: str) -> JobRecord:
    """End all attempts that have started; the next attempts form another round."""
    nodes = list(record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        if known.seen and known.ended is None:
            ended = AttemptEnd(attempt=known.attempt, cause=cause, charged=False, text=text)
            nodes[node] = replace(known, ended=ended)
    changed = tuple(nodes) != record.nodes
    record = replace(record, nodes=tuple(nodes), round_cause="", blame=None)
    return _start_next_round(record, "") if changed else record


def _handle_failures(
    job: Job, record: JobRecord, observed: ObservedJobState, groups: GroupsByAttempt, now: float
) -> JobRecord:
    verdict = failures.judge_failures(failures.find_failures(job, record, groups, now), record, observed, now)
    if record.blame is not None and not any(ended.charged for ended in verdict.ends.values()):
        verdict = replace(verdict, ends=verdict.ends | _charge_blaming_node(job, record, groups, record.blame))
    failed_by_program = failures.is_program_error(
        job, _record_attempt_ends(job, record, verdict.ends, now), observed, groups, now
    )
    if verdict.program_failed and not failed_by_program:
        charged = {node: replace(verdict.ends[node], charged=True) for node in verdict.program_failed}
        verdict = replace(verdict, ends=verdict.ends | charged, program_failed=())
    record = _record_attempt_ends(job, record, verdict.ends, now)
    if verdict.program_failed:
        why = failed_reason("NonZeroExitCode", job, verdict.program_failed, verdict.ends)
        return _end_job(record, JobState.FAILED, why, now)
    charged = {node: ended for node, ended in verdict.ends.items() if ended.charged}
    exhausted = tuple(node for node in charged if job.record.nodes[node].retries >= job.request.nodes[node].max_retries)
    continues = bool(charged) and failures.can_continue(job, record, observed, groups)
    if continues:
        record = _continue_without(job, record, charged, exhausted, now)
    elif exhausted or (_has_excluded_node(record) and (charged or _needs_all_nodes(record, verdict, observed))):
        return _end_job(record, JobState.FAILED, _retries_spent_reason(job, record, exhausted), now)
    elif charged:
        record = _start_next_round(record, format_failures(job, record, charged))
    elif verdict.loss is not None:
        record = _start_next_round(record, verdict.loss.text)
    elif verdict.blame is not None:
        record = _start_next_round(record, format_blame(job, verdict.blame), verdict.blame)
    return _end_early_finishers(job, record, groups)


def _record_attempt_ends(job: Job, record: JobRecord, ends: dict[int, AttemptEnd], now: float) -> JobRecord:
    nodes = list(record.nodes)
    for node, ended in ends.items():
        nodes[node] = _end_attempt(nodes[node], ended, job.request.nodes[node].max_retries, now)
    return replace(record, nodes=tuple(nodes))


def _continue_without(
    job: Job, record: JobRecord, charged: dict[int, AttemptEnd], exhausted: tuple[int, ...], now: float
) -> JobRecord:
    """Continue without lost nodes. Nodes without retries left stay out until the end."""
    nodes = tuple(
        replace(known, is_excluded=node in exhausted or known.is_excluded) for node, known in enumerate(record.nodes)
    )
    scripts = {node for node, ended in charged.items() if ended.cause is EndCause.PROGRAM}
    if record.loss is not None and now - record.loss.at_s < failures.SHARED_CAUSE_S:
        scripts |= set(record.loss.scripts)
    text = format_failures(job, record, charged)
    return replace(record, nodes=nodes, loss=NodeLoss(text=text, at_s=now, scripts=tuple(sorted(scripts))))


def _needs_all_nodes(record: JobRecord, verdict: failures.FailureVerdict, observed: ObservedJobState) -> bool:
    """Return whether all nodes have to reach the barrier of this round or of the next one."""
    return verdict.loss is not None or verdict.blame is not None or observed.released_round < record.round


def _has_excluded_node(record: JobRecord) -> bool:
    return any(known.is_excluded for known in record.nodes)


def _retries_spent_reason(job: Job, record: JobRecord, exhausted: tuple[int, ...]) -> Reason:
    """Return the reason for no further round: nodes that failed now, or were abandoned before."""
    nodes = exhausted or tuple(node for node, known in enumerate(record.nodes) if known.is_excluded)
    ends = {node: ended for node in nodes if (ended := record.nodes[node].ended) is not None}
    return failed_reason("BackoffLimitExceeded", job, nodes, ends)


def _charge_blaming_node(
    job: Job, record: JobRecord, groups: GroupsByAttempt, blame: PeerBlame
) -> dict[int, AttemptEnd]:
    """End and charge the first attempt that blamed a peer, once all nodes are at the barrier: no node was lost."""
    if not all(failures.is_at_barrier(record, node, groups) for node in job.used_nodes):
        return {}
    attempt = record.nodes[blame.node].attempt
    return {blame.node: AttemptEnd(attempt=attempt, cause=EndCause.PLATFORM, charged=True, text=blame.text)}


def _end_attempt(known: NodeRecord, ended: AttemptEnd, max_retries: int, now: float) -> NodeRecord:
    if not ended.charged:
        return replace(known, ended=ended)
    lifetime_s = 0.0 if known.running_since_s is None else now - known.running_since_s
    restarts = known.restarts.after_end(lifetime_s, now, is_useful=ended.cause is EndCause.PLATFORM)
    return replace(known, ended=ended, retries=known.retries + (known.retries < max_retries), restarts=restarts)


def _end_early_finishers(job: Job, record: JobRecord, groups: GroupsByAttempt) -> JobRecord:
    """End attempts that finished a round which all nodes have to repeat."""
    nodes = list(record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        group = groups.get((node, known.attempt))
        if group and known.ended is None and group.phase is GroupPhase.SUCCEEDED and group.round < record.round:
            text = "it had finished, and another node failed before all had"
            ended = AttemptEnd(attempt=known.attempt, cause=EndCause.ROUND, charged=False, text=text, exit_code=0)
            nodes[node] = replace(known, ended=ended)
    return replace(record, nodes=tuple(nodes))


def _start_retry(job: Job, record: JobRecord, now: float) -> JobRecord:
    """Start another run if one is requested after a failed run; end it at once if a stop was requested first."""
    if not _is_retry_requested(job, record):
        return record
    record = _end_all_attempts(job, record, EndCause.RETRIED, "the job was retried")
    fresh = NodeRecord().restarts
    nodes = tuple(
        replace(known, retries=0, is_excluded=False, is_abandoned=False, restarts=fresh) for known in record.nodes
    )
    record = replace(
        record,
        nodes=nodes,
        run=record.run + 1,
        round=record.round + 1,
        outcome=None,
        outcome_reason=None,
        ended_s=None,
    )
    return _stop_job(job, record, now) if job.desired.stop_run >= record.run else record


def _is_retry_requested(job: Job, record: JobRecord) -> bool:
    """Return whether the job has ended without success and another run is requested."""
    return record.outcome in (JobState.FAILED, JobState.STOPPED) and job.desired.retry_run == record.run


def _start_next_attempts(job: Job, record: JobRecord, groups: GroupsByAttempt, now: float) -> JobRecord:
    """Start the next attempt of each node whose last attempt has ended and is gone, once the delay has passed."""
    nodes = list(record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        is_waited_for = known.restarts.due_s is not None and not known.restarts.is_due(now)
        if known.ended is None or known.is_excluded or (node, known.attempt) in groups or is_waited_for:
            continue
        nodes[node] = replace(
            known,
            attempt=known.attempt + 1,
            seen=False,
            ended=None,
            history=(*known.history, known.ended)[-MAX_HISTORY:],
            running_since_s=None,
            restarts=known.restarts.starting_at(None),
        )
    return replace(record, nodes=tuple(nodes))


def _update_states(job: Job, record: JobRecord, observed: ObservedJobState, now: float) -> JobRecord:
    """Update states and reasons for people. No decision above depends on them."""
    nodes = update_node_states(job, record, observed)
    record = replace(record, nodes=nodes)
    state, why = job_state(job, record, observed)
    since_s = record.since_s if state is record.state else now
    return replace(record, state=state, reason=why, since_s=since_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StatusContext:
    """Job, record and observation to describe."""

    job: Job
    record: JobRecord
    observed: ObservedJobState
    groups: Mapping[tuple[int, int], ObservedGroup]

    def current_group(self, node: int) -> ObservedGroup | None:
        return self.groups.get((node, self.record.nodes[node].attempt))

    def is_at_barrier(self, node: int) -> bool:
        return failures.is_at_barrier(self.record, node, self.groups)

    def format_nodes(self, nodes: Iterable[int]) -> str:
        """Return `node n0`, or `nodes n0, n1 and 7 more`."""
        return _format_nodes(self.job, nodes)


def _format_nodes(job: Job, nodes: Iterable[int]) -> str:
    names = [job.node_name(node) for node in nodes]
    return f"{'node' if len(names) == 1 else 'nodes'} {shorten_names(names, len(names))}"


def failed_reason(code: str, job: Job, nodes: tuple[int, ...], ends: Mapping[int, AttemptEnd]) -> Reason:
    """Return the reason of a job that failed on these nodes."""
    words = {"job": job.request.name, "nodes": _format_nodes(job, nodes), "node": job.node_name(nodes[0])}
    return make_reason(code, **words, detail=ends[nodes[0]].text)


def finished_without_reason(job: Job, abandoned: Mapping[int, str]) -> Reason:
    """Return the reason of a job that has succeeded without hanging nodes. `abandoned`: node -> text about it."""
    nodes = sorted(abandoned)
    words = {"job": job.request.name, "nodes": _format_nodes(job, nodes), "node": job.node_name(nodes[0])}
    return make_reason("CompletedWithoutNodes", **words, detail=abandoned[nodes[0]])


def format_failures(job: Job, record: JobRecord, charged: Mapping[int, AttemptEnd]) -> str:
    """Return `node n1 failed (killed by SIGKILL), retry 1 of 3` for the first failed node, and the number of others."""
    node = min(charged)
    count, most = record.nodes[node].retries, job.request.nodes[node].max_retries
    more = f", and {len(charged) - 1} more nodes failed" if len(charged) > 1 else ""
    return f"node {job.node_name(node)} failed ({charged[node].text}), retry {count} of {most}{more}"


def format_blame(job: Job, blame: PeerBlame) -> str:
    """Return `node n0 lost another (rank 0 lost its peer), which has not answered yet`."""
    return f"node {job.node_name(blame.node)} lost another ({blame.text}), which has not answered yet"


def update_node_states(job: Job, record: JobRecord, observed: ObservedJobState) -> tuple[NodeRecord, ...]:
    """Return the nodes' records with updated state and reason."""
    view = _StatusContext(job=job, record=record, observed=observed, groups=observed.by_attempt)
    missing = [node for node in job.used_nodes if not view.is_at_barrier(node)]
    updated = []
    for node, known in enumerate(record.nodes):
        state, code, detail = _node_state(view, node)
        fix = ""
        group = view.current_group(node)
        if group is not None and group.unresponsive is not None and record.outcome is None and node in missing:
            code, detail, fix = "NodeUnreachable", group.unresponsive.text, group.unresponsive.fix
        others = view.format_nodes(missing) if code == "NodeAtBarrier" else ""
        words = {"job": job.request.name, "node": job.node_name(node), "attempt": known.attempt, "fix": fix}
        why = make_reason(code, **words, detail=detail, nodes=others) if code else None
        updated.append(replace(known, state=state, reason=why))
    return tuple(updated)


def _node_state(view: _StatusContext, node: int) -> tuple[NodeState, str, str]:
    """Return state, code of the reason and detail of one node."""
    known, group = view.record.nodes[node], view.current_group(node)
    if not view.job.counts[node]:
        return NodeState.UNUSED, "NodeUnused", ""
    if view.record.outcome is not None:
        return _ended_node_state(view, known)
    if known.ended is not None and known.is_excluded:
        return NodeState.FAILED, "NodeBackoffLimitExceeded", known.ended.text
    if known.ended is not None:
        if view.job.desired.suspend:
            return NodeState.WAITING, "NodeSuspended", ""
        return NodeState.WAITING, "NodeTerminating" if group is not None else "NodeBackOff", known.ended.text
    if group is None:
        return NodeState.WAITING, "NodeSuspended" if view.job.desired.suspend else "NodeNotCreated", ""
    return _live_node_state(view, group)


def _ended_node_state(view: _StatusContext, known: NodeRecord) -> tuple[NodeState, str, str]:
    if known.is_abandoned and known.ended is not None:
        return NodeState.STOPPED, "NodeAbandoned", known.ended.text
    if view.record.outcome is JobState.SUCCEEDED and not known.is_excluded:
        return NodeState.SUCCEEDED, "NodeCompleted", ""
    if known.ended is not None and known.ended.cause in (EndCause.PROGRAM, EndCause.PLATFORM):
        return NodeState.FAILED, "NodeFailed", known.ended.text
    return NodeState.STOPPED, "NodeStopped", ""


def _live_node_state(view: _StatusContext, group: ObservedGroup) -> tuple[NodeState, str, str]:
    detail = group.text or "the platform gives no detail"
    if group.round < view.record.round and group.phase.is_alive:
        return NodeState.INTERRUPTED, "NodeRestarting", ""
    if group.phase is GroupPhase.READY:
        is_open = view.observed.released_round >= view.record.round or all(map(view.is_at_barrier, view.job.used_nodes))
        return NodeState.READY, "NodeReleased" if is_open else "NodeAtBarrier", ""
    if group.phase is GroupPhase.RUNNING:
        return NodeState.RUNNING, "", ""
    if group.phase is GroupPhase.PENDING:
        return NodeState.PENDING, _PENDING_REASONS[group.pending_cause], detail
    table = {
        GroupPhase.SUCCEEDED: (NodeState.SUCCEEDED, "NodeCompleted"),
        GroupPhase.INTERRUPTED: (NodeState.INTERRUPTED, "NodeFailing"),
        GroupPhase.FAILED: (NodeState.FAILED, "NodeFailing"),
        GroupPhase.STOPPED: (NodeState.FAILED, "NodeFailing"),
    }
    state, code = table[group.phase]
    return state, code, detail


_PENDING_REASONS = {
    PendingCause.PREREQUISITE: "NodeCannotStart",
    PendingCause.CAPACITY: "NodeUnschedulable",
    None: "NodeInitializing",
}


def job_state(job: Job, record: JobRecord, observed: ObservedJobState) -> tuple[JobState, Reason | None]:
    """Return state and reason of the job. The states of its nodes must be up to date."""
    view = _StatusContext(job=job, record=record, observed=observed, groups=observed.by_attempt)
    name = job.request.name
    if record.deleting:
        left = sorted({group.node for group in observed.groups})
        why = make_reason("Deleting", nodes=view.format_nodes(left) if left else "its config")
        return JobState.DELETING, _unresponsive_reason(view, observed.groups) or why
    living = sorted({group.node for group in observed.groups if group.phase.is_alive})
    # A hanging node may never be gone, so it is not waited for.
    if record.outcome is not None and any(not record.nodes[node].is_abandoned for node in living):
        return JobState.ENDING, _unresponsive_reason(view, observed.groups) or record.outcome_reason
    if record.outcome is not None:
        return record.outcome, record.outcome_reason
    if job.desired.suspend:
        nodes = view.format_nodes(living)
        why = make_reason("Suspending", nodes=nodes) if living else make_reason("Suspended", job=name)
        return JobState.SUSPENDED, _unresponsive_reason(view, observed.groups) or why
    return _active_job_state(view)


def _active_job_state(view: _StatusContext) -> tuple[JobState, Reason | None]:
    """Return state and reason of a job that should run."""
    record, used = view.record, view.job.used_nodes
    states = {node: record.nodes[node].state for node in used}
    if failures.is_finishing(view.job, record, view.groups):
        return JobState.RUNNING, None
    failing_nodes = [node for node in used if _reason_code(record, node) == "NodeFailing"]
    if failing_nodes:
        return JobState.RETRYING, _nodes_reason(view, "DeterminingCause", failing_nodes)
    missing = [node for node in used if node not in view.observed.late_nodes and not view.is_at_barrier(node)]
    if record.loss is not None:
        lost = [node for node in used if states[node] not in (NodeState.RUNNING, NodeState.SUCCEEDED)]
        return JobState.RUNNING, _continuing_reason(view, lost, record.loss) if lost else None
    if missing:
        return JobState.RETRYING if record.round_cause else JobState.PENDING, _waiting_reason(view, missing)
    idle = [node for node in used if states[node] is NodeState.READY]
    return (JobState.STARTING, _nodes_reason(view, "BarrierReleased", idle)) if idle else (JobState.RUNNING, None)


def _continuing_reason(view: _StatusContext, lost: list[int], loss: NodeLoss) -> Reason:
    replaceable = [node for node in lost if not view.record.nodes[node].is_excluded]
    return _nodes_reason(
        view, "Degraded" if replaceable else "DegradedWithoutRetries", replaceable or lost, detail=loss.text
    )


def _unresponsive_reason(view: _StatusContext, groups: Iterable[ObservedGroup | None]) -> Reason | None:
    """Return the reason of groups on unresponsive machines; None if there are none."""
    found = [
        (group.node, group.unresponsive) for group in groups if group is not None and group.unresponsive is not None
    ]
    if not found:
        return None
    nodes, first = view.format_nodes(sorted({node for node, _ in found})), found[0][1]
    return make_reason("MachineUnreachable", nodes=nodes, detail=first.text, fix=first.fix)


def _waiting_reason(view: _StatusContext, missing: list[int]) -> Reason:
    unresponsive = _unresponsive_reason(view, map(view.current_group, missing))
    if unresponsive is not None:
        return unresponsive
    for lack, code in ((PendingCause.PREREQUISITE, "CannotStart"), (PendingCause.CAPACITY, "Unschedulable")):
        lacking = [
            node for node in missing if (group := view.current_group(node)) is not None and group.pending_cause is lack
        ]
        if lacking:
            return _nodes_reason(view, code, lacking)
    pending = [node for node in missing if view.record.nodes[node].state is NodeState.PENDING]
    if view.record.round_cause:
        return _nodes_reason(view, "Restarting", missing, detail=view.record.round_cause)
    if pending:
        return _nodes_reason(view, "Initializing", pending, detail=_group_detail(view, pending[0]))
    return _nodes_reason(view, "NotReady", missing)


def _nodes_reason(view: _StatusContext, code: str, nodes: list[int], detail: str | None = None) -> Reason:
    words = {"job": view.job.request.name, "node": view.job.node_name(nodes[0]), "nodes": view.format_nodes(nodes)}
    return make_reason(code, **words, detail=_group_detail(view, nodes[0]) if detail is None else detail)


def _group_detail(view: _StatusContext, node: int) -> str:
    group = view.current_group(node)
    return group.text if group and group.text else "the platform gives no detail"


def _reason_code(record: JobRecord, node: int) -> str:
    why = record.nodes[node].reason
    return why.code if why else ""
