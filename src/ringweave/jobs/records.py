"""Data of a job: observation, record, desired state, and actions of `reconcile`. Frozen; a record is saved whole."""

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from ringweave.errors import JobError
from ringweave.files import file_io
from ringweave.jobs import worker_options
from ringweave.jobs.request import ELASTIC_SERVER_MODES, JobRequest
from ringweave.jobs.restart_policy import RestartPolicy
from ringweave.jobs.states import JobState, NodeState, Reason

T = TypeVar("T")


class GroupPhase(enum.StrEnum):
    """Phase of a worker group."""

    PENDING = "Pending"
    """The group exists and is not ready: no capacity yet, image or files in transfer, or a node that boots."""
    READY = "Ready"
    """The group waits at the start barrier; no worker has started in its round."""
    RUNNING = "Running"
    """Its workers train."""
    INTERRUPTED = "Interrupted"
    """Its workers ended after another node's failure; the group is alive and can return to the barrier."""
    SUCCEEDED = "Succeeded"
    """All its workers ended with exit code 0."""
    FAILED = "Failed"
    """The group ended otherwise, by itself."""
    STOPPED = "Stopped"
    """The group ended because it was told to stop."""

    @property
    def is_alive(self) -> bool:
        """Return whether a process of the group runs or may still run."""
        return self in (GroupPhase.PENDING, GroupPhase.READY, GroupPhase.RUNNING, GroupPhase.INTERRUPTED)


class PendingCause(enum.StrEnum):
    """Known obstacle of a pending group."""

    CAPACITY = "Capacity"
    """No free capacity: the group starts when something else ends."""
    PREREQUISITE = "Prerequisite"
    """A missing image, permission or volume, which free capacity does not provide."""


