"""The states of jobs and nodes, the ways between them, and the reasons: tables, from which the docs are made."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class JobState(enum.StrEnum):
    """What a job is doing."""

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
        """It stays so until somebody retries or deletes it, or its TTL has passed."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class NodeState(enum.StrEnum):
    """What a node of a job is doing."""

    UNUSED = "Unused"
    WAITING = "Waiting"
    PENDING = "Pending"
    READY = "Ready"
    RUNNING = "Running"
    INTERRUPTED = "Interrupted"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


JOB_STATES: Mapping[JobState, str] = {
    JobState.SUSPENDED: "Admitted; nothing of it runs until it is resumed.",
    JobState.PENDING: "Its worker groups are made, and gather at the gate.",
    JobState.STARTING: "All groups were ready, the gate is open; not all have started yet.",
    JobState.RUNNING: "All groups train, or have finished; of an elastic job enough of them do.",
    JobState.RETRYING: "A node failed; it is replaced, the others go back to the gate.",
    JobState.ENDING: "How it ends is decided; some groups have not ended yet.",
    JobState.SUCCEEDED: "All groups finished with exit code 0.",
    JobState.FAILED: "The script failed, or a node failed more often than it may.",
    JobState.STOPPED: "Somebody stopped it.",
    JobState.DELETING: "Everything of it is being removed.",
}

_S = JobState
_GATHERING = (_S.PENDING, _S.STARTING, _S.RUNNING, _S.RETRYING)
_ENDS = (_S.ENDING, _S.SUCCEEDED, _S.FAILED, _S.STOPPED, _S.DELETING, _S.SUSPENDED)

