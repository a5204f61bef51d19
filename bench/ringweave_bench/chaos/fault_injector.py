"""Fault injector: finds a job's processes, signals them, cuts links, shifts clocks, fills the disk, and reverts."""

import abc
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ringweave.lab import Lab, lab_state, tools
from ringweave.telemetry import EventTail
from ringweave_bench.chaos import clock_shift, fault_script, kill_requests
from ringweave_bench.chaos.fault_script import Fault
from ringweave_bench.chaos.job_history import LeaderTracker

_COORDINATOR_MODULE = "ringweave.membership.main"
_SERVER_MODULE = "ringweave.param_server.main"
_SERVICE_MODULES = {
    fault_script.COORDINATOR: _COORDINATOR_MODULE,
    fault_script.STANDBY: _COORDINATOR_MODULE,
    fault_script.SERVER: _SERVER_MODULE,
    fault_script.SERVER_STANDBY: _SERVER_MODULE,
}
_STANDBYS = (fault_script.STANDBY, fault_script.SERVER_STANDBY)


class ProcessTable(abc.ABC):
    """Finds processes of a job."""

    @abc.abstractmethod
    def worker_pid(self, rank: int) -> int | None:
        """Return the process id of a rank; None if it has no process now."""

    @abc.abstractmethod
    def service_pid(self, name: str) -> int | None:
        """Return the process id of one of `faults.SERVICES`; None if the job has none now."""


class LabProcessTable(ProcessTable):
    """Finds processes of a job in a lab, from its events and the lab."""

    def __init__(self, place: Lab, events: Path) -> None:
        self._lab, self._tail, self._leaders = place, EventTail(events), LeaderTracker()
        self._workers: dict[int, int] = {}
        self._deciding_pid: int | None = None
        """Process of the active coordinator; looked up once after each takeover."""

    def worker_pid(self, rank: int) -> int | None:
        """Return the process of a rank, from the newest event of its start."""
        self._read_events()
        return self._workers.get(rank)

    def service_pid(self, name: str) -> int | None:
        """Return the service's process with the index of the active one, or with the other index.

        None after the active coordinator is gone, until another one reports its takeover: a process started in its
        place is a standby.
        """
        self._read_events()
        module = _SERVICE_MODULES[name]
        index = self._leaders.coordinator if module == _COORDINATOR_MODULE else self._leaders.server
        if index is None:
            return None
        first = self._pid_of(module, index)
        if module == _COORDINATOR_MODULE:
            self._deciding_pid = self._deciding_pid or first
            if first is None or first != self._deciding_pid:
                return None
        return self._pid_of(module, 1 - index) if name in _STANDBYS else first

    def _pid_of(self, module: str, index: int) -> int | None:
        pids = {pid for found in self._lab.processes().values() for pid in found}
        return next(
            (pid for pid in sorted(pids) if is_service_process(lab_state.command_line(pid), module, index)), None
        )

    def _read_events(self) -> None:
        for event in self._tail.read_new():
            if event["kind"] == "worker_watched":
                self._workers[event["rank"]] = event["pid"]
            elif event["kind"] in ("run_started", "generation_begun"):
                self._deciding_pid = None
            self._leaders.observe(event)


def is_service_process(command_line: str, module: str, index: int) -> bool:
    """True if this process runs the module with that index."""
    words = command_line.split()
    return module in words and "--index" in words and words[words.index("--index") + 1 :][:1] == [str(index)]


def is_job_process(command_line: str) -> bool:
    """True for a worker or a service of a job under chaos; no other process gets a signal."""
    words = command_line.split()
    return "watched.py" in command_line or any(module in words for module in _SERVICE_MODULES.values())


DISK_BYTES = 512 * 2**20
_BALLAST = "ballast"
_FILL_BLOCK = bytes(1 << 16)


