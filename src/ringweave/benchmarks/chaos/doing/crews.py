"""Which processes a job consists of just now: its workers, and those who decide and lead."""

import abc
from pathlib import Path

from ringweave.benchmarks.chaos import faults
from ringweave.lab import Lab, processes
from ringweave.telemetry import Event, Tail

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
        self._lab, self._tail = place, Tail(events)
        self._workers: dict[int, int] = {}
        self._deciding: dict[str, int] = {}

    def worker_pid(self, rank: int) -> int | None:
        """The process that runs a rank, as the last of its kind said."""
        self._read()
        return self._workers.get(rank)

    def service_pid(self, name: str) -> int | None:
        """The process of that kind with the index of the one that decides or leads, or with the other index."""
        self._read()
        index = self._deciding.get(_MODULES[name])
        if index is None:
            return None
        wanted = 1 - index if name in _STANDBYS else index
        pids = {pid for found in self._lab.processes().values() for pid in found}
        return next(
            (pid for pid in sorted(pids) if is_service(processes.command_line(pid), _MODULES[name], wanted)), None
        )

    def _read(self) -> None:
        for event in self._tail.new():
            self._note(event)

    def _note(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "worker_watched":
            self._workers[event["rank"]] = event["pid"]
        elif kind == "run_started":
            self._deciding.clear()
        elif kind == "epoch_begun":  # coordinator 0 has odd terms
            self._deciding[_COORDINATOR] = (event["term"] + 1) % 2
        elif kind == "server_started":  # the first one leads until another says that it does
            self._deciding.setdefault(_SERVER, 0)
        elif kind == "params_led":
            self._deciding[_SERVER] = event["server"]


def is_service(command_line: str, module: str, index: int) -> bool:
    """It is the process of a module that was started with that index."""
    words = command_line.split()
    return module in words and "--index" in words and words[words.index("--index") + 1 :][:1] == [str(index)]


def is_of_job(command_line: str) -> bool:
    """It is a worker or a service of a job under chaos: nothing else gets a signal."""
    words = command_line.split()
    return "watched.py" in command_line or any(module in words for module in _MODULES.values())
