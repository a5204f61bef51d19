"""The coordinator of an elastic run and its standby: where they go, their credentials, their processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ringweave import wire
from ringweave.errors import LaunchError, WireError
from ringweave.launch.elastic.respawning import Respawns
from ringweave.launch.elastic.rolls import Roll, Rolls
from ringweave.launch.local import attendants
from ringweave.launch.local.attendants import Post
from ringweave.launch.local.sites import Site
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import WorkerSpec
from ringweave.membership.messages import Ask, Count, is_ring
from ringweave.membership.rules.settings import Bounds
from ringweave.topology import Cluster
from ringweave.wire import Authority, Credentials, Identity

ROLE = "coordinator"
_MAIN = "ringweave.membership.serving.main"
_END_S = 3.0
_ANSWERED_S = 2.0
"""So long each step of a question may take: who leads the workers waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The two coordinators of a job, wherever they are."""

    posts: Sequence[Post]
    """Where they are, the one that decides first before the other."""
    bounds: Bounds
    """How many members the job may have."""
    expected: int
    """Members that its first epoch waits for."""
    starting: Sequence[str] = ()
    """Members that are started right after one of them: those that had their slots before have ended."""

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of each."""
        return tuple((post.meeting.host, post.meeting.port) for post in self.posts)

    def arguments(self, index: int, *, is_standby: bool, is_first: bool) -> list[str]:
        """What the process of one of them is told, its credentials and its folder apart.

        Only the first one is told who starts beside it: when there is another one they may be members.
        """
        meeting = self.posts[index].meeting
        host, port = self.addresses[1 - index]
        words = ["--host", self.posts[index].listens_at, "--port", str(meeting.port), "--other", f"{host}:{port}"]
        words += ["--elastic", str(self.bounds), "--expected", str(self.expected), "--index", str(index)]
        words += ["--successors", ",".join(self.starting)] if self.starting and is_first else []
        return [*words, "--standby"] if is_standby else words


