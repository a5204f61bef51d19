"""A job as users see it, whatever the place: frozen data, and the JSON of `-o json` and of the remote protocol."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from ringweave.jobs.life.observing import Cause
from ringweave.jobs.life.records import Ended, Job, NodeRecord
from ringweave.jobs.life.states import JobState, NodeState, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptView:
    """One try of one node."""

    attempt: int
    """From 1; with the node it names the worker group, and the logs."""
    cause: Cause | None = None
    """Why it ended; None while it has not, or ended well."""
    charged: bool = False
    """It cost one of the node's retries."""
    exit_code: int | None = None
    """Of the first worker that failed, where there is one."""
    text: str = ""
    """How it ended, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """One node of a job."""

    name: str
    workers: int
    """GPUs, or CPU workers, that the split gave it; 0 where it is not used."""
    capacity: int
    """How many it may run."""
    state: NodeState
    reason: Reason | None
    """What it waits for and what helps; None only while it runs."""
    retries: int
    """Replacements after failures of its own in this run."""
    max_retries: int
    iterations: int | None
    """Training steps done, as last reported; None where nothing was."""
    last_loss: float | None
    """The last loss reported."""
    attempts: tuple[AttemptView, ...]
    """All of them, oldest first; the last one is the current one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventView:
    """Something that happened to a job."""

    time_s: float
    """Seconds since 1970."""
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job, and everything that `status`, `why` and `events` tell of it."""

    name: str
    place: str
    """Name of the service: `local`, `slurm`, `kubernetes`, ..."""
    requester: str
    """Who asked for it, as the place says."""
    state: JobState
    reason: Reason | None
    """What it waits for, or what happened, and what helps; None only while it runs."""
    created_s: float
    """Seconds since 1970."""
    since_s: float
    """When it came into its state."""
    ended_s: float | None
    """When its outcome was decided."""
    workers: int
    """GPUs, or CPU workers, in all."""
    device: str
    """`cuda` or `cpu`."""
    mode: str
    run: int
    """1, and one more for each `retry`."""
    round: int
    """How often all nodes have been gathered at the gate."""
    ttl_s: float | None
    nodes: tuple[NodeView, ...]
    """In the order of the request."""
    events: tuple[EventView, ...] = ()
    """Oldest first; left out (empty) in lists of jobs."""
    files: str = ""
    """Where logs and run directories are, for people; empty where the place has none to show."""

    @property
    def used_nodes(self) -> tuple[NodeView, ...]:
        """Those that have workers."""
        return tuple(node for node in self.nodes if node.workers)


def view(job: Job, *, place: str, events: Sequence[EventView] = (), files: str = "") -> JobView:
    """What users see of a job, from its record as saved last."""
    record, request = job.record, job.request
    return JobView(
        name=request.name,
        place=place,
        requester=job.requester,
        state=record.state,
        reason=record.reason,
        created_s=job.created_s,
        since_s=record.since_s,
        ended_s=record.ended_s,
        workers=request.num_workers,
        device=request.device,
        mode=request.mode,
        run=record.run,
        round=record.round,
        ttl_s=request.ttl_s,
        nodes=tuple(_node(job, index) for index in range(len(request.nodes))),
        events=tuple(events),
        files=files,
    )


def document(seen: JobView) -> dict[str, Any]:
    """The view as a JSON object; `parse` gives an equal one."""
    return _VIEW.dump_python(seen, mode="json")


def parse(content: object) -> JobView:
    """The view that a JSON object of `document` is.

    Raises:
        ValueError: It is none.
    """
    return _VIEW.validate_json(json.dumps(content))


def _node(job: Job, index: int) -> NodeView:
    asked, known = job.request.nodes[index], job.record.nodes[index]
    return NodeView(
        name=asked.name,
        workers=job.counts[index],
        capacity=asked.capacity,
        state=known.state,
        reason=known.reason,
        retries=known.retries,
        max_retries=asked.max_retries,
        iterations=known.iterations,
        last_loss=known.last_loss,
        attempts=_attempts(known) if job.counts[index] else (),
    )


def _attempts(known: NodeRecord) -> tuple[AttemptView, ...]:
    current = AttemptView(attempt=known.attempt) if known.ended is None else _attempt(known.ended)
    return (*map(_attempt, known.history), current)


def _attempt(ended: Ended) -> AttemptView:
    return AttemptView(
        attempt=ended.attempt, cause=ended.cause, charged=ended.charged, exit_code=ended.exit_code, text=ended.text
    )


_VIEW = TypeAdapter(JobView)
