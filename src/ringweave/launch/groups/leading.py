"""From an assignment to an agent that serves: what the main programs of all places share."""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from ringweave import topology
from ringweave.jobs.life.observing import Phase
from ringweave.launch import records
from ringweave.launch.books import Books
from ringweave.launch.groups import layout
from ringweave.launch.groups.agent import Agent
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.crew import Crew
from ringweave.launch.groups.handing import Handover
from ringweave.launch.groups.posts import Offer, Opening, Post
from ringweave.launch.groups.results import Results
from ringweave.launch.groups.serving import ServerDesk
from ringweave.launch.local.launcher import Around, LocalLauncher
from ringweave.launch.local.merging import Console, Stream
from ringweave.launch.local.sites import Site
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Meeting, Program, WorkerGroup, WorkerSpec


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
    workers = _Workers(assignment, environ)

    def offer(round_: int) -> Offer:
        workers.prepare(round_)
        return Offer(meeting=assignment.site.meeting(node.name), server=workers.offer_server(round_))

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


class _Workers:
    """Starts the workers of each round. What does not depend on where they meet is done before the gate opens."""

    def __init__(self, assignment: Assignment, environ: Mapping[str, str]) -> None:
        self._assignment, self._config = assignment, assignment.config
        self._environ = {**environ, **self._config.environment}
        self._versions = records.versions()
        self._desk = _server_desk(assignment)
        self._program = Program(target=self._config.script)

    def prepare(self, round_: int) -> None:
        """Files of the round, and all that takes time only once."""
        run_dir = round_dir(self._assignment.home, round_)
        (run_dir.root / "logs").mkdir(parents=True, exist_ok=True)
        self._program = layout.program_of(self._config, self._assignment.home)
        self._describe(run_dir, {})

    def offer_server(self, round_: int) -> Meeting | None:
        """Where the parameter server of the round will listen, if it is this node's."""
        return self._desk.offer(round_) if self._desk else None

    def start(self, opening: Opening) -> Crew:
        """The workers of the round that is open, running."""
        assignment = self._assignment
        run_dir = round_dir(assignment.home, opening.round)
        if opening.addresses:
            self._describe(run_dir, opening.addresses)
        group = _placed(assignment, opening, run_dir, self._program)
        outputs: dict[Stream, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
        launcher = LocalLauncher(
            run_dir.log,
            Console(outputs if assignment.shows_output else {}, self._environ),
            self._environ,
            enter=assignment.site.enter,
            secret=lambda worker: _secret(assignment, opening, worker),
            around=assignment.around,
        )
        books = Books(run_dir, group, self._versions | _record(assignment, opening, self._program))
        server = self._desk.server(opening.round, run_dir, self._environ) if self._desk else None
        return Crew(group, launcher, books, Results(run_dir.events), server)

    def _describe(self, run_dir: RunDir, addresses: Mapping[str, str]) -> None:
        cluster = layout.cluster_of(self._config, addresses)
        run_dir.cluster.write_text(topology.dumps(cluster), encoding="utf-8")


def _secret(assignment: Assignment, opening: Opening, worker: WorkerSpec) -> int | None:
    if opening.server is None:
        return None
    return assignment.handover.take(opening.round, worker.global_rank).to_descriptor()


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
        "server": {"address": f"{opening.server.host}:{opening.server.port}"} if opening.server else None,
        "order": "block",
        "lab": assignment.site.lab_name,
    }
