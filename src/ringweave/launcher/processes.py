"""Worker processes on this machine: start, observe, signal, read their pipes, and end what they left behind."""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from ringweave import environment
from ringweave.errors import LaunchError
from ringweave.files import rotation
from ringweave.files.rotation import LogLimits
from ringweave.launcher import bootstrap, guard, spares, workers
from ringweave.launcher.output import OutputConsole, OutputStream, WorkerLog, WorkerStream
from ringweave.launcher.spares import ForkedProcess, Spare, SparePool, SpareRules

PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_POLL_S = 0.05

IsUnrelated = Callable[[psutil.Process], bool]
"""Returns whether a child of this process is unrelated to the workers; may raise psutil.Error for an ended one."""


def never_unrelated(process: psutil.Process) -> bool:
    """Return False: no unrelated processes start here."""
    return False


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that they stay our descendants."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(is_other: IsUnrelated = never_unrelated) -> set[psutil.Process]:
    """Return all descendants of this process, without unrelated ones and their descendants.

    Each object holds its start time, so a reused process id is never mistaken for it.
    """
    found = set(psutil.Process().children(recursive=True))
    for process in tuple(found):
        with contextlib.suppress(psutil.Error):
            if is_other(process):
                found -= {process, *process.children(recursive=True)}
    return found


def end_descendants(
    earlier: Iterable[psutil.Process], *, exit_s: float, term_s: float, is_other: IsUnrelated = never_unrelated
) -> list[psutil.Process]:
    """End processes that workers left behind.

    Args:
        earlier: Processes that existed before the run.
        exit_s: Time to finish by themselves, for helpers that clean up after a worker.
        term_s: Time between SIGTERM and SIGKILL.
        is_other: Recognizes later processes that are unrelated to the workers.

    Returns:
        Processes that survive SIGKILL; only the kernel can hold them.
    """
    earlier_processes = set(earlier)

    def left() -> set[psutil.Process]:
        return descendants(is_other) - earlier_processes

    _wait_for_exit(left, exit_s)
    _signal_all(signal.SIGTERM, left())
    _wait_for_exit(left, term_s)
    _signal_all(signal.SIGKILL, left())
    return _wait_for_exit(left, 1.0)


def _signal_all(signum: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signum)


