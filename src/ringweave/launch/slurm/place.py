"""What there is of one job in its allocation, looked at and changed. Whatever is done here may be done again."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave.errors import LaunchError
from ringweave.jobs.life import actions
from ringweave.jobs.life.actions import Action
from ringweave.jobs.life.observing import Cause, Group, Observed, Phase
from ringweave.launch.groups import config as configs
from ringweave.launch.groups import posts
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.posts import Opening, Orders, Report
from ringweave.launch.local.jobs import locks
from ringweave.launch.local.jobs.folders import GroupFolder, JobFolder, replace_text
from ringweave.launch.slurm.asking import requesting
from ringweave.launch.slurm.asking.commands import Slurm
from ringweave.launch.slurm.asking.requesting import Component
from ringweave.launch.slurm.leases import Patience

STOPPED_FROM_OUTSIDE = "its allocation was taken back by Slurm"
_SAID = "srun: error: "
QUERY_S = 2.0
"""Between two questions to Slurm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """An allocation that runs."""

    key: str
    """`12.1`: job of Slurm, and how often it was requeued."""
    job_ids: tuple[int, ...]
    """Of its components."""
    hosts: tuple[str, ...]
    """Machine of each component."""

    @property
    def job_id(self) -> int:
        """By which all components are named."""
        return self.job_ids[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What a place works with."""

    slurm: Slurm
    """Who is asked about steps and machines."""
    agent: Callable[[JobFolder, int, int, str], Sequence[str]]
    """(folder, node, attempt, key) -> command line of an agent."""
    environ: Mapping[str, str]
    """Of the steps."""
    sweeper: Sequence[str]
    """Command line of what removes a job when its TTL is over; the job's folder and id are added."""
    patience: Patience
    """How long things may be silent."""
    reached: Callable[[str], None] = lambda boundary: None
    """Called inside of actions of several steps, between them; a test dies there."""


class SlurmPlace:
    """One job's folder, and the steps that belong to it. Without a grant it can look, and clear away."""

    def __init__(
        self,
        folder: JobFolder,
        config: Config,
        components: Sequence[Component],
        grant: Grant | None,
        means: Means,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Looks at nothing yet.

        Args:
            folder: Of the job.
            config: What its groups have to know.
            components: Of the allocation.
            grant: The allocation; None where there is none now.
            means: What it works with.
            clock: Seconds that never go back.
        """
        self._folder, self._config, self._grant, self._means = folder, config, grant, means
        self._parts = {part.node: index for index, part in enumerate(components)}
        self._patience, self._clock = means.patience, clock
        self._children: list[int] = []
        self._since: dict[tuple[int, int, str], float] = {}
        self._asked: tuple[float, dict[str, str], set[str]] = (float("-inf"), {}, set())

    def observe(self) -> Observed:
        """What there is now. What is wholly gone is swept away on the way."""
        self._children = locks.reap(self._children)
        groups = [found for group in self._folder.groups() if (found := self._look(group)) is not None]
        config = self._folder.config.exists()
        return Observed(config=config, gate=self._gate_round() if config else 0, groups=tuple(groups))

    def do(self, action: Action) -> None:
        """Do it; the registry's part (the record, forgetting) is the caller's.

        Raises:
            LaunchError: A step could not be started.
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
                    self._means.reached("marked for removal")
                    self._dismiss(group, "it is removed")
            case actions.DeleteConfig():
                self._folder.gate.unlink(missing_ok=True)
                self._means.reached("gate removed")
                self._folder.config.unlink(missing_ok=True)

    def _look(self, folder: GroupFolder) -> Group | None:
        """The group; None if there is none, or not any more."""
        # In this order: who has left since the first question has said so before.
        runs = locks.is_held(_step_lock(folder)) or locks.is_held(folder.alive)
        report, orders = folder.read()
        is_told = folder.removing.exists() or (orders is not None and orders.leave)
        has_ended = report is not None and not report.phase.is_alive
        if runs or not (has_ended or self._is_gone(folder)):
            if is_told:
                self._hurry(folder)
            return self._living(folder, report, orders, leaving=is_told or not runs)
        if folder.removing.exists() or not (folder.orders.exists() and (report or self._log(folder).exists())):
            # It is removed, or a crash came before its step was started.
            shutil.rmtree(folder.root, ignore_errors=True)
            return None
        return self._ended(folder, report, orders)

    def _living(self, folder: GroupFolder, report: Report | None, orders: Orders | None, *, leaving: bool) -> Group:
        if report is None:
            round_ = orders.round if orders else 0
            report = Report(round=round_, phase=Phase.PENDING, pid=0, text="its step starts")
        return report.group(folder.node, folder.attempt, leaving=leaving)

    def _ended(self, folder: GroupFolder, report: Report | None, orders: Orders | None) -> Group:
        """Of a group of which nothing can run any more."""
        if report is None:
            report = Report(round=orders.round if orders else 0, phase=Phase.PENDING, pid=0)
        found = report.group(folder.node, folder.attempt)
        if orders is not None and orders.leave:
            return found if not report.phase.is_alive else replace(found, phase=Phase.STOPPED, text=orders.why)
        if report.phase is Phase.STOPPED or (report.phase is Phase.PENDING and not self._is_mine(folder)):
            return self._cut(folder, found)
        if not report.phase.is_alive:
            return found
        text = f"its agent ended without a word{self._last_words(folder)}"
        return replace(found, phase=Phase.FAILED, cause=Cause.PLACE, text=text)

    def _cut(self, folder: GroupFolder, found: Group) -> Group:
        """Of a group that somebody else ended: Slurm with the whole allocation, or a person with scancel."""
        if not self._is_mine(folder):
            return replace(found, phase=Phase.FAILED, cause=Cause.PEER, text=STOPPED_FROM_OUTSIDE)
        if not self._has_passed(folder, "cut", self._patience.cut_s):
            return replace(found, leaving=True)  # if it is the whole allocation, this process ends too
        return replace(found, phase=Phase.FAILED, cause=Cause.PLACE, text=f"its step was cancelled: {found.text}")

    def _is_gone(self, folder: GroupFolder) -> bool:
        """Nothing of a group that never said so can run any more; until then no other may take its place."""
        if not self._is_mine(folder):
            # One that was not past the gate can do no harm: the gate of its round stays shut.
            report, _ = folder.read()
            return report is None or report.phase is not Phase.RUNNING or self._is_fenced(folder)
        if self._is_fenced(folder):
            return True
        lost_s = self._since.setdefault((folder.node, folder.attempt, "lost"), self._clock())
        hosts, steps = self._ask(lost_s)
        host = self._host(folder.node)
        return host in hosts and not hosts[host] and _step_name(folder) not in steps

    def _is_fenced(self, folder: GroupFolder) -> bool:
        """It has been lost for longer than its lease. By the clock of the file server, whoever looks."""
        lost, now = folder.root / "lost", folder.root / "looked"
        if not lost.exists():
            lost.touch()
        now.touch()
        return now.stat().st_mtime - lost.stat().st_mtime >= self._patience.fence_s

    def _hurry(self, folder: GroupFolder) -> None:
        """Have Slurm kill an agent that does not leave; its workers die with it."""
        if self._grant is None or not self._has_passed(folder, "leave", self._patience.leave_s):
            return
        for step in self._means.slurm.steps(self._grant.job_ids):
            if step.name == _step_name(folder):
                self._means.slurm.cancel(step.step_id)

    def _has_passed(self, folder: GroupFolder, what: str, wait_s: float) -> bool:
        since = self._since.setdefault((folder.node, folder.attempt, what), self._clock())
        return self._clock() - since >= wait_s

    def _ask(self, after_s: float) -> tuple[dict[str, str], set[str]]:
        """Machine -> its state where Slurm hears nothing of it, else an empty text; and names of running steps.

        Args:
            after_s: The answer is not older than this; what was asked before a step was lost says nothing of it.
        """
        asked_s, hosts, steps = self._asked
        if self._grant is not None and (asked_s < after_s or self._clock() - asked_s >= QUERY_S):
            steps = {step.name for step in self._means.slurm.steps(self._grant.job_ids)}
            hosts = {
                host.name: "" if host.answers else host.state for host in self._means.slurm.hosts(self._means.environ)
            }
            self._asked = (self._clock(), hosts, steps)
        return hosts, steps

    def _create(self, action: actions.CreateGroup) -> None:
        if self._grant is None:
            raise LaunchError(f"job {self._config.job}: no allocation, expected one that runs. Ask Slurm for one.")
        folder = self._folder.group(action.node, action.attempt)
        folder.root.mkdir(parents=True, exist_ok=True)
        self._means.reached("folder made")
        self._log(folder).parent.mkdir(parents=True, exist_ok=True)
        lock = locks.try_lock(_step_lock(folder))
        if lock is None:
            return
        try:
            replace_text(_grant_file(folder), self._grant.key)
            self._means.reached("grant written")
            replace_text(folder.orders, posts.dump_orders(Orders(round=action.round)))
            self._means.reached("orders written")
            agent = self._means.agent(self._folder, action.node, action.attempt, self._grant.key)
            argv = requesting.step(self._parts[action.node], len(self._parts), _step_name(folder), agent)
            program = shutil.which(argv[0], path=self._means.environ.get("PATH")) or argv[0]
            pid = locks.spawn([program, *argv[1:]], self._means.environ, lock=lock, log=self._log(folder))
            self._children.append(pid)
        except OSError as error:
            name = self._config.node(action.node).name
            raise LaunchError(f"step of node {name} could not be started: {error}. [srun]") from error
        finally:
            os.close(lock)

    def _open(self, round_: int) -> None:
        offers = {}
        for folder in self._folder.groups():
            report, _ = folder.read()
            if report and report.round == round_ and report.meeting:
                offers[self._config.node(folder.node).name] = report.meeting
        first = offers.get(self._config.nodes[0].name)
        if first is not None:
            addresses = {name: meeting.host for name, meeting in offers.items()}
            opening = Opening(round=round_, meeting=first, addresses=addresses)
            replace_text(self._folder.gate, posts.dump_opening(opening))

    def _dismiss(self, folder: GroupFolder, why: str) -> None:
        _, orders = folder.read()
        if orders is not None:
            self._order(folder, Orders(round=orders.round, leave=True, why=why))

    def _order(self, folder: GroupFolder, orders: Orders) -> None:
        _, before = folder.read()
        if before is not None and (orders.leave or not before.leave):
            replace_text(folder.orders, posts.dump_orders(orders))

    def _gate_round(self) -> int:
        try:
            return posts.parse_opening(self._folder.gate.read_bytes()).round
        except FileNotFoundError:
            return 0

    def _is_mine(self, folder: GroupFolder) -> bool:
        """It was made in the allocation that runs now."""
        try:
            key = _grant_file(folder).read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        return self._grant is not None and key == self._grant.key

    def _host(self, node: int) -> str:
        return self._grant.hosts[self._parts[node]] if self._grant is not None else ""

    def _log(self, folder: GroupFolder) -> Path:
        """What srun and the agent say; there as soon as srun was started."""
        return self._folder.runs(self._config.node(folder.node).name, folder.attempt) / "agent.log"

    def _last_words(self, folder: GroupFolder) -> str:
        """What srun said last."""
        with contextlib.suppress(OSError):
            lines = self._log(folder).read_text(encoding="utf-8", errors="replace").splitlines()
            said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
            return f": {said[-1]}" if said else ""
        return ""


def _step_name(folder: GroupFolder) -> str:
    return f"rw-{folder.node}-{folder.attempt}"


def _step_lock(folder: GroupFolder) -> Path:
    """Held by srun."""
    return folder.root / "step"


def _grant_file(folder: GroupFolder) -> Path:
    """Key of the allocation that the group was made in."""
    return folder.root / "grant"
