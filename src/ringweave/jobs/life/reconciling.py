"""The one decision that all launchers share: what to do now for a job, given what its place holds.

`reconcile` first settles what is known (`advance`), then compares what is known with what is there (`_converge`). The
second part looks at nothing else, so an action that was lost in a crash is asked for again, and one that was done is
not: all that has to survive is the record, which is saved before anything follows from it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ringweave.jobs.life import failing, going_on, hanging
from ringweave.jobs.life.actions import (
    Action,
    CreateConfig,
    CreateGroup,
    DeleteConfig,
    DeleteGroup,
    Event,
    Forget,
    OpenGate,
    Regather,
    SaveRecord,
    StopGroup,
    Wake,
)
from ringweave.jobs.life.advancing import advance, expires_s, is_to_run
from ringweave.jobs.life.observing import Group, Observed
from ringweave.jobs.life.records import Job, Record
from ringweave.jobs.life.states import JobState
from ringweave.jobs.requests.request import DeletionPolicy


def reconcile(job: Job, observed: Observed, now: float) -> tuple[Action, ...]:
    """What to do now, in this order; an action that fails ends the list, and the next call finds what is left.

    Level-triggered: call it whenever something may have changed, after every list that held more than a `Wake`, and at
    the time of a `Wake`. Where nothing is to be done the list is empty, or holds a `Wake`.

    Args:
        job: The job with its record as saved last, and what verbs ask of it.
        observed: What its place holds; looked at after the record was read.
        now: Seconds on the clock of `created_s` and of the groups' `ended_s`.
    """
    record = advance(job, observed, now)
    actions: list[Action] = []
    if record != job.record:
        actions.append(SaveRecord(record=record, events=tuple(_events(job, record))))
    actions += _converge(job, record, observed)
    wake_s = _wake_s(replace(job, record=record), observed, now)
    if wake_s is not None:
        actions.append(Wake(at_s=wake_s))
    return tuple(actions)


def _converge(job: Job, record: Record, observed: Observed) -> Iterator[Action]:
    """From what is there to what is wanted."""
    current = {(node, record.nodes[node].attempt) for node in job.used_nodes}
    strays = [group for group in observed.groups if (group.node, group.attempt) not in current]
    yield from _deleted(strays)
    kept = [group for group in observed.groups if (group.node, group.attempt) in current]
    if is_to_run(job, record):
        yield from _run(job, record, observed, kept)
    elif record.outcome is not None and not record.deleting:
        yield from _tidy(job, record, kept)
    else:
        yield from _deleted(kept)
    if not is_to_run(job, record) and not observed.groups:
        if observed.config:
            yield DeleteConfig()
        elif record.deleting:
            yield Forget()


def _deleted(groups: Iterable[Group]) -> Iterator[DeleteGroup]:
    """Those that were told already are on their way."""
    return (DeleteGroup(node=group.node, attempt=group.attempt) for group in groups if not group.leaving)


def _run(job: Job, record: Record, observed: Observed, kept: list[Group]) -> Iterator[Action]:
    groups = {group.node: group for group in kept}
    if observed.torn or not observed.config:
        yield CreateConfig(counts=job.counts)
    is_through = going_on.is_through(job, record, {(group.node, group.attempt): group for group in kept})
    for node in job.used_nodes:
        known, group = record.nodes[node], groups.get(node)
        if known.is_given_up:
            yield from _stopped([group] if group else [])  # its node's policy decides in the end
        elif known.ended is not None:
            yield from _deleted([group] if group else [])
        elif group is None:
            if not is_through:
                yield CreateGroup(node=node, attempt=known.attempt, workers=job.counts[node], round=record.round)
        elif max(group.round, group.called) < record.round and group.phase.is_alive and not group.leaving:
            yield Regather(node=node, attempt=known.attempt, round=record.round)
    if observed.gate < record.round and all(_is_at_gate(record, node, groups) for node in job.used_nodes):
        yield OpenGate(round=record.round)


def _is_at_gate(record: Record, node: int, groups: dict[int, Group]) -> bool:
    """Ready for this round. Groups beyond the gate count too: it is shut again if somebody removes the config."""
    group = groups.get(node)
    if group is None or record.nodes[node].ended is not None or group.round != record.round:
        return False
    return group.is_at_gate


def _tidy(job: Job, record: Record, kept: list[Group]) -> Iterator[Action]:
    """All groups come to an end; each node's policy says whether something stays to be looked at."""
    for group in kept:
        if not _is_kept(job, record, group.node):
            yield from _deleted([group])
        else:
            yield from _stopped([group])


def _stopped(groups: Iterable[Group]) -> Iterator[StopGroup]:
    """Those that live, and were not told."""
    alive = [group for group in groups if group.phase.is_alive and not group.leaving]
    return (StopGroup(node=group.node, attempt=group.attempt) for group in alive)


def _is_kept(job: Job, record: Record, node: int) -> bool:
    policy = job.request.nodes[node].deletion
    on_failure = policy is DeletionPolicy.KEEP_ON_FAILURE and record.outcome is JobState.FAILED
    return policy is DeletionPolicy.KEEP or on_failure


def _wake_s(job: Job, observed: Observed, now: float) -> float | None:
    """The next time at which something is to be done though nothing happens: a TTL, or a verdict on failures."""
    if job.record.deleting:
        return None
    if is_to_run(job, job.record):
        groups = {(group.node, group.attempt): group for group in observed.groups}
        found = failing.to_judge(job, job.record, groups, now)
        judged_s = failing.judge(found, job.record, observed, now).wait_until_s
        hangs_s = hanging.hangs_at_s(job, job.record, groups, now)
        return min((time_s for time_s in (judged_s, hangs_s) if time_s is not None), default=None)
    return expires_s(job, job.record)


def _events(job: Job, record: Record) -> Iterator[Event]:
    """What this record tells that the one before did not."""
    for node in job.used_nodes:
        before, after = job.record.nodes[node], record.nodes[node]
        name = job.node_name(node)
        if after.ended is not None and before.ended is None:
            key = f"node{node}/attempt{after.attempt}/ended"
            text = f"node {name}, attempt {after.attempt}: {after.ended.text}"
            yield Event(key=key, kind=f"Attempt{after.ended.cause}", text=text)
        if after.seen and (not before.seen or after.attempt != before.attempt):
            key = f"node{node}/attempt{after.attempt}/begun"
            yield Event(key=key, kind="AttemptBegun", text=f"node {name}, attempt {after.attempt} is there")
    attempts = ".".join(str(known.attempt) for known in record.nodes)
    if record.loss is not None and record.loss != job.record.loss:
        yield Event(key=f"without/{attempts}", kind="GoesOn", text=f"{record.loss.text}; the others train on")
    if record.state is not job.record.state:
        text = str(record.reason) if record.reason else "all nodes run"
        when = f"round{record.round}" if job.request.elastic is None else f"round{record.round}/{attempts}"
        yield Event(key=f"run{record.run}/{when}/{record.state}", kind=str(record.state), text=text)