class FaultInjector(abc.ABC):
    """Injects one fault, and lifts it."""

    @abc.abstractmethod
    def inject(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        """Inject a fault now.

        Returns:
            Text with the target, and a function that lifts the fault; None if the target is absent now, such as a
            worker that is being started.
        """


class OverlappingFaults:
    """Active faults by kind and target: lifting one leaves the effects of the others."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], dict[int, Fault]] = {}
        self._numbers = itertools.count()

    def is_active(self, kind: str, target: str) -> bool:
        """True if there is at least one."""
        return (kind, target) in self._under_way

    def add_fault(
        self, kind: str, target: str, fault: Fault, act: Callable[[Sequence[Fault]], None]
    ) -> Callable[[], None]:
        """Add an active fault.

        Args:
            kind: Kind of the fault.
            target: Target as it is at this moment: a process, not its rank.
            fault: The fault.
            act: Applies all active faults together, oldest first; with none, restores the normal state.

        Returns:
            A function that lifts this fault.
        """
        number, under_way = next(self._numbers), self._under_way.setdefault((kind, target), {})
        under_way[number] = fault
        act(list(under_way.values()))

        def lift() -> None:
            del under_way[number]
            if not under_way:
                del self._under_way[kind, target]
            act(list(under_way.values()))

        return lift


class LabFaultInjector(FaultInjector):
    """Injects faults into a lab."""

    def __init__(self, lab: Lab, disk: Path, events: Path, process_table: ProcessTable) -> None:
        """`disk` is used by this job only; kill requests to workers lie beside the events."""
        self._lab, self._disk, self._events, self._process_table = lab, disk, events, process_table
        self._kill_requests: dict[Fault, int] = {}
        self._overlaps = OverlappingFaults()
        self._usual_rates: dict[str, float] = {}
        """Link -> its rate without the active faults."""

    def inject(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        if fault.moment:
            return self._kill_at_moment(fault)
        if fault.kind in (fault_script.KILL, fault_script.PAUSE):
            return self._signal_process(fault)
        target = fault.target
        if fault.kind == fault_script.SLOW and not self._overlaps.is_active(fault_script.SLOW, target):
            self._usual_rates[target] = self._lab.rate(target)
        words, act = {
            fault_script.CUT: (f"node {target}", lambda left: self._cut(target, left)),
            fault_script.SLOW: (f"link {target}", lambda left: self._slow(target, left)),
            fault_script.CLOCK: (f"clock of node {target}", lambda left: self._shift(target, left)),
            fault_script.FILL: (str(self._disk), self._fill),
        }[fault.kind]
        return words, self._overlaps.add_fault(fault.kind, target, fault, act)

    def _cut(self, node: str, left: Sequence[Fault]) -> None:
        """Combine cuts: one inbound and one outbound cut together cut both directions."""
        ways = {each.direction for each in left}
        if ways:
            self._lab.cut(node, ways.pop() if len(ways) == 1 else "both")
        else:
            self._lab.reconnect(node)

    def _slow(self, link: str, left: Sequence[Fault]) -> None:
        self._lab.set_rate(link, left[-1].rate_bytes_per_s if left else self._usual_rates[link])

    def _shift(self, node: str, left: Sequence[Fault]) -> None:
        clock_shift.shift_clock(self._lab, node, left[-1].shift_s if left else 0.0)

    def _fill(self, left: Sequence[Fault]) -> None:
        if left:
            fill_disk(self._disk)
        else:
            (self._disk / _BALLAST).unlink(missing_ok=True)

    def _signal_process(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        process_table, target = self._process_table, fault.target
        pid = process_table.worker_pid(int(target)) if fault.hits_worker else process_table.service_pid(target)
        if pid is None or not _is_job_pid(pid):
            return None
        how = signal.SIGKILL if fault.kind == fault_script.KILL else signal.SIGSTOP
        handle = _send_signal(pid, how)
        if handle is None:
            return None
        if fault.kind == fault_script.KILL:
            return f"process {pid}", lambda: os.close(handle)
        lift = self._overlaps.add_fault(
            fault_script.PAUSE, str(pid), fault, lambda left: None if left else _send_continue(handle)
        )
        return f"process {pid}", lambda: _lift_and_close(lift, handle)

    def _kill_at_moment(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        """Let the worker kill itself; the fault has happened when the process is gone and has confirmed it.

        A process that is gone without confirmation died of something else: the fault then waits for the next process of
        the rank. It also waits while another fault's request to the worker is pending.
        """
        request, pid = kill_requests.kill_request_path(self._events, int(fault.target)), self._kill_requests.get(fault)
        if pid is not None:
            if _is_job_pid(pid):
                return None
            del self._kill_requests[fault]
            reached = kill_requests.confirmed_moment(request, pid)
            if reached:
                return f"process {pid} during {reached}", lambda: None
        pid = self._process_table.worker_pid(int(fault.target))
        if pid is not None and pid not in self._kill_requests.values() and _is_job_pid(pid):
            kill_requests.write_kill_request(request, pid, fault.moment)
            self._kill_requests[fault] = pid
        return None


def fill_disk(folder: Path) -> None:
    """Write until the disk is full."""
    with (folder / _BALLAST).open("ab", buffering=0) as file:
        size = len(_FILL_BLOCK)
        while size:
            try:
                file.write(_FILL_BLOCK[:size])
            except OSError:
                size //= 2


@contextmanager
def mount_small_disk(folder: Path) -> Iterator[Path]:
    """Mount a small disk in memory for a job, so that filling it affects nothing else. Mount it before the lab is made.

    Raises:
        LabError: It cannot be mounted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={DISK_BYTES},mode=0755"
    tools.run_tool(["mount", "-t", "tmpfs", "-o", options, "ringweave-chaos", str(folder)])
    try:
        yield folder
    finally:
        tools.run_tool(["umount", "--lazy", str(folder)], may_fail=True)


def _is_job_pid(pid: int) -> bool:
    return is_job_process(lab_state.command_line(pid))


def _send_signal(pid: int, signal_number: signal.Signals) -> int | None:
    """Signal a process and return its handle; None if it is gone, or if its id was reused."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if _is_job_pid(pid):
            signal.pidfd_send_signal(handle, signal_number)
            return handle
    except ProcessLookupError:
        pass
    os.close(handle)
    return None


def _send_continue(handle: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGCONT)


def _lift_and_close(lift: Callable[[], None], handle: int) -> None:
    try:
        lift()
    finally:
        os.close(handle)
