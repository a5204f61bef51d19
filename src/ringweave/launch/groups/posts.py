"""The seam between a group agent and its place: what it is told, what it tells, how it waits. JSON in every place."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from ringweave.jobs.life.observing import Cause, Group, Phase
from ringweave.launch.groups.config import Config
from ringweave.launch.workers import Meeting


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a group that is ready for a round offers."""

    meeting: Meeting
    """Where workers could meet, if this is the first node."""
    server: Meeting | None = None
    """Where the job's parameter server will listen; None where this node has none."""
    coordinator: Meeting | None = None
    """Where this node's coordinator of an elastic job will listen; None where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The gate is open for a round: all nodes were ready for it."""

    round: int
    meeting: Meeting
    """What the first node of the config offered when it was ready for this round."""
    server: Meeting | None = None
    """Where the job's parameter server of this round listens; None where it has none."""
    coordinators: tuple[Meeting, ...] = ()
    """Where the coordinators of an elastic job listen in this round, the one that decides first; none of any other."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Node name -> address; for nodes that are not found by their names alone. Left out where all share a machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What is wanted of a group now; levels, not events: they can be read at any time and any number of times."""

    round: int
    """Be ready for this round, or beyond its gate; workers of an earlier one are ended."""
    opening: Opening | None = None
    """The last opening of the gate; None where it has not been opened. It counts if it is of the same round."""
    leave: bool = False
    """End the workers, and the group."""
    why: str = ""
    """Why it shall leave, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a group says of itself; each replaces the one before."""

    round: int
    phase: Phase
    pid: int
    """The agent's process."""
    meeting: Meeting | None = None
    """Of a group that is ready: where workers could meet."""
    server: Meeting | None = None
    """Of a group that is ready and has the job's parameter server: where that will listen."""
    coordinator: Meeting | None = None
    """Of a group that is ready and has a coordinator of an elastic job: where that will listen."""
    cause: Cause | None = None
    """Of one that failed: why."""
    exit_code: int | None = None
    """Of the first worker that failed, where there is one."""
    text: str = ""
    """How it ended, in words."""
    ended_s: float | None = None
    """When it ended or was interrupted, seconds since 1970."""
    iterations: int | None = None
    last_loss: float | None = None
    epoch: tuple[int, int] = (0, 0)
    """The newest epoch of the membership of an elastic job (term, number) that is known to it; zeros if none is."""
    members: tuple[str, ...] = ()
    """Its own workers as members of an elastic job, `RANK.LIFE`."""
    out: tuple[str, ...] = ()
    """Members of an elastic job that are none any more in that epoch, and have not finished."""

    def group(self, node: int, attempt: int, *, called: int = 0, leaving: bool = False) -> Group:
        """The group as `reconcile` sees it."""
        return Group(
            node=node,
            attempt=attempt,
            round=self.round,
            called=called,
            phase=self.phase,
            cause=self.cause,
            exit_code=self.exit_code,
            text=self.text,
            ended_s=self.ended_s,
            leaving=leaving,
            iterations=self.iterations,
            last_loss=self.last_loss,
            epoch=self.epoch,
            members=self.members,
            out=self.out,
        )


class Post(abc.ABC):
    """Where an agent gets its orders and leaves its reports."""

    @abc.abstractmethod
    def orders(self) -> Orders:
        """What is wanted now; returns at once.

        These are orders to leave where nobody is there to give any more, and the place wants that to be the end.
        """

    @abc.abstractmethod
    def tell(self, report: Report) -> None:
        """Leave a report where the supervisor finds it, whole, also after the agent has ended."""

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Return when the orders may have changed, or after this time."""


def opening_of(config: Config, round_: int, offers: Mapping[str, Report]) -> Opening | None:
    """How the gate is opened for a round in which all are ready; None where not all is said that workers need.

    Args:
        config: Of the job.
        round_: Of the gate.
        offers: Node name -> what it said when it was ready.
    """
    first, coordinators = offers.get(config.nodes[0].name), coordinators_of(config, offers)
    if first is None or first.meeting is None or coordinators is None:
        return None
    hosts = {name: report.meeting.host for name, report in offers.items() if report.meeting}
    return Opening(
        round=round_,
        meeting=first.meeting,
        server=next((report.server for report in offers.values() if report.server), None),
        coordinators=coordinators,
        addresses=hosts if len(set(hosts.values())) > 1 else {},
    )


def coordinators_of(config: Config, offers: Mapping[str, Report]) -> tuple[Meeting, ...] | None:
    """Where the coordinators will listen, the one that decides first; none of a job that has none, None if not known.

    Args:
        config: Of the job.
        offers: Node name -> what it said when it was ready.
    """
    offered = [offers[name].coordinator if name in offers else None for name in config.coordinating]
    found = tuple(meeting for meeting in offered if meeting is not None)
    return found if len(found) == len(config.coordinating) else None


def dump_report(report: Report) -> str:
    """The report as JSON."""
    return _REPORT.dump_json(report).decode()


def parse_report(text: str | bytes) -> Report:
    """The report that a text of `dump_report` is.

    Raises:
        ValueError: It is none.
    """
    return _REPORT.validate_json(text)


def dump_orders(orders: Orders) -> str:
    """The orders as JSON."""
    return _ORDERS.dump_json(orders).decode()


def parse_orders(text: str | bytes) -> Orders:
    """The orders that a text of `dump_orders` is.

    Raises:
        ValueError: It is none.
    """
    return _ORDERS.validate_json(text)


def dump_opening(opening: Opening) -> str:
    """The opening as JSON."""
    return _OPENING.dump_json(opening).decode()


def parse_opening(text: str | bytes) -> Opening:
    """The opening that a text of `dump_opening` is.

    Raises:
        ValueError: It is none.
    """
    return _OPENING.validate_json(text)


_REPORT, _ORDERS, _OPENING = TypeAdapter(Report), TypeAdapter(Orders), TypeAdapter(Opening)