TRANSITIONS: Mapping[JobState, tuple[JobState, ...]] = {
    _S.SUSPENDED: (_S.PENDING, _S.ENDING, _S.STOPPED, _S.DELETING),
    _S.PENDING: (_S.STARTING, _S.RUNNING, _S.RETRYING, *_ENDS),
    _S.STARTING: (_S.RUNNING, _S.RETRYING, *_ENDS),
    _S.RUNNING: (_S.RETRYING, *_ENDS),
    _S.RETRYING: (_S.STARTING, _S.RUNNING, *_ENDS),
    _S.ENDING: (_S.SUCCEEDED, _S.FAILED, _S.STOPPED, _S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.SUCCEEDED: (_S.DELETING,),
    _S.FAILED: (_S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.STOPPED: (_S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.DELETING: (),
}
"""State -> the states that can follow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why something does not run, or not all of it: what it waits for, and what would help."""

    code: str
    """One word, for programs."""
    text: str
    """What it waits for, or what happened."""
    helps: str
    """What would help; never empty."""

    def __str__(self) -> str:
        return f"{self.text}. {self.helps}."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    of: str
    states: str
    text: str
    helps: str


_BY_ITSELF = "Nothing to do: it goes on by itself"

REASONS: Mapping[str, _Kind] = {
    "Suspended": _Kind(
        of="job", states="Suspended", text="it is suspended, nothing of it runs", helps="ringweave resume {job}"
    ),
    "Suspending": _Kind(
        of="job", states="Suspended", text="it is suspended, and waits for {nodes} to end", helps=_BY_ITSELF
    ),
    "NotPlaced": _Kind(
        of="job",
        states="Pending, Retrying",
        text="waits for a place for {nodes}: {detail}",
        helps="Free room there, or ask for fewer (ringweave split says which totals can be), "
        "or take it back with ringweave stop {job}",
    ),
    "CannotBegin": _Kind(
        of="job",
        states="Pending, Retrying",
        text="{nodes} cannot begin: {detail}",
        helps="See that what is named there can be had: it is tried again; "
        "where the job has to change for it, ringweave delete {job}, and submit it anew",
    ),
    "MachineSilent": _Kind(
        of="job",
        states="Pending, Retrying, Ending, Suspended, Deleting",
        text="the machine of {nodes} does not answer: {detail}",
        helps="Once you know that nothing runs there any more, {mend}",
    ),
    "Beginning": _Kind(
        of="job",
        states="Pending",
        text="waits for {nodes} to begin: {detail}",
        helps="Nothing to do while an image or files are on their way; if it lasts, see what its place says of it",
    ),
    "NotReady": _Kind(
        of="job",
        states="Pending",
        text="waits for {nodes} to be ready; no node starts before all are",
        helps="ringweave logs {job} --node {node} shows what it does",
    ),
    "Replacing": _Kind(
        of="job",
        states="Retrying",
        text="{detail}; waits for {nodes} to be ready, then all start again, from their last checkpoint if any",
        helps="ringweave logs {job} shows why it failed; a node that fails again and again needs mending",
    ),
    "GoesOn": _Kind(
        of="job",
        states="Running",
        text="{detail}; the others train on, and {nodes} can join them when replaced",
        helps="Nothing to do; ringweave logs {job} --node {node} shows why it failed",
    ),
    "GoesOnWithout": _Kind(
        of="job",
        states="Running",
        text="{detail}; the others train on without {nodes}, which failed more often than max_retries allows",
        helps="Nothing to do; ringweave logs {job} --node {node} shows why it failed",
    ),
    "FindingCause": _Kind(
        of="job",
        states="Pending, Starting, Retrying",
        text="{nodes} ended, and the first cause is looked for: {detail}",
        helps="Nothing to do: it is decided within seconds",
    ),
    "GateOpen": _Kind(
        of="job", states="Starting", text="all nodes were ready; waits for {nodes} to start", helps=_BY_ITSELF
    ),
    "Finished": _Kind(
        of="job",
        states="Ending, Succeeded",
        text="all nodes finished their iterations",
        helps="ringweave logs {job} shows the results; ringweave delete {job} removes what is kept",
    ),
    "FinishedWithout": _Kind(
        of="job",
        states="Ending, Succeeded",
        text="all nodes finished their iterations but {nodes}: {detail}",
        helps="ringweave logs {job} shows the results; see to the machine of {nodes} before another job gets it",
    ),
    "ProgramFailed": _Kind(
        of="job",
        states="Ending, Failed",
        text="the script failed on {nodes}: {detail}; trying again would not mend it",
        helps="Mend the script (ringweave logs {job} --node {node}), then ringweave retry {job}; "
        "a script without a directory was copied: ringweave delete {job}, and submit it anew",
    ),
    "RetriesSpent": _Kind(
        of="job",
        states="Ending, Failed",
        text="{nodes} failed more often than max_retries allows: {detail}",
        helps="Mend the node or leave it out, raise max_retries, then ringweave retry {job}",
    ),
    "TakenAway": _Kind(
        of="job",
        states="Ending, Failed",
        text="its place took it all away {count} times in a row before all nodes ran: {detail}",
        helps="See why the place does that, then ringweave retry {job}",
    ),
    "Stopped": _Kind(
        of="job",
        states="Ending, Stopped",
        text="it was stopped",
        helps="ringweave retry {job} starts it again, from its last checkpoint",
    ),
    "Deleting": _Kind(
        of="job",
        states="Deleting",
        text="waits for {nodes} to be removed",
        helps="Nothing to do: the name is free when it is gone",
    ),
    "NodeUnused": _Kind(
        of="node",
        states="Unused",
        text="the split needs nothing of it",
        helps="Nothing to do; a larger total would use it",
    ),
    "NodeSuspended": _Kind(of="node", states="Waiting", text="the job is suspended", helps="ringweave resume {job}"),
    "NodeLeaving": _Kind(
        of="node", states="Waiting", text="waits for its attempt {attempt} to be gone: {detail}", helps=_BY_ITSELF
    ),
    "NodeToMake": _Kind(
        of="node", states="Waiting", text="waits for its worker group to be made (attempt {attempt})", helps=_BY_ITSELF
    ),
    "NodePending": _Kind(
        of="node",
        states="Pending",
        text="waits for its place: {detail}",
        helps="Free room there, or ask for fewer; ringweave logs {job} --node {node} shows what it does",
    ),
    "NodeBeginning": _Kind(
        of="node",
        states="Pending",
        text="begins: {detail}",
        helps="Nothing to do while its image or files are on their way; if it lasts, see what its place says of it",
    ),
    "NodeSilent": _Kind(
        of="node",
        states="Waiting, Pending, Ready, Running, Interrupted",
        text="its machine does not answer: {detail}",
        helps="Once you know that nothing runs there any more, {mend}",
    ),
    "NodeCannotBegin": _Kind(
        of="node",
        states="Pending",
        text="cannot begin: {detail}",
        helps="See that what is named there can be had: it is tried again",
    ),
    "NodeAtGate": _Kind(of="node", states="Ready", text="is ready, and waits for {nodes}", helps=_BY_ITSELF),
    "NodeMayStart": _Kind(of="node", states="Ready", text="is ready, and may start", helps=_BY_ITSELF),
    "NodeCalledBack": _Kind(
        of="node",
        states="Interrupted",
        text="goes back to the gate, since another node failed",
        helps="Nothing to do: it starts again when all are ready, from the last checkpoint if there is one",
    ),
    "NodeFailing": _Kind(
        of="node", states="Failed, Interrupted", text="ended: {detail}", helps="Nothing to do: it is decided in seconds"
    ),
    "NodeFinished": _Kind(
        of="node", states="Succeeded", text="finished its iterations", helps="ringweave logs {job} --node {node}"
    ),
    "NodeLeftBehind": _Kind(
        of="node",
        states="Stopped",
        text="the others finished without it: {detail}",
        helps="See to its machine; ringweave logs {job} --node {node} shows how far it came",
    ),
    "NodeFailed": _Kind(
        of="node", states="Failed", text="failed: {detail}", helps="ringweave logs {job} --node {node} shows why"
    ),
    "NodeGivenUp": _Kind(
        of="node",
        states="Failed",
        text="failed more often than max_retries allows: {detail}",
        helps="Nothing to do: the others go on without it; ringweave logs {job} --node {node} shows why",
    ),
    "NodeStopped": _Kind(of="node", states="Stopped", text="ended with the job", helps="ringweave retry {job}"),
}
"""Code -> of what, in which states, what it says and what helps; `{...}` is filled in."""


def reason(code: str, **words: object) -> Reason:
    """The reason of this code, its words filled in."""
    kind = REASONS[code]
    return Reason(code=code, text=kind.text.format(**words), helps=kind.helps.format(**words))


def to_mermaid() -> str:
    """The state diagram of docs/jobs.md. DELETING can follow every state, and is drawn behind the ends only."""
    lines = ["stateDiagram-v2", "    [*] --> Pending", "    [*] --> Suspended"]
    for state, after in TRANSITIONS.items():
        lines += [f"    {state} --> {other}" for other in after if other is not JobState.DELETING or state.is_end]
    return "\n".join([*lines, "    Deleting --> [*]"]) + "\n"


def to_markdown() -> str:
    """The tables of states and reasons of docs/jobs.md."""
    states = [f"| {state} | {meaning} |" for state, meaning in JOB_STATES.items()]
    reasons = [
        f"| {kind.of} | {kind.states} | `{code}` | {_escaped(kind.text)} | {_escaped(kind.helps)} |"
        for code, kind in REASONS.items()
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


def _escaped(text: str) -> str:
    return text.replace("{", "_").replace("}", "_").replace("|", "\\|")
