"""The controller of one job: runs inside of its allocation, so that nothing has to stay where people log in.

    python -m ringweave.launch.slurm.controller JOB_FOLDER [LEASE_S FENCE_S]

The batch script starts it, and again unless it ends well. All that it knows it reads anew at every look. It gives the
allocation back when nothing of the job wants to run.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ringweave.errors import LaunchError
from ringweave.jobs.life import actions, advancing
from ringweave.jobs.life.actions import Action
from ringweave.jobs.life.observing import Observed
from ringweave.jobs.life.reconciling import reconcile
from ringweave.jobs.life.records import Record
from ringweave.jobs.life.states import JobState
from ringweave.launch.local.jobs import locks
from ringweave.launch.local.jobs.folders import JobFolder
from ringweave.launch.services import farewells
from ringweave.launch.slurm.asking import requesting
from ringweave.launch.slurm.asking.commands import Slurm
from ringweave.launch.slurm.leases import Heart, Patience
from ringweave.launch.slurm.place import STOPPED_FROM_OUTSIDE, Grant, Means, SlurmPlace
from ringweave.launch.slurm.registry import Entry, Hold, Registry

LOOK_S = 0.2
"""Between two looks: a few small files of the shared file system."""
SWEEP_S = 60.0
"""So long before the end of a TTL Slurm is to begin the sweeper, which waits for it: Slurm begins jobs late."""
MOST_FRUITLESS = 10
"""So often in a row Slurm may requeue a job before all its nodes ran, as workers are given up that never come to be
members; the job has failed then. One that ran may be preempted for ever."""
FAILED_S = 1.0
"""Before an action or a look that failed is tried again."""

Reached = Callable[[str], None]


def place_of(registry: Registry, entry: Entry, grant: Grant | None, means: Means) -> SlurmPlace:
    """The job's place, in its allocation or without one."""
    folder, config = registry.folder(entry.job.request.name), entry.origin.config(entry.job)
    return SlurmPlace(folder, config, entry.components, grant, means)


def means_of(slurm: Slurm, environ: Mapping[str, str], patience: Patience) -> Means:
    """What a job's place works with: our own agents, with this interpreter."""

    def agent(folder: JobFolder, node: int, attempt: int, key: str) -> Sequence[str]:
        words = [str(folder.root), str(node), str(attempt), key, str(patience.lease_s)]
        return [sys.executable, "-P", "-m", "ringweave.launch.slurm.group", *words]

    sweeper = [sys.executable, "-P", "-m", "ringweave.launch.slurm.sweeping", *patience_words(patience)]
    return Means(slurm=slurm, agent=agent, environ=environ, sweeper=sweeper, patience=patience)


def patience_words(patience: Patience) -> list[str]:
    """As arguments of our main programs."""
    return [str(patience.lease_s), str(patience.fence_s)]


class TakenBackError(BaseException):
    """Slurm ends the allocation: whatever is seen from now on is its doing, and nothing may be concluded from it."""


