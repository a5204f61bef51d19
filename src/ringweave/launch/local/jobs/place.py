"""What there is of one job on this machine, looked at and changed. Whatever is done here may be done again."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil

from ringweave.errors import LaunchError
from ringweave.jobs.life import actions
from ringweave.jobs.life.actions import Action
from ringweave.jobs.life.observing import Cause, Group, Observed, Phase
from ringweave.launch.groups import config as configs
from ringweave.launch.groups import posts
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.posts import Opening, Orders, Report
from ringweave.launch.local.jobs import bells, locks
from ringweave.launch.local.jobs.folders import GroupFolder, JobFolder, replace_text

LEAVE_S = 20.0
"""An agent that has not left so long after it was told to is killed; its workers die with it."""


class LocalPlace:
    """One job's folder, and the processes that belong to it."""

    def __init__(
        self,
        folder: JobFolder,
        config: Config,
        *,
        agent: Sequence[str],
        environ: Mapping[str, str],
        reached: Callable[[str], None] = lambda boundary: None,
    ) -> None:
        """Looks at nothing yet.

        Args:
            folder: Of the job.
            config: What its groups have to know.
            agent: Command line of an agent; the job's folder, node and attempt are added.
            environ: Of the agents, and what workers inherit.
            reached: Called inside of actions of several steps, between them; a test dies there.
        """
        self._folder, self._config, self._agent, self._environ = folder, config, tuple(agent), dict(environ)
        self._reached = reached
        self._children: list[int] = []

    def observe(self) -> Observed:
        """What there is now. What is wholly gone is swept away on the way."""
        self._children = locks.reap(self._children)
        groups = [found for group in self._folder.groups() if (found := self._look(group)) is not None]
        gate = self._gate()
        config = self._folder.config.exists()
        return Observed(config=config, gate=gate.round if gate and config else 0, groups=tuple(groups))

    def do(self, action: Action) -> None:
        """Do it; the registry's part (the record, forgetting) is the caller's.

        Raises:
            LaunchError: A process could not be started.
        """
        match action:
            case actions.CreateConfig():
                self._folder.gate.unlink(missing_ok=True)
                replace_text(self._folder.config, configs.dumps(self._config))
            case actions.CreateGroup():
                self._create(action)
            case actions.Regather(node=node, attempt=attempt, round=round_):
                self._order(self._folder.group(node, attempt), Orders(round=round_))
            case actions.OpenGate(round=round_):
                self._open(round_)
            case actions.StopGroup(node=node, attempt=attempt):
                self._dismiss(self._folder.group(node, attempt), "the job ends")
            case actions.DeleteGroup(node=node, attempt=attempt):
                group = self._folder.group(node, attempt)
                if group.root.exists():
                    group.removing.touch()
                    self._reached("marked for removal")
                    self._dismiss(group, "it is removed")
            case actions.DeleteConfig():
                self._folder.gate.unlink(missing_ok=True)
                self._reached("gate removed")
                self._folder.config.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all files of the job."""
        shutil.rmtree(self._folder.root, ignore_errors=True)

    def _look(self, folder: GroupFolder) -> Group | None:
        """The group; None if there is none, which is where a crash came between making its folder and its process."""
        is_held = locks.is_held(folder.alive)
        report, orders = folder.read()
        is_told_to_go = folder.removing.exists() or (orders is not None and orders.leave)
        if not is_held and (report is None or folder.removing.exists()):
            shutil.rmtree(folder.root, ignore_errors=True)
            return None
        if report is None:
            round_ = orders.round if orders else 0
            waiting = Report(round=round_, phase=Phase.PENDING, pid=0, text="its agent starts")
            return waiting.group(folder.node, folder.attempt, leaving=is_told_to_go)
        if is_held and is_told_to_go:
            self._hurry(folder, report)
        found = report.group(folder.node, folder.attempt, leaving=is_held and is_told_to_go)
        if is_held or not report.phase.is_alive:
            return found
        if is_told_to_go:
            return replace(found, phase=Phase.STOPPED, text="its agent was killed when it was to end")
        return replace(found, phase=Phase.FAILED, cause=Cause.PLACE, text="its agent was killed")

    def _hurry(self, folder: GroupFolder, report: Report) -> None:
        """Kill an agent that does not leave; its workers die with it, and the guard ends what they started."""
        asked_s = max((path.stat().st_mtime for path in (folder.orders, folder.removing) if path.exists()), default=0)
        if time.time() - asked_s < LEAVE_S:
            return
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(report.pid)
            if str(self._folder.root) in process.cmdline():  # a process id may be somebody else's by now
                process.send_signal(signal.SIGKILL)

    def _create(self, action: actions.CreateGroup) -> None:
        folder = self._folder.group(action.node, action.attempt)
        folder.root.mkdir(parents=True, exist_ok=True)
        self._reached("folder made")
        runs = self._folder.runs(self._config.node(action.node).name, action.attempt)
        runs.mkdir(parents=True, exist_ok=True)
        lock = locks.try_lock(folder.alive)
        if lock is None:
            return
        try:
            replace_text(folder.orders, posts.dump_orders(Orders(round=action.round)))
            self._reached("orders written")
            argv = (*self._agent, str(self._folder.root), str(action.node), str(action.attempt))
            self._children.append(locks.spawn(argv, self._environ, lock=lock, log=runs / "agent.log"))
        except OSError as error:
            name = self._config.node(action.node).name
            raise LaunchError(f"agent of node {name} could not be started: {error}. [{self._agent[0]}]") from error
        finally:
            os.close(lock)

    def _open(self, round_: int) -> None:
        first = self._config.nodes[0].index
        for folder in self._folder.groups():
            report, _ = folder.read()
            if folder.node == first and report and report.round == round_ and report.meeting:
                opening = Opening(round=round_, meeting=report.meeting)
                replace_text(self._folder.gate, posts.dump_opening(opening))
        self._reached("gate opened")
        for folder in self._folder.groups():
            bells.ring(folder.bell)

    def _dismiss(self, folder: GroupFolder, why: str) -> None:
        _, orders = folder.read()
        if orders is not None:
            self._order(folder, Orders(round=orders.round, leave=True, why=why))

    def _order(self, folder: GroupFolder, orders: Orders) -> None:
        if not folder.root.exists():
            return
        _, before = folder.read()
        if before is None or not before.leave or orders.leave:
            replace_text(folder.orders, posts.dump_orders(orders))
        bells.ring(folder.bell)

    def _gate(self) -> Opening | None:
        try:
            return posts.parse_opening(self._folder.gate.read_bytes())
        except FileNotFoundError:
            return None
