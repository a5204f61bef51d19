"""What there is of one job on this machine, looked at and changed."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from ringweave.jobs.life.observing import Cause, Group, Phase
from ringweave.launch.causes import find_exception
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.posts import Orders, Report
from ringweave.launch.local.jobs import bells, locks
from ringweave.launch.local.jobs.folders import GroupFolder, JobFolder
from ringweave.launch.local.jobs.places import FolderPlace, Reached

LEAVE_S = 20.0
"""An agent that has not left so long after it was told to is killed; its workers die with it."""


class LocalPlace(FolderPlace):
    """One job's folder, and the processes that belong to it."""

    def __init__(
        self,
        folder: JobFolder,
        config: Config,
        *,
        agent: Sequence[str],
        environ: Mapping[str, str],
        reached: Reached = lambda boundary: None,
    ) -> None:
        """`agent` begins the command line of an agent; the job's folder, node and attempt are added."""
        super().__init__(folder, config, environ, reached)
        self._agent = tuple(agent)

    def remove(self) -> None:
        """Remove all files of the job."""
        shutil.rmtree(self._folder.root, ignore_errors=True)

    def _look(self, folder: GroupFolder, *, sweeps: bool) -> Group | None:
        """The group; None also where a crash came between making its folder and its process."""
        is_held = locks.is_held(folder.alive)
        report, orders = folder.read()
        is_told_to_go = folder.removing.exists() or (orders is not None and orders.leave)
        if not is_held and report is None and not is_told_to_go:
            report = self._silent_end(folder, orders)
        if not is_held and (report is None or folder.removing.exists()):
            if sweeps:
                shutil.rmtree(folder.root, ignore_errors=True)
            return None
        if is_held and is_told_to_go and sweeps:
            self._hurry(folder, report)
        round_ = orders.round if orders else 0
        if report is None:
            waiting = Report(round=round_, phase=Phase.PENDING, pid=0, text="its agent starts")
            return waiting.group(folder.node, folder.attempt, leaving=is_told_to_go)
        found = report.group(folder.node, folder.attempt, called=round_, leaving=is_held and is_told_to_go)
        if is_held or not report.phase.is_alive:
            return found
        if is_told_to_go:
            return replace(found, phase=Phase.STOPPED, text="its agent was killed when it was to end")
        return replace(found, phase=Phase.FAILED, cause=Cause.PLACE, text="its agent was killed")

    def _silent_end(self, folder: GroupFolder, orders: Orders | None) -> Report | None:
        """Of an agent that ended before its first word, and printed why; None where none was started."""
        try:
            lines = self._log(folder).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return None
        if orders is None or not lines:
            return None
        text = f"its agent ended without a word: {find_exception(lines) or lines[-1]}"
        return Report(round=orders.round, phase=Phase.FAILED, pid=0, cause=Cause.PLACE, text=text)

    def _lock(self, folder: GroupFolder) -> Path:
        return folder.alive

    def _command(self, folder: GroupFolder) -> Sequence[str]:
        return (*self._agent, *self._arguments(folder))

    def _arguments(self, folder: GroupFolder) -> list[str]:
        return [str(self._folder.root), str(folder.node), str(folder.attempt)]

    def _ring(self, folder: GroupFolder) -> None:
        bells.ring(folder.bell)

    def _hurry(self, folder: GroupFolder, report: Report | None) -> None:
        """Kill an agent that does not leave; its workers die with it, and the guard ends what they started.

        A guard that stands still as they did is woken: it holds the lock until it has seen to that.
        """
        asked_s = max((path.stat().st_mtime for path in (folder.orders, folder.removing) if path.exists()), default=0)
        if time.time() - asked_s < LEAVE_S:
            return
        for process in self._agents(folder, report):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        for pid in locks.holders(folder.alive):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _agents(self, folder: GroupFolder, report: Report | None) -> Iterator[psutil.Process]:
        """The group's agent; it is looked for among all processes where it has never said its number."""
        for pid in psutil.pids() if report is None else [report.pid]:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                # A process id may be somebody else's by now.
                if process.cmdline()[-3:] == self._arguments(folder):
                    yield process
