"""Spares: started processes that have imported what the script needs, and wait to become a worker of an elastic run.

`SparePool` keeps them, in the launcher. A spare runs this file as a script, `spares.py DESCRIPTOR SCRIPT ARGUMENT..`:
on the socket DESCRIPTOR it reports as JSON that it is ready, and gets a descriptor of its slot as JSON.
"""

import ast
import contextlib
import ctypes
import importlib
import importlib.util
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringweave import environment
from ringweave.launcher import entry
from ringweave.launcher.restarts import RestartPolicy

if TYPE_CHECKING:
    from ringweave.launcher.node_context import NodeEntry  # brings the lab, of which a spare has no need
    from ringweave.launcher.workers import WorkerSpec

_SLOT_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GLOO_SOCKET_IFNAME"),
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


@dataclass(kw_only=True, slots=True)
class Spare:
    """A spare, from its start to its use."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    started_s: float
    ready_s: float = math.inf
    """Time at which it was ready; infinite while it imports."""
    import_s: float = 0.0
    """Seconds of its imports, measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpareRules:
    """Number of spares, and the functions that their launcher calls."""

    num_spares: int
    """Number of spares to keep ready, at most `jobs.request.MAX_SPARES`."""
    node_entry: "Callable[[WorkerSpec], NodeEntry]"
    """Returns the way of a running process into a worker's node."""
    on_ready: Callable[[Spare], object]
    """Gets each spare that has become ready."""
    on_give_up: Callable[[str], object]
    """Gets the reason, in words, when no more spares are started."""


