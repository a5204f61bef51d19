"""Tables of job and node states, their transitions and the reasons; the tables in the docs are rendered from them."""

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


JOB_STATE_TEXTS: Mapping[JobState, str] = {
    JobState.SUSPENDED: "Admitted; nothing of it runs until it is resumed.",
    JobState.PENDING: "Its worker groups are made, and wait at the start barrier.",
    JobState.STARTING: "All groups were ready, the gate is open; not all have started yet.",
    JobState.RUNNING: "All groups train, or have finished; of an elastic job enough of them do.",
    JobState.RETRYING: "A node failed; it is replaced, and the others wait at the start barrier again.",
    JobState.ENDING: "How it ends is decided; some groups have not ended yet.",
    JobState.SUCCEEDED: "All groups finished with exit code 0.",
    JobState.FAILED: "The script failed, or a node failed more often than it may.",
    JobState.STOPPED: "Somebody stopped it.",
    JobState.DELETING: "Everything of it is being removed.",
}

_S = JobState
_AFTER_RUNNING = (_S.ENDING, _S.SUCCEEDED, _S.FAILED, _S.STOPPED, _S.DELETING, _S.SUSPENDED)

TRANSITIONS: Mapping[JobState, tuple[JobState, ...]] = {
    _S.SUSPENDED: (_S.PENDING, _S.ENDING, _S.STOPPED, _S.DELETING),
    _S.PENDING: (_S.STARTING, _S.RUNNING, _S.RETRYING, *_AFTER_RUNNING),
    _S.STARTING: (_S.RUNNING, _S.RETRYING, *_AFTER_RUNNING),
    _S.RUNNING: (_S.RETRYING, *_AFTER_RUNNING),
    _S.RETRYING: (_S.STARTING, _S.RUNNING, *_AFTER_RUNNING),
    _S.ENDING: (_S.SUCCEEDED, _S.FAILED, _S.STOPPED, _S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.SUCCEEDED: (_S.DELETING,),
    _S.FAILED: (_S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.STOPPED: (_S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.DELETING: (),
}
"""State -> states that can follow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Reason for which a job or node does not run, or only in part, with a hint."""

    code: str
    """One word for programs."""
    text: str
    """Description of the wait or the event."""
    helps: str
    """Hint for the user; never empty."""

    def __str__(self) -> str:
        return f"{self.text}. {self.helps}."


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReasonTemplate:
    subject: str
    states: str
    text: str
    hint: str


_NO_ACTION = "Nothing to do: it goes on by itself"

REASON_TEMPLATES: Mapping[str, _ReasonTemplate] = {
    "Suspended": _ReasonTemplate(
        subject="job", states="Suspended", text="it is suspended, nothing of it runs", hint="ringweave resume {job}"
    ),
    "Suspending": _ReasonTemplate(
        subject="job", states="Suspended", text="it is suspended, and waits for {nodes} to end", hint=_NO_ACTION
    ),
    "NotPlaced": _ReasonTemplate(
        subject="job",
        states="Pending, Retrying",
        text="waits for a place for {nodes}: {detail}",
        hint="Free room there, or ask for fewer (ringweave split says which totals can be), "
        "or take it back with ringweave stop {job}",
    ),
    "CannotBegin": _ReasonTemplate(
        subject="job",
        states="Pending, Retrying",
        text="{nodes} cannot begin: {detail}",
        hint="See that what is named there can be had: it is tried again; "
        "where the job has to change for it, ringweave delete {job}, and submit it anew",
    ),
    "MachineSilent": _ReasonTemplate(
        subject="job",
        states="Pending, Retrying, Ending, Suspended, Deleting",
        text="the machine of {nodes} does not answer: {detail}",
        hint="Once you know that nothing runs there any more, {mend}",
    ),
    "Beginning": _ReasonTemplate(
        subject="job",
        states="Pending",
        text="waits for {nodes} to begin: {detail}",
        hint="Nothing to do while an image or files are on their way; if it lasts, see what its place says of it",
    ),
    "NotReady": _ReasonTemplate(
        subject="job",
        states="Pending",
        text="waits for {nodes} to be ready; no node starts before all are",
        hint="ringweave logs {job} --node {node} shows what it does",
    ),
    "Replacing": _ReasonTemplate(
        subject="job",
        states="Retrying",
        text="{detail}; waits for {nodes} to be ready, then all start again, from their last checkpoint if any",
        hint="ringweave logs {job} shows why it failed; a node that fails again and again needs mending",
    ),
    "GoesOn": _ReasonTemplate(
        subject="job",
        states="Running",
        text="{detail}; the others train on, and {nodes} can join them when replaced",
        hint="Nothing to do; ringweave logs {job} --node {node} shows why it failed",
    ),
    "GoesOnWithout": _ReasonTemplate(
        subject="job",
        states="Running",
        text="{detail}; the others train on without {nodes}, which failed more often than max_retries allows",
        hint="Nothing to do; ringweave logs {job} --node {node} shows why it failed",
    ),
    "FindingCause": _ReasonTemplate(
        subject="job",
        states="Pending, Starting, Retrying",
        text="{nodes} ended, and the first cause is looked for: {detail}",
        hint="Nothing to do: it is decided within seconds",
    ),
    "GateOpen": _ReasonTemplate(
        subject="job", states="Starting", text="all nodes were ready; waits for {nodes} to start", hint=_NO_ACTION
    ),
    "Finished": _ReasonTemplate(
        subject="job",
        states="Ending, Succeeded",
        text="all nodes finished their iterations",
        hint="ringweave logs {job} shows the results; ringweave delete {job} removes what is kept",
    ),
    "FinishedWithout": _ReasonTemplate(
        subject="job",
        states="Ending, Succeeded",
        text="all nodes finished their iterations but {nodes}: {detail}",
        hint="ringweave logs {job} shows the results; see to the machine of {nodes} before another job gets it",
    ),
    "ProgramFailed": _ReasonTemplate(
        subject="job",
        states="Ending, Failed",
        text="the script failed on {nodes}: {detail}; trying again would not mend it",
        hint="Mend the script (ringweave logs {job} --node {node}), then ringweave retry {job}; "
        "a script without a directory was copied: ringweave delete {job}, and submit it anew",
    ),
    "RetriesSpent": _ReasonTemplate(
        subject="job",
        states="Ending, Failed",
        text="{nodes} failed more often than max_retries allows: {detail}",
        hint="Mend the node or leave it out, raise max_retries, then ringweave retry {job}",
    ),
    "TakenAway": _ReasonTemplate(
        subject="job",
        states="Ending, Failed",
        text="its place took it all away {count} times in a row before all nodes ran: {detail}",
        hint="See why the place does that, then ringweave retry {job}",
    ),
    "Stopped": _ReasonTemplate(
        subject="job",
        states="Ending, Stopped",
        text="it was stopped",
        hint="ringweave retry {job} starts it again, from its last checkpoint",
    ),
    "Deleting": _ReasonTemplate(
        subject="job",
        states="Deleting",
        text="waits for {nodes} to be removed",
        hint="Nothing to do: the name is free when it is gone",
    ),
    "NodeUnused": _ReasonTemplate(
        subject="node",
        states="Unused",
        text="the split needs nothing of it",
        hint="Nothing to do; a larger total would use it",
    ),
    "NodeSuspended": _ReasonTemplate(
        subject="node", states="Waiting", text="the job is suspended", hint="ringweave resume {job}"
    ),
    "NodeLeaving": _ReasonTemplate(
        subject="node", states="Waiting", text="waits for its attempt {attempt} to be gone: {detail}", hint=_NO_ACTION
    ),
    "NodeToMake": _ReasonTemplate(
        subject="node",
        states="Waiting",
        text="waits for its worker group to be made (attempt {attempt})",
        hint=_NO_ACTION,
    ),
    "NodePending": _ReasonTemplate(
        subject="node",
        states="Pending",
        text="waits for its place: {detail}",
        hint="Free room there, or ask for fewer; ringweave logs {job} --node {node} shows what it does",
    ),
    "NodeBeginning": _ReasonTemplate(
        subject="node",
        states="Pending",
        text="begins: {detail}",
        hint="Nothing to do while its image or files are on their way; if it lasts, see what its place says of it",
    ),
    "NodeSilent": _ReasonTemplate(
        subject="node",
        states="Waiting, Pending, Ready, Running, Interrupted",
        text="its machine does not answer: {detail}",
        hint="Once you know that nothing runs there any more, {mend}",
    ),
    "NodeCannotBegin": _ReasonTemplate(
        subject="node",
        states="Pending",
        text="cannot begin: {detail}",
        hint="See that what is named there can be had: it is tried again",
    ),
    "NodeAtGate": _ReasonTemplate(
        subject="node", states="Ready", text="is ready, and waits for {nodes}", hint=_NO_ACTION
    ),
    "NodeMayStart": _ReasonTemplate(subject="node", states="Ready", text="is ready, and may start", hint=_NO_ACTION),
    "NodeCalledBack": _ReasonTemplate(
        subject="node",
        states="Interrupted",
        text="waits at the start barrier again, since another node failed",
        hint="Nothing to do: it starts again when all are ready, from the last checkpoint if there is one",
    ),
    "NodeFailing": _ReasonTemplate(
        subject="node",
        states="Failed, Interrupted",
        text="ended: {detail}",
        hint="Nothing to do: it is decided in seconds",
    ),
    "NodeFinished": _ReasonTemplate(
        subject="node", states="Succeeded", text="finished its iterations", hint="ringweave logs {job} --node {node}"
    ),
    "NodeLeftBehind": _ReasonTemplate(
        subject="node",
        states="Stopped",
        text="the others finished without it: {detail}",
        hint="See to its machine; ringweave logs {job} --node {node} shows how far it came",
    ),
    "NodeFailed": _ReasonTemplate(
        subject="node", states="Failed", text="failed: {detail}", hint="ringweave logs {job} --node {node} shows why"
    ),
    "NodeGivenUp": _ReasonTemplate(
        subject="node",
        states="Failed",
        text="failed more often than max_retries allows: {detail}",
        hint="Nothing to do: the others go on without it; ringweave logs {job} --node {node} shows why",
    ),
    "NodeStopped": _ReasonTemplate(
        subject="node", states="Stopped", text="ended with the job", hint="ringweave retry {job}"
    ),
}
"""Code -> subject, states, text and hint; `{...}` is filled in."""


def make_reason(code: str, **words: object) -> Reason:
    """Return the reason of this code, with its placeholders filled in."""
    kind = REASON_TEMPLATES[code]
    return Reason(code=code, text=kind.text.format(**words), helps=kind.hint.format(**words))


def states_to_mermaid() -> str:
    """Return the state diagram of docs/reference/job-states.md; DELETING is drawn after end states only."""
    lines = ["stateDiagram-v2", "    [*] --> Pending", "    [*] --> Suspended"]
    for state, after in TRANSITIONS.items():
        lines += [f"    {state} --> {other}" for other in after if other is not JobState.DELETING or state.is_end]
    return "\n".join([*lines, "    Deleting --> [*]"]) + "\n"


def states_to_markdown() -> str:
    """Return the tables of states and reasons of docs/reference/job-states.md."""
    states = [f"| {state} | {meaning} |" for state, meaning in JOB_STATE_TEXTS.items()]
    reasons = [
        f"| {kind.subject} | {kind.states} | `{code}` | {_escape_markdown(kind.text)} | {_escape_markdown(kind.hint)} |"
        for code, kind in REASON_TEMPLATES.items()
    ]
    return "\n".join(
        [
            "| state | meaning |",
            "|---|---|",
            *states,
            "",
            "| of | state | reason | what it waits for, or what happened | what helps |",
            "|---|---|---|---|---|",
            *reasons,
            "",
        ]
    )


def _escape_markdown(text: str) -> str:
    return text.replace("{", "_").replace("}", "_").replace("|", "\\|")
