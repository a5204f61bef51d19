"""Spares: started processes that have imported what the script needs, and fork workers or become one.

`SparePool` keeps them, in the launcher. A spare runs this file as a script, `spares.py DESCRIPTOR NICE SCRIPT
ARGUMENT..`: on the socket DESCRIPTOR it reports as JSON that it is ready, and gets a descriptor of a slot as JSON. A
spare that can be forked is a fork server: it forks a worker for each slot, and stays. Any other becomes the worker.
"""

import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import math
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ringweave import environment
from ringweave.jobs.restart_policy import RestartPolicy
from ringweave.launcher import bootstrap, entry

if TYPE_CHECKING:
    from ringweave.launcher.node_context import NodeEntry  # brings the lab, of which a spare has no need
    from ringweave.launcher.workers import WorkerProgram, WorkerSpec

_SLOT_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GLOO_SOCKET_IFNAME"),
        *("MASTER_ADDR", "MASTER_PORT", environment.COORDINATORS, environment.SERVER),
        *(environment.NODE, environment.MEMBER, environment.CREDENTIALS, environment.FINDINGS),
    }
)
"""Variables of a slot that no library reads on import; a spare fits a worker that differs in none but these."""
_MAX_REPORT_BYTES = 4096
_MAX_ERROR_BYTES = 4096
_REFILL_DELAY_S = 1.0
"""Time in which a used spare joins the others before the next one takes processor time."""
_MAX_EARLY_DEATHS = 3
_EXIT_TIMEOUT_S = 0.5
_FORK_TIMEOUT_S = 10.0
"""Time for a fork server to fork a worker; a server that takes longer, as one that is stopped, is ended."""
_FIRST_TIMEOUT_S = 120.0
"""Time for the imports of the first spare, before workers are started without it."""
_POLL_S, _FIRST_POLL_S = 0.005, 0.02


class ForkedProcess:
    """Child of this process that a fork server has made; has of `subprocess.Popen` what the launcher uses."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped elsewhere; subprocess.Popen says 0 as well
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended.

        Raises:
            subprocess.TimeoutExpired: It runs after `timeout` seconds.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return code


@dataclass(kw_only=True, slots=True)
class Spare:
    """A spare, from its start to its use; once it is used, with the process of the worker."""

    process: "subprocess.Popen[bytes] | ForkedProcess"
    channel: socket.socket
    started_s: float
    ready_s: float = math.inf
    """Time at which it was ready; infinite while it imports."""
    import_s: float = 0.0
    """Seconds of its imports, measured."""
    can_fork: bool = False
    printed: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b""})
    """Output of a fork server's imports that no worker's log has yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpareRules:
    """Number of spares, and the functions that their launcher calls."""

    num_spares: int
    """Number of spares to keep ready where they are no fork servers, at most `jobs.request.MAX_SPARES`."""
    is_elastic: bool
    """Workers are replaced: a fork server stays for that. Otherwise it ends when all have been started."""
    is_over: Callable[[], bool]
    """Returns whether no worker is wanted any more, so that nothing waits for the first spare."""
    node_entry: "Callable[[WorkerSpec], NodeEntry]"
    """Returns the way of a running process into a worker's node."""
    on_ready: Callable[[Spare], object]
    on_give_up: Callable[[str], object]
    """Gets the reason, in words, when no more spares are started."""


