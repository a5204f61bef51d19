"""Channel between a node agent and its platform: desired state in, status out, credentials between agents.

The agent with the parameter server, or with the first coordinator of an elastic job, issues the credentials of all
processes of a round; their holders are `worker-RANK`, `coordinator-INDEX` and `server-INDEX`. Each is used once, so a
holder has several where its process may be started again. The issuer forgets the authority's key
(docs/explanation/job-lifecycle.md): a key in a file would open everything, and a key in one process's memory is lost
with its node, which is what an elastic job survives. Desired state and status are JSON on every platform.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringweave.errors import explain
from ringweave.jobs.records import EndCause, GroupPhase, JsonForm, ObservedGroup
from ringweave.launcher.restarts import NoRestartError
from ringweave.launcher.scale_requests import WantedWorkers
from ringweave.launcher.workers import HostPort
from ringweave.param_server.leadership import LeadershipLog
from ringweave.platforms.agent.job_config import JobConfig, RendezvousResult

if TYPE_CHECKING:  # a supervisor, and most commands, need no TLS
    from ringweave.rpc import Credentials

NUM_INCARNATIONS = 8
"""Starts of a process of an elastic job in a round, at least. After the last one a new round begins, in which all nodes
start again."""
NUM_SERVER_INCARNATIONS = 2
"""Credentials of a worker that trains with a parameter server in a round: one to use, one if the first got lost on the
way to its agent."""

StopReason = Callable[[], str]
"""Returns the reason to stop waiting, in words; empty while there is none."""


def never_stop() -> str:
    """Return no reason to stop."""
    return ""


class RoundOverError(NoRestartError):
    """The next round was requested, or the agent told to leave, while this round was being prepared; not a failure."""

    def __init__(self, round_: int, got: str) -> None:
        do = "Nothing to do; this node joins the next round"
        expected = "a current round"
        super().__init__(explain(f"credentials of round {round_}", got=got, expected=expected, do=do))


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredState:
    """Desired state of a node agent; it can be read at any time and any number of times."""

    round: int
    """Round to be ready for, or to run in; workers of an earlier round are stopped."""
    rendezvous: RendezvousResult | None = None
    """Last rendezvous result; None if there was none. It counts only for the same round."""
    stop: bool = False
    """Stop the workers, and exit."""
    reason: str = ""
    """Reason to stop, for people."""
    wanted: WantedWorkers | None = None
    """Number of workers of an elastic job that was asked for last; None: as many as it began with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStatus:
    """Status of a node agent; each replaces the previous one."""

    round: int
    phase: GroupPhase
    pid: int
    """Process id of the agent."""
    master_address: HostPort | None = None
    """Possible master address, of a ready node."""
    server: HostPort | None = None
    """Address of a parameter server, of a ready node that has one."""
    coordinator: HostPort | None = None
    """Address of an elastic job's coordinator, of a ready node that has one."""
    cause: EndCause | None = None
    exit_code: int | None = None
    """Exit code of the first failed worker, if there is one."""
    text: str = ""
    """Description of the end, in words."""
    ended_s: float | None = None
    """Time of the end or interruption, seconds since 1970."""
    iterations: int | None = None
    last_loss: float | None = None
    generation: tuple[int, int] = (0, 0)
    """Newest known generation (term, number) of an elastic job's membership; zeros if none is known."""
    members: tuple[str, ...] = ()
    """Member names of its own workers in an elastic job, `RANK.INCARNATION`."""
    evicted: tuple[str, ...] = ()
    """Members of an elastic job that are not in that generation any more and have not finished."""

    def to_group(self, node: int, attempt: int, *, requested_round: int = 0, leaving: bool = False) -> ObservedGroup:
        return ObservedGroup(
            node=node,
            attempt=attempt,
            round=self.round,
            requested_round=requested_round,
            phase=self.phase,
            cause=self.cause,
            exit_code=self.exit_code,
            text=self.text,
            ended_s=self.ended_s,
            is_terminating=leaving,
            iterations=self.iterations,
            last_loss=self.last_loss,
            generation=self.generation,
            members=self.members,
            evicted=self.evicted,
        )


