"""The workers of one system, from their start to their end."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import psutil

from ringweave.benchmarks.sessions.channels import Channel, ChannelError, Hello, Listener, ask
from ringweave.benchmarks.systems.system import Knob, Setup, Start, System
from ringweave.errors import LaunchError, PeerError, explain

START_S = 120.0
"""How long all ranks may take to come up: interpreters with PyTorch take seconds each where CPUs are few."""
STOP_S = 10.0
TERM_S = 2.0
_LAST_LINES = 12
_NOT_OURS = (
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
_NOT_OURS_EITHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Session:
    """One system with one knob, its ranks alive and waiting. A context manager: when it is left, they are gone."""

    def __init__(self, system: System, knob: Knob, setup: Setup) -> None:
        self.system, self.knob = system, knob
        self._setup = setup
        self._log_path = setup.folder / "output.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._hellos: list[Hello] = []
        self._channels: list[Channel] = []
        self._has_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> str:
        """Of the system, as rank 0 gives it."""
        return self._hellos[0].version

    def start(self, listener: Listener, networks: Mapping[str, int]) -> None:
        """Start all ranks and wait until they have joined their group, each in its node.

        Args:
            listener: Where they come to.
            networks: Node -> number of its network namespace.

        Raises:
            LaunchError: They did not come, or not where they belong.
        """
        self._setup.folder.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            for start in self.system.starts(self._setup, self.knob):
                self._processes.append(self._start(start, log.fileno()))
        world_size = len(self._setup.node_of_rank)
        try:
            greeted = listener.gather(self._setup.session, world_size, START_S, self._check_alive)
        except ChannelError as error:
            raise LaunchError(self._failure("could not be started", str(error))) from error
        self._hellos, self._channels = [hello for hello, _ in greeted], [channel for _, channel in greeted]
        self._check_places(networks)

    def ask(self, order: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Give all ranks an order; their answers by rank.

        Raises:
            PeerError: A rank is gone, failed, or does not answer in time.
        """
        try:
            return ask(self._channels, order, timeout_s)
        except ChannelError as error:
            self._has_failed = True
            raise PeerError(self._failure(f"failed in {order['do']!r}", str(error))) from error

    def close(self) -> None:
        """End all ranks: by word, then by hanging up, then by signals to the processes that are known."""
        if self._channels and not self._has_failed:
            with contextlib.suppress(ChannelError):
                ask(self._channels, {"do": "stop"}, STOP_S)
        for channel in self._channels:
            channel.close()
        known = [hello.process for hello in self._hellos]
        _end([*known, *_alive([process.pid for process in self._processes if process.poll() is None])])
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes, self._hellos, self._channels = [], [], []

    def _start(self, start: Start, log: int) -> subprocess.Popen[bytes]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_NOT_OURS) and name not in _NOT_OURS_EITHER
        }
        try:
            return subprocess.Popen(
                self._setup.place.command(start.node, start.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, **start.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(self._failure("could not be started", str(error))) from error

    def _check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise ChannelError(f"a process ended with exit code {process.returncode}")

    def _check_places(self, networks: Mapping[str, int]) -> None:
        for hello in self._hellos:
            node = self._setup.node_of_rank[hello.rank]
            if hello.network != networks[node]:
                elsewhere = next((name for name, number in networks.items() if number == hello.network), "no node")
                raise LaunchError(
                    explain(
                        f"node of rank {hello.rank} of {self.system.name}",
                        got=elsewhere,
                        expected=f"{node}, where the other systems have it",
                        do="Measure nothing: the library places ranks in another way",
                    )
                )

    def _failure(self, what: str, said: str) -> str:
        return explain(
            f"{self.system.name} ({self.knob.name}) {what}",
            got=_Verbatim(said),
            expected="all ranks to answer",
            do=f"Its last words:\n{self._last_words()}\n",
            where=f"{len(self._setup.node_of_rank)} ranks",
        )

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines() if self._log_path.exists() else []
        return "\n".join(f"    {line}" for line in lines[-_LAST_LINES:]) or "    (none)"


def _alive(pids: Sequence[int]) -> list[psutil.Process]:
    """Those that have not ended meanwhile."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _end(processes: Sequence[psutil.Process]) -> None:
    """Wait for the end of these processes, and bring it about where it does not come by itself."""
    left = _wait_gone(processes, TERM_S)
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(how)
        left = _wait_gone(left, TERM_S)


def _wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
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


class _Verbatim:
    """Text that is shown without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