class SparePool:
    """Keeps spares ready: starts them one at a time, and another one for each that is used or dies.

    One fork server is enough, since it is not used up.
    """

    def __init__(
        self,
        rules: SpareRules,
        command: Sequence[str],
        environ: Mapping[str, str],
        start: "Callable[[Sequence[str], Mapping[str, str], Sequence[int]], subprocess.Popen[bytes]]",
        clock: Callable[[], float],
    ) -> None:
        """Create a pool; `refill` starts its spares.

        Args:
            rules: Rules of the spares.
            command: Interpreter, script or `-m` and module, arguments.
            environ: Environment of any worker.
            start: Starts a process with a command line, an environment, and descriptors that it inherits.
            clock: Monotonic seconds.
        """
        self._rules, self._command = rules, tuple(command)
        self._environ, self._start, self._clock = _without_slot(environ), start, clock
        self._spares: list[Spare] = []
        self._policy = RestartPolicy(first_delay_s=_REFILL_DELAY_S, max_failed_starts=_MAX_EARLY_DEATHS)
        self._due_s, self._is_closed = 0.0, False
        self._has_fork_server: bool | None = None
        """Whether the spares are fork servers; None until the first one is ready."""

    def start_first(self) -> None:
        """Start the first spare, with a worker's priority."""
        self._start_spare(nice=0)

    def wait_first(self) -> None:
        """Wait until the first spare is ready, has died, or is late."""
        deadline_s = self._clock() + _FIRST_TIMEOUT_S
        while any(each.ready_s == math.inf for each in self._spares) and not self._rules.is_over():
            if self._clock() >= deadline_s:
                return
            time.sleep(_FIRST_POLL_S)
            self._check_spares()

    def refill(self) -> None:
        """Note which spares are ready or have died, and start one if one is due; called regularly."""
        self._check_spares()
        is_loading = any(each.ready_s == math.inf for each in self._spares)
        if is_loading or self._is_closed or self._policy.has_given_up or self._clock() < self._due_s:
            return
        num_wanted = self._rules.num_spares if self._has_fork_server is False else 1
        if len(self._spares) < num_wanted:
            self._start_spare(nice=_LOW_PRIORITY)

    def _check_spares(self) -> None:
        for spare in list(self._spares):
            if spare.process.poll() is not None:
                self._bury(spare)
            elif spare.ready_s == math.inf:
                self._read_report(spare)

    def take(
        self, worker: "WorkerSpec", environ: Mapping[str, str], command: Sequence[str], credentials_fd: int | None
    ) -> Spare | None:
        """Return a ready spare as this worker, forked or not; None if no spare is ready, or none fits.

        Args:
            worker: The worker.
            environ: Its whole environment.
            command: Command that starts it; a spare that cannot enter its node becomes the worker by this command.
            credentials_fd: Descriptor of its credentials, of which the spare gets a copy; None if it has none.
        """
        if self._environ != _without_slot(environ):
            return None
        slot = {"environ": dict(environ), "command": list(command), **asdict(self._rules.node_entry(worker))}
        for spare in [each for each in self._spares if each.ready_s < math.inf and each.process.poll() is None]:
            forked = self._fork(spare, slot, credentials_fd) if spare.can_fork else None
            if forked is not None:
                return replace(spare, process=forked, printed=_take_printed(spare))
            self._spares.remove(spare)
            self._due_s = self._clock() + _REFILL_DELAY_S
            with spare.channel:
                inherited = [] if credentials_fd is None else [credentials_fd]
                if not spare.can_fork and _send_slot(spare.channel, slot, inherited):
                    return spare
            _end(spare)
        return None

    def close(self) -> None:
        """End all spares, and start no more."""
        self._is_closed = True
        while self._spares:
            spare = self._spares.pop()
            spare.channel.close()
            _end(spare)

    def _fork(self, spare: Spare, slot: Mapping[str, Any], credentials_fd: int | None) -> ForkedProcess | None:
        """Return a worker that a fork server has forked; None if it did not answer."""
        ends = [os.pipe(), os.pipe()]
        inherited = [*(write for _, write in ends), *([] if credentials_fd is None else [credentials_fd])]
        pid = 0
        with contextlib.suppress(OSError, ValueError):
            if _send_slot(spare.channel, {**slot, "is_forked": True}, inherited):
                spare.channel.settimeout(_FORK_TIMEOUT_S)
                pid = int(json.loads(spare.channel.recv(_MAX_REPORT_BYTES) or "{}").get("pid", 0))
                spare.channel.setblocking(False)
        for _, write in ends:
            os.close(write)
        stdout, stderr = (os.fdopen(read, "rb", buffering=0) for read, _ in ends)
        if pid:
            return ForkedProcess(pid, stdout, stderr)
        stdout.close()
        stderr.close()
        return None

    def _start_spare(self, *, nice: int) -> None:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            python, *words = self._command
            command = [python, __file__, str(other.fileno()), str(nice), *words]
            try:
                process = self._start(command, self._environ, [other.fileno()])
            except OSError as error:
                own.close()
                self._note_death(0.0, str(error))
                return
        own.setblocking(False)
        self._spares.append(Spare(process=process, channel=own, started_s=self._clock()))

    def _read_report(self, spare: Spare) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError, ValueError):
            report: dict[str, Any] = json.loads(spare.channel.recv(_MAX_REPORT_BYTES) or "null") or {}
            if "import_s" in report:
                spare.ready_s, spare.import_s = self._clock(), float(report["import_s"])
                spare.can_fork = self._has_fork_server = bool(report["can_fork"])
                if self._rules.num_spares:
                    self._rules.on_ready(spare)

    def _bury(self, spare: Spare) -> None:
        self._spares.remove(spare)
        spare.channel.close()
        text = _last_words(spare.process)
        _end(spare)
        how = text or f"exit code {spare.process.returncode}"
        self._note_death(self._clock() - spare.started_s, how)

    def _note_death(self, lived_s: float, text: str) -> None:
        now_s = self._clock()
        self._policy = self._policy.after_end(lived_s, now_s)
        self._due_s = self._policy.due_s or now_s
        if self._policy.has_given_up and self._rules.num_spares:
            self._rules.on_give_up(
                f"no more spares are started: {_MAX_EARLY_DEATHS} of them ended, the last with: {text}"
            )


