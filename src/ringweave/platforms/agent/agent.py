"""Node agent: its state machine, and how a platform's main program runs it.

    PENDING: stop what runs, report READY --barrier released--> RUNNING --all succeed--> SUCCEEDED, and leave
       ^                                              |-- killed, or the script failed --> FAILED, and leave
       +----- restarted in another round -------------+-- another node failed, or the round is over by the time
                                                          that workers start --> INTERRUPTED, and wait for that

In an elastic job the barrier of its round may be released already: the agent then replaces one that was lost.
The agent holds no state that has to survive: if it dies, its attempt is over.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from ringweave import topology
from ringweave.environment import PROBE
from ringweave.errors import RingweaveError
from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.launcher import run_dir
from ringweave.launcher.node_context import NodeContext
from ringweave.launcher.output import OutputConsole, OutputStream, write_notice
from ringweave.launcher.processes import ProcessContext
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.scale_requests import NodeRequests
from ringweave.launcher.supervise import (
    ElasticRules,
    NodePlan,
    NodeSetup,
    PreparedLauncher,
    start_node,
    with_member,
)
from ringweave.launcher.workers import HostPort, WorkerGroup, WorkerProgram, WorkerSpec
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.agent_channel import (
    AgentChannel,
    AgentStatus,
    DesiredState,
    RoundOverError,
)
from ringweave.platforms.agent.job_config import JobConfig, RendezvousResult
from ringweave.platforms.agent.node_round import (
    NodeOutcome,
    NodeRound,
    ProgressReader,
    RoundServices,
    wanted_workers,
)
from ringweave.rpc import Credentials

RUNNING_POLL_S = 0.05
"""Time between two polls of running workers."""
IDLE_POLL_S = 0.5
"""Upper limit of the time between two reads of the desired state."""
PROGRESS_INTERVAL_S = 0.5
"""Minimum time between two reports that differ only in progress."""
_NO_OFFER = {"master_address": None, "server": None, "coordinator": None}


class NodeAgent:
    """Follows the desired state until it may leave."""

    def __init__(
        self,
        channel: AgentChannel,
        *,
        make_offer: Callable[[DesiredState], Mapping[str, HostPort]],
        start_workers: Callable[[RendezvousResult], NodeRound],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create an agent in phase PENDING.

        `make_offer`: prepares the desired round, and picks addresses on this node: fields of the status.
        """
        self._channel, self._make_offer, self._start_workers, self._clock = channel, make_offer, start_workers, clock
        self._status = AgentStatus(round=0, phase=GroupPhase.PENDING, pid=os.getpid())
        self._workers: NodeRound | None = None
        self._reported_s = 0.0
        self._leave_reason = ""
        self._round = 0

    def request_leave(self, reason: str) -> None:
        """Leave as if the desired state said so; a signal handler may call it."""
        self._leave_reason = reason

    def stop_reason(self) -> str:
        """Return the reason why the current round is obsolete, in words; empty while it is not.

        Waiting code calls it.
        """
        desired = self._desired_state()
        if desired.stop:
            return desired.reason or "stopped by the job"
        return f"round {desired.round} is called" if desired.round > self._round else ""

    def serve_until_done(self) -> GroupPhase:
        """Follow the desired state to the end; return the last phase. No process of the workers is left then."""
        while True:
            desired = self._desired_state()
            self._advance_running(desired) if self._workers else self._advance_idle(desired)
            if self._is_over:
                return self._status.phase
            self._channel.wait_for_change(RUNNING_POLL_S if self._workers else IDLE_POLL_S)

    @property
    def _is_over(self) -> bool:
        return not self._workers and not self._status.phase.is_alive

    def _desired_state(self) -> DesiredState:
        desired = self._channel.desired_state()
        return replace(desired, stop=True, reason=self._leave_reason) if self._leave_reason else desired

    def _advance_idle(self, desired: DesiredState) -> None:
        """Follow the desired state while no workers run."""
        rendezvous = desired.rendezvous
        if desired.stop:
            self._finish(NodeOutcome(phase=GroupPhase.STOPPED, text=desired.reason or "stopped by the job"))
        elif desired.round > self._status.round:
            self._join_round(desired)
        elif self._status.phase is GroupPhase.READY and rendezvous and rendezvous.round == self._status.round:
            self._start_round(rendezvous)

    def _advance_running(self, desired: DesiredState) -> None:
        """Follow the desired state while workers run."""
        assert self._workers is not None
        is_restarted = desired.round > self._status.round
        if desired.stop or is_restarted:
            self._workers.request_stop()
        if desired.wanted is not None:
            self._workers.request_workers(desired.wanted)
        outcome = self._workers.poll()
        if outcome is None:
            self._report_progress()
            return
        self._status = self._with_progress()
        self._workers = None
        desired = (
            self._desired_state()
        )  # again: whatever ends all processes of a node ends workers shortly before or after us
        if is_restarted and not desired.stop:
            self._join_round(desired)
        elif outcome.phase is GroupPhase.STOPPED or (desired.stop and outcome.cause is EndCause.PLATFORM):
            self._finish(replace(outcome, phase=GroupPhase.STOPPED, text=desired.reason or outcome.text))
        else:
            self._finish(outcome)

    def _join_round(self, desired: DesiredState) -> None:
        self._round = desired.round
        try:
            offer = self._make_offer(desired)
        except RoundOverError:  # the next read of the desired state says what is wanted instead
            return
        except (RingweaveError, OSError) as error:
            self._finish(NodeOutcome(phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text=str(error)))
            return
        ready = AgentStatus(
            round=desired.round,
            phase=GroupPhase.READY,
            pid=os.getpid(),
            master_address=offer["master_address"],
            server=offer.get("server"),
            coordinator=offer.get("coordinator"),
            iterations=self._status.iterations,
            last_loss=self._status.last_loss,
        )
        self._report_status(ready)

    def _start_round(self, rendezvous: RendezvousResult) -> None:
        try:
            self._workers = self._start_workers(rendezvous)
        except RoundOverError as error:
            self._finish(NodeOutcome(phase=GroupPhase.INTERRUPTED, text=str(error)))
            return
        except (RingweaveError, OSError) as error:
            self._finish(NodeOutcome(phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text=str(error)))
            return
        self._report_status(replace(self._status, phase=GroupPhase.RUNNING, **_NO_OFFER))

    def _finish(self, outcome: NodeOutcome) -> None:
        changes = {"phase": outcome.phase, "exit_code": outcome.exit_code, "text": outcome.text}
        cause = outcome.cause if outcome.phase is GroupPhase.FAILED else None
        self._report_status(replace(self._status, **changes, cause=cause, ended_s=self._clock(), **_NO_OFFER))

    def _report_progress(self) -> None:
        now_s = self._clock()
        if abs(now_s - self._reported_s) < PROGRESS_INTERVAL_S:
            return
        self._reported_s = now_s
        status = self._with_progress()
        if status != self._status:
            self._report_status(status)

    def _with_progress(self) -> AgentStatus:
        assert self._workers is not None
        progress = self._workers.progress()
        status = replace(
            self._status, generation=progress.generation, members=progress.members, evicted=progress.evicted
        )
        if progress.iterations is None:
            return status
        return replace(status, iterations=progress.iterations, last_loss=progress.last_loss)

    def _report_status(self, status: AgentStatus) -> None:
        self._status = status
        self._channel.report_status(status)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentAssignment:
    """Identity of a node agent, its files, and the objects of its platform."""

    config: JobConfig
    node: int
    attempt: int
    home: Path
    """Folder of this attempt; it contains a run directory per round (`round_run_dir`)."""
    cpus_shared_by: int
    """Number of workers that share this machine's CPUs: the node's own, or those of all nodes on the same machine."""
    node_context: NodeContext
    """Context that runs processes on the node."""
    host: str | None = None
    """Name by which other nodes reach this node, even after another agent has replaced this one; None if its address
    stays the same."""
    process_context: ProcessContext = field(default_factory=ProcessContext)
    """Descriptors and children of this process that are not the workers': locks of the group, unrelated processes."""
    echoes_output: bool = True
    """Also print the workers' output on this process's own output, with the rank in front."""


