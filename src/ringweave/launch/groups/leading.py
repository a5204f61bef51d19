"""From an assignment to an agent that serves: what the main programs of all places share."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from ringweave import environment, topology
from ringweave.errors import LaunchError, explain
from ringweave.jobs.life.observing import Phase
from ringweave.launch import records
from ringweave.launch.books import Books
from ringweave.launch.groups import layout
from ringweave.launch.groups.agent import Agent
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.coordinating import CoordinatorDesk
from ringweave.launch.groups.crew import Attendant, Crew
from ringweave.launch.groups.handing import Handover
from ringweave.launch.groups.posts import Offer, Opening, Orders, Post
from ringweave.launch.groups.results import Results
from ringweave.launch.groups.serving import ServerDesk
from ringweave.launch.groups.spares import Spares
from ringweave.launch.local.launcher import Around, LocalLauncher
from ringweave.launch.local.merging import Console, Stream
from ringweave.launch.local.sites import Site
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Meeting, Program, WorkerGroup, WorkerSpec
from ringweave.wire import Credentials


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Which group this is, and where its files go."""

    config: Config
    node: int
    """Index in the request."""
    attempt: int
    home: Path
    """Folder of this attempt; each round has a run directory below it: see `round_dir`."""
    cpus_shared_by: int
    """Workers that share this machine's CPUs: the node's own, or those of all nodes where they are one machine."""
    site: Site
    """How processes are put onto the node."""
    handover: Handover
    """The way to the other groups of the job, for credentials of its workers where there is a parameter server."""
    spares: Spares | None = None
    """The same for the processes of an elastic job; None where the place has no elastic jobs."""
    host: str | None = None
    """Name by which the others find this node, also when another agent has taken its place; None where its address
    stays the same."""
    around: Around = field(default_factory=Around)
    """What this process has beside the workers: locks of the group, processes of others that come from it."""
    shows_output: bool = True
    """What workers print goes to this process's own output too, with the rank in front."""


def round_dir(home: Path, round_: int) -> RunDir:
    """Run directory of a round: logs, events, cluster file, run.json."""
    return RunDir(root=home.absolute() / f"round-{round_}")


def lead(assignment: Assignment, post: Post, environ: Mapping[str, str]) -> Phase:
    """Serve as this group's agent until it may leave; SIGTERM and SIGINT make it leave.

    Args:
        assignment: Which group this is.
        post: Where orders come from and reports go.
        environ: What workers inherit; the job's own variables are put over it.
    """
    node = assignment.config.node(assignment.node)

    def why_stop() -> str:
        return agent.why_stop()

    workers = _Workers(assignment, environ, why_stop)

    def offer(orders: Orders) -> Offer:
        workers.prepare(orders.round)
        return Offer(meeting=assignment.site.meeting(node.name), **workers.offer_attendants(orders))

    agent = Agent(post, offer=offer, start=workers.start)

    def leave(number: int, _: FrameType | None) -> None:
        agent.leave(f"it got {signal.Signals(number).name}")

    for how in (signal.SIGTERM, signal.SIGINT):
        signal.signal(how, leave)
    return agent.serve()


def _server_desk(assignment: Assignment) -> ServerDesk | None:
    """What makes the server of each round, where that is this node's to do."""
    name = assignment.config.node(assignment.node).name
    if layout.server_node(assignment.config) != name:
        return None
    return ServerDesk(assignment.config, name, assignment.site, assignment.handover)


def _coordinator_desk(assignment: Assignment) -> CoordinatorDesk | None:
    """What makes the coordinator of each round, where the job is elastic.

    Raises:
        LaunchError: It is, and its place has no way for that.
    """
    config = assignment.config
    if config.least is None:
        return None
    if assignment.spares is None:
        do = "Submit it to a place that has elastic jobs"
        got, expected = f"elastic, at least {config.least} workers", "a job that is not elastic"
        raise LaunchError(explain(f"job {config.job}", got=got, expected=expected, do=do))
    name = config.node(assignment.node).name
    return CoordinatorDesk(config, name, assignment.site, assignment.spares, assignment.host)


