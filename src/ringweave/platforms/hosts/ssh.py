"""Connection to a host by the system's OpenSSH client, so that its configuration, keys, agent and known hosts count.

One ssh process runs `remote_main` on the host for the length of the connection; on the machine of the command a shell
does, without ssh. A request is one line of JSON, with the
number of bytes that follow it; so is an answer. Nothing else is opened on either side.
"""

import json
import os
import re
import selectors
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ringweave.errors import JobError, LaunchError, RingweaveError, UnknownJobError, shorten
from ringweave.files import file_io
from ringweave.platforms.hosts.host_list import THIS_MACHINE, HostSpec
from ringweave.platforms.hosts.run_entry import HostsOptions

T = TypeVar("T")

HELLO = b"ringweave-remote "
"""Beginning of the first line of `remote_main`; a login script may print lines before it."""
REMOTE_MODULE = "ringweave.platforms.hosts.remote_main"
CONNECT_TIMEOUT_S = 60.0
"""Until the greeting: a host that trains, or has its Python on a network folder, is slow to import it."""
CALL_TIMEOUT_S = 30.0
MEASURE_TIMEOUT_S = 600.0
"""Time for a measurement of all links, which takes half a minute on 16 hosts."""
NO_PYTHON_EXIT = 97
"""Exit code of the remote shell where no interpreter with ringweave was found."""
_NUM_CLOCK_READINGS = 3
MAX_LINE_BYTES = 64 * 2**20
MAX_PAYLOAD_BYTES = 2**30
_SSH_OPTIONS = (
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)


class HostError(LaunchError):
    """A host cannot be used; the text names the host and a mend."""


class NoRingweaveError(HostError):
    """A host lets us in, but has no Python with ringweave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SshFailure:
    pattern: str
    got: str
    do: str


_SSH_FAILURES = (
    _SshFailure(
        pattern=r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        got="another host key than the known one",
        do="If the host was installed anew, forget its old key (ssh-keygen -R {host}), then ssh {destination} once; "
        "else somebody may listen in",
    ),
    _SshFailure(
        pattern=r"Host key verification failed|No \S+ host key is known",
        got="a host key that is not known",
        do="Connect once by hand and confirm the key: ssh {destination}",
    ),
    _SshFailure(
        pattern=r"Could not resolve hostname|Name or service not known",
        got="a name that cannot be resolved",
        do="Correct the name in --hosts, or give it an address in ~/.ssh/config",
    ),
    _SshFailure(
        pattern=r"Permission denied|Too many authentication failures",
        got="no key that it accepts",
        do="Put your key there (ssh-copy-id {destination}), or load it into your agent (ssh-add)",
    ),
    _SshFailure(
        pattern=r"Connection refused",
        got="no ssh server at its port",
        do="Start sshd there, or set Port in ~/.ssh/config",
    ),
    _SshFailure(
        pattern=r"timed out|No route to host|Network is unreachable|Connection (to \S+ )?(closed|reset)|Broken pipe",
        got="no answer",
        do="Check that it is up and reachable: ssh {destination} true",
    ),
)


def python_command(python: str | None, *, installed: str = "") -> str:
    """Return the command for the remote shell that runs `remote_main` with the right interpreter.

    Args:
        python: Interpreter that the user names; None: the one at the same path as here, else the one of the `ringweave`
            on the PATH.
        installed: Path below the home folder of the interpreter that `--install` made; empty without.
    """
    run = f'exec "$p" -P -m {REMOTE_MODULE}'
    has_ringweave = '[ -x "$p" ] && "$p" -P -c "import ringweave.platforms.hosts" 2>/dev/null'
    if python is not None:
        tried = [f"p={shlex.quote(python)}; {has_ringweave} && {run}"]
    else:
        tried = [f'p="$HOME"/{shlex.quote(installed)}; {has_ringweave} && {run}'] if installed else []
        tried += [f"p={shlex.quote(sys.executable)}; {has_ringweave} && {run}"]
        tried += [
            'r=$(command -v ringweave 2>/dev/null || ls "$HOME"/.local/bin/ringweave 2>/dev/null); '
            f'p=$(sed -n "1s/^#!//p" "$r" 2>/dev/null); {has_ringweave} && {run}'
        ]
    return f"sh -c {shlex.quote('; '.join([*tried, f'exit {NO_PYTHON_EXIT}']))}"


class ClockReading(NamedTuple):
    """Clock of a host, by the fastest of a few readings."""

    round_trip_s: float
    offset_s: float
    """Its clock minus this machine's, exact to half of the round trip."""


