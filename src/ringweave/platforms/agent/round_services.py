"""Services of one round that a node agent runs beside its workers: parameter server or coordinator.

The agent that runs the server creates the round's certificate authority, so that its key stays in one process.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringweave.launcher.node_context import NodeContext
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.services import (
    COORDINATOR_ROLE,
    SERVER_ROLE,
    CoordinatorPair,
    CoordinatorProcesses,
    JobServer,
    SidecarEndpoint,
    count_established,
)
from ringweave.launcher.workers import HostPort
from ringweave.membership.settings import MemberBounds
from ringweave.platforms.agent.channel import DesiredState, RendezvousResult
from ringweave.platforms.agent.credentials import (
    NUM_INCARNATIONS,
    CredentialDistribution,
    CredentialPool,
    StopReason,
    never_stop,
)
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.rpc import CertificateAuthority, Credentials, Identity

COORDINATOR_LINGER_S = 10.0
"""Time that a coordinator stays for workers of other nodes after its own have finished; they report their end too."""
_OTHER_COORDINATOR_CONNECTIONS = 1
"""Number of connections of the other coordinator."""


class RoundCoordinatorFactory:
    """Prepares and creates a node's coordinator of each round."""

    def __init__(
        self,
        config: JobConfig,
        node: str,
        node_context: NodeContext,
        credential_pool: CredentialPool,
        host: str | None = None,
    ) -> None:
        """Create the factory; makes no coordinator yet.

        Args:
            config: Config of the job.
            node: Name of any node of the job; only its first two have a coordinator.
            node_context: Context that runs processes on the node.
            credential_pool: Pool of credentials.
            host: Name of this node that stays valid when another agent replaces this one; None: its address stays.
        """
        self._config, self._node, self._node_context, self._credential_pool, self._host = (
            config,
            node,
            node_context,
            credential_pool,
            host,
        )
        self._prepared: tuple[int, HostPort] | None = None

    def prepare_round(self, desired: DesiredState, stop_reason: StopReason = never_stop) -> HostPort | None:
        """Return the address of this node's coordinator; None if it has none or the round has started already.

        On the first node it also issues the credentials of all processes of the round.

        Raises:
            RoundOverError: The round is obsolete, as `stop_reason` says.
            LaunchError: There is no free port, or no receiver of the credentials.
            OSError: The credentials cannot be written.
        """
        is_open = desired.opening is not None and desired.opening.round == desired.round
        if self._node not in self._config.coordinator_nodes or is_open:
            return None
        if self._node == self._config.coordinator_nodes[0]:
            self._credential_pool.fill(desired.round, self._issue_credentials(desired.round), stop_reason)
        address = self._node_context.pick_address(self._node)
        address = replace(address, host=self._host or address.host)
        self._prepared = (desired.round, address)
        return address

    def create_coordinator(
        self,
        rendezvous: RendezvousResult,
        run_dir: RunDir,
        environ: Mapping[str, str],
        *,
        initial_members: Sequence[str],
    ) -> "RoundCoordinator | None":
        """Create this node's coordinator of the started round; return None if it has none. It does not run yet.

        Args:
            rendezvous: Rendezvous result of the round.
            run_dir: Run directory of this round on this node.
            environ: Inherited environment of the process.
            initial_members: Member names of this node's workers.
        """
        if self._node not in self._config.coordinator_nodes or len(rendezvous.coordinators) < len(
            self._config.coordinator_nodes
        ):
            return None
        index = self._config.coordinator_nodes.index(self._node)
        assert self._config.least is not None, "it has coordinators"
        node_addresses = zip(self._config.coordinator_nodes, rendezvous.coordinators, strict=True)
        pair = CoordinatorPair(
            endpoints=[self._endpoint(node, address) for node, address in node_addresses],
            bounds=MemberBounds(min_members=self._config.least, max_members=self._config.world_size),
            expected_members=self._config.world_size,
            initial_members=initial_members,
        )
        processes = CoordinatorProcesses(
            pair,
            self._node_context,
            run_dir,
            credentials=lambda which: self._credential_pool.take(rendezvous.round, f"{COORDINATOR_ROLE}-{which}"),
            standby_by_index={index: index > 0 or self._prepared != (rendezvous.round, rendezvous.coordinators[index])},
            give_up=_write_warning,
        )
        return RoundCoordinator(processes, rendezvous.coordinators[index].port, environ)

    def _endpoint(self, node: str, address: HostPort) -> SidecarEndpoint:
        """Return a coordinator's endpoint.

        This node's own coordinator listens at the node's present address; its advertised name may still resolve to a
        lost node.
        """
        is_named = node == self._node and self._host is not None
        return SidecarEndpoint(
            node=node, advertised=address, listen_host=self._node_context.pick_address(node).host if is_named else None
        )

    def _issue_credentials(self, round_: int) -> dict[str, list[Credentials]]:
        """Issue the credentials of a round: holder -> credentials.

        A worker's name it as a member, `RANK.INCARNATION`.
        """
        identity = Identity(job=f"{self._config.job}-{round_}-{os.getpid()}", role=COORDINATOR_ROLE, name="0")
        authority = CertificateAuthority(identity.job)
        issued = {
            f"worker-{rank}": [
                authority.issue("worker", f"{rank}.{incarnation}") for incarnation in range(NUM_INCARNATIONS)
            ]
            for rank in range(self._config.world_size)
        }
        for index in range(len(self._config.coordinator_nodes)):
            issued[f"{COORDINATOR_ROLE}-{index}"] = [
                authority.issue(COORDINATOR_ROLE, str(index)) for _ in range(NUM_INCARNATIONS)
            ]
        return issued