def _without_slot(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _SLOT_VARIABLES}


def _take_printed(spare: Spare) -> dict[str, bytes]:
    """Return what the imports of a fork server have printed since the last worker was forked."""
    assert isinstance(spare.process, subprocess.Popen)
    return {"stdout": _read_nowait(spare.process.stdout), "stderr": _read_nowait(spare.process.stderr)}


def _read_nowait(pipe: IO[bytes] | None) -> bytes:
    if pipe is None:
        return b""
    os.set_blocking(pipe.fileno(), False)
    return pipe.read() or b""


def _send_slot(channel: socket.socket, slot: Mapping[str, Any], inherited: Sequence[int]) -> bool:
    """Send a slot to a spare that waits, as a descriptor of JSON: no size and no stopped spare makes this block."""
    descriptor = os.memfd_create("ringweave-slot", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(json.dumps({"is_forked": False, **slot, "credentials": environment.CREDENTIALS}).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        socket.send_fds(channel, [b"\n"], [descriptor, *inherited])
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _last_words(process: "subprocess.Popen[bytes] | ForkedProcess") -> str:
    """Return the last line that an ended spare wrote to standard error."""
    lines = _read_nowait(process.stderr)[-_MAX_ERROR_BYTES:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _end(spare: Spare) -> None:
    """Kill a spare with all of its session, unless it has ended, and close its pipes."""
    if spare.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(spare.process.pid, signal.SIGKILL)
    for pipe in (spare.process.stdout, spare.process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it; the launcher reports what is left
        spare.process.wait(timeout=_EXIT_TIMEOUT_S)


PRELOADED_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "ringweave.comm.backend",
    "ringweave.comm.engine.engine",
    "ringweave.comm.generation_group",
    "ringweave.comm.group_plan",
    "ringweave.comm.probing.measure",
    "ringweave.comm.transport.shared_memory",
    "ringweave.comm.transport.sockets",
    "ringweave.comm.tuning.selector",
    "ringweave.topology.cluster_file",
)
"""Modules that a training script needs sooner or later; torch loads torch._dynamo with the first optimizer."""
_PREPARED_MODULES = ("ringweave.training", "ringweave.training.elastic.member_process")
"""Modules that a script needs too, if it names ringweave or is no single file."""
_PRELOADED_PACKAGES = {each.partition(".")[0] for each in PRELOADED_MODULES}
_IMPORT_TIME_PREFIXES = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "TORCH_", "PYTORCH_", "CUDA_", "RINGWEAVE_")
"""Beginnings of variables that are read on import."""
_CHANGING_METHODS = {"setdefault", "update", "pop", "popitem", "clear", "__setitem__"}
_LOW_PRIORITY = 5
"""Nice value of a spare that imports: a third of a worker's share of a processor. With the lowest one (19) it would get
next to nothing, and never be ready, where workers compute on all processors."""
_CAP_SYS_NICE = 23
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_RETRIES, _AUTOGROUP_RETRY_S = 25, 0.02
_CLONE_FS = 0x200
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""Beginnings of files that a process has open once a device's driver is loaded; after a fork it could not be used."""


def main(descriptor: int, nice: int, command_words: list[str]) -> object:
    """Wait for a slot as a spare, then run the script there; the caller has to keep the returned namespace alive."""
    wait_for_slot(socket.socket(fileno=descriptor), nice, command_words)
    return entry.main(command_words)


def wait_for_slot(channel: socket.socket, nice: int, command_words: list[str]) -> None:
    """Import what the script needs, report that, and take the environment and the node of a slot that comes.

    Returns in the worker: in this process, or in each process that a fork server forks. The process ends here if the
    launcher has no more use for it.
    """
    launcher_pid, raise_priority = os.getppid(), _lower_priority(nice)
    started_s = time.monotonic()
    gc.disable()  # collections find 8 MB of garbage in what is imported, and take a fifth of the time
    _preload(command_words)
    raise_priority()
    report = {"import_s": round(time.monotonic() - started_s, 3), "can_fork": _can_fork()}
    gc.freeze()  # a collection would write to all objects, and so copy all pages that workers share
    gc.enable()
    found: tuple[dict[str, Any], list[int]] | None = None
    with contextlib.suppress(OSError):  # the launcher is gone
        channel.send(json.dumps(report).encode())
        while (found := _receive_slot(channel)) and found[0]["is_forked"]:
            if _fork_worker(channel, launcher_pid, found[1]):
                break
    if not found:
        os._exit(0)
    channel.close()
    slot, descriptors = found
    os.environ.clear()
    os.environ.update(slot["environ"])
    for each in descriptors:
        os.environ[slot["credentials"]] = f"fd:{each}"
        os.set_inheritable(each, True)
    try:
        _enter_node(slot["namespaces"], slot["control_group"])
    except OSError:  # as in a container that lacks the privilege
        os.execvp(slot["command"][0], slot["command"])


def _receive_slot(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a slot and the descriptors that come with it; None once the launcher has no more use for this process."""
    is_wanted, descriptors, *_ = socket.recv_fds(channel, 1, 4)
    if not is_wanted:
        return None
    with os.fdopen(descriptors[0], "rb") as file:
        return json.load(file), descriptors[1:]


def _can_fork() -> bool:
    """Return whether workers can be forked from this process: it has one thread, and no device's driver is loaded.

    Libraries such as OpenBLAS end their threads before a fork, and torch knows in a forked process whether CUDA was
    asked for anything before; so a process is forked to find out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of the threads that are counted below
        child = os.fork()
    if not child:
        torch = sys.modules.get("torch")
        os._exit(1 if torch is not None and torch.cuda._is_in_bad_fork() else 0)
    _, status = os.waitpid(child, 0)
    return status == 0 and len(list(Path("/proc/self/task").iterdir())) == 1 and not _has_device_open()


def _has_device_open() -> bool:
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(each.readlink()).startswith(_DEVICE_FILES):
                return True
    return False


def _fork_worker(channel: socket.socket, launcher_pid: int, descriptors: list[int]) -> bool:
    """Fork a worker as a child of the launcher; return whether this process is that worker.

    A process in between ends at once, so that the kernel makes the launcher the worker's parent. The first two of the
    descriptors become the worker's output, and are then left out.
    """
    reads, writes = os.pipe()
    try:
        between = os.fork()
    except OSError:
        between = -1
    if between:
        os.close(writes)
        if between > 0:
            os.waitpid(between, 0)
        with os.fdopen(reads, "rb") as file:
            channel.send(json.dumps({"pid": int(file.read() or b"0")}).encode())
        for each in descriptors:
            os.close(each)
        return False
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(_POLL_S / 10)
    os.close(reads)
    _become_child(launcher_pid, descriptors[:2])
    del descriptors[:2]
    os.write(writes, b"%d" % os.getpid())
    os.close(writes)
    return True


def _become_child(launcher_pid: int, outputs: list[int]) -> None:
    """Do in a forked worker what `subprocess` and `bootstrap` do in another one."""
    os.setsid()
    bootstrap.tie_life_to(launcher_pid)
    for each, number in zip(outputs, (1, 2), strict=True):
        os.dup2(each, number)
        os.close(each)
    sys.excepthook = _print_exception
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # Python reseeds its own generator after a fork


def _print_exception(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print an exception as the interpreter does, without the frames that come before the script's."""
    before = (__file__, entry.__file__, runpy.run_module.__code__.co_filename)
    while trace is not None and trace.tb_frame.f_code.co_filename in before:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _preload(command_words: list[str]) -> None:
    """Import `PRELOADED_MODULES` and what the script imports first; errors are left for the script to meet.

    A script that sets variables which are read on import has to import everything itself.
    """
    is_module = command_words[0] == "-m"
    target = command_words[1] if is_module else command_words[0]
    entry.set_search_path(target, is_module=is_module)
    source = _source_of(target, is_module=is_module)
    imports, is_harmless = script_imports(source)
    if not is_harmless or _imports_little(source):
        return
    wanted = (*PRELOADED_MODULES, *(_PREPARED_MODULES if not source or b"ringweave" in source else ()))
    for module, name in (*((each, "") for each in wanted), *imports):
        package = module.partition(".")[0]
        with contextlib.suppress(BaseException):
            if package in _PRELOADED_PACKAGES or _is_installed(package):
                _import(module, name)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sys.exit("an import of the script initializes CUDA, before the device of the worker is known")


def _import(module: str, name: str) -> None:
    found = importlib.import_module(module)
    if name and name != "*" and not hasattr(found, name):
        importlib.import_module(f"{module}.{name}")


def _source_of(target: str, *, is_module: bool) -> bytes:
    """Return the source of the script; empty if it is not a single source file, or cannot be read."""
    try:
        if is_module:
            found = None if "." in target else importlib.util.find_spec(target)
            target = (found.origin or "") if found else ""
        return b"" if target.endswith((".pyc", ".pyz")) else Path(target).read_bytes()
    except (OSError, ImportError, ValueError):
        return b""


def script_imports(source: bytes) -> tuple[list[tuple[str, str]], bool]:
    """Return the first imports of a script, and whether it makes no difference that they come before its first line.

    Imports are (module, name), with an empty name for a whole module: those up to the first statement that changes the
    environment. It makes a difference if that statement names a variable that is read on import.
    """
    found: list[tuple[str, str]] = []
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return found, True
    for statement in body:
        if isinstance(statement, ast.Import):
            found += [(alias.name, "") for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            found += [(statement.module or "", alias.name) for alias in statement.names if not statement.level]
        elif _changes_environment(statement):
            texts = [each.value for each in ast.walk(statement) if isinstance(each, ast.Constant)]
            return found, not any(isinstance(each, str) and each.startswith(_IMPORT_TIME_PREFIXES) for each in texts)
    return found, True


def _changes_environment(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    for each in ast.walk(statement):
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store | ast.Del) and _is_environ(each.value):
            return True
        if isinstance(each, ast.AugAssign) and _is_environ(each.target):
            return True
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            is_change = each.func.attr in _CHANGING_METHODS and _is_environ(each.func.value)
            if is_change or each.func.attr in ("putenv", "unsetenv"):
                return True
    return False


def _is_environ(node: ast.expr) -> bool:
    return "environ" in (getattr(node, "attr", None), getattr(node, "id", None))


def gains_from_fork_server(program: "WorkerProgram", environ: Mapping[str, str]) -> bool:
    """Return whether workers are to be forked from one process that has done their imports.

    They are unless the user's environment says otherwise, or the source of the program shows that it imports modules of
    Python's own alone, or that it sets variables which are read on import.

    Raises:
        UsageError: RINGWEAVE_START_METHOD is neither `fork` nor `spawn`.
    """
    if not environment.forks_workers(environ) or program.is_command:
        return False
    source = _source_of(program.target, is_module=program.is_module)
    return script_imports(source)[1] and not _imports_little(source)


def _imports_little(source: bytes) -> bool:
    """Return whether a script, anywhere in it, imports modules of Python's own alone."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return True
    modules = [alias.name for each in nodes if isinstance(each, ast.Import) for alias in each.names]
    modules += [each.module or "." for each in nodes if isinstance(each, ast.ImportFrom)]
    return bool(source) and all(each.partition(".")[0] in sys.stdlib_module_names for each in modules)


def _is_installed(package: str) -> bool:
    """Return whether a package is Python's own or installed: the user's own modules may do anything on import."""
    if package in sys.stdlib_module_names:
        return True
    found = importlib.util.find_spec(package)
    if found is None:
        return False
    places = [found.origin] if found.origin else list(found.submodule_search_locations or ())
    folders = [each for each in sys.path[1:] if Path(each).name in ("site-packages", "dist-packages")]
    folders += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return bool(places) and all(any(Path(each).is_relative_to(folder) for folder in folders) for each in places)


def _lower_priority(lowest: int) -> Callable[[], None]:
    """Give this process a low priority, as far as it can be raised again; return the function that raises it.

    Where the kernel shares processors among sessions, only a session's own priority counts, which anybody may raise
    again up to the usual one. A process may do so with its own only with a privilege.
    """
    before: list[str] = []
    if not lowest:
        return lambda: None
    with contextlib.suppress(OSError):
        before += _AUTOGROUP.read_text(encoding="ascii").split()[-1:]
        _AUTOGROUP.write_text(str(lowest), encoding="ascii")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    can_raise = _can_raise_priority(nice)
    if can_raise:
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, lowest))

    def raise_priority() -> None:
        if can_raise:  # of all threads: libraries have started some, and each has its own
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
        for text in before:
            _write_autogroup(text)

    return raise_priority


def _can_raise_priority(nice: int) -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    is_privileged = bool(int(capabilities, 16) >> _CAP_SYS_NICE & 1)
    return is_privileged or limit == resource.RLIM_INFINITY or limit >= 20 - nice


def _write_autogroup(text: str) -> None:
    """Write the session's priority; without privileges the kernel takes one each 0.1 s, of all users together."""
    for _ in range(_AUTOGROUP_RETRIES):
        try:
            _AUTOGROUP.write_text(text, encoding="ascii")
        except BlockingIOError:
            time.sleep(_AUTOGROUP_RETRY_S)
        except OSError:
            return
        else:
            return


def _enter_node(namespaces: list[str], control_group: str) -> None:
    """Enter a node of a lab: its namespaces with this thread, and the CPU quota of the device with all of them."""
    if control_group:
        Path(control_group, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    if not namespaces:
        return
    folder, library = Path.cwd(), ctypes.CDLL(None, use_errno=True)
    files = [os.open(each, os.O_RDONLY | os.O_CLOEXEC) for each in namespaces]
    if library.unshare(_CLONE_FS) != 0 or any(library.setns(each, 0) != 0 for each in files):
        number = ctypes.get_errno()
        raise OSError(number, f"a spare cannot enter its node: {os.strerror(number)}")
    for each in files:
        os.close(each)
    os.chdir(folder)


if __name__ == "__main__":
    kept = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