class SparePool:
    """Keeps spares ready: starts them one at a time, and another one for each that is used or dies."""

    def __init__(
        self,
        rules: SpareRules,
        argv: Sequence[str],
        environ: Mapping[str, str],
        start: "Callable[[Sequence[str], Mapping[str, str], Sequence[int]], subprocess.Popen[bytes]]",
        clock: Callable[[], float],
    ) -> None:
        """Create a pool; `refill` starts its spares.

        Args:
            rules: Rules of the spares.
            argv: Command line of a worker: interpreter, `entry`, script, arguments.
            environ: Environment of any worker.
            start: Starts a process with a command line, an environment, and descriptors that it inherits.
            clock: Monotonic seconds.
        """
        python, _, *words = argv
        self._command = lambda descriptor: [python, __file__, str(descriptor), *words]
        self._rules, self._environ, self._start, self._clock = rules, _without_slot(environ), start, clock
        self._spares: list[Spare] = []
        self._policy = RestartPolicy(max_early_deaths=_MAX_EARLY_DEATHS)
        self._due_s, self._is_closed = 0.0, False

    def refill(self) -> None:
        """Note which spares are ready or have died, and start one if one is due; called regularly."""
        for spare in list(self._spares):
            if spare.process.poll() is not None:
                self._bury(spare)
            elif spare.ready_s == math.inf:
                self._read_report(spare)
        is_loading = any(each.ready_s == math.inf for each in self._spares)
        if is_loading or self._is_closed or self._policy.has_given_up or self._clock() < self._due_s:
            return
        if len(self._spares) < self._rules.num_spares:
            self._start_spare()

    def take(
        self, worker: "WorkerSpec", environ: Mapping[str, str], command: Sequence[str], credentials_fd: int | None
    ) -> Spare | None:
        """Make a ready spare this worker; None if no spare is ready, or none fits.

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
            self._spares.remove(spare)
            self._due_s = self._clock() + _REFILL_DELAY_S
            with spare.channel:
                if _send_slot(spare.channel, slot, credentials_fd):
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

    def _start_spare(self) -> None:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            try:
                process = self._start(self._command(other.fileno()), self._environ, [other.fileno()])
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
        self._policy.record_death(lived_s, now_s)
        self._due_s = now_s + 2.0**self._policy.num_early_deaths
        if self._policy.has_given_up:
            self._rules.on_give_up(
                f"no more spares are started: {_MAX_EARLY_DEATHS} of them ended, the last with: {text}"
            )


def _without_slot(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _SLOT_VARIABLES}


def _send_slot(channel: socket.socket, slot: Mapping[str, Any], credentials_fd: int | None) -> bool:
    """Send a slot to a spare that waits, as a descriptor of JSON: no size and no stopped spare makes this block."""
    descriptor = os.memfd_create("ringweave-slot", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(json.dumps({**slot, "credentials": environment.CREDENTIALS}).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        socket.send_fds(channel, [b"\n"], [descriptor, *([] if credentials_fd is None else [credentials_fd])])
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _last_words(process: "subprocess.Popen[bytes]") -> str:
    """Return the last line that an ended spare wrote to standard error."""
    if process.stderr is None:
        return ""
    os.set_blocking(process.stderr.fileno(), False)
    lines = (process.stderr.read() or b"")[-_MAX_ERROR_BYTES:].decode(errors="replace").strip().splitlines()
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
    "ringweave.training",
    "ringweave.training.elastic.member_process",
    "ringweave.comm.backend",
    "ringweave.comm.engine.engine",
    "ringweave.comm.generation_group",
    "ringweave.comm.group_plan",
    "ringweave.comm.transport.shared_memory",
    "ringweave.comm.transport.sockets",
    "ringweave.comm.tuning.selector",
)
"""Modules that a training script needs sooner or later; torch loads torch._dynamo with the first optimizer."""
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


def main(descriptor: int, command_words: list[str]) -> object:
    """Wait for a slot as a spare, then run the script there; the caller has to keep the returned namespace alive."""
    wait_for_slot(socket.socket(fileno=descriptor), command_words)
    return entry.main(command_words)


def wait_for_slot(channel: socket.socket, command_words: list[str]) -> None:
    """Import what the script needs, report that, and take the environment and the node of the slot that comes.

    The process ends here if the launcher has no more use for it.
    """
    raise_priority, descriptors = _lower_priority(), list[int]()
    started_s = time.monotonic()
    _preload(command_words)
    try:
        channel.send(json.dumps({"import_s": round(time.monotonic() - started_s, 3)}).encode())
        is_wanted, descriptors, *_ = socket.recv_fds(channel, 1, 2)
    except OSError:  # the launcher is gone
        is_wanted = b""
    if not is_wanted:
        os._exit(0)
    channel.close()
    raise_priority()
    with os.fdopen(descriptors[0], "rb") as file:
        slot = json.load(file)
    os.environ.clear()
    os.environ.update(slot["environ"])
    for each in descriptors[1:]:
        os.environ[slot["credentials"]] = f"fd:{each}"
        os.set_inheritable(each, True)
    try:
        _enter_node(slot["namespaces"], slot["control_group"])
    except OSError:  # as in a container that lacks the privilege
        os.execvp(slot["command"][0], slot["command"])


def _preload(command_words: list[str]) -> None:
    """Import `PRELOADED_MODULES` and what the script imports first; errors are left for the script to meet.

    A script that sets variables which are read on import has to import everything itself.
    """
    is_module = command_words[0] == "-m"
    target = command_words[1] if is_module else command_words[0]
    entry.set_search_path(target, is_module=is_module)
    imports, is_harmless = script_imports(_source_of(target, is_module=is_module))
    if not is_harmless:
        return
    for module, name in (*((each, "") for each in PRELOADED_MODULES), *imports):
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


def _lower_priority() -> Callable[[], None]:
    """Give this process a low priority, as far as it can be raised again; return the function that raises it.

    Where the kernel shares processors among sessions, only a session's own priority counts, which anybody may raise
    again up to the usual one. A process may do so with its own only with a privilege.
    """
    before: list[str] = []
    with contextlib.suppress(OSError):
        before += _AUTOGROUP.read_text(encoding="ascii").split()[-1:]
        _AUTOGROUP.write_text(str(_LOW_PRIORITY), encoding="ascii")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    can_raise = _can_raise_priority(nice)
    if can_raise:
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, _LOW_PRIORITY))

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
    kept = main(int(sys.argv[1]), sys.argv[2:])