class EndCause(enum.StrEnum):
    """Cause of the end of an attempt."""

    PROGRAM = "Program"
    """The script ended with an exit code other than 0: an error of the user, which a retry does not fix."""
    PLATFORM = "Platform"
    """A signal, a lost node or a missing image: no fault of the script, so the attempt is retried."""
    PEER = "Peer"
    """Another node failed, and this attempt with it."""
    ROUND = "Round"
    """The attempt had finished, and all nodes have to repeat the round."""
    SUSPENDED = "Suspended"
    """The job was suspended."""
    RETRIED = "Retried"
    """The whole job was retried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnresponsiveMachine:
    """Unresponsive machine. Only a person can find out whether anything runs on it."""

    text: str
    """Evidence; constant while the machine stays unresponsive."""
    fix: str
    """Command that tells the platform that nothing runs there any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedGroup:
    """Observed worker group: the workers of one node in one attempt."""

    node: int
    attempt: int
    """Number from 1; unique on the platform together with the node."""
    round: int
    """Round of the barrier that the group waits for, or has passed."""
    phase: GroupPhase
    requested_round: int = 0
    """Round that the group was last told to join, if the platform knows; the group may not have heard of it yet."""
    cause: EndCause | None = None
    """Cause of a FAILED group: PROGRAM, PLATFORM or PEER; None in other phases. An unknown cause counts as PLATFORM."""
    exit_code: int | None = None
    """Exit code of the first worker that failed, if known."""
    text: str = ""
    """Text of the platform: cause of waiting, or of the end."""
    pending_cause: PendingCause | None = None
    """Known obstacle of a pending group; None if it may only need time."""
    unresponsive: UnresponsiveMachine | None = None
    """Set if the machine is unresponsive, as far as the platform knows; None after the group has ended."""
    ended_s: float | None = None
    """Time of the end or interruption, on the clock of `reconcile`."""
    is_terminating: bool = False
    """The group was told to stop or is being removed, by us or by others. False again once it has ended and is kept."""
    iterations: int | None = None
    """Training steps done."""
    last_loss: float | None = None
    generation: tuple[int, int] = (0, 0)
    """Newest known membership generation (term, number) of an elastic job; zeros if none is known."""
    members: tuple[str, ...] = ()
    """The group's workers as members of an elastic job, `RANK.INCARNATION`."""
    evicted: tuple[str, ...] = ()
    """Members of an elastic job that are not in that generation any more and have not finished."""

    @property
    def is_at_barrier(self) -> bool:
        """Return whether the group is ready for its round, or beyond."""
        return not self.is_terminating and self.phase in (GroupPhase.READY, GroupPhase.RUNNING, GroupPhase.SUCCEEDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedJobState:
    """Observation of one job on its platform, made after the record was read, so never older than it."""

    has_config: bool = False
    """The config (node names, worker counts, script) exists."""
    is_config_incomplete: bool = False
    """A part of the config was removed; it must be created again before any group."""
    released_round: int = 0
    """The barrier is released for rounds up to this one; 0 without a config."""
    groups: tuple[ObservedGroup, ...] = ()
    """All worker groups, including those being removed. A group is gone when none of its processes can run any more."""
    late_nodes: frozenset[int] = frozenset()
    """Nodes of an elastic job that may come while the others train; the barrier does not wait for them."""

    @property
    def by_attempt(self) -> dict[tuple[int, int], ObservedGroup]:
        """Node and attempt -> group."""
        return {(group.node, group.attempt): group for group in self.groups}

    @property
    def is_under_way(self) -> bool:
        """A group runs, or is being removed."""
        return any(group.phase.is_alive or group.is_terminating for group in self.groups)


def cause_of_exit(exit_code: int | None, signal_name: str | None, *, blames_peer: bool) -> EndCause:
    """Return the cause of the end of failed workers, by the first one that failed.

    Args:
        exit_code: Exit code of the worker; None if a signal ended it. A shell reports a signal as a code above 128.
        signal_name: The signal that ended it, or None.
        blames_peer: The last line of its output blames another rank.
    """
    if blames_peer:
        return EndCause.PEER
    if signal_name is not None or exit_code is None or exit_code > 128:
        return EndCause.PLATFORM
    return EndCause.PROGRAM


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """End of an attempt."""

    attempt: int
    cause: EndCause
    charged: bool
    """The end counts against the node's retries."""
    text: str
    """Description for people."""
    exit_code: int | None = None
    """Exit code of the first worker that failed, if known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """Record of one node of a job."""

    attempt: int = 1
    """Current attempt; attempts are counted through all runs, so that each has a unique name."""
    seen: bool = False
    """The current attempt was observed on the platform; if it is missing later, it was lost."""
    ended: AttemptEnd | None = None
    """End of the current attempt; None while the attempt is wanted."""
    retries: int = 0
    """Replacements in this run after failures of the node's own."""
    is_excluded: bool = False
    """The node exceeded its retries, and the other nodes of an elastic job continue without it to the end."""
    is_abandoned: bool = False
    """The node hung when the other nodes had finished, and the job has succeeded without it."""
    state: NodeState = NodeState.WAITING
    reason: Reason | None = None
    """Reason for not running; None only while the node runs."""
    iterations: int | None = None
    """Train steps done, as last reported."""
    last_loss: float | None = None
    suspected_since_s: float | None = None
    """Time since which the node is suspected to hang; None if it is not suspected."""
    running_since_s: float | None = None
    """Time at which the current attempt was first seen to run."""
    restarts: RestartPolicy = field(default_factory=lambda: RestartPolicy(max_failed_starts=None))
    """Time of the next attempt, by the failures of the node's own in a row; `max_retries` says when it is given up."""
    history: tuple[AttemptEnd, ...] = ()
    """Ends of the newest earlier attempts, oldest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerBlame:
    """First end of a round whose ends all blame a peer, while a possible culprit had not answered."""

    node: int
    """Node of that end. It is charged if all nodes answer after all, so that this cannot repeat for ever."""
    text: str
    """Description of the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLoss:
    """Last failure in a round of an elastic job that the other nodes continued without."""

    text: str
    """Failed node and failure, for people. Members that cannot continue after all follow from it and are not charged.
    """
    at_s: float
    """Time of the decision that the other nodes continue."""
    scripts: tuple[int, ...] = ()
    """Nodes whose script failed, in this loss and in those shortly before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """Record of a job."""

    state: JobState
    since_s: float
    """Time of the last change of state."""
    nodes: tuple[NodeRecord, ...]
    """Records of the nodes, in the order of the request."""
    reason: Reason | None = None
    """Reason for not running; None only while the job runs."""
    run: int = 1
    """Number of the run: 1, plus one for each `retry` of the whole job."""
    round: int = 1
    """Number of the round: one more each time all nodes have to gather at the barrier again."""
    round_cause: str = ""
    """Failure that caused this round; empty if no failure did."""
    blame: PeerBlame | None = None
    """Uncharged failure; settled when a node turns out to be lost, or when all nodes are at the barrier."""
    loss: NodeLoss | None = None
    """Loss that the others continue without, or did until all ran again. It belongs to this round."""
    outcome: JobState | None = None
    """SUCCEEDED, FAILED or STOPPED once decided."""
    outcome_reason: Reason | None = None
    ended_s: float | None = None
    """Time of the decision on the outcome; the TTL counts from here."""
    deleting: bool = False
    """All of the job is being removed; this cannot be undone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredJobState:
    """Desired state of a job, set by verbs. Levels, not events: readable at any time and any number of times."""

    suspend: bool = False
    """No group of the job may run."""
    stop_run: int = 0
    """Runs up to this one have to stop."""
    retry_run: int = 0
    """Run to follow by another one after it has failed or was stopped."""
    delete: bool = False
    """All of the job has to be removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Admitted job."""

    request: JobRequest
    requester: str
    """The user that the platform reports."""
    created_s: float
    """Time of admission."""
    counts: tuple[int, ...]
    """Workers of each node, in the order of the request; 0 if the split does not use the node."""
    desired: DesiredJobState
    record: JobRecord
    """Last saved record."""

    @property
    def used_nodes(self) -> tuple[int, ...]:
        """Return the indices of the nodes that get workers."""
        return tuple(node for node, count in enumerate(self.counts) if count)

    @property
    def elastic_server_nodes(self) -> tuple[int, ...]:
        """Return the indices of the nodes with a parameter server of an elastic job; empty for other jobs.

        It is the first node and, with a standby, the second: both have a coordinator too, so that the job depends on
        no further node.
        """
        has_server = self.request.elastic is not None and self.request.mode in ELASTIC_SERVER_MODES
        return self.used_nodes[: 1 + self.request.standby] if has_server else ()

    def node_name(self, node: int) -> str:
        return self.request.nodes[node].name

    def ranks_of_node(self, node: int) -> list[int]:
        """Return the global ranks of the workers of a node, ascending."""
        return worker_options.ranks_by_node(self.counts, self.request.worker_options.order)[node]


def new_job(request: JobRequest, *, requester: str, counts: tuple[int, ...], now: float) -> Job:
    """Return a job that was just admitted. Nothing of it exists yet."""
    nodes = tuple(NodeRecord(state=NodeState.WAITING if count else NodeState.UNUSED) for count in counts)
    record = JobRecord(state=JobState.SUSPENDED if request.suspend else JobState.PENDING, since_s=now, nodes=nodes)
    desired = DesiredJobState(suspend=request.suspend)
    return Job(request=request, requester=requester, created_s=now, counts=counts, desired=desired, record=record)


RECORD_FORMAT = 2
"""Format of a saved record, and of the files around it. Format 1 had other names of fields, causes and reasons."""


def add_format(text: bytes) -> bytes:
    """Return a JSON object with the key `format` in front of its own keys."""
    return b'{"format":%d,%b' % (RECORD_FORMAT, text[1:])


def check_format(text: str | bytes, what: str, where: str = "") -> None:
    """Refuse a saved JSON object of another format.

    Raises:
        JobError: Its format is not `RECORD_FORMAT`.
    """
    found = _FORMAT_ADAPTER.validate_json(file_io.bounded(text)).format
    if found != RECORD_FORMAT:
        do = "Delete the job with the ringweave that made it, then submit it again"
        expected = f"format {RECORD_FORMAT}"
        raise JobError(what, got=f"format {found}", expected=expected, do=do, where=where)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SavedFormat:
    """Format of a saved JSON object; its other keys are ignored."""

    format: int = 1


_FORMAT_ADAPTER = TypeAdapter(_SavedFormat)


class JsonForm(Generic[T]):
    """JSON of one type; what `dump` returns, `parse` reads."""

    def __init__(self, kind: type[T], *, saved_as: str = "", indent: int | None = None) -> None:
        """`saved_as` names a text that has the format of records; with `indent`, it is for people as well."""
        self._kind, self._saved_as, self._indent = kind, saved_as, indent

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        """Built on first use: a process imports the forms of many types, and needs few of them."""
        return TypeAdapter(self._kind)

    def dump(self, value: T) -> str:
        """Return the JSON of a value."""
        text = self._adapter.dump_json(value, indent=self._indent)
        whole = add_format(text) if self._saved_as else text
        return whole.decode() + ("\n" if self._indent else "")

    def parse(self, text: str | bytes) -> T:
        """Parse the JSON of a value.

        Raises:
            JobError: It has another format: another ringweave has written it.
            ValueError: It is none.
        """
        if self._saved_as:
            check_format(text, self._saved_as)
        return self._adapter.validate_json(file_io.bounded(text))


RECORD_JSON = JsonForm(JobRecord, saved_as="record of the job")


MAX_HISTORY = 100
"""Ends of earlier attempts of a node that its record keeps."""
MAX_EVENTS = 1000
"""Newest events of a job that its platform keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """Event of a job, reported once."""

    key: str
    """Unique within the job and equal after a crash, so that a platform that stores events can drop duplicates."""
    kind: str
    """Code of a reason, or a state."""
    text: str
    """Description for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRecord:
    """Save the record and its events, in one transaction if the platform has them. Later actions need its success."""

    record: JobRecord
    events: tuple[JobEvent, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateConfig:
    """Create the config or its missing parts: node names, worker counts, the script, and a closed start barrier."""

    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateGroup:
    """Create the worker group of a node's attempt; its workers wait at the start barrier of the round."""

    node: int
    attempt: int
    workers: int
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartGroup:
    """Stop the workers of a group that is kept; the group then waits at the start barrier of the round."""

    node: int
    attempt: int
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseBarrier:
    """Release the start barrier: all groups of the round may start."""

    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StopGroup:
    """Stop the processes of a group and keep its files and logs."""

    node: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteGroup:
    """Stop the processes of a group and remove it. Its logs are kept until the job is forgotten."""

    node: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteConfig:
    """Remove the config with its start barrier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetJob:
    """Remove the record, the logs and the name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequeueAt:
    """Reconcile again at this time, even if nothing changes before."""

    at_s: float


JobAction = (
    SaveRecord
    | CreateConfig
    | CreateGroup
    | RestartGroup
    | ReleaseBarrier
    | StopGroup
    | DeleteGroup
    | DeleteConfig
    | ForgetJob
    | RequeueAt
)
