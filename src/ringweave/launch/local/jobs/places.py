"""What places share whose groups are folders: this machine's, and Slurm's on a shared file system.

A job is a folder (`folders.py`); orders, reports and the gate are files in it. What differs by place is how an agent is
started, how it is known that nothing of it can run any more, and whether anybody can be woken.
"""

import abc
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ringweave.errors import explain
from ringweave.jobs.life import actions
from ringweave.jobs.life.actions import Action
from ringweave.jobs.life.observing import Cause, Group, Observed, Phase
from ringweave.launch.groups import config as configs
from ringweave.launch.groups import posts
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.posts import Orders, Report, opening_of
from ringweave.launch.local.jobs import locks
from ringweave.launch.local.jobs.folders import GroupFolder, JobFolder, replace_text

Reached = Callable[[str], None]


class FolderPlace(abc.ABC):
    """One job's folder, and what runs for it. Whatever is done here may be done again."""

    def __init__(self, folder: JobFolder, config: Config, environ: Mapping[str, str], reached: Reached) -> None:
        """Looks at nothing yet.

        Args:
            folder: Of the job.
            config: What its groups have to know.
            environ: Of what leads a group, and what workers inherit.
            reached: Called inside of actions of several steps, between them; a test dies there.
        """
        self._folder, self._config = folder, config
        self._environ, self._reached = dict(environ), reached
        self._children: list[int] = []

    @abc.abstractmethod
    def _look(self, folder: GroupFolder, *, sweeps: bool) -> Group | None:
        """The group; None if there is none, or not any more. If `sweeps`, it is helped to go as `observe` says."""

    @abc.abstractmethod
    def _lock(self, folder: GroupFolder) -> Path:
        """Locked by what leads the group, as long as it runs."""

    @abc.abstractmethod
    def _command(self, folder: GroupFolder) -> Sequence[str]:
        """The command line of what leads the group; whoever asks holds its lock, and starts it."""

    @abc.abstractmethod
    def _ring(self, folder: GroupFolder) -> None:
        """Wake the group's agent, if that can be."""

    def observe(self, *, sweeps: bool = True) -> Observed:
        """What there is now.

        Args:
            sweeps: What is wholly gone is swept away on the way, and who does not leave is killed. Only for whoever
                leads the job: a group that somebody else is just making looks like one that is gone.
        """
        self._children = locks.reap(self._children)
        found = [self._look(group, sweeps=sweeps) for group in self._folder.groups()]
        groups = [group for group in found if group is not None]
        config = self._folder.config.exists()
        return Observed(config=config, gate=self._gate_round() if config else 0, groups=tuple(groups))

    def do(self, action: Action) -> None:
        """Do it; the registry's part (the record, forgetting) is the caller's.

        Raises:
            LaunchError: There is nothing that a process could be started in.
            OSError: Files cannot be written.
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
                shutil.rmtree(self._folder.secrets, ignore_errors=True)  # what was never used of an elastic job's
                self._folder.config.unlink(missing_ok=True)

    def _log(self, folder: GroupFolder) -> Path:
        """What leads the group says; there as soon as it was started."""
        return self._folder.runs(self._config.node(folder.node).name, folder.attempt) / "agent.log"

    def _create(self, action: actions.CreateGroup) -> None:
        folder = self._folder.group(action.node, action.attempt)
        folder.root.mkdir(parents=True, exist_ok=True)
        self._reached("folder made")
        self._log(folder).parent.mkdir(parents=True, exist_ok=True)
        lock = locks.try_lock(self._lock(folder))
        if lock is None:
            return
        try:
            argv = self._command(folder)
            replace_text(folder.orders, posts.dump_orders(Orders(round=action.round)))
            self._reached("orders written")
            self._spawn(folder, argv, lock, action.round)
        finally:
            os.close(lock)

    def _spawn(self, folder: GroupFolder, argv: Sequence[str], lock: int, round_: int) -> None:
        """Start what leads the group; where that cannot be, its attempt has failed, and its node's retries end it."""
        try:
            self._children.append(locks.spawn(argv, self._environ, lock=lock, log=self._log(folder)))
        except OSError as error:
            what = f"agent of node {self._config.node(folder.node).name}"
            do = "See what this machine lacks: the interpreter, memory, processes"
            got, expected = error.strerror or str(error), "a program that starts"
            text = explain(what, got=got, expected=expected, do=do, where=argv[0])
            failed = Report(round=round_, phase=Phase.FAILED, pid=0, cause=Cause.PLACE, text=text)
            replace_text(folder.report, posts.dump_report(failed))

    def _open(self, round_: int) -> None:
        """Let all start where the first node offered to meet."""
        offers = {}
        for folder in self._folder.groups():
            report, _ = folder.read()
            if report and report.round == round_ and report.meeting:
                offers[self._config.node(folder.node).name] = report
        opening = opening_of(self._config, round_, offers)
        if opening is not None:
            replace_text(self._folder.gate, posts.dump_opening(opening))
        self._reached("gate opened")
        for folder in self._folder.groups():
            self._ring(folder)

    def _dismiss(self, folder: GroupFolder, why: str) -> None:
        _, orders = folder.read()
        if orders is not None:
            self._order(folder, Orders(round=orders.round, leave=True, why=why))

    def _order(self, folder: GroupFolder, orders: Orders) -> None:
        """Replace the orders; who was told to leave stays so."""
        if not folder.root.exists():
            return
        _, before = folder.read()
        if before is None or not before.leave or orders.leave:
            replace_text(folder.orders, posts.dump_orders(orders))
        self._ring(folder)

    def _gate_round(self) -> int:
        """The round of the last opening; 0 if there was none."""
        try:
            return posts.parse_opening(self._folder.gate.read_bytes()).round
        except FileNotFoundError:
            return 0
