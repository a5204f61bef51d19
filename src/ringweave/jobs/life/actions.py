"""What a launcher is told to do, as data. Each action may be done again without harm: create means create or adopt."""

from dataclasses import dataclass

from ringweave.jobs.life.records import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something worth telling, once."""

    key: str
    """Unique within the job and the same after a crash, so that a place which keeps events can leave out a second."""
    kind: str
    """A reason's code, or a state."""
    text: str
    """In words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRecord:
    """Save the record and its events, in one transaction where the place has them. Nothing after it if that fails."""

    record: Record
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateConfig:
    """Make the config, or what is missing of it: node names with their counts, and the script; its gate is closed."""

    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateGroup:
    """Make the worker group of a node's attempt; its workers wait at the gate of the round."""

    node: int
    attempt: int
    workers: int
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Regather:
    """End the workers of a group that stays, and have it wait at the gate of the round."""

    node: int
    attempt: int
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenGate:
    """Let all groups of the round start."""

    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StopGroup:
    """End the processes of a group and keep what there is to look at."""

    node: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteGroup:
    """End the processes of a group and remove it; its logs are kept until the job is forgotten."""

    node: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteConfig:
    """Remove the config, and the gate with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """Remove the record, the logs and the name: nothing is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wake:
    """Reconcile again at this time, even if nothing happens until then."""

    at_s: float


Action = (
    SaveRecord
    | CreateConfig
    | CreateGroup
    | Regather
    | OpenGate
    | StopGroup
    | DeleteGroup
    | DeleteConfig
    | Forget
    | Wake
)