class AgentChannel(abc.ABC):
    """Channel of a node agent to its platform and, for credentials, to the other agents of its job."""

    @abc.abstractmethod
    def desired_state(self) -> DesiredState:
        """Return the desired state without waiting.

        It says to leave if its source is gone and the platform wants agents to end then.
        """

    @abc.abstractmethod
    def report_status(self, status: AgentStatus) -> None:
        """Store the status where the supervisor finds it complete, even after the agent has ended."""

    @abc.abstractmethod
    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until the desired state may have changed, at most for this time."""

    def num_incarnations(self, num_workers: int) -> int:
        """Return the number of credentials for each process of an elastic job with so many workers."""
        del num_workers
        return NUM_INCARNATIONS

    @abc.abstractmethod
    def publish_credentials(
        self, round_: int, credentials: "Mapping[str, Sequence[Credentials]]", stop_reason: StopReason = never_stop
    ) -> None:
        """Make the credentials of a round available to all agents of the job; those of other rounds are removed.

        `credentials`: holder (`worker-3`) -> credentials of its first process, its second, and so on.

        Raises:
            RoundOverError: The round is obsolete, as `stop_reason` says.
            LaunchError: There is no receiver.
            OSError: The credentials cannot be written.
        """

    @abc.abstractmethod
    def leadership_log(self, round_: int) -> LeadershipLog:
        """Return the log of leadership records of a round's two parameter servers, which outlives each node."""

    @abc.abstractmethod
    def take_credentials(self, round_: int, holder: str, stop_reason: StopReason = never_stop) -> "Credentials":
        """Take the next credentials of a holder, each once; only one process at a time may be a holder's agent.

        Raises:
            RoundOverError: None is left for this round, or it is obsolete, as `stop_reason` says.
            LaunchError: The credentials cannot be obtained.
            OSError: The credentials cannot be read.
        """


def rendezvous_result(config: JobConfig, round_: int, offers: Mapping[str, AgentStatus]) -> RendezvousResult | None:
    """Return the rendezvous result of a round in which the nodes are ready; None if an address is missing.

    `offers`: node name -> its status when it was ready; of an elastic job, late nodes may be absent.
    """
    first_status, coordinators = offers.get(config.master_node), coordinator_addresses(config, offers)
    servers = server_addresses(config, offers)
    if first_status is None or first_status.master_address is None or coordinators is None or servers is None:
        return None
    return RendezvousResult(
        round=round_,
        master_address=first_status.master_address,
        servers=servers,
        coordinators=coordinators,
        addresses=node_addresses(offers),
        late_nodes=tuple(node.name for node in config.nodes if node.name not in offers),
    )


def node_addresses(offers: Mapping[str, AgentStatus]) -> dict[str, str]:
    """Return the address of each node by its name; empty if all are on one machine."""
    hosts = {name: status.master_address.host for name, status in offers.items() if status.master_address}
    return hosts if len(set(hosts.values())) > 1 else {}


def coordinator_addresses(config: JobConfig, offers: Mapping[str, AgentStatus]) -> tuple[HostPort, ...] | None:
    """Return the coordinators' addresses, the active one first; empty for a job without, None if one is missing.

    `offers`: node name -> its status when it was ready.
    """
    offered = [offers[name].coordinator if name in offers else None for name in config.coordinator_nodes]
    addresses = tuple(address for address in offered if address is not None)
    return addresses if len(addresses) == len(config.coordinator_nodes) else None


def server_addresses(config: JobConfig, offers: Mapping[str, AgentStatus]) -> tuple[HostPort, ...] | None:
    """Return the parameter servers' addresses, the one that leads first; empty without any, None if one is missing.

    `offers`: node name -> its status when it was ready.
    """
    offered = [offers[node.name].server for node in config.nodes if node.name in offers]
    addresses = tuple(address for address in offered if address is not None)
    return addresses if len(addresses) == config.num_servers else None


STATUS_JSON, DESIRED_STATE_JSON = JsonForm(AgentStatus), JsonForm(DesiredState)
RENDEZVOUS_JSON = JsonForm(RendezvousResult)
