"""advance_record: a job's next record from its last record and an observation. Pure and idempotent."""

from dataclasses import replace

from ringweave.jobs import failures, status_text
from ringweave.jobs.records import (
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
)
from ringweave.jobs.states import JobState, Reason, make_reason

GroupsByAttempt = dict[tuple[int, int], ObservedGroup]


def advance_record(job: Job, observed: ObservedJobState, now: float) -> JobRecord:
    """Return the record after this observation.

    Args:
        job: The job with the record as it was saved last.
        observed: Observation of the platform, made after the record was read.
        now: Seconds on the clock of `created_s` and of the groups' `ended_s`.
    """
    groups = {(group.node, group.attempt): group for group in observed.groups}
    record = _update_progress(job, groups)
    if not _should_delete(job, record, now):
        record = _decide_outcome(job, record, observed, now)
    # Again: an end that is observed late may be longer ago than the TTL.
    record = replace(record, deleting=_should_delete(job, record, now))
    if not record.deleting:
        record = _start_retry(job, record, now)
    if should_run(job, record):
        record = _start_next_attempts(job, record, groups)
    return _update_states(job, _update_hang_timers(job, record, groups, now), observed, now)


def record_after_preemption(record: JobRecord, cause: str) -> JobRecord:
    """Return the record of a job whose platform preempted all groups at once and allocated again: an uncharged round.

    Args:
        record: As saved last.
        cause: Text for people.
    """
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


def _update_progress(job: Job, groups: GroupsByAttempt) -> JobRecord:
    """Mark attempts as seen and update the progress of their groups."""
    nodes = list(job.record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        group = groups.get((node, known.attempt))
        if group is not None:
            iterations = known.iterations if group.iterations is None else group.iterations
            last_loss = known.last_loss if group.last_loss is None else group.last_loss
            nodes[node] = replace(known, seen=True, iterations=iterations, last_loss=last_loss)
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


def _decide_outcome(job: Job, record: JobRecord, observed: ObservedJobState, now: float) -> JobRecord:
    """Set the outcome if there is one; otherwise end attempts after suspension or failures."""
    groups = {(group.node, group.attempt): group for group in observed.groups}
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
    return _end_job(record, JobState.SUCCEEDED, status_text.finished_without_reason(job, abandoned), now)


def _stop_job(job: Job, record: JobRecord, now: float) -> JobRecord:
    return _end_job(record, JobState.STOPPED, make_reason("Stopped", job=job.request.name), now)


def fail_after_preemptions(job: Job, record: JobRecord, cause: str, count: int, now: float) -> JobRecord:
    """Return the record of a job that failed because its platform preempted it too often in a row.

    Args:
        job: The job.
        record: As saved last.
        cause: Text for people.
        count: Preemptions in a row.
        now: Seconds on the clock of the job.
    """
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
        job, _record_attempt_ends(job, record, verdict.ends), observed, groups, now
    )
    if verdict.program_failed and not failed_by_program:
        charged = {node: replace(verdict.ends[node], charged=True) for node in verdict.program_failed}
        verdict = replace(verdict, ends=verdict.ends | charged, program_failed=())
    record = _record_attempt_ends(job, record, verdict.ends)
    if verdict.program_failed:
        why = status_text.failed_reason("NonZeroExitCode", job, verdict.program_failed, verdict.ends)
        return _end_job(record, JobState.FAILED, why, now)
    charged = {node: ended for node, ended in verdict.ends.items() if ended.charged}
    exhausted = tuple(node for node in charged if job.record.nodes[node].retries >= job.request.nodes[node].max_retries)
    continues = bool(charged) and failures.can_continue(job, record, observed, groups)
    if continues:
        record = _continue_without(job, record, charged, exhausted, now)
    elif exhausted or (_has_excluded_node(record) and (charged or _needs_all_nodes(record, verdict, observed))):
        return _end_job(record, JobState.FAILED, _retries_spent_reason(job, record, exhausted), now)
    elif charged:
        record = _start_next_round(record, status_text.format_failures(job, record, charged))
    elif verdict.loss is not None:
        record = _start_next_round(record, verdict.loss.text)
    elif verdict.blame is not None:
        record = _start_next_round(record, status_text.format_blame(job, verdict.blame), verdict.blame)
    return _end_early_finishers(job, record, groups)


def _record_attempt_ends(job: Job, record: JobRecord, ends: dict[int, AttemptEnd]) -> JobRecord:
    nodes = list(record.nodes)
    for node, ended in ends.items():
        nodes[node] = _end_attempt(nodes[node], ended, job.request.nodes[node].max_retries)
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
    text = status_text.format_failures(job, record, charged)
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
    return status_text.failed_reason("BackoffLimitExceeded", job, nodes, ends)


def _charge_blaming_node(
    job: Job, record: JobRecord, groups: GroupsByAttempt, blame: PeerBlame
) -> dict[int, AttemptEnd]:
    """End and charge the first attempt that blamed a peer, once all nodes are at the barrier: no node was lost."""
    current = {node: groups.get((node, record.nodes[node].attempt)) for node in job.used_nodes}
    are_ready = all(
        group is not None and group.is_at_barrier and group.round == record.round and record.nodes[node].ended is None
        for node, group in current.items()
    )
    if not are_ready:
        return {}
    attempt = record.nodes[blame.node].attempt
    return {blame.node: AttemptEnd(attempt=attempt, cause=EndCause.PLATFORM, charged=True, text=blame.text)}


def _end_attempt(known: NodeRecord, ended: AttemptEnd, max_retries: int) -> NodeRecord:
    is_retry = ended.charged and known.retries < max_retries
    return replace(known, ended=ended, retries=known.retries + is_retry)


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
    nodes = tuple(replace(known, retries=0, is_excluded=False, is_abandoned=False) for known in record.nodes)
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


def _start_next_attempts(job: Job, record: JobRecord, groups: GroupsByAttempt) -> JobRecord:
    """Start the next attempt of each node whose last attempt has ended and is gone."""
    nodes = list(record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        if known.ended is not None and not known.is_excluded and (node, known.attempt) not in groups:
            history = (*known.history, known.ended)
            nodes[node] = replace(known, attempt=known.attempt + 1, seen=False, ended=None, history=history)
    return replace(record, nodes=tuple(nodes))


def _update_states(job: Job, record: JobRecord, observed: ObservedJobState, now: float) -> JobRecord:
    """Update states and reasons for people. No decision above depends on them."""
    nodes = status_text.update_node_states(job, record, observed)
    record = replace(record, nodes=nodes)
    state, why = status_text.job_state(job, record, observed)
    since_s = record.since_s if state is record.state else now
    return replace(record, state=state, reason=why, since_s=since_s)