def read_clock(read_theirs: Callable[[], float], read_own: Callable[[], float] = time.time) -> ClockReading:
    """Return the difference of two clocks and the round trip between them."""
    readings = []
    for _ in range(_NUM_CLOCK_READINGS):
        before_s, theirs_s, after_s = read_own(), read_theirs(), read_own()
        readings.append(ClockReading(after_s - before_s, theirs_s - (before_s + after_s) / 2))
    return min(readings)


class FairLock:
    """Lock that threads get in the order in which they asked.

    A thread that releases a `threading.Lock` and asks again at once mostly gets it again, before any that waits.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._is_held:
                self._is_held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C: nobody would release it for the others
            with self._guard:
                has_turn = turn not in self._waiting
                if not has_turn:
                    self._waiting.remove(turn)
            if has_turn:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False


class SshConnection:
    """Connection to one host; calls are answered one after the other. Threads may share it."""

    def __init__(self, host: HostSpec, command: str, *, python: str | None = None) -> None:
        """Start ssh and wait for the host's greeting.

        `command`: command for its shell, as `python_command` returns it.

        Raises:
            HostError: The host cannot be reached, does not let us in, or has no ringweave.
        """
        self.host, self._python = host, python
        self._lock = FairLock()
        self._errors: deque[str] = deque(maxlen=40)
        self._buffer = b""
        self._process = open_ssh(host, command)
        threading.Thread(target=self._read_errors, name=f"ssh {host.node}", daemon=True).start()
        try:
            self.hello = self._read_hello()
        except HostError:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._process.poll() is None

    def call(
        self, verb: str, payload: bytes = b"", *, timeout_s: float = CALL_TIMEOUT_S, **fields: object
    ) -> dict[str, Any]:
        """Call the remote program and return its answer.

        Raises:
            HostError: The connection is gone, or the host refuses.
        """
        return self.call_for_bytes(verb, payload, timeout_s=timeout_s, **fields)[0]

    def call_for_bytes(
        self, verb: str, payload: bytes = b"", *, timeout_s: float = CALL_TIMEOUT_S, **fields: object
    ) -> tuple[dict[str, Any], bytes]:
        """Call the remote program and return its answer with the bytes that follow it.

        Raises:
            HostError: The connection is gone, or the host refuses.
        """
        request = json.dumps({"verb": verb, "size": len(payload), **fields}).encode() + b"\n"
        with self._lock:
            deadline_s = time.monotonic() + timeout_s
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(request + payload)
                self._process.stdin.flush()
            except OSError as error:
                raise self._connection_error() from error
            answer = self._parse_object(self._read_line(deadline_s))
            size = answer.pop("size", 0)
            if type(size) is not int or not 0 <= size <= MAX_PAYLOAD_BYTES:
                raise HostError(f"host {self.host.node}: an answer of {size!r:.40} bytes, expected a size.")
            content = self._read_bytes(size, deadline_s)
        if "error" in answer:
            raise self._remote_error(str(answer["error"]), str(answer.get("kind", "")))
        return answer, content

    def read_clock(self) -> ClockReading:
        """Read the clock of the host.

        Raises:
            HostError: The connection is gone.
        """
        return read_clock(lambda: float(self.call("clock")["time"]))

    def close(self) -> None:
        """End the connection; the remote program ends with it, and nothing else."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_hello(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while not (line := self._read_line(deadline_s)).startswith(HELLO):
            pass
        return self._parse_object(line.removeprefix(HELLO))

    def _parse_object(self, line: bytes) -> dict[str, Any]:
        """Parse a line of the program at the other end."""
        try:
            found = file_io.parse_json(line, MAX_LINE_BYTES)
        except ValueError as error:
            raise HostError(f"host {self.host.node}: an answer that cannot be read: {error}, expected JSON.") from error
        if not isinstance(found, dict):
            raise HostError(f"host {self.host.node}: {shorten(line)} as an answer, expected a JSON object.")
        return found

    def _read_line(self, deadline_s: float) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise HostError(f"host {self.host.node}: an answer without an end, expected a line of JSON.")
            self._read_more(deadline_s)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _read_bytes(self, count: int, deadline_s: float) -> bytes:
        pieces, got = [self._buffer], len(self._buffer)
        self._buffer = b""
        while got < count:
            self._read_more(deadline_s)
            pieces.append(self._buffer)
            got += len(self._buffer)
            self._buffer = b""
        whole = b"".join(pieces)
        self._buffer = whole[count:]
        return whole[:count]

    def _read_more(self, deadline_s: float) -> None:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                self._process.kill()
                self._process.wait()  # else the next caller could still get the late answer
                raise self._error("no answer in time", f"Check that it is up: ssh {self.host.destination} true")
        received = os.read(self._process.stdout.fileno(), 1 << 20)
        if not received:
            raise self._connection_error()
        self._buffer += received

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._errors.append(line.decode(errors="replace").rstrip())

    def _connection_error(self) -> HostError:
        """Return the error of a connection that has ended, by what ssh printed and its exit code."""
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = -1
        if code == NO_PYTHON_EXIT:
            got = f"no ringweave at {self._python}" if self._python else "no Python with ringweave"
            do = "Install ringweave there, name its interpreter with --python PATH, or add --install"
            return NoRingweaveError(str(self._error(got, do)))
        time.sleep(0.05)  # the last lines of ssh
        return ssh_error(self.host, list(self._errors), code)

    def _remote_error(self, text: str, kind: str) -> RingweaveError:
        """Return the error that the remote program has met."""
        if kind == "UnknownJobError":
            return UnknownJobError(text)
        return JobError(text) if kind == "JobError" else HostError(f"host {self.host.node}: {text}")

    def _error(self, got: str, do: str) -> HostError:
        what, expected = f"host {self.host.node}", "an answer by ssh"
        return HostError(what, got=got, expected=expected, do=do, where="--hosts")


