"""Labs of an ordinary user: a user namespace in which the user is root and the same code makes labs; CPU quotas there.

A user namespace lives as long as a process is in it. The *pause process* is that process: `ringweave lab up` starts it,
the other commands enter its namespaces, and it ends when the last lab is down and no command is inside. Whatever is
left in its namespaces ends with it: the kernel removes namespaces, mounts and links of its own accord.

The pause process listens on a socket with an abstract name, which vanishes with it, so nothing on disk can be out of
date. A connection stands for a command that is inside; the program that the command becomes inherits it.

Source: user_namespaces(7), unix(7) (abstract names, SO_PEERCRED).
"""

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringweave.errors import LabError
from ringweave.lab import bring_up, lab_state, tools
from ringweave.lab.cpu_quotas import QUOTA_PERIOD_US
from ringweave.lab.lab_state import NamespaceId

PERIOD_S = QUOTA_PERIOD_US * 1e-6
MIN_SLEEP_S = 0.002
SCAN_S = 0.1
"""Time between two looks for new processes and quotas."""
FULL_SCAN_S = 1.0
"""Time between two looks at all processes: an old one may have entered a node."""
YOUNG_S = 3.0
"""Age up to which each look includes a process: it starts outside of its node."""
_PROCESS_CLOCK = 2
"""Kind of a process's clock: CPUCLOCK_SCHED."""
_PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True, slots=True)
class DeviceBudget:
    """Processor time that the processes of a device may still use in this period."""

    quota_us: int
    balance_us: float
    """Negative after more was used than allowed."""
    used_s: dict[int, float] = field(default_factory=dict)
    """Process id -> reading of its clock."""
    stopped: set[int] = field(default_factory=set)
    """Processes that were stopped, and not continued since."""

    def refill(self, num_periods: int) -> None:
        """Begin a period: the quota is added, and unused time is not kept."""
        self.balance_us = min(self.balance_us + num_periods * self.quota_us, float(self.quota_us))

    def charge(self, clocks: Mapping[int, float]) -> None:
        """Take off the processor time since the last call; a process counts from its first reading on.

        Args:
            clocks: Process id -> seconds on its clock.
        """
        spent_s = sum(now - self.used_s.get(pid, now) for pid, now in clocks.items())
        self.used_s = dict(clocks)
        self.stopped &= clocks.keys()
        self.balance_us -= spent_s * 1e6

    @property
    def is_spent(self) -> bool:
        return self.balance_us <= 0