class Controller:
    """Leads one job as long as its claim holds."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        grant: Grant | None,
        means: Means,
        clock: Callable[[], float] = time.time,
        reached: Reached = lambda boundary: None,
    ) -> None:
        """Without a grant it only clears away; `reached` is called at every boundary of an action, by name."""
        self._registry, self._name, self._grant, self._means = registry, name, grant, means
        self._clock, self._reached = clock, reached
        self._place: SlurmPlace | None = None

    def claim(self) -> bool:
        """Make the job ours, by its allocation; False where another allocation has it, or it is gone."""
        assert self._grant is not None, "there is nothing to claim it by"
        with self._registry.changing(self._name) as entry:
            if entry is None or entry.hold.allocation not in (None, self._grant.job_id):
                return False
            if not _is_newer(self._grant.key, entry.hold.claim):
                return False
            hold = replace(entry.hold, allocation=self._grant.job_id, claim=self._grant.key)
            self._registry.save(self._name, entry.job.record, hold)
            return True

    def adopt(self) -> None:
        """Have the record know that this allocation is another one: all nodes gather again, and nobody pays for it."""
        assert self._grant is not None, "there is nothing to adopt it into"
        with self._registry.changing(self._name) as entry:
            if entry is None or entry.hold.adopted == self._grant.key:
                return
            record, count = entry.job.record, _num_fruitless(entry, self._grant)
            if count >= MOST_FRUITLESS:
                record = advancing.taken_away(entry.job, record, STOPPED_FROM_OUTSIDE, count, self._clock())
            elif self._has_groups(record):
                record = advancing.regathered(record, STOPPED_FROM_OUTSIDE)
            hold = replace(entry.hold, adopted=self._grant.key, num_fruitless=count)
            self._registry.save(self._name, record, hold)

    def _has_groups(self, record: Record) -> bool:
        """Something of the attempts that are wanted ran in an allocation before; not of one that is kept to be seen."""
        wanted = {(node, known.attempt) for node, known in enumerate(record.nodes) if known.ended is None}
        return any((each.node, each.attempt) in wanted for each in self._registry.folder(self._name).groups())

    def is_ours(self) -> bool:
        """No other controller has claimed the job since."""
        entry = self._registry.find(self._name)
        return entry is not None and self._grant is not None and entry.hold.claim == self._grant.key

    def step(self) -> float | None:
        """One look, and what follows from it; seconds until the next look, None if there is nothing more to do."""
        entry = self._registry.find(self._name)
        if entry is None or (self._grant is not None and entry.hold.claim != self._grant.key):
            return None
        self._place = self._place or place_of(self._registry, entry, self._grant, self._means)
        observed, now = self._place.observe(), self._clock()
        todo = [each for each in reconcile(entry.job, observed, now) if not isinstance(each, actions.Wake)]
        for action in todo:
            if self._grant is None and isinstance(action, actions.CreateConfig | actions.CreateGroup):
                latest = self._registry.find(self._name)
                return None if latest is None or wants_allocation(latest) else 0.0  # it waits for an allocation
            try:
                self._do(self._place, entry, action, now)
            except (OSError, LaunchError) as error:
                print(f"{type(action).__name__}: {error}", file=sys.stderr, flush=True)
                return FAILED_S
        if todo:
            return 0.0
        return LOOK_S if _is_under_way(observed) else self._release(entry)

    def step_or_retry(self) -> float | None:
        """As `step`; where Slurm or the file system does not answer the next look comes later, and nothing ends."""
        try:
            return self.step()
        except (OSError, LaunchError) as error:
            print(f"look at {self._name}: {error}", file=sys.stderr, flush=True)
            return FAILED_S

    def _release(self, entry: Entry) -> float | None:
        """Give the allocation back, unless it is still wanted or something was asked of the job meanwhile."""
        with self._registry.changing(self._name) as latest:
            if latest is None:
                return None
            if latest.job.desired != entry.job.desired:
                return 0.0
            if wants_allocation(latest) and self._grant is not None:
                return LOOK_S
            hold = self._swept(latest, replace(latest.hold, allocation=None))
            self._registry.save(self._name, latest.job.record, hold)
            return None

    def _swept(self, entry: Entry, hold: Hold) -> Hold:
        """Have Slurm begin something that removes the job when its TTL is over, though nobody looks."""
        at_s = advancing.expires_s(entry.job, entry.job.record)
        if at_s is None or at_s == hold.sweeps_at_s:
            return hold
        if hold.sweeper is not None:  # of an end that was followed by another run
            self._means.slurm.cancel(str(hold.sweeper), only_pending=True)
        argv = [*self._means.sweeper, str(self._registry.folder(self._name).root), entry.id]
        script = requesting.sweep_script(entry.job, max(0.0, at_s - self._clock() - SWEEP_S), argv)
        try:
            sweeper = self._means.slurm.submit(script, outside(self._means.environ))
        except LaunchError as error:
            print(f"TTL of {self._name}: {error}", file=sys.stderr, flush=True)
            return hold  # the next look after it removes the job all the same
        return replace(hold, sweeper=sweeper, sweeps_at_s=at_s)

    def _do(self, place: SlurmPlace, entry: Entry, action: Action, now: float) -> None:
        name = type(action).__name__
        self._reached(f"before {name}")
        if isinstance(action, actions.SaveRecord):
            with self._registry.changing(self._name) as latest:
                if latest is None or latest.hold.claim != entry.hold.claim:
                    raise LaunchError("the record is another controller's by now")
                self._registry.tell(self._name, action.events, now)
                self._reached("events told")
                self._registry.save(self._name, action.record, latest.hold)
        elif isinstance(action, actions.Forget):
            latest = self._registry.find(self._name)
            if latest is not None and not latest.job.desired.delete:
                farewells.say(self._registry.folder(self._name).root, latest.job.record)
            self._registry.forget(entry)
            if entry.hold.sweeper is not None:
                self._means.slurm.cancel(str(entry.hold.sweeper), only_pending=True)
        else:
            place.do(action)
        self._reached(f"after {name}")


def wants_allocation(entry: Entry) -> bool:
    """The job is to run, so it needs machines."""
    job = entry.job
    if job.desired.delete or job.desired.suspend or job.record.deleting:
        return False
    if job.record.outcome is None:
        return job.desired.stop_run < job.record.run
    return advancing.is_tried_again(job)


def _num_fruitless(entry: Entry, grant: Grant) -> int:
    """How often in a row Slurm has requeued this allocation before all nodes ran, with this time."""
    is_requeued = entry.hold.adopted.partition(".")[0] == str(grant.job_id)
    return entry.hold.num_fruitless + 1 if is_requeued and entry.job.record.state is not JobState.RUNNING else 0


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what an outer job of Slurm left: the new one would take it for its own."""
    return {key: value for key, value in environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}


