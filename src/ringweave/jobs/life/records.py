"""What is known of a job and must survive a crash; frozen, and saved whole before anything is done about it."""

from dataclasses import dataclass

from pydantic import TypeAdapter

from ringweave.jobs.life.observing import Cause
from ringweave.jobs.life.states import JobState, NodeState, Reason
from ringweave.jobs.requests.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How an attempt ended."""

    attempt: int
    """Which one."""
    cause: Cause
    """Why."""
    charged: bool
    """It counts against the node's retries."""
    text: str
    """In words."""
    exit_code: int | None = None
    """Of the first worker that failed, where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """What is known of one node of a job."""

    attempt: int = 1
    """The current attempt; attempts are counted through all runs, so that each has a name of its own."""
    seen: bool = False
    """The current attempt has been seen in the place; if it is missing after that, it was lost."""
    ended: Ended | None = None
    """How the current attempt ended; None while it is wanted."""
    retries: int = 0
    """Replacements after failures of its own in this run."""
    is_given_up: bool = False
    """It has failed more often than it may, and the others of an elastic job go on without it to the end."""
    is_left_behind: bool = False
    """It hung when the others had finished, and the job has succeeded without it."""
    state: NodeState = NodeState.WAITING
    """What it is doing, for people."""
    reason: Reason | None = None
    """Why it does not run; None only while it does."""
    iterations: int | None = None
    """Training steps done, as last reported."""
    last_loss: float | None = None
    """The last loss reported."""
    silent_since_s: float | None = None
    """Since when it may hang, as far as is known; None while nothing speaks for it."""
    history: tuple[Ended, ...] = ()
    """How earlier attempts ended, oldest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The first end of a round whose ends all blamed another, while a node had not answered that could be the one."""

    node: int
    """Whose end it was; it pays where all answer after all, so that this cannot go on for ever."""
    text: str
    """How it ended, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The last failure of a round of an elastic job that the others went on without."""

    text: str
    """Who failed and how, in words. Who cannot go on after all follows from it, and pays nothing."""
    at_s: float
    """When it was decided that the others go on."""
    scripts: tuple[int, ...] = ()
    """Nodes whose script had failed, of this loss and of those shortly before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is known of a job."""

    state: JobState
    """What it is doing, for people."""
    since_s: float
    """When it came into that state."""
    nodes: tuple[NodeRecord, ...]
    """In the order of the request."""
    reason: Reason | None = None
    """Why it does not run; None only while it does."""
    run: int = 1
    """1, then one more for every `retry` of the whole job."""
    round: int = 1
    """One more for every time that all have to gather at the gate again."""
    round_cause: str = ""
    """The failure for which this round was begun; empty for one that follows no failure."""
    blame: Blame | None = None
    """What nobody has paid for yet; settled when a node turns out to be lost, or all are at the gate."""
    loss: Loss | None = None
    """What the others go on without, or went on without before all ran again; of this round, None in another."""
    outcome: JobState | None = None
    """SUCCEEDED, FAILED or STOPPED once that is decided."""
    outcome_reason: Reason | None = None
    """Why so."""
    ended_s: float | None = None
    """When the outcome was decided; the TTL counts from here."""
    deleting: bool = False
    """Everything of it is being removed; there is no way back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Desired:
    """What is asked of a job by verbs; levels, not events: they can be read at any time and any number of times."""

    suspend: bool = False
    """Nothing of it shall run."""
    stop_run: int = 0
    """Runs up to this one shall stop."""
    retry_run: int = 0
    """This run, once it has ended badly, shall be followed by another."""
    delete: bool = False
    """It shall be removed with all it left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An admitted job."""

    request: Request
    """What was asked for."""
    requester: str
    """Who asked, as the place says."""
    created_s: float
    """When it was admitted."""
    counts: tuple[int, ...]
    """Workers of each node, in the order of the request; 0 where the split needs none."""
    desired: Desired
    """What verbs ask of it now."""
    record: Record
    """What is known of it."""

    @property
    def used_nodes(self) -> tuple[int, ...]:
        """Indices of the nodes that get workers."""
        return tuple(node for node, count in enumerate(self.counts) if count)

    def node_name(self, node: int) -> str:
        """The node's name."""
        return self.request.nodes[node].name


def new_job(request: Request, *, requester: str, counts: tuple[int, ...], now: float) -> Job:
    """A job that was admitted just now; nothing of it exists yet."""
    nodes = tuple(NodeRecord(state=NodeState.WAITING if count else NodeState.UNUSED) for count in counts)
    record = Record(state=JobState.SUSPENDED if request.suspend else JobState.PENDING, since_s=now, nodes=nodes)
    desired = Desired(suspend=request.suspend)
    return Job(request=request, requester=requester, created_s=now, counts=counts, desired=desired, record=record)


def dump_record(record: Record) -> str:
    """The record as JSON; `parse_record` gives an equal one."""
    return _RECORD.dump_json(record).decode()


def parse_record(text: str) -> Record:
    """The record that a text of `dump_record` is."""
    return _RECORD.validate_json(text)


_RECORD = TypeAdapter(Record)