class Throttle:
    """Duty cycle: limits the CPU time of devices by SIGSTOP and SIGCONT, where the user has no control group.

    It counts as the CPU quotas of control groups do: the processes of a device may use its quota of processor time in
    each period of 40 ms; then they stop until the next period. What they used beyond it, because the clocks are read a
    few milliseconds late, is taken off later periods, so the average is the quota. Results name it, as it is coarser
    than a quota of the kernel: a shell with job control reports stopped processes, and processes that are stopped on
    purpose go on. A device's processes are those in its UTS namespace, which children inherit; only they are signalled.

    Source: kernel, scheduler/sched-bwc.rst; clock_getcpuclockid(3) (the clock of another process).
    """

    def __init__(
        self,
        find_processes: Callable[[], Mapping[NamespaceId, list[int]]],
        read_quotas: Callable[[], Mapping[NamespaceId, int]],
        send: Callable[[int, signal.Signals], object],
        read_clock: Callable[[int], float | None],
    ) -> None:
        """Create it; nothing is stopped yet.

        Args:
            find_processes: Returns UTS namespace -> ids of the processes in it.
            read_quotas: Returns UTS namespace of a device -> its quota in microseconds.
            send: Sends a signal to a process, if it is still there.
            read_clock: Returns the processor time of a process in seconds; None if it is gone.
        """
        self._find_processes, self._read_quotas = find_processes, read_quotas
        self._send, self._read_clock = send, read_clock
        self._budgets: dict[NamespaceId, DeviceBudget] = {}
        self._members: dict[NamespaceId, list[int]] = {}

    @property
    def has_devices(self) -> bool:
        return bool(self._budgets)

    def scan(self) -> None:
        """Look for devices, quotas and processes; a device that is gone lets its processes go on."""
        quotas = self._read_quotas()
        for each in self._budgets.keys() - quotas.keys():
            self._resume(self._budgets.pop(each))
        found = self._find_processes() if quotas else {}
        self._members = {each: found.get(each, []) for each in quotas}
        for each, quota_us in quotas.items():
            if each in self._budgets:
                self._budgets[each].quota_us = quota_us
            else:
                self._budgets[each] = DeviceBudget(quota_us=quota_us, balance_us=quota_us)
                for pid in self._members[each]:  # one that was here before may have stopped them
                    self._send(pid, signal.SIGCONT)

    def step(self, num_periods: int) -> float:
        """Charge all devices, stop those that have spent their quota, and begin periods; return the least balance.

        Returns:
            Seconds of processor time that the device nearest to its limit has left.
        """
        for each, budget in self._budgets.items():
            clocks = {pid: clock for pid in self._members[each] if (clock := self._read_clock(pid)) is not None}
            budget.charge(clocks)
            if num_periods:
                budget.refill(num_periods)
            if budget.is_spent:
                for pid in clocks.keys() - budget.stopped:
                    self._send(pid, signal.SIGSTOP)
                budget.stopped = set(clocks)
            elif budget.stopped:
                self._resume(budget)
        left = [budget.balance_us for budget in self._budgets.values() if not budget.is_spent]
        return min(left, default=QUOTA_PERIOD_US) * 1e-6

    def release(self) -> None:
        """Let all processes go on."""
        for budget in self._budgets.values():
            self._resume(budget)

    def _resume(self, budget: DeviceBudget) -> None:
        for pid in budget.stopped:
            self._send(pid, signal.SIGCONT)
        budget.stopped = set()


class ProcessScan:
    """Finds processes of this user by their UTS namespaces, mostly without a look at old ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._first_seen_s: dict[int, float] = {}
        self._namespaces: dict[int, NamespaceId] = {}
        self._full_scan_s = 0.0

    def __call__(self) -> dict[NamespaceId, list[int]]:
        """Return UTS namespace -> ids of the processes in it."""
        now_s = self._clock()
        is_full = now_s >= self._full_scan_s
        if is_full:
            self._full_scan_s = now_s + FULL_SCAN_S
        pids = set(lab_state.all_pids())
        self._first_seen_s = {pid: self._first_seen_s.get(pid, now_s) for pid in pids}
        for pid in self._namespaces.keys() - pids:
            del self._namespaces[pid]
        for pid, first_s in self._first_seen_s.items():
            if is_full or now_s - first_s < YOUNG_S:
                found = lab_state.namespace_id(Path(f"/proc/{pid}/ns/uts"))
                if found is not None:
                    self._namespaces[pid] = found
        by_namespace: dict[NamespaceId, list[int]] = {}
        for pid, found in self._namespaces.items():
            by_namespace.setdefault(found, []).append(pid)
        return by_namespace


def read_lab_quotas() -> dict[NamespaceId, int]:
    """Return UTS namespace of each device of a complete lab with a duty cycle -> its quota in microseconds."""
    return dict(_lab_quotas())


def _lab_quotas() -> Iterator[tuple[NamespaceId, int]]:
    for name in lab_state.lab_names():
        record = lab_state.read_record(name)
        if record is None or not record.is_complete:
            continue
        for path in lab_state.duty_cycle_folder(name).glob("*"):
            found = lab_state.namespace_id(lab_state.namespace_folder(name) / f"{path.name}.uts")
            with contextlib.suppress(OSError, ValueError):
                if found is not None:
                    yield found, int(path.read_text(encoding="ascii"))


def read_process_clock(pid: int) -> float | None:
    """Return the processor time of another process in seconds; None if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    except OSError:
        return None


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class ThrottleProcess:
    """Child process that limits the devices of all labs, while there is one with a duty cycle.

    It lets everything go on when it ends or its parent does. When it was killed, another one takes its place, which
    begins with that.
    """

    def __init__(self) -> None:
        self._pid: int | None = None

    def check(self) -> None:
        """Start it if it is needed and does not run; called regularly."""
        if self._pid is not None and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = None
        if self._pid is None and read_lab_quotas():
            parent = os.getpid()
            self._pid = os.fork()
            if self._pid == 0:
                _run_child(parent)

    def stop(self) -> None:
        """End it, and wait for that."""
        if self._pid is not None:
            send_signal(self._pid, signal.SIGTERM)
            os.waitpid(self._pid, 0)
            self._pid = None


