"""Workers on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from ringweave import environment
from ringweave.errors import LaunchError
from ringweave.launch.launcher import Exit, Launcher, WorkerState
from ringweave.launch.local import bootstrap, guard, leftovers
from ringweave.launch.local.merging import Console, LogFile, MergedStream, Stream
from ringweave.launch.local.pump import Pump
from ringweave.launch.workers import USERS_OWN, WorkerGroup, WorkerSpec

LEAVE_S = 0.5
TERM_S = 0.5
DRAIN_S = 1.0
_TAIL_BYTES = 64 * 1024
"""Of the end of a log: enough for the last lines of any worker, however much it has printed before."""
_NOT_OURS = ("TORCHELASTIC_", "TORCH_DEVICE_BACKEND_AUTOLOAD")
_OURS = (
    environment.CLUSTER,
    environment.NODE,
    environment.RUN_DIR,
    environment.REPLACE_BACKEND,
    environment.SCHEDULE,
    environment.TUNING,
    environment.MODE,
    environment.SERVER,
    environment.CREDENTIALS,
    environment.DATA,
    environment.MEMBER,
    environment.COORDINATORS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What the process that starts workers has beside them."""

    guard_holds: Sequence[int] = ()
    """Descriptors that stay open until nothing of the workers can run any more, whoever is killed."""
    is_other: leftovers.IsOther = leftovers.all_are_ours
    """Processes that may begin while the workers run, and are not theirs: they stay when the workers are gone."""