class _Workers:
    """Starts the workers of each round. What does not depend on where they meet is done before the gate opens."""

    def __init__(self, assignment: Assignment, environ: Mapping[str, str], why_stop: Callable[[], str]) -> None:
        """`why_stop` says why nobody wants what is waited for any more; empty while somebody does."""
        self._why_stop = why_stop
        self._assignment, self._config = assignment, assignment.config
        self._environ = {**environ, **self._config.environment}
        self._versions = records.versions()
        self._desk, self._coordination = _server_desk(assignment), _coordinator_desk(assignment)
        self._program = Program(target=self._config.script)

    def prepare(self, round_: int) -> None:
        """Files of the round, and all that takes time only once."""
        run_dir = round_dir(self._assignment.home, round_)
        (run_dir.root / "logs").mkdir(parents=True, exist_ok=True)
        self._program = layout.program_of(self._config, self._assignment.home)
        self._describe(run_dir, {})

    def offer_attendants(self, orders: Orders) -> dict[str, Meeting | None]:
        """Where the parameter server and a coordinator of the round will listen, if they are this node's."""
        return {
            "server": self._desk.offer(orders.round, self._why_stop) if self._desk else None,
            "coordinator": self._coordination.offer(orders, self._why_stop) if self._coordination else None,
        }

    def start(self, opening: Opening) -> Crew:
        """The workers of the round that is open, running."""
        assignment = self._assignment
        run_dir = round_dir(assignment.home, opening.round)
        if opening.addresses:
            self._describe(run_dir, opening.addresses)
        group = _placed(assignment, opening, run_dir, self._program)
        credentials = _credentials(assignment, opening, group, self._why_stop)
        if self._coordination:
            group = _named(group, credentials)
        outputs: dict[Stream, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
        launcher = LocalLauncher(
            run_dir.log,
            Console(outputs if assignment.shows_output else {}, self._environ),
            self._environ,
            enter=assignment.site.enter,
            secret=lambda worker: _secret(credentials, worker),
            around=assignment.around,
        )
        books = Books(run_dir, group, self._versions | _record(assignment, opening, self._program))
        names = [each.identity.name for each in credentials.values()]
        attendant = self._attendant(opening, run_dir, names)
        is_elastic = self._coordination is not None
        results = Results(run_dir.events, names if is_elastic else ())
        return Crew(group, launcher, books, results, attendant, is_elastic=is_elastic)

    def _attendant(self, opening: Opening, run_dir: RunDir, starting: list[str]) -> Attendant | None:
        if self._coordination:
            return self._coordination.coordinator(opening, run_dir, self._environ, starting=starting)
        return self._desk.server(opening.round, run_dir, self._environ) if self._desk else None

    def _describe(self, run_dir: RunDir, addresses: Mapping[str, str]) -> None:
        cluster = layout.cluster_of(self._config, addresses)
        run_dir.cluster.write_text(topology.dumps(cluster), encoding="utf-8")


def _credentials(
    assignment: Assignment, opening: Opening, group: WorkerGroup, why_stop: Callable[[], str]
) -> dict[int, Credentials]:
    """Global rank -> what its worker shows to a server or to coordinators; empty where there is neither."""
    ranks = [worker.global_rank for worker in group.workers]
    if opening.coordinators and assignment.spares is not None:
        return {rank: assignment.spares.take(opening.round, f"worker-{rank}", why_stop) for rank in ranks}
    if opening.server is not None:
        return {rank: assignment.handover.take(opening.round, rank, why_stop) for rank in ranks}
    return {}


def _named(group: WorkerGroup, credentials: Mapping[int, Credentials]) -> WorkerGroup:
    """The workers as members of their job, under the names that their credentials give them."""
    members = {rank: {environment.MEMBER: each.identity.name} for rank, each in credentials.items()}
    workers = [replace(each, environ={**each.environ, **members[each.global_rank]}) for each in group.workers]
    return replace(group, workers=tuple(workers))


def _secret(credentials: Mapping[int, Credentials], worker: WorkerSpec) -> int | None:
    found = credentials.get(worker.global_rank)
    return None if found is None else found.to_descriptor()


def _placed(assignment: Assignment, opening: Opening, run_dir: RunDir, program: Program) -> WorkerGroup:
    cpus = max(1, len(os.sched_getaffinity(0)) // assignment.cpus_shared_by)
    group = layout.workers_of(
        assignment.config,
        assignment.node,
        opening,
        run_dir=run_dir,
        program=program,
        python=sys.executable,
        cpus=cpus,
    )
    of_site = [replace(each, environ={**each.environ, **assignment.site.environ(each.node)}) for each in group.workers]
    return replace(group, workers=tuple(of_site))


def _record(assignment: Assignment, opening: Opening, program: Program) -> dict[str, Any]:
    config = assignment.config
    return {
        "command": program.words(),
        "job": config.job,
        "node": config.node(assignment.node).name,
        "attempt": assignment.attempt,
        "round": opening.round,
        "cluster": {
            "name": config.job,
            "path": None,
            "nodes": [{"name": node.name, "workers": node.workers} for node in config.nodes],
        },
        "world_size": config.world_size,
        "schedule": None,
        "tuning": None,
        "mode": config.mode,
        "elastic": None if config.least is None else f"{config.least}:{config.world_size}",
        "server": {"address": f"{opening.server.host}:{opening.server.port}"} if opening.server else None,
        "order": "block",
        "lab": assignment.site.lab_name,
    }