class Coordinators:
    """Those of a pair that this process starts, and starts again when they die: the members know what one knew.

    One that dies time after time is given up. Training goes on: it needs none but when members come or go.
    """

    def __init__(
        self,
        pair: Pair,
        site: Site,
        run_dir: RunDir,
        credentials: Callable[[int], Credentials],
        *,
        own: Mapping[int, bool],
        give_up: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing yet.

        Args:
            pair: Both of them.
            site: Knows how a node is entered.
            run_dir: Gets their logs and events.
            credentials: Index -> what its next process shows to the others.
            own: Index of each that is this process's to start -> it is a standby at first.
            give_up: Told of each that is not started again, in words.
            clock: Seconds that never go back.
        """
        self._pair, self._site, self._run_dir, self._credentials = pair, site, run_dir, credentials
        self._own, self._give_up, self._clock = dict(own), give_up, clock
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._respawns = {index: Respawns() for index in self._own}
        self._environ: Mapping[str, str] = {}

    @property
    def pids(self) -> frozenset[int]:
        """Of those that run."""
        return frozenset(process.pid for process in self._processes.values() if process.poll() is None)

    @contextmanager
    def running(self, environ: Mapping[str, str]) -> Iterator[None]:
        """Run them for the length of a block.

        Raises:
            LaunchError: One could not be started.
        """
        self._environ = environ
        try:
            for index, is_standby in self._own.items():
                self._start(index, is_standby=is_standby, is_first=True)
            yield
        finally:
            for process in self._processes.values():
                process.terminate()
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                process.kill()
                process.wait()

    def look(self) -> None:
        """Start again what has died, as a standby."""
        now_s = self._clock()
        for index, process in list(self._processes.items()):
            respawns = self._respawns[index]
            exit_code = process.poll()
            if exit_code is not None and respawns.note_end(now_s, exit_code):
                self._tell_given_up(index, f"the last one with exit code {exit_code}")
            if respawns.take_due(now_s):
                try:
                    self._start(index, is_standby=True, is_first=False)
                except (LaunchError, OSError) as error:
                    respawns.note_death(0.0, now_s)
                    self._tell_given_up(index, f"and another one could not be started: {error}")

    def _tell_given_up(self, index: int, how: str) -> None:
        respawns = self._respawns[index]
        if respawns.has_given_up:
            node, log = self._pair.posts[index].node, self._log(index)
            self._give_up(
                f"coordinator {index} on node {node} is given up: {respawns.num_quick} of its processes in a row were "
                f"over soon after they began, {how}. Training goes on; nobody takes over if the other coordinator "
                f"dies as well. See what it lacks in {log}."
            )

    def _log(self, index: int) -> Path:
        return self._run_dir.root / "logs" / f"coordinator-{index}.log"

    def _start(self, index: int, *, is_standby: bool, is_first: bool) -> None:
        secret = self._credentials(index).to_descriptor()
        told = self._pair.arguments(index, is_standby=is_standby, is_first=is_first)
        serve = [sys.executable, "-m", _MAIN, "--credentials", f"fd:{secret}", *told]
        serve += ["--run-dir", str(self._run_dir.root)]
        self._processes[index] = attendants.start(
            "coordinator",
            serve,
            post=self._pair.posts[index],
            site=self._site,
            environ=self._environ,
            log=self._log(index),
            secret=secret,
        )
        self._respawns[index].note_start(self._clock())


class JobCoordinators:
    """Two coordinators of one run, on two nodes where there are two; its authority lives in this process alone."""

    def __init__(
        self,
        posts: list[Post],
        bounds: Bounds,
        expected: int,
        site: Site,
        run_dir: RunDir,
        authority: Authority | None = None,
        give_up: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`authority` is the job's, if it has one already; `give_up` is told of what is not started again."""
        self._authority = authority or Authority(Identity(job=f"run-{os.getpid()}", role=ROLE, name="0").job)
        self._pair = Pair(posts=posts, bounds=bounds, expected=expected)
        self._both = Coordinators(
            self._pair,
            site,
            run_dir,
            credentials=lambda index: self._authority.issue(ROLE, str(index)),
            own={0: False, 1: True},
            give_up=give_up,
        )
        self._rolls = Rolls(run_dir.events, self._ask if site.lab_name is None else lambda names: ())
        self._trust: wire.Trust | None = None

    @classmethod
    def of(
        cls,
        bounds: Bounds,
        cluster: Cluster,
        site: Site,
        run_dir: RunDir,
        authority: Authority | None = None,
        give_up: Callable[[str], object] = lambda text: None,
    ) -> "JobCoordinators":
        """Those of a run on a cluster.

        Raises:
            LaunchError: There is no free port.
        """
        names = [node.name for node in cluster.nodes]
        places = [names[0], names[1 % len(names)]]
        posts = [Post(node=node, meeting=site.meeting(node)) for node in places]
        return cls(posts, bounds, sum(node.num_devices for node in cluster.nodes), site, run_dir, authority, give_up)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of each, the one that decides first."""
        return self._pair.addresses

    @property
    def pids(self) -> frozenset[int]:
        """Of those that run."""
        return self._both.pids

    def secret(self, worker: WorkerSpec) -> int:
        """A descriptor of the worker's credentials, for it to inherit: they name the very process."""
        return self._authority.issue("worker", worker.environ["RINGWEAVE_MEMBER"]).to_descriptor()

    def running(self, environ: Mapping[str, str]) -> AbstractContextManager[None]:
        """Run both for the length of a block.

        Raises:
            LaunchError: One could not be started.
        """
        return self._both.running(environ)

    def look(self) -> None:
        """Start again what has died."""
        self._both.look()

    def roll(self, names: Collection[str] = ()) -> Roll:
        """Who has been a member so far: as the event log says, and where it does not know one of these names, they do.

        Those in the network of a lab are not asked: it is not this process's.
        """
        return self._rolls.look(names)

    def _ask(self, names: Collection[str]) -> set[str]:
        """Who is a member now; all of these where rings have memberships of their own, of which no more is told."""
        found: set[str] = set()
        with suppress(OSError, RuntimeError):  # a descriptor, or a thread, is not to be had
            self._trust = self._trust or wire.Tls(self._authority.issue("launcher", "0"))
            for address in self.addresses:
                with suppress(WireError):  # the other one knows
                    count = _count(address, self._trust)
                    found.update(count.members, names if any(map(is_ring, count.parts)) else ())
        return found


def _count(address: tuple[str, int], trust: wire.Trust) -> Count:
    limits, (host, port) = wire.Limits(handshake_s=_ANSWERED_S), address
    with wire.Client.connect(host, port, trust, role=ROLE, limits=limits, timeout_s=_ANSWERED_S) as client:
        count = client.call(Ask(), timeout_s=_ANSWERED_S).message
    assert isinstance(count, Count), "the class of the reply"
    return count
