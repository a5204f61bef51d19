"""States of jobs and nodes, and the reasons for them; docs/reference/job-states.md describes them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class JobState(enum.StrEnum):
    """State of a job."""

    SUSPENDED = "Suspended"
    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RETRYING = "Retrying"
    ENDING = "Ending"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"
    DELETING = "Deleting"

    @property
    def is_end(self) -> bool:
        """Return whether the state lasts until a retry, a deletion or the end of the TTL."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class NodeState(enum.StrEnum):
    """State of a node of a job."""

    UNUSED = "Unused"
    WAITING = "Waiting"
    PENDING = "Pending"
    READY = "Ready"
    RUNNING = "Running"
    INTERRUPTED = "Interrupted"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Reason for which a job or node does not run, or only in part, with a hint."""

    code: str
    """One word for programs."""
    text: str
    """Description of the wait or the event."""
    hint: str
    """Remedy for the user; never empty."""

    def __str__(self) -> str:
        return f"{self.text}. {self.hint}."


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReasonTemplate:
    text: str
    hint: str


_NO_ACTION = "Nothing to do; the job continues by itself"

REASON_TEMPLATES: Mapping[str, _ReasonTemplate] = {
    "Suspended": _ReasonTemplate(
        text="suspended; no process of it runs",
        hint="ringweave resume {job}",
    ),
    "Suspending": _ReasonTemplate(
        text="suspended, and waits for {nodes} to end",
        hint=_NO_ACTION,
    ),
    "Unschedulable": _ReasonTemplate(
        text="waits for capacity for {nodes}: {detail}",
        hint="Free capacity on the platform, ask for fewer workers (ringweave split prints the possible totals), "
        "or run ringweave stop {job}",
    ),
    "CannotStart": _ReasonTemplate(
        text="{nodes} cannot start: {detail}",
        hint="Provide the missing resource; the start is tried again. If the job itself has to change, ringweave "
        "delete {job} and submit it again",
    ),
    "MachineUnreachable": _ReasonTemplate(
        text="the machine of {nodes} does not answer: {detail}",
        hint="Once you know that no process runs there any more, {fix}",
    ),
    "Initializing": _ReasonTemplate(
        text="waits for {nodes} to start: {detail}",
        hint="Nothing to do while an image or files are transferred; if it takes long, look at the platform's own "
        "status",
    ),
    "NotReady": _ReasonTemplate(
        text="waits for {nodes} to be ready; no node starts before all are ready",
        hint="ringweave logs {job} --node {node} shows its output",
    ),
    "Restarting": _ReasonTemplate(
        text="{detail}; waits for {nodes} to be ready, then all nodes start again, from their last checkpoint if "
        "there is one",
        hint="ringweave logs {job} shows why the node failed; repair a node that fails repeatedly",
    ),
    "Degraded": _ReasonTemplate(
        text="{detail}; the other nodes continue, and {nodes} can join them when replaced",
        hint="Nothing to do; ringweave logs {job} --node {node} shows why it failed",
    ),
    "DegradedWithoutRetries": _ReasonTemplate(
        text="{detail}; the other nodes continue without {nodes}, which failed more often than max_retries allows",
        hint="Nothing to do; ringweave logs {job} --node {node} shows why it failed",
    ),
    "DeterminingCause": _ReasonTemplate(
        text="{nodes} ended, and the first cause is being determined: {detail}",
        hint="Nothing to do; the decision takes seconds",
    ),
    "BarrierReleased": _ReasonTemplate(
        text="all nodes were ready; waits for {nodes} to start",
        hint=_NO_ACTION,
    ),
    "Completed": _ReasonTemplate(
        text="all nodes finished their iterations",
        hint="ringweave logs {job} shows the results; ringweave delete {job} removes the kept files",
    ),
    "CompletedWithoutNodes": _ReasonTemplate(
        text="all nodes but {nodes} finished their iterations: {detail}",
        hint="ringweave logs {job} shows the results; check the machine of {nodes} before another job gets it",
    ),
    "NonZeroExitCode": _ReasonTemplate(
        text="the script failed on {nodes}: {detail}; a retry would not fix it",
        hint="Fix the script (ringweave logs {job} --node {node}), then ringweave retry {job}; a script without a "
        "directory was copied: ringweave delete {job}, and submit it again",
    ),
    "BackoffLimitExceeded": _ReasonTemplate(
        text="{nodes} failed more often than max_retries allows: {detail}",
        hint="Repair the node or leave it out, or raise max_retries, then ringweave retry {job}",
    ),
    "Preempted": _ReasonTemplate(
        text="preempted {count} times in a row before all nodes were running: {detail}",
        hint="Find out why the platform preempts the job, then ringweave retry {job}",
    ),
    "Stopped": _ReasonTemplate(
        text="stopped by a user",
        hint="ringweave retry {job} starts it again, from its last checkpoint",
    ),
    "Deleting": _ReasonTemplate(
        text="waits for {nodes} to be removed",
        hint="Nothing to do; the name is free when the removal is complete",
    ),
    "NodeUnused": _ReasonTemplate(
        text="the split gives it no workers",
        hint="Nothing to do; a larger total would use it",
    ),
    "NodeSuspended": _ReasonTemplate(
        text="the job is suspended",
        hint="ringweave resume {job}",
    ),
    "NodeTerminating": _ReasonTemplate(
        text="waits for the end of its attempt {attempt}: {detail}",
        hint=_NO_ACTION,
    ),
    "NodeNotCreated": _ReasonTemplate(
        text="waits for its worker group to be created (attempt {attempt})",
        hint=_NO_ACTION,
    ),
    "NodeUnschedulable": _ReasonTemplate(
        text="waits for capacity: {detail}",
        hint="Free capacity on the platform, or ask for fewer workers; ringweave logs {job} --node {node} shows "
        "its output",
    ),
    "NodeInitializing": _ReasonTemplate(
        text="starts: {detail}",
        hint="Nothing to do while its image or files are transferred; if it takes long, look at the platform's "
        "own status",
    ),
    "NodeUnreachable": _ReasonTemplate(
        text="its machine does not answer: {detail}",
        hint="Once you know that no process runs there any more, {fix}",
    ),
    "NodeCannotStart": _ReasonTemplate(
        text="cannot start: {detail}",
        hint="Provide the missing resource; the start is tried again",
    ),
    "NodeAtBarrier": _ReasonTemplate(
        text="ready, and waits for {nodes}",
        hint=_NO_ACTION,
    ),
    "NodeBackOff": _ReasonTemplate(
        text="starts again within half a minute, since it failed soon more than once: {detail}",
        hint="ringweave logs {job} --node {node} shows why",
    ),
    "NodeReleased": _ReasonTemplate(
        text="ready, and released to start",
        hint=_NO_ACTION,
    ),
    "NodeRestarting": _ReasonTemplate(
        text="waits at the start barrier again, since another node failed",
        hint="Nothing to do; it starts again when all nodes are ready, from the last checkpoint if there is one",
    ),
    "NodeFailing": _ReasonTemplate(
        text="ended: {detail}",
        hint="Nothing to do; the cause is determined within seconds",
    ),
    "NodeCompleted": _ReasonTemplate(
        text="finished its iterations",
        hint="ringweave logs {job} --node {node}",
    ),
    "NodeAbandoned": _ReasonTemplate(
        text="the other nodes finished without it: {detail}",
        hint="Check its machine; ringweave logs {job} --node {node} shows its last iterations",
    ),
    "NodeFailed": _ReasonTemplate(
        text="failed: {detail}",
        hint="ringweave logs {job} --node {node} shows why",
    ),
    "NodeBackoffLimitExceeded": _ReasonTemplate(
        text="failed more often than max_retries allows: {detail}",
        hint="Nothing to do; the other nodes continue without it. ringweave logs {job} --node {node} shows why",
    ),
    "NodeStopped": _ReasonTemplate(
        text="ended with the job",
        hint="ringweave retry {job}",
    ),
}
"""Code -> text and hint; `{...}` is filled in. Codes of a node's reasons begin with Node."""


def make_reason(code: str, **words: object) -> Reason:
    """Return the reason of this code, with its placeholders filled in."""
    kind = REASON_TEMPLATES[code]
    return Reason(code=code, text=kind.text.format(**words), hint=kind.hint.format(**words))
