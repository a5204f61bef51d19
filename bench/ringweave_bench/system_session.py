"""Sessions: the workers of one system with one knob, from start to end."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

from ringweave import topology
from ringweave.errors import LaunchError, PeerError, explain
from ringweave.launcher.node_context import free_port
from ringweave_bench.bench_cluster import BenchCluster
from ringweave_bench.systems import BenchmarkedSystem, Knob, ProcessStart, SessionSetup
from ringweave_bench.worker_channel import WorkerChannel, WorkerChannelError, WorkerHello, WorkerListener, request_all

START_TIMEOUT_S = 120.0
"""Time for all ranks to come up: interpreters with PyTorch take seconds each where CPUs are few."""
STOP_TIMEOUT_S = 10.0
TERM_TIMEOUT_S = 2.0
_NUM_LOG_LINES = 12
_DROPPED_PREFIXES = (
    "RINGWEAVE_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "HYDRA_",
    "MPIR_",
    "MPICH_",
    "UCX_",
    "GLOO_",
    "TORCHELASTIC_",
)
_DROPPED_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class SystemSession:
    """Live ranks of one system with one knob, waiting for requests. A context manager: afterwards they are gone."""

    def __init__(self, system: BenchmarkedSystem, knob: Knob, setup: SessionSetup) -> None:
        self.system, self.knob = system, knob
        self._setup = setup
        self._log_path = setup.folder / "output.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._hellos: list[WorkerHello] = []
        self._channels: list[WorkerChannel] = []
        self._has_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> str:
        """Version of the system, as rank 0 reports it."""
        return self._hellos[0].version

    def start(self, listener: WorkerListener, networks: Mapping[str, int]) -> None:
        """Start all ranks and wait until they have joined their group, each in its node.

        Args:
            listener: Listener to which they connect.
            networks: Node -> number of its network namespace.

        Raises:
            LaunchError: Ranks did not connect, or not from their nodes.
        """
        self._setup.folder.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            for start in self.system.process_starts(self._setup, self.knob):
                self._processes.append(self._start_process(start, log.fileno()))
        world_size = len(self._setup.node_of_rank)
        try:
            greeted = listener.wait_for_workers(self._setup.session, world_size, START_TIMEOUT_S, self._check_alive)
        except WorkerChannelError as error:
            raise LaunchError(self._failure_text("could not be started", str(error))) from error
        self._hellos, self._channels = [hello for hello, _ in greeted], [channel for _, channel in greeted]
        self._check_nodes(networks)

    def request(self, order: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Send a request to all ranks; return their answers by rank.

        Raises:
            PeerError: A rank is gone, failed, or does not answer in time.
        """
        try:
            return request_all(self._channels, order, timeout_s)
        except WorkerChannelError as error:
            self._has_failed = True
            raise PeerError(self._failure_text(f"failed in {order['do']!r}", str(error))) from error

    def close(self) -> None:
        """End all ranks: by request, then by closing connections, then by signals to the known processes."""
        if self._channels and not self._has_failed:
            with contextlib.suppress(WorkerChannelError):
                request_all(self._channels, {"do": "stop"}, STOP_TIMEOUT_S)
        for channel in self._channels:
            channel.close()
        known = [hello.process for hello in self._hellos]
        _end_processes(
            [*known, *_living_processes([process.pid for process in self._processes if process.poll() is None])]
        )
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes, self._hellos, self._channels = [], [], []

    def _start_process(self, start: ProcessStart, log: int) -> subprocess.Popen[bytes]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED_VARIABLES
        }
        try:
            return subprocess.Popen(
                self._setup.bench_cluster.command(start.node, start.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, **start.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(self._failure_text("could not be started", str(error))) from error

    def _check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise WorkerChannelError(f"a process ended with exit code {process.returncode}")

    def _check_nodes(self, networks: Mapping[str, int]) -> None:
        for hello in self._hellos:
            node = self._setup.node_of_rank[hello.rank]
            if hello.network != networks[node]:
                elsewhere = next((name for name, number in networks.items() if number == hello.network), "no node")
                raise LaunchError(
                    f"node of rank {hello.rank} of {self.system.name}",
                    got=elsewhere,
                    expected=f"{node}, where the other systems have it",
                    do="Measure nothing: the library places ranks in another way",
                )

    def _failure_text(self, what: str, reason: str) -> str:
        return explain(
            f"{self.system.name} ({self.knob.name}) {what}",
            got=_PlainRepr(reason),
            expected="all ranks to answer",
            do=f"Its last words:\n{self._log_tail()}\n",
            where=f"{len(self._setup.node_of_rank)} ranks",
        )

    def _log_tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines() if self._log_path.exists() else []
        return "\n".join(f"    {line}" for line in lines[-_NUM_LOG_LINES:]) or "    (none)"


def _living_processes(pids: Sequence[int]) -> list[psutil.Process]:
    """Return the processes that have not ended meanwhile."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _end_processes(processes: Sequence[psutil.Process]) -> None:
    """Wait for the end of these processes, and kill those that do not end."""
    left = _wait_exited(processes, TERM_TIMEOUT_S)
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(how)
        left = _wait_exited(left, TERM_TIMEOUT_S)


def _wait_exited(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    deadline_s = time.monotonic() + timeout_s
    left = list(processes)
    while (left := [process for process in left if _is_running(process)]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class _PlainRepr:
    """Text that is shown without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_FIRST_LAB_PORT = 21_000
"""First port in a lab, where every port is free; below the range that the kernel assigns."""


class SessionFactory:
    """Opens sessions on a benchmark cluster."""

    def __init__(
        self, bench_cluster: BenchCluster, listener: WorkerListener, folder: Path, schedule: str | None
    ) -> None:
        self.bench_cluster = bench_cluster
        self._listener, self._folder, self._schedule = listener, folder, schedule
        self._cluster_path = folder / "cluster.yaml"
        self._cluster_path.write_text(topology.dumps(bench_cluster.cluster), encoding="utf-8")
        self._networks = {
            node.name: _namespace_number(bench_cluster, node.name) for node in bench_cluster.cluster.nodes
        }
        self._num_sessions = 0

    @contextmanager
    def open_session(
        self, system: BenchmarkedSystem, knob: Knob, node_of_rank: tuple[str, ...]
    ) -> Iterator[SystemSession]:
        """Open a session with all its ranks up; afterwards they are gone.

        Raises:
            LaunchError: They did not come up.
        """
        session = self._start_session(system, knob, node_of_rank)
        try:
            yield session
        finally:
            session.close()

    def _start_session(self, system: BenchmarkedSystem, knob: Knob, node_of_rank: tuple[str, ...]) -> SystemSession:
        """Start the ranks, at a second try if needed: Open MPI's starter may crash where nodes have unlike NICs."""
        for is_last in (False, True):
            session = SystemSession(system, knob, self._make_setup(system, node_of_rank))
            try:
                session.start(self._listener, self._networks)
            except LaunchError:
                session.close()
                if is_last:
                    raise
            except BaseException:
                session.close()
                raise
            else:
                return session
        raise AssertionError("the last try returns or raises")

    def _make_setup(self, system: BenchmarkedSystem, node_of_rank: tuple[str, ...]) -> SessionSetup:
        self._num_sessions += 1
        name = f"{self._num_sessions}-{system.name}"
        return SessionSetup(
            bench_cluster=self.bench_cluster,
            node_of_rank=node_of_rank,
            cluster_path=self._cluster_path,
            control_path=self._listener.path,
            session=name,
            folder=self._folder / name,
            port=self._next_port(),
            schedule=self._schedule,
        )

    def _next_port(self) -> int:
        if self.bench_cluster.is_limited:
            return _FIRST_LAB_PORT + self._num_sessions
        return free_port(random.SystemRandom())


def _namespace_number(bench_cluster: BenchCluster, node: str) -> int:
    """Return the number of a node's network namespace."""
    command = bench_cluster.command(node, ["readlink", "/proc/self/ns/net"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    number = done.stdout.strip().removeprefix("net:[").removesuffix("]")
    if not number.isdigit():
        raise LaunchError(
            f"network of node {node}",
            got=(done.stdout + done.stderr).strip(),
            expected="the number of a namespace",
            do="See whether the lab is up: ringweave lab status",
        )
    return int(number)
