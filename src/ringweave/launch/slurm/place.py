"""What there is of one job in its allocation, looked at and changed."""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave.errors import LaunchError
from ringweave.jobs.life.observing import Cause, Group, Phase
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.posts import Orders, Report
from ringweave.launch.local.jobs import locks
from ringweave.launch.local.jobs.folders import GroupFolder, JobFolder, replace_text
from ringweave.launch.local.jobs.places import FolderPlace, Reached
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
    reached: Reached = lambda boundary: None
    """Called inside of actions of several steps, between them; a test dies there."""
    wall: Callable[[], float] = time.time
    """Seconds since 1970, on the clock of whoever decides."""


class SlurmPlace(FolderPlace):
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
        super().__init__(folder, config, means.environ, means.reached)
        self._grant, self._means = grant, means
        self._parts = {part.node: index for index, part in enumerate(components)}
        self._patience, self._clock = means.patience, clock
        self._since: dict[tuple[int, int, str], float] = {}
        self._asked: tuple[float, dict[str, str], set[str]] = (float("-inf"), {}, set())

    def _look(self, folder: GroupFolder, *, sweeps: bool) -> Group | None:
        """The group; None if there is none, or not any more."""
        # In this order: who has left since the first question has said so before.
        runs = locks.is_held(self._lock(folder)) or locks.is_held(folder.alive)
        report, orders = folder.read()
        is_told = folder.removing.exists() or (orders is not None and orders.leave)
        has_ended = report is not None and not report.phase.is_alive
        was_started = report is not None or self._log(folder).exists()
        if runs or (was_started and not has_ended and not self._is_gone(folder)):
            if is_told and sweeps:
                self._hurry(folder)
            return self._living(folder, report, orders, leaving=is_told or not runs)
        if folder.removing.exists() or not (was_started and folder.orders.exists()):
            # It is removed, or a crash came before its step was started: whoever starts one holds its lock until then.
            if sweeps:
                shutil.rmtree(folder.root, ignore_errors=True)
            return None
        return self._ended(folder, report, orders)

    def _living(self, folder: GroupFolder, report: Report | None, orders: Orders | None, *, leaving: bool) -> Group:
        round_ = orders.round if orders else 0
        if report is None:
            report = Report(round=round_, phase=Phase.PENDING, pid=0, text="its step starts")
        return replace(self._seen(folder, report, leaving=leaving), called=round_)

    def _seen(self, folder: GroupFolder, report: Report, *, leaving: bool = False) -> Group:
        """What the group says of itself; when it ended, on our clock."""
        found = report.group(folder.node, folder.attempt, leaving=leaving)
        return found if found.ended_s is None else replace(found, ended_s=self._means.wall() - self._age_s(folder))

    def _age_s(self, folder: GroupFolder) -> float:
        """How long ago its last report came. By the clock of the file server: the machines' own may be hours apart."""
        return max(0.0, _touched_s(folder.root / "looked") - folder.report.stat().st_mtime)

    def _ended(self, folder: GroupFolder, report: Report | None, orders: Orders | None) -> Group:
        """Of a group of which nothing can run any more."""
        if report is None:
            report = Report(round=orders.round if orders else 0, phase=Phase.PENDING, pid=0)
        found = self._seen(folder, report)
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
        lost = folder.root / "lost"
        if not lost.exists():
            lost.touch()
        return _touched_s(folder.root / "looked") - lost.stat().st_mtime >= self._patience.fence_s

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

    def _lock(self, folder: GroupFolder) -> Path:
        """Held by srun."""
        return folder.root / "step"

    def _command(self, folder: GroupFolder) -> Sequence[str]:
        if self._grant is None:
            raise LaunchError(f"job {self._config.job}: no allocation, expected one that runs. Ask Slurm for one.")
        replace_text(_grant_file(folder), self._grant.key)
        self._reached("grant written")
        agent = self._means.agent(self._folder, folder.node, folder.attempt, self._grant.key)
        argv = requesting.step(self._parts[folder.node], len(self._parts), _step_name(folder), agent)
        return [shutil.which(argv[0], path=self._environ.get("PATH")) or argv[0], *argv[1:]]

    def _ring(self, folder: GroupFolder) -> None:
        """Nothing: other machines cannot be rung, and look often."""

    def _is_mine(self, folder: GroupFolder) -> bool:
        """It was made in the allocation that runs now."""
        try:
            key = _grant_file(folder).read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        return self._grant is not None and key == self._grant.key

    def _host(self, node: int) -> str:
        return self._grant.hosts[self._parts[node]] if self._grant is not None else ""

    def _last_words(self, folder: GroupFolder) -> str:
        """What srun said last."""
        with contextlib.suppress(OSError):
            lines = self._log(folder).read_text(encoding="utf-8", errors="replace").splitlines()
            said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
            return f": {said[-1]}" if said else ""
        return ""


def _step_name(folder: GroupFolder) -> str:
    return f"rw-{folder.node}-{folder.attempt}"


def _touched_s(path: Path) -> float:
    """The time of day of the file server."""
    path.touch()
    return path.stat().st_mtime


def _grant_file(folder: GroupFolder) -> Path:
    """Key of the allocation that the group was made in."""
    return folder.root / "grant"
