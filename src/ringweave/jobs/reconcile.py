"""reconcile: the actions that bring a job's platform from its observed to its desired state; shared by all platforms.

`reconcile` first advances the record (`advance_record`), then compares the record with the observation (`_converge`).
The second step reads nothing else. So an action lost in a crash is requested again, and a finished action is not. Only
the record has to survive, and it is saved before any action that follows from it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ringweave.jobs import failures as jobs_failures
from ringweave.jobs import records
from ringweave.jobs.advance import advance_record, should_run, ttl_expiry_s
from ringweave.jobs.records import Job, JobAction, JobRecord, ObservedGroup, ObservedJobState
from ringweave.jobs.request import DeletionPolicy
from ringweave.jobs.states import JobState


def reconcile(job: Job, observed: ObservedJobState, now: float) -> tuple[JobAction, ...]:
    """Return the actions to take now, in order. A failed action ends the list; the next call finds what is left.

    Level-triggered: call it whenever something may have changed, after every list with more than a `RequeueAt`, and at
    the time of a `RequeueAt`. If there is nothing to do, the list is empty or holds a `RequeueAt`.

    Args:
        job: The job with its record as saved last, and its desired state.
        observed: Observation of the platform, made after the record was read.
        now: Seconds on the clock of `created_s` and of the groups' `ended_s`.
    """
    record = advance_record(job, observed, now)
    actions: list[JobAction] = []
    if record != job.record:
        actions.append(records.SaveRecord(record=record, events=tuple(_new_events(job, record))))
    actions += _converge(job, record, observed)
    requeue_s = _next_requeue_s(replace(job, record=record), observed, now)
    if requeue_s is not None:
        actions.append(records.RequeueAt(at_s=requeue_s))
    return tuple(actions)


def _converge(job: Job, record: JobRecord, observed: ObservedJobState) -> Iterator[JobAction]:
    """Yield the actions that lead from the observed to the wanted state."""
    current = {(node, record.nodes[node].attempt) for node in job.used_nodes}
    outdated = [group for group in observed.groups if (group.node, group.attempt) not in current]
    yield from _delete_groups(outdated)
    kept = [group for group in observed.groups if (group.node, group.attempt) in current]
    if should_run(job, record):
        yield from _run_groups(job, record, observed, kept)
    elif record.outcome is not None and not record.deleting:
        yield from _clean_up(job, record, kept)
    else:
        yield from _delete_groups(kept)
    if not should_run(job, record) and not observed.groups:
        if observed.has_config:
            yield records.DeleteConfig()
        elif record.deleting:
            yield records.ForgetJob()


def _delete_groups(groups: Iterable[ObservedGroup]) -> Iterator[records.DeleteGroup]:
    """Yield deletions of groups that are not terminating already."""
    return (records.DeleteGroup(node=group.node, attempt=group.attempt) for group in groups if not group.is_terminating)


def _run_groups(
    job: Job, record: JobRecord, observed: ObservedJobState, kept: list[ObservedGroup]
) -> Iterator[JobAction]:
    groups = {group.node: group for group in kept}
    if observed.is_config_incomplete or not observed.has_config:
        yield records.CreateConfig(counts=job.counts)
    job_is_finishing = jobs_failures.is_finishing(job, record, observed.by_attempt)
    for node in job.used_nodes:
        known, group = record.nodes[node], groups.get(node)
        if known.is_excluded:
            yield from _stop_groups([group] if group else [])  # its node's policy decides in the end
        elif known.ended is not None:
            yield from _delete_groups([group] if group else [])
        elif group is None:
            if not job_is_finishing:
                yield records.CreateGroup(
                    node=node, attempt=known.attempt, workers=job.counts[node], round=record.round
                )
        elif (
            max(group.round, group.requested_round) < record.round and group.phase.is_alive and not group.is_terminating
        ):
            yield records.RestartGroup(node=node, attempt=known.attempt, round=record.round)
    if observed.released_round < record.round and _is_barrier_full(job, record, observed):
        yield records.ReleaseBarrier(round=record.round)


def _is_barrier_full(job: Job, record: JobRecord, observed: ObservedJobState) -> bool:
    """Return whether all nodes are at the barrier but late ones, and these leave enough workers."""
    groups = observed.by_attempt
    present = [node for node in job.used_nodes if jobs_failures.is_at_barrier(record, node, groups)]
    if not observed.late_nodes.issuperset(set(job.used_nodes) - set(present)):
        return False
    least = job.request.elastic.min if job.request.elastic is not None else job.request.num_workers
    return sum(job.counts[node] for node in present) >= least


def _clean_up(job: Job, record: JobRecord, kept: list[ObservedGroup]) -> Iterator[JobAction]:
    """Yield the actions that end all groups; the deletion policy of each node decides whether its group is kept."""
    for group in kept:
        if not _keeps_group(job, record, group.node):
            yield from _delete_groups([group])
        else:
            yield from _stop_groups([group])


def _stop_groups(groups: Iterable[ObservedGroup]) -> Iterator[records.StopGroup]:
    """Yield stops of groups that are alive and not terminating already."""
    alive = [group for group in groups if group.phase.is_alive and not group.is_terminating]
    return (records.StopGroup(node=group.node, attempt=group.attempt) for group in alive)


def _keeps_group(job: Job, record: JobRecord, node: int) -> bool:
    policy = job.request.nodes[node].deletion
    on_failure = policy is DeletionPolicy.KEEP_ON_FAILURE and record.outcome is JobState.FAILED
    return policy is DeletionPolicy.KEEP or on_failure


def _next_requeue_s(job: Job, observed: ObservedJobState, now: float) -> float | None:
    """Return the time of the next decision that needs no event: a TTL, a hang, a verdict on failures, a restart."""
    if job.record.deleting:
        return None
    if should_run(job, job.record):
        groups = observed.by_attempt
        failures = jobs_failures.find_failures(job, job.record, groups, now)
        judged_s = jobs_failures.judge_failures(failures, job.record, observed, now).wait_until_s
        hangs_s = jobs_failures.next_hang_s(job, job.record, groups, now)
        found_s = [time_s for time_s in (judged_s, hangs_s) if time_s is not None]
        due_s = [job.record.nodes[node].restarts.due_s for node in job.used_nodes]
        # One that is due already waits for the end of its last group, which is an event.
        return min([*found_s, *(time_s for time_s in due_s if time_s is not None and time_s > now)], default=None)
    return ttl_expiry_s(job, job.record)


def _new_events(job: Job, record: JobRecord) -> Iterator[records.JobEvent]:
    """Yield the events of the step from the job's record to this one."""
    for node in job.used_nodes:
        before, after = job.record.nodes[node], record.nodes[node]
        name = job.node_name(node)
        if after.ended is not None and before.ended is None:
            key = f"node{node}/attempt{after.attempt}/ended"
            text = f"node {name}, attempt {after.attempt}: {after.ended.text}"
            yield records.JobEvent(key=key, kind=f"Attempt{after.ended.cause}", text=text)
        if after.seen and (not before.seen or after.attempt != before.attempt):
            key = f"node{node}/attempt{after.attempt}/started"
            yield records.JobEvent(
                key=key, kind="AttemptStarted", text=f"node {name}, attempt {after.attempt} was created"
            )
    attempts = ".".join(str(known.attempt) for known in record.nodes)
    if record.loss is not None and record.loss != job.record.loss:
        yield records.JobEvent(
            key=f"degraded/{attempts}", kind="Degraded", text=f"{record.loss.text}; the other nodes continue"
        )
    if record.state is not job.record.state:
        text = str(record.reason) if record.reason else "all nodes are running"
        when = f"round{record.round}" if job.request.elastic is None else f"round{record.round}/{attempts}"
        yield records.JobEvent(key=f"run{record.run}/{when}/{record.state}", kind=str(record.state), text=text)
