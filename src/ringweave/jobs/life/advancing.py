"""What is known of a job after another look at its place. Pure; a second look at the same changes nothing."""

from dataclasses import replace

from ringweave.jobs.life import failing, going_on, hanging, telling
from ringweave.jobs.life.observing import Cause, Group, Observed, Phase
from ringweave.jobs.life.records import Blame, Ended, Job, Loss, NodeRecord, Record
from ringweave.jobs.life.states import JobState, Reason, reason

Groups = dict[tuple[int, int], Group]


def advance(job: Job, observed: Observed, now: float) -> Record:
    """The record after this look.

    Args:
        job: The job with the record as it was saved last.
        observed: What its place holds; looked at after the record was read.
        now: Seconds on the clock of `created_s` and of the groups' `ended_s`.
    """
    groups = {(group.node, group.attempt): group for group in observed.groups}
    record = _looked(job, groups)
    if not _is_to_go(job, record, now):
        record = _decided(job, record, observed, now)
    # Again, since an end that is seen late may be longer ago than the TTL.
    record = replace(record, deleting=_is_to_go(job, record, now))
    if not record.deleting:
        record = _tried_again(job, record, now)
    if is_to_run(job, record):
        record = _renewed(job, record, groups)
    return _told(job, _silent(job, record, groups, now), observed, now)


def regathered(record: Record, cause: str) -> Record:
    """The record of a job whose place took all groups away at once and gave another one: a round that nobody pays for.

    Args:
        record: As saved last.
        cause: What happened, for people.
    """
    if record.outcome is not None:
        return record
    return _next_round(record, cause)


def is_tried_again(job: Job) -> bool:
    """Another run is asked for after a bad end, and its place has not begun with it."""
    return _is_retried(job, job.record) and job.desired.stop_run <= job.record.run


def is_over(job: Job) -> bool:
    """It has ended, and nobody has asked that it is tried again."""
    return job.record.state.is_end and not is_tried_again(job)


def as_asked(job: Job, now: float) -> Job:
    """The job as it is to be shown: one that is tried again is not over any more, though nobody has begun with it."""
    if job.record.deleting or job.desired.delete or not is_tried_again(job):
        return job
    return replace(job, record=advance(job, Observed(), now))


def is_to_run(job: Job, record: Record) -> bool:
    """Its worker groups are wanted."""
    return not record.deleting and record.outcome is None and not job.desired.suspend