def round_run_dir(home: Path, round_: int) -> RunDir:
    """Return the run directory of a round: logs, events, cluster file, run.json."""
    return RunDir(root=home.absolute() / f"round-{round_}")


MAX_ROUNDS = 20
"""Rounds of which a node keeps the run directories: the newest, over all its attempts."""


def remove_old_rounds(home: Path) -> None:
    """Remove the run directories of rounds that ended long ago, and what is left of attempts that did.

    A reader reads the newest round, or has read the others when they ended: of logs that are gone it has no lines.

    Args:
        home: Folder of this attempt; where its name is a number, earlier attempts of the node are beside it.
    """
    attempts = [each for each in home.parent.glob("*") if each.name.isdecimal()] if home.name.isdecimal() else [home]
    found = [path for attempt in attempts for path in attempt.glob("round-*")]
    numbers = {path: int(text) for path in found if (text := path.name.removeprefix("round-")).isdecimal()}
    old = sorted(numbers, key=lambda path: numbers[path])[:-MAX_ROUNDS]
    ended = [each for each in attempts if each != home and int(each.name) <= int(home.name) - MAX_ROUNDS]
    for path in (*old, *ended):
        shutil.rmtree(path, ignore_errors=True)


def run_agent(assignment: AgentAssignment, channel: AgentChannel, environ: Mapping[str, str]) -> GroupPhase:
    """Run as a node agent until it may leave; SIGTERM and SIGINT make it leave.

    `environ`: environment that workers inherit; the job's own variables override it.
    """

    def why_stop() -> str:
        return agent.stop_reason()

    starter = _RoundStarter(assignment, channel, environ, why_stop)

    agent = NodeAgent(channel, make_offer=starter.prepare_round, start_workers=starter.start_workers)

    def leave(number: int, _: FrameType | None) -> None:
        agent.request_leave(f"it got {signal.Signals(number).name}")

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, leave)
    try:
        return agent.serve_until_done()
    finally:
        starter.close()