class LocalLauncher(Launcher):
    """Starts each worker in a session of its own. A context manager: when it is left, nothing of the run is left.

    Workers die with this process, whatever kills it. They are not waited for until the end: while an ended worker is a
    zombie, its process group id cannot be reused, so a signal to the group never meets a stranger.
    """

    def __init__(
        self,
        log_paths: Callable[[int], Path],
        console: Console,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        enter: Callable[[WorkerSpec, Sequence[str]], Sequence[str]] = lambda worker, argv: argv,
        secret: Callable[[WorkerSpec], int | None] = lambda worker: None,
        around: Around = Around(),
    ) -> None:
        """`secret` opens the descriptor of a worker's credentials, which the worker inherits; None gives it none.

        `around` says what of this process is not the workers'; what came from it before this is not either.
        """
        self._secret, self._around = secret, around
        self._log_paths, self._console, self._environ, self._clock = log_paths, console, environ, clock
        self._enter = enter
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, Exit] = {}
        self._stopping = False
        self._pump = Pump()
        self._outputs: dict[int, list[threading.Event]] = {}
        self._logs: dict[int, LogFile] = {}
        self._members: set[int] = set()
        self._spared = leftovers.descendants()
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not all(state.exit for state in self.observe()):
            self.stop(signal.SIGKILL)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it; reported below
                process.wait(timeout=LEAVE_S)
        is_other = self._around.is_other
        left = leftovers.end_descendants(self._spared, leave_s=LEAVE_S, term_s=TERM_S, is_other=is_other)
        self._pump.close(DRAIN_S)
        for log in self._logs.values():
            log.close()
        self._tell_guard(b"done")
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise LaunchError(f"processes {pids} do not end, even after SIGKILL. Look at them with ps. [launch/local]")

    def start(self, group: WorkerGroup) -> None:
        """Start all workers, which may be those of one node; their output is read from now on."""
        leftovers.adopt_orphans()
        self._start_guard()
        for worker in group.workers:
            self._start_one(worker, group.argv)
        self._pump.start()

    def restart(self, worker: WorkerSpec, argv: tuple[str, ...]) -> None:
        """Start a further worker, or one in the place of one of the same rank that has ended; of that nothing is left.

        Raises:
            LaunchError: It could not be started. It may be tried again: until then the one before it has ended.
        """
        before = self._processes.pop(worker.global_rank, None)
        if before is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(before.pid, signal.SIGKILL)
            before.wait()
        self._start_one(worker, argv)
        self._exits.pop(worker.global_rank, None)

    def pid(self, global_rank: int) -> int:
        """Process id of a worker, which is also its process group and session."""
        return self._processes[global_rank].pid

    def observe(self) -> Sequence[WorkerState]:
        """The state of every worker now."""
        for global_rank, process in self._processes.items():
            if global_rank not in self._exits:
                self._look_at(global_rank, process)
        ranks = sorted({*self._processes, *self._exits})
        return [WorkerState(global_rank=rank, exit=self._exits.get(rank)) for rank in ranks]

    def stop(self, how: signal.Signals) -> None:
        """Send a signal to every worker's process group, ended workers' groups included.

        A member of an elastic job that runs gets it alone, unless it is SIGKILL: it is to finish its train step before
        it leaves, and cannot where the processes that load its data have been ended.
        """
        self.observe()
        self._stopping = True
        for global_rank, process in self._processes.items():
            is_alone = global_rank in self._members - self._exits.keys() and how is not signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                (os.kill if is_alone else os.killpg)(process.pid, how)

    def ask(self, global_rank: int, how: signal.Signals) -> None:
        """Send a signal to one worker that runs, and to nothing that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[global_rank].pid, how)

    def logs(self, global_rank: int, num_lines: int) -> list[str]:
        """The last lines of the worker's log file; all that it printed is there once it has ended.

        Nothing where there is no log any more.
        """
        if global_rank in self._exits:  # its last words may still be in the pipe, which a grandchild may hold open
            for has_ended in self._outputs.pop(global_rank, ()):
                has_ended.wait(DRAIN_S)
        with contextlib.suppress(OSError), self._log_paths(global_rank).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-num_lines:]
        return []

    def _start_guard(self) -> None:
        command = [sys.executable, "-I", "-S", guard.__file__]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=tuple(self._around.guard_holds)
        )
        self._spared.add(psutil.Process(self._guard.pid))

    def _tell_guard(self, word: bytes) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(word)
            self._guard.stdin.flush()
        if word == b"done":
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.close()
            self._guard.wait()

    def _start_one(self, worker: WorkerSpec, argv: tuple[str, ...]) -> None:
        try:
            log, process = self._log(worker.global_rank), self._spawn(worker, argv)
        except OSError as error:
            raise LaunchError(f"worker {worker.global_rank} could not be started: {error}. [{argv[0]}]") from error
        self._processes[worker.global_rank] = process
        if environment.MEMBER in worker.environ:
            self._members.add(worker.global_rank)
        self._tell_guard(b"%d\n" % process.pid)
        streams: tuple[tuple[IO[bytes] | None, Stream], ...] = ((process.stdout, "stdout"), (process.stderr, "stderr"))
        outputs = self._outputs[worker.global_rank] = []
        for pipe, stream in streams:
            assert pipe is not None
            outputs.append(self._pump.add(pipe, MergedStream(self._console, stream, worker.global_rank, log)))

    def _log(self, global_rank: int) -> LogFile:
        """One for all processes of a rank: who is started again can write even where nothing can be opened any more."""
        if global_rank not in self._logs:
            self._logs[global_rank] = LogFile(self._log_paths(global_rank))
        return self._logs[global_rank]

    def _spawn(self, worker: WorkerSpec, argv: tuple[str, ...]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-I", "-S", bootstrap.__file__, str(os.getpid()), *self._enter(worker, argv)]
        secret = self._secret(worker)
        told = {} if secret is None else {environment.CREDENTIALS: f"fd:{secret}"}
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environ(self._environ, worker) | told,
                start_new_session=True,
                pass_fds=() if secret is None else (secret,),
            )
        finally:
            if secret is not None:
                os.close(secret)

    def _look_at(self, global_rank: int, process: subprocess.Popen[bytes]) -> None:
        seen = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return
        by_itself = seen.si_code == os.CLD_EXITED
        self._exits[global_rank] = Exit(
            exit_code=seen.si_status if by_itself else None,
            signal_name=None if by_itself else _signal_name(seen.si_status),
            time_s=self._clock(),
            stopped=self._stopping,
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _environ(inherited: Mapping[str, str], worker: WorkerSpec) -> dict[str, str]:
    """The worker's variables over ours, without what an outer launcher left; some stay as the user has them."""
    kept = {k: v for k, v in inherited.items() if k not in _OURS and not k.startswith(_NOT_OURS)}
    own = {k: v for k, v in worker.environ.items() if not (k in USERS_OWN and k in kept)}
    return kept | own