def _wait_for_exit(remaining: Callable[[], Iterable[psutil.Process]], timeout_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while running := reap_children(remaining()):
        if time.monotonic() >= deadline:
            return running
        time.sleep(LEFTOVER_POLL_S)
    return []


def reap_children(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Reap ended children of this process; return the processes that still run."""
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
            elif process.ppid() == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
    return running


OUTPUT_POLL_S = 0.1
READ_BYTES = 64 * 1024


class OutputReader:
    """Reads pipes of workers, in one thread, until all have ended.

    It has its own thread, so that a blocked terminal delays neither the supervision nor Ctrl-C.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._added: deque[tuple[IO[bytes], WorkerStream, threading.Event]] = deque()
        self._draining, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def add(self, pipe: IO[bytes], stream: WorkerStream) -> threading.Event:
        """Also read this pipe. The returned event is set once the pipe has ended and the stream has all of it."""
        has_ended = threading.Event()
        self._added.append((pipe, stream, has_ended))
        return has_ended

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Wait until all pipes have ended, at most for the timeout; then stop reading."""
        self._draining.set()
        if self._thread.ident is None:
            self._register_added()
            self._finish()
            return
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        looked_s = 0.0
        while not self._closing.is_set():
            self._register_added()
            if self._draining.is_set() and not self._selector.get_map():
                break
            ready = {key.fd for key, _ in self._selector.select(OUTPUT_POLL_S)}
            looks = time.monotonic() - looked_s >= OUTPUT_POLL_S  # at idle pipes too: an unfinished line may be due
            looked_s = time.monotonic() if looks else looked_s
            for key in list(self._selector.get_map().values()):
                if looks or key.fd in ready:
                    self._read_pipe(key, key.fd in ready)
        self._finish()

    def _register_added(self) -> None:
        while self._added:
            pipe, *rest = self._added.popleft()
            self._selector.register(pipe, selectors.EVENT_READ, (pipe, *rest))

    def _finish(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._close_pipe(key)
        self._selector.close()

    def _read_pipe(self, key: selectors.SelectorKey, is_ready: bool) -> None:
        received = os.read(key.fd, READ_BYTES) if is_ready else b""
        if is_ready and not received:
            self._close_pipe(key)
        else:
            _, stream, _ = key.data
            stream.feed(received)

    def _close_pipe(self, key: selectors.SelectorKey) -> None:
        pipe, stream, has_ended = key.data
        self._selector.unregister(pipe)
        stream.finish()
        pipe.close()
        has_ended.set()


WORKER_EXIT_TIMEOUT_S = 0.5
LEFTOVER_TERM_TIMEOUT_S = 0.5
OUTPUT_DRAIN_TIMEOUT_S = 1.0
_TAIL_BYTES = 64 * 1024
"""Part of a log that is read from its end: enough for the last lines of any worker."""
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "TORCH_DEVICE_BACKEND_AUTOLOAD")
_RINGWEAVE_VARIABLES = (
    environment.CLUSTER,
    environment.NODE,
    environment.RUN_DIR,
    environment.REPLACE_BACKEND,
    environment.SCHEDULE,
    environment.TUNING,
    environment.LEADER_PER_NIC,
    environment.MODE,
    environment.SERVER,
    environment.CREDENTIALS,
    environment.DATA,
    environment.MEMBER,
    environment.COORDINATORS,
)


_WorkerProcess = subprocess.Popen[bytes] | ForkedProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessContext:
    """Process that starts workers: its descriptors and children that are not the workers'."""

    guard_descriptors: Sequence[int] = ()
    """Descriptors that stay open until no process of the workers can run any more, whichever process is killed."""
    is_unrelated: IsUnrelated = never_unrelated
    """Recognizes processes that start beside the workers and are unrelated to them; they stay when the workers are
    gone."""


class LocalLauncher:
    """Launcher of workers on this machine, each in its own session; leaving its context leaves no process behind.

    Workers die with this process, whatever kills it. They are reaped only at the end: while an ended worker is a
    zombie, its process group id cannot be reused, so a signal to the group never reaches an unrelated process.
    """

    def __init__(
        self,
        log_paths: Callable[[int], Path],
        console: OutputConsole,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        wrap_command: Callable[[workers.WorkerSpec, Sequence[str]], Sequence[str]] = lambda worker, argv: argv,
        open_credentials: Callable[[workers.WorkerSpec], int | None] = lambda worker: None,
        process_context: ProcessContext = ProcessContext(),
    ) -> None:
        """`open_credentials` opens a descriptor of a worker's credentials, which it inherits, or returns None.

        `process_context` recognizes children of this process that are not the workers'; earlier children are not
        either.
        """
        self._open_credentials, self._process_context = open_credentials, process_context
        self._log_paths, self._console, self._environ, self._clock = log_paths, console, environ, clock
        self._wrap_command = wrap_command
        self._processes: dict[int, _WorkerProcess] = {}
        self._exits: dict[int, workers.WorkerExit] = {}
        self._is_stopping = False
        self._output_reader = OutputReader()
        self._output_ends: dict[int, list[threading.Event]] = {}
        self._logs: dict[int, WorkerLog] = {}
        self._member_ranks: set[int] = set()
        self._earlier_processes = descendants()
        self._guard: subprocess.Popen[bytes] | None = None
        self._spare_rules: SpareRules | None = None
        self._spare_program: workers.WorkerProgram | None = None
        self._spares: SparePool | None = None

    def keep_spares(self, program: workers.WorkerProgram, rules: SpareRules) -> None:
        """Keep spares of this program by these rules, unless it is a command; called before `start`.

        The first one is a fork server, where workers gain from one.
        """
        if not program.is_command:
            self._spare_rules, self._spare_program = rules, program

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spares is not None:
            self._spares.close()
        if not all(state.exit for state in self.observe()):
            self.stop(signal.SIGKILL)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it; reported below
                process.wait(timeout=WORKER_EXIT_TIMEOUT_S)
        is_other = self._process_context.is_unrelated
        left = end_descendants(
            self._earlier_processes, exit_s=WORKER_EXIT_TIMEOUT_S, term_s=LEFTOVER_TERM_TIMEOUT_S, is_other=is_other
        )
        self._output_reader.close(OUTPUT_DRAIN_TIMEOUT_S)
        for log in self._logs.values():
            log.close()
        self._write_to_guard(b"done")
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise LaunchError(f"processes {pids} do not end, even after SIGKILL. Look at them with ps. [launch/local]")

    def start(self, group: workers.WorkerGroup) -> None:
        """Start all workers, possibly only those of one node, and begin to read their output.

        Raises:
            LaunchError: A worker could not be started; those already started have to be stopped.
        """
        if self._guard is None:
            self.begin_imports(group, is_early=False)
        if self._spares is not None:
            self._spares.wait_first()
        for worker in group.workers:
            self._start_worker(worker, group.argv)
        self._output_reader.start()
        if self._spares is not None and self._spare_rules is not None and not self._spare_rules.is_elastic:
            self._spares.close()
            self._spares = None

    def begin_imports(self, group: workers.WorkerGroup, *, is_early: bool = True) -> None:
        """Open the pool of spares if there is to be one; a fork server begins its imports, for which `start` waits.

        Args:
            group: The workers, as `start` gets them later. Addresses of other nodes may still be wrong.
            is_early: There is something else to wait for meanwhile, so even one worker gains from a fork server.
        """
        adopt_orphans()
        self._start_guard()
        rules, program = self._spare_rules, self._spare_program
        if rules is None or program is None or not group.workers:
            return
        has_use = is_early or rules.is_elastic or group.world_size > 1
        forks = has_use and spares.gains_from_fork_server(program, self._environ)
        if not forks and not rules.num_spares:
            return
        command = [group.argv[0], *program.command_words()]
        environ = _worker_environ(self._environ, group.workers[0])
        self._spares = SparePool(rules, command, environ, self._start_spare, self._clock)
        if forks:
            self._spares.start_first()

    def restart(self, worker: workers.WorkerSpec, argv: tuple[str, ...]) -> Spare | None:
        """Start a further worker, or replace an ended one of the same rank, of which every process is killed.

        Returns:
            The spare that has become the worker or has forked it, if the run was asked for spares; None if a new
            process was started.

        Raises:
            LaunchError: It could not be started. The caller may retry; the earlier worker has ended.
        """
        previous = self._processes.pop(worker.global_rank, None)
        if previous is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(previous.pid, signal.SIGKILL)
            previous.wait()
            self._write_to_guard(b"-%d\n" % previous.pid)
        spare = self._start_worker(worker, argv)
        self._exits.pop(worker.global_rank, None)
        return spare if self._spare_rules is not None and self._spare_rules.num_spares else None

    def pid(self, global_rank: int) -> int:
        """Return the process id of a worker, which is also its process group and session."""
        return self._processes[global_rank].pid

    def observe(self) -> Sequence[workers.WorkerState]:
        """Return the current state of every worker, by global rank, without waiting; also keep the spares ready."""
        if self._spares is not None:
            self._spares.refill()
        for global_rank, process in self._processes.items():
            if global_rank not in self._exits:
                self._observe_worker(global_rank, process)
        ranks = sorted({*self._processes, *self._exits})
        return [workers.WorkerState(global_rank=rank, exit=self._exits.get(rank)) for rank in ranks]

    def stop(self, signum: signal.Signals) -> None:
        """Send a signal to every worker's process group, including those of ended workers, without waiting.

        For a running member of an elastic job only the member itself gets it, unless it is SIGKILL: the member has to
        finish its train step before it leaves, and needs its data-loading processes for that.
        """
        self.observe()
        self._is_stopping = True
        if self._spares is not None:
            self._spares.close()
        for global_rank, process in self._processes.items():
            is_alone = global_rank in self._member_ranks - self._exits.keys() and signum is not signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                (os.kill if is_alone else os.killpg)(process.pid, signum)

    def signal_worker(self, global_rank: int, signum: signal.Signals) -> None:
        """Send a signal to one running worker, and to none of its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[global_rank].pid, signum)

    def logs(self, global_rank: int, num_lines: int) -> list[str]:
        """Return the last lines of the worker's log; the log is complete once the worker has ended.

        Returns an empty list if the log is gone.
        """
        if global_rank in self._exits:  # its last output may still be in the pipe, which a grandchild may hold open
            for has_ended in self._output_ends.pop(global_rank, ()):
                has_ended.wait(OUTPUT_DRAIN_TIMEOUT_S)
        with contextlib.suppress(OSError):
            tail = rotation.read_tail(self._log_paths(global_rank), _TAIL_BYTES)
            return tail.decode(errors="replace").splitlines()[-num_lines:]
        return []

    def _start_guard(self) -> None:
        command = [sys.executable, "-I", "-S", guard.__file__]
        self._guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=tuple(self._process_context.guard_descriptors),
        )
        self._earlier_processes.add(psutil.Process(self._guard.pid))

    def _write_to_guard(self, word: bytes) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(word)
            self._guard.stdin.flush()
        if word == b"done":
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.close()
            self._guard.wait()

    def _start_worker(self, worker: workers.WorkerSpec, argv: tuple[str, ...]) -> Spare | None:
        try:
            log, (process, spare) = self._open_log(worker.global_rank), self._spawn(worker, argv)
        except OSError as error:
            raise LaunchError(f"worker {worker.global_rank} could not be started: {error}. [{argv[0]}]") from error
        self._processes[worker.global_rank] = process
        if environment.MEMBER in worker.environ:
            self._member_ranks.add(worker.global_rank)
        self._write_to_guard(b"%d\n" % process.pid)
        streams: tuple[tuple[IO[bytes] | None, OutputStream], ...] = (
            (process.stdout, "stdout"),
            (process.stderr, "stderr"),
        )
        outputs = self._output_ends[worker.global_rank] = []
        for pipe, stream in streams:
            assert pipe is not None
            worker_stream = WorkerStream(self._console, stream, worker.global_rank, log)
            worker_stream.feed(spare.printed[stream] if spare else b"")
            outputs.append(self._output_reader.add(pipe, worker_stream))
        return spare

    def _open_log(self, global_rank: int) -> WorkerLog:
        """Return the log of a rank, one file for all its processes: a restart can log even if no file can be opened."""
        if global_rank not in self._logs:
            limits = LogLimits.from_environ(self._environ)
            self._logs[global_rank] = WorkerLog(self._log_paths(global_rank), limits)
        return self._logs[global_rank]

    def _spawn(self, worker: workers.WorkerSpec, argv: tuple[str, ...]) -> tuple["_WorkerProcess", Spare | None]:
        """Return the worker's process, and the spare that it was, if one could be taken."""
        command, environ = self._wrap_command(worker, argv), _worker_environ(self._environ, worker)
        credentials_fd = self._open_credentials(worker)
        try:
            if self._spares is not None:
                spare = self._spares.take(worker, environ, command, credentials_fd)
                if spare is not None:
                    return spare.process, spare
            extra_environ = {} if credentials_fd is None else {environment.CREDENTIALS: f"fd:{credentials_fd}"}
            inherited = () if credentials_fd is None else (credentials_fd,)
            return _start_process(command, environ | extra_environ, inherited), None
        finally:
            if credentials_fd is not None:
                os.close(credentials_fd)

    def _start_spare(
        self, command: Sequence[str], environ: Mapping[str, str], inherited: Sequence[int]
    ) -> "subprocess.Popen[bytes]":
        process = _start_process(command, environ, inherited)
        self._write_to_guard(b"%d\n" % process.pid)
        return process

    def _observe_worker(self, global_rank: int, process: "_WorkerProcess") -> None:
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return
        has_exited = status.si_code == os.CLD_EXITED
        self._exits[global_rank] = workers.WorkerExit(
            exit_code=status.si_status if has_exited else None,
            signal_name=None if has_exited else _signal_name(status.si_status),
            time_s=self._clock(),
            was_stopped=self._is_stopping,
        )


def _start_process(
    command: Sequence[str], environ: Mapping[str, str], inherited: Sequence[int]
) -> "subprocess.Popen[bytes]":
    """Start a process in its own session that ends with this one, with pipes for its output."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", bootstrap.__file__, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,
        pass_fds=inherited,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _worker_environ(inherited: Mapping[str, str], worker: workers.WorkerSpec) -> dict[str, str]:
    """Return the worker's variables over ours, without those of an outer launcher; some keep the user's values."""
    inherited_kept = {
        k: v for k, v in inherited.items() if k not in _RINGWEAVE_VARIABLES and not k.startswith(_FOREIGN_PREFIXES)
    }
    own = {
        k: v for k, v in worker.environ.items() if not (k in workers.USER_CONTROLLED_VARIABLES and k in inherited_kept)
    }
    return inherited_kept | own
