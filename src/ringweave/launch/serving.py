"""The parameter server of a run: where it goes, who gets which credentials, its process from begin to end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ringweave import telemetry
from ringweave.errors import LaunchError
from ringweave.launch.local import bootstrap
from ringweave.launch.local.sites import Site
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Meeting, WorkerSpec
from ringweave.topology import Cluster
from ringweave.wire import Authority, Identity

ROLE = "server"
_END_S = 5.0
_SAYS = "parameter server: "


class JobServer:
    """One server of one run, on the node that is connected best; its job's authority lives in this process alone."""

    def __init__(self, node: str, meeting: Meeting, site: Site, run_dir: RunDir, authority: Authority) -> None:
        self.node, self._meeting, self._site, self._run_dir = node, meeting, site, run_dir
        self._authority = authority
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, mode: str | None, cluster: Cluster, site: Site, run_dir: RunDir) -> "JobServer | None":
        """The server that a mode needs, or may come to need (`auto`); None if it needs none.

        Raises:
            LaunchError: There is no free port.
        """
        from ringweave.planning import central, modes  # brings numpy, which most runs need not wait for here

        if mode not in (*modes.SERVED, modes.AUTO) or (mode == modes.AUTO and cluster.num_nodes == 1):
            return None
        node = central.best_connected(cluster).node
        job = Identity(job=f"run-{os.getpid()}", role=ROLE, name="0").job
        return cls(node, site.meeting(node), site, run_dir, Authority(job))

    @property
    def address(self) -> str:
        """`host:port`, for the workers."""
        return f"{self._meeting.host}:{self._meeting.port}"

    @property
    def exit_code(self) -> int | None:
        """Of a server that ended, negative if a signal ended it; None while it runs, and before."""
        return self._process.poll() if self._process is not None else None

    @property
    def num_peers(self) -> int:
        """Connections to it that are open now."""
        if self._process is None or self._process.poll() is not None:
            return 0
        return _num_established(self._process.pid, self._meeting.port)

    def secret(self, worker: WorkerSpec) -> int:
        """A descriptor of the worker's credentials, for it to inherit."""
        return self._authority.issue("worker", str(worker.global_rank)).to_descriptor()

    @contextmanager
    def running(self, environ: Mapping[str, str]) -> Iterator[None]:
        """Run it for the length of a block.

        Raises:
            LaunchError: It could not be started.
        """
        log = telemetry.EventLog(self._run_dir.events)
        process = self._process = self._start(environ)
        log.write("server_started", node=self.node, pid=process.pid, address=self.address)
        try:
            yield
        finally:
            found = process.poll()
            was_stopped = found is None
            exit_code = _end(process) if found is None else found
            log.write(
                "server_exited",
                node=self.node,
                exit_code=exit_code if exit_code >= 0 else None,
                signal=signal.Signals(-exit_code).name if exit_code < 0 else None,
                stopped=was_stopped,
            )

    def to_text(self) -> str:
        """What it said of itself in the end, or that it did not come to that; for the user."""
        lines = self._run_dir.server_log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line for line in lines if line.startswith(_SAYS)]
        if said:
            return f"ringweave: {said[-1]}\n"
        last = lines[-1] if lines else "it printed nothing"
        return f"ringweave: the parameter server on node {self.node} served no push ({last})\n"

    def _start(self, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        secret = self._authority.issue(ROLE, "0").to_descriptor()
        serve = [sys.executable, "-m", "ringweave", "server", "--host", self._meeting.host]
        serve += ["--port", str(self._meeting.port), "--credentials", f"fd:{secret}"]
        serve += ["--node", self.node, "--run-dir", str(self._run_dir.root)]
        command = [
            sys.executable,
            "-I",
            "-S",
            bootstrap.__file__,
            str(os.getpid()),
            *self._site.enter_node(self.node, serve),
        ]
        try:
            with self._run_dir.server_log.open("wb") as output:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**environ, **self._site.environ(self.node)},
                    start_new_session=True,
                    pass_fds=(secret,),
                )
        except OSError as error:
            raise LaunchError(f"parameter server could not be started: {error}. [node {self.node}]") from error
        finally:
            os.close(secret)


def _num_established(pid: int, port: int) -> int:
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
