"""The parameter server of a run: where it goes, who gets which credentials, its process from begin to end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ringweave import telemetry
from ringweave.errors import LaunchError
from ringweave.launch.elastic.respawning import Respawns
from ringweave.launch.local import attendants
from ringweave.launch.local.attendants import Post
from ringweave.launch.local.sites import Site
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import WorkerSpec
from ringweave.topology import Cluster
from ringweave.wire import Authority, Identity

ROLE = "server"
_END_S = 5.0
_SAYS, _COUNTS = "parameter server: ", "pushes applied"


class JobServer:
    """The server of one run, on the node that is connected best, and its standby on another one, if it has one.

    Its job's authority lives in this process alone. With a standby, whichever of the two dies is started again, and
    follows the other.
    """

    def __init__(
        self,
        posts: Sequence[Post],
        site: Site,
        run_dir: RunDir,
        authority: Authority,
        *,
        give_up: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`posts` are where it is, and then where its standby is, if it has one.

        `give_up` is told of one that dies time after time, in words; it is not started again.
        """
        self._posts, self._site, self._run_dir = tuple(posts), site, run_dir
        self.authority = authority
        self._log = telemetry.EventLog(run_dir.events)
        self._give_up, self._clock = give_up, clock
        self._respawns = [Respawns() for _ in posts]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environ: Mapping[str, str] = {}

    @classmethod
    def of(
        cls,
        mode: str | None,
        cluster: Cluster,
        site: Site,
        run_dir: RunDir,
        *,
        has_standby: bool = False,
        give_up: Callable[[str], object] = lambda text: None,
    ) -> "JobServer | None":
        """The server that a mode needs, or may come to need (`auto`); None if it needs none.

        Raises:
            LaunchError: There is no free port.
        """
        from ringweave.planning import central, modes  # brings numpy, which most runs need not wait for here

        if mode not in (*modes.SERVED, modes.AUTO) or (mode == modes.AUTO and cluster.num_nodes == 1):
            return None
        best = central.best_connected(cluster).node
        others = [node.name for node in cluster.nodes if node.name != best]
        nodes = [best, *([*others, best][:1] if has_standby else ())]
        job = Identity(job=f"run-{os.getpid()}", role=ROLE, name="0").job
        posts = [Post(node=node, meeting=site.meeting(node)) for node in nodes]
        return cls(posts, site, run_dir, Authority(job), give_up=give_up)

    @property
    def node(self) -> str:
        """Where it is at the start."""
        return self._posts[0].node

    @property
    def address(self) -> str:
        """`host:port`, for the workers; with a standby two of them, with a comma between."""
        return ",".join(_address(post) for post in self._posts)

    @property
    def exit_code(self) -> int | None:
        """Of a server without a standby that ended, negative if a signal ended it; None while it runs, and before."""
        return self._processes[0].poll() if len(self._processes) == 1 else None

    @property
    def pids(self) -> frozenset[int]:
        """Of it and of its standby, as far as they run."""
        return frozenset(process.pid for process in self._processes if process.poll() is None)

    @property
    def num_peers(self) -> int:
        """Connections that are open now, to it and to its standby."""
        return sum(
            num_established(process.pid, post.meeting.port)
            for process, post in zip(self._processes, self._posts, strict=False)
            if process.poll() is None
        )

    def secret(self, worker: WorkerSpec) -> int:
        """A descriptor of the worker's credentials, for it to inherit."""
        return self.authority.issue("worker", str(worker.global_rank)).to_descriptor()

    @contextmanager
    def running(self, environ: Mapping[str, str]) -> Iterator[None]:
        """Run it for the length of a block.

        Raises:
            LaunchError: It could not be started.
        """
        self._environ = environ
        try:
            for index in range(len(self._posts)):
                self._processes.append(self._start(index))
            yield
        finally:
            for index, process in enumerate(self._processes):
                found = process.poll()
                self._note_exit(index, _end(process) if found is None else found, was_stopped=found is None)

    def look(self) -> None:
        """Start again what has died, if there is another one that it can follow."""
        now_s = self._clock()
        for index, process in enumerate(self._processes if len(self._posts) > 1 else ()):
            respawns, exit_code = self._respawns[index], process.poll()
            if exit_code and respawns.note_end(now_s, exit_code):
                self._note_exit(index, exit_code, was_stopped=False)
                self._tell_given_up(index, f"the last one with exit code {exit_code}")
            if respawns.take_due(now_s):
                try:
                    self._processes[index] = self._start(index)
                except (LaunchError, OSError) as error:
                    respawns.note_death(0.0, now_s)
                    self._tell_given_up(index, f"and another one could not be started: {error}")

    def _tell_given_up(self, index: int, last: str) -> None:
        if self._respawns[index].has_given_up:
            self._give_up(self._why(index, last, self._respawns[index].num_quick))

    def _why(self, index: int, last: str, num_deaths: int) -> str:
        node, log = self._posts[index].node, self._run_dir.server_log(index)
        return (
            f"parameter server {index} on node {node} is given up: {num_deaths} of its processes in a row were over "
            f"soon after they began, {last}. Training goes on with the other one; "
            f"nobody takes over if that dies as well. See what it lacks in {log}."
        )

    def to_text(self) -> str:
        """What it said of itself in the end, or that it did not come to that; for the user."""
        lines = [line for index in range(len(self._posts)) for line in self._lines(index)]
        said = [line for line in lines if line.startswith(_SAYS) and _COUNTS in line]
        if said:
            return f"ringweave: {said[-1]}\n"
        last = lines[-1] if lines else "it printed nothing"
        return f"ringweave: the parameter server on node {self.node} served no push ({last})\n"

    def _lines(self, index: int) -> list[str]:
        path = self._run_dir.server_log(index)
        return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []

    def _note_exit(self, index: int, exit_code: int, *, was_stopped: bool) -> None:
        self._log.write(
            "server_exited",
            node=self._posts[index].node,
            exit_code=exit_code if exit_code >= 0 else None,
            signal=signal.Signals(-exit_code).name if exit_code < 0 else None,
            stopped=was_stopped,
        )

    def _start(self, index: int) -> "subprocess.Popen[bytes]":
        post = self._posts[index]
        secret = self.authority.issue(ROLE, str(index)).to_descriptor()
        serve = [sys.executable, "-m", "ringweave", "server", "--host", post.meeting.host]
        serve += ["--port", str(post.meeting.port), "--credentials", f"fd:{secret}"]
        serve += ["--node", post.node, "--run-dir", str(self._run_dir.root)]
        if len(self._posts) > 1:
            serve += ["--other", _address(self._posts[1 - index]), "--index", str(index)]
            serve += ["--claims", str(self._run_dir.claims)]
        log = self._run_dir.server_log(index)
        process = attendants.start(
            "parameter server", serve, post=post, site=self._site, environ=self._environ, log=log, secret=secret
        )
        self._respawns[index].note_start(self._clock())
        self._log.write("server_started", node=post.node, pid=process.pid, address=_address(post))
        return process


def _address(post: Post) -> str:
    return f"{post.meeting.host}:{post.meeting.port}"


def num_established(pid: int, port: int) -> int:
    """Connections at a port, as the kernel counts them where the process is: it may be in a network of its own."""
    wanted, established = f":{port:04X}", "01"
    count = 0
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/{family}").read_text(encoding="ascii").splitlines()]
            count += sum(row[1].endswith(wanted) and row[3] == established for row in rows[1:])
    return count


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Ask it to end, and see to it; the exit code, negative if a signal ended it."""
    process.terminate()
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