class HostConnections:
    """Connections to all hosts of a run, opened at the same time."""

    def __init__(self, hosts: Sequence[HostSpec], options: HostsOptions, *, connects: bool = True) -> None:
        """Connect, unless `connects` is false.

        Raises:
            HostError: Some hosts cannot be used; the text has one line for each.
        """
        self.hosts = tuple(hosts)
        self._options = options
        self.open = self._connect_all() if connects else []

    def _connect_all(self) -> list[SshConnection]:
        results = run_parallel(self._try_connect, self.hosts)
        opened = [each for each in results if isinstance(each, SshConnection)]
        errors = [each for each in results if isinstance(each, HostError)]
        if errors:
            for connection in opened:
                connection.close()
            raise HostError("\n".join(str(error) for error in errors))
        return opened

    def connect(self, index: int) -> SshConnection:
        """Connect to one host.

        Raises:
            HostError: It cannot be used.
        """
        command = python_command(self._options.python, installed=self._options.installed)
        return SshConnection(self.hosts[index], command, python=self._options.python)

    def _try_connect(self, host: HostSpec) -> SshConnection | HostError:
        try:
            return self.connect(self.hosts.index(host))
        except HostError as error:
            return error

    def close(self) -> None:
        run_parallel(SshConnection.close, self.open)

    def __enter__(self) -> "HostConnections":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_parallel(function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """Return the results of one call for each item, all at the same time; the first error is raised."""
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(arguments[0])))) as pool:
        return list(pool.map(function, *arguments))


def end_run_at_once(connections: Sequence[SshConnection], run_id: str) -> None:
    """End what runs of a run on these hosts, and remove its files there."""
    for connection in connections:
        try:
            connection.call("abort", run_id=run_id)
        except LaunchError:
            continue


def open_ssh(host: HostSpec, command: str) -> "subprocess.Popen[bytes]":
    """Start an ssh process that runs the command on the host; on this machine a shell, in the home folder as there.

    Raises:
        HostError: There is no ssh client here.
    """
    argv = ["ssh", *_SSH_OPTIONS, "--", host.destination, command]
    folder = None
    if host.destination == THIS_MACHINE:
        argv, folder = ["sh", "-c", command], Path.home()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        return subprocess.Popen(argv, **pipes, cwd=folder, start_new_session=True)
    except OSError as error:
        do, got = "Install OpenSSH's client, such as Debian's openssh-client", error.strerror or str(error)
        raise HostError("ssh", got=got, expected="a program on the PATH", do=do) from error


def ssh_error(host: HostSpec, lines: Sequence[str], exit_code: int) -> HostError:
    """Return the error for what ssh printed before it ended."""
    text = "\n".join(lines)
    last = next((line for line in reversed(lines) if line.strip()), f"ssh ended with exit code {exit_code}")
    words: Mapping[str, str] = {"host": host.destination.rpartition("@")[2], "destination": host.destination}
    for failure in _SSH_FAILURES:
        if re.search(failure.pattern, text):
            do, got = failure.do.format(**words), failure.got
            return HostError(f"host {host.node}", got=got, expected="an answer by ssh", do=do, where=f"--hosts: {last}")
    do = f"Try it by hand: ssh {host.destination} true"
    return HostError(f"host {host.node}", got=last, expected="an answer by ssh", do=do, where="--hosts")