def _looked(job: Job, groups: Groups) -> Record:
    """What is seen for the first time, and how far the groups have come."""
    nodes = list(job.record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        group = groups.get((node, known.attempt))
        if group is not None:
            iterations = known.iterations if group.iterations is None else group.iterations
            last_loss = known.last_loss if group.last_loss is None else group.last_loss
            nodes[node] = replace(known, seen=True, iterations=iterations, last_loss=last_loss)
    return replace(job.record, nodes=tuple(nodes))


def _silent(job: Job, record: Record, groups: Groups, now: float) -> Record:
    """Since when nodes may hang."""
    found = hanging.silent(job, record, groups) if is_to_run(job, record) else {}
    nodes = [
        replace(known, silent_since_s=(now if known.silent_since_s is None else known.silent_since_s))
        if node in found
        else replace(known, silent_since_s=None)
        for node, known in enumerate(record.nodes)
    ]
    return replace(record, nodes=tuple(nodes))


def _is_to_go(job: Job, record: Record, now: float) -> bool:
    expiry_s = expires_s(job, record)
    return record.deleting or job.desired.delete or (expiry_s is not None and now >= expiry_s)


def expires_s(job: Job, record: Record) -> float | None:
    """When the TTL ends; None where nothing is decided yet, or the job is kept."""
    return record.ended_s + job.request.ttl_s if record.ended_s is not None and job.request.ttl_s is not None else None


def _decided(job: Job, record: Record, observed: Observed, now: float) -> Record:
    """The outcome where there is one; else what suspension or failures make of the attempts."""
    groups = {(group.node, group.attempt): group for group in observed.groups}
    if record.outcome is not None:
        return record
    finished_s = _finished_s(job, record, groups, now)
    if finished_s is not None:
        return _finished(job, record, groups, finished_s, now)
    if job.desired.stop_run >= record.run:
        return _stopped(job, record, now)
    if job.desired.suspend:
        return _given_up(job, record, Cause.SUSPENDED, "the job was suspended")
    record = _after_failures(job, record, observed, groups, now)
    finished_s = _finished_s(job, record, groups, now)  # again: of who is judged now nobody waits for any more
    if record.outcome is None and finished_s is not None:
        return _finished(job, record, groups, finished_s, now)
    return record


def _finished(job: Job, record: Record, groups: Groups, finished_s: float, now: float) -> Record:
    """It has succeeded, if need be without nodes that hang: nobody waits for them, and nobody pays."""
    left = hanging.hung(job, record, groups, now)
    if not left:
        return _ended(record, JobState.SUCCEEDED, reason("Finished", job=job.request.name), finished_s)
    nodes = list(record.nodes)
    for node, text in left.items():
        ended = Ended(attempt=nodes[node].attempt, cause=Cause.PLACE, charged=False, text=text)
        nodes[node] = replace(nodes[node], ended=ended, is_left_behind=True)
    record = replace(record, nodes=tuple(nodes))
    return _ended(record, JobState.SUCCEEDED, telling.finished_without(job, left), now)


def _stopped(job: Job, record: Record, now: float) -> Record:
    return _ended(record, JobState.STOPPED, reason("Stopped", job=job.request.name), now)


def taken_away(job: Job, record: Record, cause: str, count: int, now: float) -> Record:
    """The record of a job that its place took away so often before it came to anything that it would for ever.

    Args:
        job: Which one.
        record: As saved last.
        cause: What happened, for people.
        count: How often in a row.
        now: Seconds on the clock of the job.
    """
    if record.outcome is not None:
        return record
    why = reason("TakenAway", job=job.request.name, count=count, detail=cause)
    return _ended(record, JobState.FAILED, why, now)


def _next_round(record: Record, cause: str, blame: Blame | None = None) -> Record:
    return replace(record, round=record.round + 1, round_cause=cause, blame=blame, loss=None)


def _finished_s(job: Job, record: Record, groups: Groups, now: float) -> float | None:
    """When the last of all groups finished; None where not all have."""
    if job.request.elastic is not None:
        return max(going_on.ends_s(job, record, groups, now), default=None)
    current = [groups.get((node, record.nodes[node].attempt)) for node in job.used_nodes]
    ends_s = [
        now if group.ended_s is None else group.ended_s
        for node, group in zip(job.used_nodes, current, strict=True)
        if group is not None
        and group.phase is Phase.SUCCEEDED
        and group.round == record.round
        and record.nodes[node].ended is None
    ]
    return max(ends_s) if len(ends_s) == len(current) else None


def _ended(record: Record, outcome: JobState, why: Reason, at_s: float) -> Record:
    return replace(record, outcome=outcome, outcome_reason=why, ended_s=at_s)


def _given_up(job: Job, record: Record, cause: Cause, text: str) -> Record:
    """All attempts that have begun are over, and the next ones gather in another round."""
    nodes = list(record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        if known.seen and known.ended is None:
            ended = Ended(attempt=known.attempt, cause=cause, charged=False, text=text)
            nodes[node] = replace(known, ended=ended)
    changed = tuple(nodes) != record.nodes
    record = replace(record, nodes=tuple(nodes), round_cause="", blame=None)
    return _next_round(record, "") if changed else record


def _after_failures(job: Job, record: Record, observed: Observed, groups: Groups, now: float) -> Record:
    verdict = failing.judge(failing.to_judge(job, record, groups, now), record, observed, now)
    if record.blame is not None and not any(ended.charged for ended in verdict.ends.values()):
        verdict = replace(verdict, ends=verdict.ends | _paid(job, record, groups, record.blame))
    is_mistake = going_on.is_mistake(job, _judged(job, record, verdict.ends), observed, groups, now)
    if verdict.program_failed and not is_mistake:
        charged = {node: replace(verdict.ends[node], charged=True) for node in verdict.program_failed}
        verdict = replace(verdict, ends=verdict.ends | charged, program_failed=())
    record = _judged(job, record, verdict.ends)
    if verdict.program_failed:
        why = telling.failed("ProgramFailed", job, verdict.program_failed, verdict.ends)
        return _ended(record, JobState.FAILED, why, now)
    charged = {node: ended for node, ended in verdict.ends.items() if ended.charged}
    spent = tuple(node for node in charged if job.record.nodes[node].retries >= job.request.nodes[node].max_retries)
    goes_on = bool(charged) and going_on.can_go_on(job, record, observed, groups)
    if goes_on:
        record = _gone_on(job, record, charged, spent, now)
    elif spent or (_is_given_up(record) and (charged or _has_to_gather(record, verdict, observed))):
        return _ended(record, JobState.FAILED, _spent(job, record, spent), now)
    elif charged:
        record = _next_round(record, telling.failures(job, record, charged))
    elif verdict.follows is not None:
        record = _next_round(record, verdict.follows.text)
    elif verdict.blame is not None:
        record = _next_round(record, telling.blame(job, verdict.blame), verdict.blame)
    return _finished_too_early(job, record, groups)


def _judged(job: Job, record: Record, ends: dict[int, Ended]) -> Record:
    """With these ends of attempts."""
    nodes = list(record.nodes)
    for node, ended in ends.items():
        nodes[node] = _failed(nodes[node], ended, job.request.nodes[node].max_retries)
    return replace(record, nodes=tuple(nodes))


def _gone_on(job: Job, record: Record, charged: dict[int, Ended], spent: tuple[int, ...], now: float) -> Record:
    """Some are lost and the others go on; to the end, without those that may not be tried again."""
    nodes = tuple(
        replace(known, is_given_up=node in spent or known.is_given_up) for node, known in enumerate(record.nodes)
    )
    scripts = {node for node, ended in charged.items() if ended.cause is Cause.PROGRAM}
    if record.loss is not None and now - record.loss.at_s < going_on.SAME_S:
        scripts |= set(record.loss.scripts)
    text = telling.failures(job, record, charged)
    return replace(record, nodes=nodes, loss=Loss(text=text, at_s=now, scripts=tuple(sorted(scripts))))


def _has_to_gather(record: Record, verdict: failing.Verdict, observed: Observed) -> bool:
    """All nodes, at the gate of this round or of the next one."""
    return verdict.follows is not None or verdict.blame is not None or observed.gate < record.round


def _is_given_up(record: Record) -> bool:
    return any(known.is_given_up for known in record.nodes)


def _spent(job: Job, record: Record, spent: tuple[int, ...]) -> Reason:
    """Why there is no other round: of those that failed just now, or were given up before."""
    nodes = spent or tuple(node for node, known in enumerate(record.nodes) if known.is_given_up)
    ends = {node: ended for node in nodes if (ended := record.nodes[node].ended) is not None}
    return telling.failed("RetriesSpent", job, nodes, ends)


def _paid(job: Job, record: Record, groups: Groups, blame: Blame) -> dict[int, Ended]:
    """The end of the first one that blamed another, once all are at the gate: nobody was lost."""
    current = {node: groups.get((node, record.nodes[node].attempt)) for node in job.used_nodes}
    are_there = all(
        group is not None and group.is_at_gate and group.round == record.round and record.nodes[node].ended is None
        for node, group in current.items()
    )
    if not are_there:
        return {}
    attempt = record.nodes[blame.node].attempt
    return {blame.node: Ended(attempt=attempt, cause=Cause.PLACE, charged=True, text=blame.text)}


def _failed(known: NodeRecord, ended: Ended, max_retries: int) -> NodeRecord:
    is_retry = ended.charged and known.retries < max_retries
    return replace(known, ended=ended, retries=known.retries + is_retry)


def _finished_too_early(job: Job, record: Record, groups: Groups) -> Record:
    """Groups that finished a round which has to be run again by all."""
    nodes = list(record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        group = groups.get((node, known.attempt))
        if group and known.ended is None and group.phase is Phase.SUCCEEDED and group.round < record.round:
            text = "it had finished, and another node failed before all had"
            ended = Ended(attempt=known.attempt, cause=Cause.ROUND, charged=False, text=text, exit_code=0)
            nodes[node] = replace(known, ended=ended)
    return replace(record, nodes=tuple(nodes))


def _tried_again(job: Job, record: Record, now: float) -> Record:
    """Another run, where one is asked for after a bad end; over at once if it was stopped before it has begun."""
    if not _is_retried(job, record):
        return record
    record = _given_up(job, record, Cause.RETRIED, "the job was tried again")
    nodes = tuple(replace(known, retries=0, is_given_up=False, is_left_behind=False) for known in record.nodes)
    record = replace(
        record,
        nodes=nodes,
        run=record.run + 1,
        round=record.round + 1,
        outcome=None,
        outcome_reason=None,
        ended_s=None,
    )
    return _stopped(job, record, now) if job.desired.stop_run >= record.run else record


def _is_retried(job: Job, record: Record) -> bool:
    """It has ended badly, and another run is asked for."""
    return record.outcome in (JobState.FAILED, JobState.STOPPED) and job.desired.retry_run == record.run


def _renewed(job: Job, record: Record, groups: Groups) -> Record:
    """The next attempt of each node whose last one is over and gone."""
    nodes = list(record.nodes)
    for node in job.used_nodes:
        known = nodes[node]
        if known.ended is not None and not known.is_given_up and (node, known.attempt) not in groups:
            history = (*known.history, known.ended)
            nodes[node] = replace(known, attempt=known.attempt + 1, seen=False, ended=None, history=history)
    return replace(record, nodes=tuple(nodes))


def _told(job: Job, record: Record, observed: Observed, now: float) -> Record:
    """States and reasons, for people; nothing above depends on them."""
    nodes = telling.nodes(job, record, observed)
    record = replace(record, nodes=nodes)
    state, why = telling.job_state(job, record, observed)
    since_s = record.since_s if state is record.state else now
    return replace(record, state=state, reason=why, since_s=since_s)