class _RoundStarter:
    """Starts the workers of each round; what needs no rendezvous result is prepared before the round starts."""

    def __init__(
        self,
        assignment: AgentAssignment,
        channel: AgentChannel,
        environ: Mapping[str, str],
        stop_reason: Callable[[], str],
    ) -> None:
        """`stop_reason` returns the reason to stop waiting; empty while there is none."""
        self._channel, self._stop_reason = channel, stop_reason
        self._assignment, self._config = assignment, assignment.config
        self._environ = {**environ, **self._config.environment}
        self._versions = run_dir.software_versions()
        self._node = assignment.config.node(assignment.node).name
        self._services = RoundServices(assignment.config, self._node, assignment.node_context, channel, assignment.host)
        self._program = job_config.worker_program(self._config)
        self._credentials: dict[int, Credentials] = {}
        """Those of the round's workers, by global rank."""
        self._prepared: PreparedLauncher | None = None
        """Launcher of a round that has not begun."""

    def close(self) -> None:
        """End what was prepared for a round that has not begun."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            with prepared.launcher:
                pass

    def prepare_round(self, desired: DesiredState) -> dict[str, HostPort]:
        """Prepare the round's files and services on this node; return the addresses that it offers."""
        run_dir = round_run_dir(self._assignment.home, desired.round)
        (run_dir.root / "logs").mkdir(parents=True, exist_ok=True)
        remove_old_rounds(self._assignment.home)
        self._program = job_config.write_worker_program(self._config, self._assignment.home)
        self._write_cluster_file(run_dir, {})
        master_address = self._assignment.node_context.pick_address(self._node)
        self._begin_imports(RendezvousResult(round=desired.round, master_address=master_address), run_dir)
        return {"master_address": master_address, **self._services.prepare_round(desired, self._stop_reason)}

    def _begin_imports(self, rendezvous: RendezvousResult, run_dir: RunDir) -> None:
        """Import what the workers need while the other nodes get ready; `rendezvous` is not the round's yet."""
        self.close()
        self._credentials = {}
        is_elastic = self._config.min_workers is not None
        prepared = PreparedLauncher(self._setup(run_dir, {}), self._environ, is_elastic=is_elastic)
        prepared.launcher.begin_imports(self._worker_group(rendezvous, run_dir))
        self._prepared = prepared

    def _worker_group(self, rendezvous: RendezvousResult, run_dir: RunDir) -> WorkerGroup:
        return job_config.node_worker_group(
            self._config,
            self._assignment.node,
            rendezvous,
            run_dir=run_dir,
            program=self._program,
            cpus=max(1, len(os.sched_getaffinity(0)) // self._assignment.cpus_shared_by),
            node_environ=self._node_environ,
        )

    def _node_environ(self, node: str, local_rank: int) -> dict[str, str]:
        """Return further variables of a worker; what the environment says of probing counts."""
        said = {PROBE: self._environ[PROBE]} if PROBE in self._environ else {}
        return {**self._assignment.node_context.node_environ(node, local_rank), **said}

    def start_workers(self, rendezvous: RendezvousResult) -> NodeRound:
        run_dir = round_run_dir(self._assignment.home, rendezvous.round)
        if rendezvous.addresses:
            self._write_cluster_file(run_dir, rendezvous.addresses)
        group = self._worker_group(rendezvous, run_dir)
        slots, is_elastic = group, self._config.min_workers is not None
        wanted = wanted_workers(self._config, self._channel.desired_state())
        requests = NodeRequests([each.global_rank for each in slots.workers], wanted) if is_elastic else None
        if requests is not None:
            group = replace(slots, workers=slots.workers[: requests.workers])
        credentials = self._credentials
        credentials.update(self._take_credentials(rendezvous, group))
        if is_elastic:
            named = [with_member(each, credentials[each.global_rank].identity.name) for each in group.workers]
            group = replace(group, workers=tuple(named))
        names = [each.identity.name for each in credentials.values()]
        setup = self._setup(run_dir, self._versions | _round_record(self._assignment, rendezvous, self._program))
        plan = NodePlan(
            group=group,
            environ=self._environ,
            services=self._services.create_services(rendezvous, run_dir, initial_members=names),
            elastic=self._elastic_rules(rendezvous, setup, slots, credentials, requests) if is_elastic else None,
            is_node_of_job=True,
        )
        prepared, self._prepared = self._prepared, None
        workers, recorder = start_node(plan, setup, prepared=prepared)
        return NodeRound(workers, recorder, ProgressReader(run_dir.events), requests)

    def _setup(self, run_dir: RunDir, record: Mapping[str, Any]) -> NodeSetup:
        assignment, credentials = self._assignment, self._credentials
        outputs: dict[OutputStream, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
        return NodeSetup(
            program=self._program,
            run_dir=run_dir,
            record=record,
            node_context=assignment.node_context,
            console=OutputConsole(outputs if assignment.echoes_output else {}, self._environ),
            open_credentials=lambda worker: _open_credentials(credentials, worker),
            is_over=lambda: bool(self._stop_reason()),
            warn=write_notice,
            num_spares=self._config.num_spares,
            process_context=assignment.process_context,
        )

    def _elastic_rules(
        self,
        rendezvous: RendezvousResult,
        setup: NodeSetup,
        slots: WorkerGroup,
        credentials: dict[int, Credentials],
        requests: NodeRequests | None,
    ) -> ElasticRules:
        """Return the rules of an elastic job's workers; new ones take further credentials of their slots.

        The coordinators are queried for members with the credentials of a worker, which are in this process anyway
        once one has run here.
        """
        # The initial workers of this round have a member name already.
        names = {rank: each.identity.name for rank, each in credentials.items()}
        members = [
            with_member(each, names[each.global_rank]) if each.global_rank in names else each for each in slots.workers
        ]

        def take(rank: int) -> Credentials:
            credentials[rank] = self._channel.take_credentials(rendezvous.round, f"worker-{rank}", self._stop_reason)
            return credentials[rank]

        return setup.elastic_rules(
            replace(slots, workers=tuple(members)),
            self._environ,
            [(address.host, address.port) for address in rendezvous.coordinators],
            lambda: next(iter(credentials.values()), None) or take(slots.workers[0].global_rank),
            new_member=lambda worker, _: with_member(worker, take(worker.global_rank).identity.name),
            scale_requests=requests,
            ends_without_services=True,
        )

    def _take_credentials(self, rendezvous: RendezvousResult, group: WorkerGroup) -> dict[int, Credentials]:
        """Take the workers' credentials for server, coordinators and each other: global rank -> credentials.

        Empty if no one needs any.
        """
        if not (rendezvous.coordinators or rendezvous.servers or self._config.encrypts):
            return {}
        ranks = [worker.global_rank for worker in group.workers]
        take = self._channel.take_credentials
        return {rank: take(rendezvous.round, f"worker-{rank}", self._stop_reason) for rank in ranks}

    def _write_cluster_file(self, run_dir: RunDir, addresses: Mapping[str, str]) -> None:
        cluster = job_config.build_cluster(self._config, addresses)
        run_dir.cluster_file.write_text(topology.dumps(cluster), encoding="utf-8")


def _open_credentials(credentials: Mapping[int, Credentials], worker: WorkerSpec) -> int | None:
    found = credentials.get(worker.global_rank)
    return None if found is None else found.to_descriptor()


def _round_record(assignment: AgentAssignment, rendezvous: RendezvousResult, program: WorkerProgram) -> dict[str, Any]:
    config = assignment.config
    return {
        "command": program.command_words(),
        "job": config.job,
        "node": config.node(assignment.node).name,
        "attempt": assignment.attempt,
        "round": rendezvous.round,
        "cluster": {
            "name": config.job,
            "path": None,
            "nodes": [{"name": name, "workers": ranks} for name, ranks in config.ranks_by_node.items()],
        },
        "world_size": config.world_size,
        **config.worker_options.to_record(),
        "mode": config.mode,
        "elastic": None if config.min_workers is None else f"{config.min_workers}:{config.num_slots}",
        "spares": config.num_spares,
        "server": {"address": rendezvous.server_text} if rendezvous.servers else None,
        "lab": assignment.node_context.lab_name,
        "lab_quotas": assignment.node_context.quota_kind,
    }