def _run_child(parent: int) -> None:
    """Limit devices until SIGTERM, which comes with the parent's death too, or until there is none; never return."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    throttle = Throttle(ProcessScan(), read_lab_quotas, send_signal, read_process_clock)
    try:
        os.closerange(3, 1024)  # else the socket would outlive the parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        throttle.scan()
        if os.getppid() == parent:
            throttle_devices(throttle)
    except SystemExit:
        pass
    finally:
        throttle.release()
        os._exit(0)


def throttle_devices(
    throttle: Throttle, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Limit devices until there is none."""
    num_cpus = len(os.sched_getaffinity(0))
    period_s = scan_s = clock()
    while throttle.has_devices:
        now_s = clock()
        if now_s >= scan_s:
            throttle.scan()
            scan_s = now_s + SCAN_S
        num_periods = max(0, int((now_s - period_s) / PERIOD_S))
        period_s += num_periods * PERIOD_S
        least_s = throttle.step(num_periods) / num_cpus  # a device with a thread on each CPU spends it so fast
        sleep(max(MIN_SLEEP_S, min(least_s, period_s + PERIOD_S - clock())))


_GREETING = b"1"
_PEER_CREDENTIALS = struct.Struct("3i")
_START_TIMEOUT_S = 30.0
_RETRY_S = 0.02
_CHECK_S = 0.25
"""Time between two looks at the labs: a new one may need its duty cycle."""
_IDLE_S = 10.0
"""Time in which the first command has to come."""

_RUN_FOLDER_SCRIPT = """set -e
mount -t tmpfs -o mode=0755,size=64m rw-run /tmp
for entry in /run/* /run/.[!.]*; do
    name=${entry##*/}
    case $name in mount | netns | ringweave*) continue ;; esac
    if [ -L "$entry" ]; then cp -P "$entry" /tmp/
    elif [ -d "$entry" ]; then mkdir "/tmp/$name" && mount --rbind "$entry" "/tmp/$name" || :
    elif [ -e "$entry" ]; then : > "/tmp/$name" && mount --bind "$entry" "/tmp/$name" || :
    fi
done
mkdir /tmp/netns /tmp/ringweave
mount -n --move /tmp /run
cd /
exec "$@"
"""
"""Shell script that gives the new mount namespace a /run in which the user may write. All of the machine's own entries
are in it, but for labs, named network namespaces and the table of mounts. It is made over /tmp, which is always there.
"""


def enter(argv: Sequence[str], *, starts: bool) -> None:
    """Replace this process by a program in the user's namespaces; return at once if this process is root, or inside.

    Args:
        argv: The program, a path, and its arguments. It keeps the current directory, environment and streams.
        starts: Start the pause process if there is none; otherwise return then.

    Raises:
        LabError: The kernel does not let this user have a user namespace, or the pause process does not start.
    """
    if os.geteuid() == 0:
        return
    connection = _connect()
    if connection is None:
        if not starts:
            return
        tools.raise_lab_problems(tools.user_namespace_problems())
        connection = _start_pause_process()
    pid, _ = _peer(connection)
    os.set_inheritable(connection.detach(), True)
    namespaces = [f"--{option}=/proc/{pid}/ns/{kind}" for option, kind in (("user", "user"), ("mount", "mnt"))]
    nsenter = tools.find_program("nsenter") or "nsenter"
    shell = ["/bin/sh", "-c", tools.RUN_IN_FOLDER_SCRIPT, "rw-enter", str(Path.cwd())]
    sys.stdout.flush()
    os.execv(nsenter, [nsenter, "--preserve-credentials", *namespaces, "--", *shell, *argv])


