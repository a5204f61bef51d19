"""The coordinator of an elastic run and its standby: where they go, their credentials, their processes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ringweave.launch.local import attendants
from ringweave.launch.local.attendants import Post
from ringweave.launch.local.sites import Site
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import WorkerSpec
from ringweave.membership.rules.settings import Bounds
from ringweave.topology import Cluster
from ringweave.wire import Authority, Identity

ROLE = "coordinator"
_MAIN = "ringweave.membership.serving.main"
_END_S = 3.0


class JobCoordinators:
    """Two coordinators of one run, on two nodes where there are two; the job's authority lives in this process alone.

    One that dies is started again as a standby: what it knew the members know as well.
    """

    def __init__(
        self,
        posts: list[Post],
        bounds: Bounds,
        expected: int,
        site: Site,
        run_dir: RunDir,
        authority: Authority | None = None,
    ) -> None:
        """`authority` is the job's, if it has one already."""
        self.bounds = bounds
        self._posts, self._expected, self._site, self._run_dir = posts, expected, site, run_dir
        self._authority = authority or Authority(Identity(job=f"run-{os.getpid()}", role=ROLE, name="0").job)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environ: Mapping[str, str] = {}

    @classmethod
    def of(
        cls, bounds: Bounds, cluster: Cluster, site: Site, run_dir: RunDir, authority: Authority | None = None
    ) -> "JobCoordinators":
        """Those of a run on a cluster.

        Raises:
            LaunchError: There is no free port.
        """
        names = [node.name for node in cluster.nodes]
        places = [names[0], names[1 % len(names)]]
        posts = [Post(node=node, meeting=site.meeting(node)) for node in places]
        return cls(posts, bounds, sum(node.num_devices for node in cluster.nodes), site, run_dir, authority)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of each, the one that decides first."""
        return tuple((post.meeting.host, post.meeting.port) for post in self._posts)

    @property
    def pids(self) -> frozenset[int]:
        """Of those that run."""
        return frozenset(process.pid for process in self._processes if process.poll() is None)

    def secret(self, worker: WorkerSpec) -> int:
        """A descriptor of the worker's credentials, for it to inherit: they name the very process."""
        return self._authority.issue("worker", worker.environ["RINGWEAVE_MEMBER"]).to_descriptor()

    @contextmanager
    def running(self, environ: Mapping[str, str]) -> Iterator[None]:
        """Run both for the length of a block.

        Raises:
            LaunchError: One could not be started.
        """
        self._environ = environ
        try:
            self._processes = [self._start(index, is_standby=index > 0) for index in range(len(self._posts))]
            yield
        finally:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                process.kill()
                process.wait()

    def look(self) -> None:
        """Start again what has died."""
        for index, process in enumerate(self._processes):
            if process.poll() is not None:
                self._processes[index] = self._start(index, is_standby=True)

    def _start(self, index: int, *, is_standby: bool) -> "subprocess.Popen[bytes]":
        post = self._posts[index]
        secret = self._authority.issue(ROLE, str(index)).to_descriptor()
        serve = [sys.executable, "-m", _MAIN, "--host", post.meeting.host, "--port", str(post.meeting.port)]
        serve += ["--credentials", f"fd:{secret}", "--elastic", str(self.bounds), "--expected", str(self._expected)]
        host, port = self.addresses[1 - index]
        serve += ["--other", f"{host}:{port}", "--run-dir", str(self._run_dir.root), "--index", str(index)]
        serve += ["--standby"] if is_standby else []
        log = self._run_dir.root / "logs" / f"coordinator-{index}.log"
        return attendants.start(
            "coordinator", serve, post=post, site=self._site, environ=self._environ, log=log, secret=secret
        )