def _is_newer(key: str, claimed: str) -> bool:
    """The same allocation, or one that was given later."""
    return not claimed or tuple(map(int, key.split("."))) >= tuple(map(int, claimed.split(".")))


def _is_under_way(observed: Observed) -> bool:
    return any(group.phase.is_alive or group.leaving for group in observed.groups)


def grant_of(environ: Mapping[str, str]) -> Grant:
    """The allocation that this process runs in."""
    size = int(environ.get("SLURM_HET_SIZE", "1"))
    job_id = int(environ["SLURM_JOB_ID"])
    if size == 1:
        job_ids, hosts = (job_id,), (environ["SLURM_JOB_NODELIST"],)
    else:
        job_ids = tuple(int(environ[f"SLURM_JOB_ID_HET_GROUP_{part}"]) for part in range(size))
        hosts = tuple(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{part}"] for part in range(size))
    return Grant(key=f"{job_id}.{environ.get('SLURM_RESTART_COUNT') or 0}", job_ids=job_ids, hosts=hosts)


def main(root: Path, patience: Patience) -> None:
    """Lead the job of a folder until nothing of it wants to run, or somebody else does."""
    slurm, grant = Slurm(), grant_of(os.environ)
    os.chdir("/")
    registry = Registry(root.parent.parent)
    controller = Controller(registry, root.name, grant, means_of(slurm, os.environ, patience))
    heart = Heart(root / "beat.json", grant.key)

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise TakenBackError

    signal.signal(signal.SIGTERM, leave)
    try:
        _lead(controller, root, heart)
    except TakenBackError:
        heart.revoke()


def _lead(controller: Controller, root: Path, heart: Heart) -> None:
    if not controller.claim():
        return
    while (held := locks.try_lock(root / "controller.lock")) is None:
        if not controller.is_ours():
            return
        time.sleep(LOOK_S)
    controller.adopt()
    heart.start()
    while (wait_s := controller.step_or_retry()) is not None:
        time.sleep(wait_s)
    heart.stop()
    os.close(held)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Patience(lease_s=float(sys.argv[2]), fence_s=float(sys.argv[3])))