def _address(uid: int) -> str:
    return f"\0ringweave-lab-{uid}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user of the process that listens."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return pid, uid


def _connect() -> socket.socket | None:
    """Return a connection to the user's pause process; None if there is none, or if it is about to end."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(os.getuid()))
        pid, uid = _peer(connection)
        if uid != os.getuid():
            what, expected = "pause process of labs", f"one of user {os.getuid()}"
            do = "Ask that user to end it, or put sudo in front"
            raise LabError(what, got=f"process {pid} of user {uid}", expected=expected, do=do)
        connection.settimeout(_START_TIMEOUT_S)
        if connection.recv(1) == _GREETING:
            connection.settimeout(None)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _start_pause_process() -> socket.socket:
    """Start the pause process, and return a connection to it."""
    unshare = [tools.find_program("unshare") or "unshare", "--user", "--map-root-user", "--mount"]
    shell = ["--propagation", "slave", "sh", "-c", _RUN_FOLDER_SCRIPT, "rw-pause"]
    command = [*unshare, *shell, sys.executable, "-P", "-m", __name__, str(os.getuid())]
    nothing = subprocess.DEVNULL
    with tools.run_on_first_cpu():
        process = subprocess.Popen(
            command,
            stdin=nothing,
            stdout=nothing,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=tools.tool_environ(),
        )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while (connection := _connect()) is None:
        has_failed = process.poll() not in (None, 0)  # 0: another one was faster
        if has_failed or time.monotonic() > deadline:
            process.kill()
            said = (process.communicate()[1] or b"").decode(errors="replace")
            do = "See what the kernel says (dmesg), or put sudo in front"
            got = " ".join(said.split()) or f"nothing in {_START_TIMEOUT_S:g} s"
            raise LabError("pause process of labs", got=got, expected="one that starts", do=do)
        time.sleep(_RETRY_S)
    return connection


def main(uid: int) -> None:
    """Run the pause process of this user to its end; return at once if there is another one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(_address(uid))
        except OSError:
            return
        listener.listen(64)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.sched_setaffinity(0, range(1024))  # the kernel leaves out those that are not there
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        throttle = ThrottleProcess()
        try:
            serve(listener, has_labs=_has_labs, on_check=throttle.check)
        finally:
            for name in lab_state.lab_names():  # those whose command was killed
                with contextlib.suppress(LabError):
                    bring_up.remove_lab(name)
            throttle.stop()


def _has_labs() -> bool:
    """Return whether a lab is complete; one whose command was killed is not."""
    return any(bring_up.is_record_up(lab_state.read_record(name)) for name in lab_state.lab_names())


def serve(listener: socket.socket, *, has_labs: Callable[[], bool], on_check: Callable[[], object]) -> None:
    """Count the commands that are inside; return when none is, and there is no lab.

    `on_check`: called several times a second.
    """
    until_s, num_inside = time.monotonic() + _IDLE_S, 0
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = selector.select(_CHECK_S)
            for key, _ in ready:
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.send(_GREETING)
                    selector.register(connection, selectors.EVENT_READ)
                    num_inside, until_s = num_inside + 1, 0.0
                elif not _has_more(key.fileobj):
                    selector.unregister(key.fileobj)
                    num_inside -= 1
            on_check()
            if not ready and not num_inside and time.monotonic() > until_s and not has_labs():
                return


def _has_more(connection: object) -> bool:
    """Return whether a connection is still open; close it if not."""
    assert isinstance(connection, socket.socket)
    with contextlib.suppress(OSError):
        if connection.recv(1):
            return True
    connection.close()
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