class RoundCoordinator:
    """One node's coordinator in one round."""

    failure_text = ""
    """Always empty: its death ends no round, because the other coordinator takes over and this one is restarted."""

    def __init__(self, processes: CoordinatorProcesses, port: int, environ: Mapping[str, str]) -> None:
        self._processes, self._port, self._environ = processes, port, environ
        self._running = contextlib.ExitStack()
        self._waiting_since_s: float | None = None

    def start(self) -> None:
        """Start the coordinator.

        Raises:
            LaunchError: It could not be started.
        """
        self._running.enter_context(self._processes.running(self._environ))

    def keep_alive(self) -> None:
        """Restart the coordinator if it has died."""
        self._processes.restart_dead()

    def stop(self) -> None:
        self._running.close()

    def is_needed(self, now_s: float) -> bool:
        """Return whether other nodes' workers are still connected, for a limited time after its own have finished."""
        self._waiting_since_s = now_s if self._waiting_since_s is None else self._waiting_since_s
        if now_s - self._waiting_since_s >= COORDINATOR_LINGER_S:
            return False
        return sum(count_established(pid, self._port) for pid in self._processes.pids) > _OTHER_COORDINATOR_CONNECTIONS


def _write_warning(text: str) -> None:
    sys.stderr.write(f"ringweave: {text}\n")
    sys.stderr.flush()


SERVER_IDLE_TIMEOUT_S = 10.0
"""A server without connections for this long is not needed any more: the script trained without it, or its members left
without a goodbye. A member that lost its connection is back within seconds."""


class RoundServerFactory:
    """Prepares and creates the server of each round, on one node."""

    def __init__(
        self, config: JobConfig, node: str, node_context: NodeContext, credential_distribution: CredentialDistribution
    ) -> None:
        """`credential_distribution` distributes credentials to the other agents of the job."""
        self._config, self._node, self._node_context, self._credential_distribution = (
            config,
            node,
            node_context,
            credential_distribution,
        )
        self._prepared: tuple[int, HostPort, CertificateAuthority] | None = None

    def prepare_round(self, round_: int, stop_reason: StopReason = never_stop) -> HostPort:
        """Return the address of the round's server, after distributing the credentials of all workers.

        Raises:
            RoundOverError: The round is obsolete, as `stop_reason` says.
            LaunchError: There is no free port, or no receiver of the credentials.
            OSError: The credentials cannot be written.
        """
        address = self._node_context.pick_address(self._node)
        identity = Identity(job=f"{self._config.job}-{round_}-{os.getpid()}", role=SERVER_ROLE, name="0")
        authority = CertificateAuthority(identity.job)
        ranks = range(self._config.world_size)
        self._credential_distribution.publish(
            round_, {rank: authority.issue("worker", str(rank)) for rank in ranks}, stop_reason
        )
        self._prepared = (round_, address, authority)
        return address

    def create_server(self, round_: int, run_dir: RunDir, environ: Mapping[str, str]) -> "RoundServer | None":
        """Create the server that was prepared for this round; it does not run yet."""
        if self._prepared is None or self._prepared[0] != round_:
            return None
        _, address, authority = self._prepared
        return RoundServer(
            JobServer([SidecarEndpoint(node=self._node, advertised=address)], self._node_context, run_dir, authority),
            environ,
        )


class RoundServer:
    """Parameter server of one round."""

    def __init__(self, server: JobServer, environ: Mapping[str, str]) -> None:
        self._server, self._environ = server, environ
        self._running = contextlib.ExitStack()
        self._last_connected_s: float | None = None

    def start(self) -> None:
        """Start the server.

        Raises:
            LaunchError: It could not be started.
        """
        self._running.enter_context(self._server.running(self._environ))

    def keep_alive(self) -> None:
        """Do nothing: a failed server ends the round."""

    def stop(self) -> None:
        """Stop the server, if it has not ended by itself."""
        self._running.close()

    @property
    def failure_text(self) -> str:
        """Failure of the server, in words; empty while it runs, and after a good end."""
        code = self._server.exit_code
        if not code:
            return ""
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the parameter server on node {self._server.node} {ending}"

    def is_needed(self, now_s: float) -> bool:
        """Return whether workers are or were recently connected.

        The server ends by itself when all rings have left it.
        """
        if self._server.exit_code is not None:
            return False
        if self._last_connected_s is None or self._server.num_connections:
            self._last_connected_s = now_s
        return now_s - self._last_connected_s < SERVER_IDLE_TIMEOUT_S
