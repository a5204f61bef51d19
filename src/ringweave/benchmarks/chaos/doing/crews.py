"""Which processes a job consists of just now: its workers, and those who decide and lead."""

import abc
from pathlib import Path

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.deciders import Deciders
from ringweave.lab import Lab, processes
from ringweave.telemetry import Tail

_COORDINATOR = "ringweave.membership.serving.main"
_SERVER = "ringweave.params.serving.main"
_MODULES = {
    faults.COORDINATOR: _COORDINATOR,
    faults.STANDBY: _COORDINATOR,
    faults.SERVER: _SERVER,
    faults.SERVER_STANDBY: _SERVER,
}
_STANDBYS = (faults.STANDBY, faults.SERVER_STANDBY)


class Crew(abc.ABC):
    """The processes of a job."""

    @abc.abstractmethod
    def worker_pid(self, rank: int) -> int | None:
        """That of a rank; None if it has none now."""

    @abc.abstractmethod
    def service_pid(self, name: str) -> int | None:
        """That of one of `faults.SERVICES`; None if the job has none now."""


class LabCrew(Crew):
    """Those of a job in a lab, as its events and the lab tell."""

    def __init__(self, place: Lab, events: Path) -> None:
        self._lab, self._tail, self._deciders = place, Tail(events), Deciders()
        self._workers: dict[int, int] = {}
        self._deciding: int | None = None
        """The process of the coordinator that decides, when it was looked for since it last said so."""

    def worker_pid(self, rank: int) -> int | None:
        """The process that runs a rank, as the last of its kind said."""
        self._read()
        return self._workers.get(rank)

    def service_pid(self, name: str) -> int | None:
        """The process of that kind with the index of the one that decides or leads, or with the other index.

        There is none for a moment after the coordinator that decided is gone, until one says that it has taken over:
        what is started in its place is a standby.
        """
        self._read()
        module = _MODULES[name]
        index = self._deciders.coordinator if module == _COORDINATOR else self._deciders.server
        if index is None:
            return None
        first = self._pid_of(module, index)
        if module == _COORDINATOR:
            self._deciding = self._deciding or first
            if first is None or first != self._deciding:
                return None
        return self._pid_of(module, 1 - index) if name in _STANDBYS else first

    def _pid_of(self, module: str, index: int) -> int | None:
        pids = {pid for found in self._lab.processes().values() for pid in found}
        return next((pid for pid in sorted(pids) if is_service(processes.command_line(pid), module, index)), None)

    def _read(self) -> None:
        for event in self._tail.new():
            if event["kind"] == "worker_watched":
                self._workers[event["rank"]] = event["pid"]
            elif event["kind"] in ("run_started", "epoch_begun"):
                self._deciding = None
            self._deciders.note(event)


def is_service(command_line: str, module: str, index: int) -> bool:
    """It is the process of a module that was started with that index."""
    words = command_line.split()
    return module in words and "--index" in words and words[words.index("--index") + 1 :][:1] == [str(index)]


def is_of_job(command_line: str) -> bool:
    """It is a worker or a service of a job under chaos: nothing else gets a signal."""
    words = command_line.split()
    return "watched.py" in command_line or any(module in words for module in _MODULES.values())
