"""The supervisor of one job: look, decide, do, until nothing is left to do. It may be killed at any time.

    python -m ringweave.launch.local.jobs.supervisor STATE ID

Started by whoever finds a job without one: `submit`, every other command on jobs, and the job's own agents.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ringweave.errors import LaunchError
from ringweave.jobs.life import actions
from ringweave.jobs.life.actions import Action
from ringweave.jobs.life.observing import Observed
from ringweave.jobs.life.reconciling import reconcile
from ringweave.launch.local.jobs import bells, locks
from ringweave.launch.local.jobs.bells import Bell
from ringweave.launch.local.jobs.folders import REGISTRY, job_folder
from ringweave.launch.local.jobs.place import LocalPlace
from ringweave.launch.local.jobs.registry import Entry, Registry
from ringweave.launch.services import farewells

LOOK_S = 0.5
"""Between two looks where nothing rings: so late an agent that was killed is noticed."""
LEAVING_S = 0.05
"""The same while a group leaves: nothing rings when the last process of a group is gone."""
IDLE_S = 30.0
"""The same while only a TTL runs; short enough for clocks that are set."""
FAILED_S = 1.0
"""Before an action that failed is tried again."""
MODULE = "ringweave.launch.local.jobs.supervisor"
"""This one, as a command line names it."""
AGENT = (sys.executable, "-P", "-m", "ringweave.launch.local.jobs.group")

Reached = Callable[[str], None]


class Supervisor:
    """Leads one job; all that it knows it reads anew at every look."""

    def __init__(
        self,
        state: Path,
        job_id: str,
        *,
        agent: Sequence[str] = AGENT,
        clock: Callable[[], float] = time.time,
        reached: Reached = lambda boundary: None,
    ) -> None:
        """`agent` begins the agents' command line; `reached` is called at every boundary of an action, by name."""
        self._registry, self._id = Registry(state / REGISTRY), job_id
        self._folder = job_folder(state, job_id)
        self._agent, self._clock, self._reached = agent, clock, reached

    def serve(self) -> None:
        """Lead the job until nothing is left to do for now, or nothing is left of it."""
        entry = self._registry.load(self._id)
        if entry is None:
            self._clear()
            return
        self._folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = self._place(entry)
        bell = Bell(self._folder.bell)
        try:
            while (wait_s := self.step(place)) is not None:
                bell.wait(wait_s)
        finally:
            bell.close()

    def step(self, place: LocalPlace) -> float | None:
        """One look, and what follows from it; seconds until the next look, None if there is nothing more to do."""
        entry = self._registry.load(self._id)
        if entry is None:
            self._clear()
            return None
        observed, now = place.observe(), self._clock()
        todo = reconcile(entry.job, observed, now)
        wake_s = next((action.at_s for action in todo if isinstance(action, actions.Wake)), None)
        todo = [action for action in todo if not isinstance(action, actions.Wake)]
        for action in todo:
            try:
                self._do(place, action, now)
            except (OSError, LaunchError) as error:
                print(f"{type(action).__name__}: {error}", file=sys.stderr, flush=True)
                return FAILED_S
        if todo:
            return 0.0
        if wake_s is None:
            return _look_s(observed) if _is_under_way(observed) else None
        return max(0.0, min(_look_s(observed), wake_s - now))

    def is_idle(self) -> bool:
        """There is nothing to do for now; looks, and changes nothing."""
        entry = self._registry.load(self._id)
        if entry is None:
            self._clear()
            return True
        observed = self._place(entry).observe(sweeps=False)  # another supervisor may lead it by now
        return not _is_under_way(observed) and not reconcile(entry.job, observed, self._clock())

    def _do(self, place: LocalPlace, action: Action, now: float) -> None:
        name = type(action).__name__
        self._reached(f"before {name}")
        if isinstance(action, actions.SaveRecord):
            self._registry.save(self._id, action.record, action.events, now)
        elif isinstance(action, actions.Forget):
            entry = self._registry.load(self._id)
            if entry is not None and not entry.job.desired.delete:
                farewells.say(self._folder.root, entry.job.record)
            place.remove()
            self._reached("files removed")
            self._registry.forget(self._id)
        else:
            place.do(action)
        self._reached(f"after {name}")

    def _place(self, entry: Entry) -> LocalPlace:
        config = entry.origin.config(entry.job)
        return LocalPlace(self._folder, config, agent=self._agent, environ=entry.origin.environ, reached=self._reached)

    def _clear(self) -> None:
        """Of a job that is forgotten nothing stays, also if somebody began to supervise it meanwhile."""
        shutil.rmtree(self._folder.root, ignore_errors=True)


def ensure(state: Path, job_id: str, environ: dict[str, str]) -> None:
    """Start a supervisor where none lives; wake the one that does. Of a job that is just being removed there is none.

    Raises:
        LaunchError: It cannot be started.
    """
    folder = job_folder(state, job_id)
    try:
        folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = locks.try_lock(folder.lock)
        if lock is None:
            bells.ring(folder.bell)
            return
        try:
            argv = (sys.executable, "-P", "-m", MODULE, str(state), job_id)
            locks.spawn(argv, environ, lock=lock, log=folder.log)
        finally:
            os.close(lock)
    except OSError as error:
        if not folder.root.exists():  # by the supervisor that lived until now
            return
        raise LaunchError(f"supervisor could not be started: {error}. [{folder.root}]") from error


def main(state: Path, job_id: str) -> None:
    """Lead a job; the lock was inherited. It is given back before the last look, for what is asked while it is held."""
    supervisor = Supervisor(state, job_id)
    lock: int | None = locks.INHERITED
    while lock is not None:
        supervisor.serve()
        os.close(lock)
        lock = None if supervisor.is_idle() else locks.try_lock(job_folder(state, job_id).lock)


def _look_s(observed: Observed) -> float:
    """Until the next look, if nothing rings."""
    if any(group.leaving for group in observed.groups):
        return LEAVING_S
    return LOOK_S if _is_under_way(observed) else IDLE_S


def _is_under_way(observed: Observed) -> bool:
    return any(group.phase.is_alive or group.leaving for group in observed.groups)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
