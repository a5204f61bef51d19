"""What commands do for a job whose controller does not run: ask Slurm for an allocation, take it back, clear away.

The controller does the rest; both look at the same files and decide by the same `reconcile`.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave.jobs.life import advancing
from ringweave.jobs.life.actions import Event
from ringweave.jobs.life.observing import Group, Lack, Observed, Phase
from ringweave.jobs.life.records import Job
from ringweave.launch.local.jobs import locks
from ringweave.launch.slurm.asking import requesting, waiting
from ringweave.launch.slurm.asking.commands import Allocation, Slurm, SlurmSilentError
from ringweave.launch.slurm.controller import Controller, means_of, outside, patience_words, wants_allocation
from ringweave.launch.slurm.leases import Patience
from ringweave.launch.slurm.place import STOPPED_FROM_OUTSIDE
from ringweave.launch.slurm.registry import Entry, Hold, Registry

CANCELLED_S = 10.0
"""How long a waiting job is given to leave Slurm's queue; what is late is found at the next look."""
CLEARED_S = 2.0
"""The same for files."""
POLL_S = 0.1
ANSWER_S = 2.0
"""How long an answer of Slurm is believed by a mere look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tended:
    """A job and what Slurm says of it."""

    entry: Entry
    allocation: Allocation | None
    """None where it has none, or Slurm does not know it any more."""


class Tending:
    """Sees to the jobs of a registry."""

    def __init__(
        self,
        registry: Registry,
        slurm: Slurm,
        *,
        environ: Mapping[str, str],
        patience: Patience,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._registry, self._slurm, self._environ, self._patience = registry, slurm, environ, patience
        self._clock, self._sleep = clock, sleep
        self._answers: dict[int, tuple[float, str, Allocation | None]] = {}
        """By job of Slurm: when it was asked about, who led then, and the answer."""

    def tend(self, name: str, *, may_ask: bool = False) -> Tended | None:
        """The job after all that can be done for it now; None once it is forgotten.

        Args:
            name: Of the job.
            may_ask: Ask Slurm for an allocation where one is wanted. A mere look never does: a job must not begin
                because somebody looks at it hours later.
        """
        entry = self._found(self._registry.find(name))
        if entry is None:
            return None
        found = self._allocation(entry.hold, fresh=may_ask)
        if found is not None and found.is_pending and not wants_allocation(entry):
            found = self._take_back(found)
        if entry.hold.allocation is not None and (found is None or found.is_over):
            self._give_up(name, entry.hold.allocation, found)
        elif found is not None:
            return Tended(entry=entry, allocation=found)
        if may_ask:
            self._ask(name)
        return self._cleared(name)

    def script(self, entry: Entry) -> str:
        """The batch script of a job."""
        folder = self._registry.folder(entry.job.request.name).root
        return requesting.script(entry.job, entry.id, entry.components, folder, self._controller(folder))

    def _found(self, entry: Entry | None) -> Entry | None:
        """The entry with the job of Slurm that was asked for without an answer, if Slurm has it."""
        if entry is None or not entry.hold.unsure or entry.hold.allocation is not None:
            return entry
        job_id = self._slurm.find(requesting.job_name(entry.job), entry.id)
        if job_id is None:
            return entry
        name = entry.job.request.name
        with self._registry.changing(name) as latest:
            if latest is not None and latest.hold.allocation is None:
                hold = replace(latest.hold, allocation=job_id, unsure=False)
                self._registry.save(name, latest.job.record, hold)
        return self._registry.find(name)

    def _ask(self, name: str) -> None:
        """Hand the batch script in. Who is killed behind that leaves a job of Slurm that finds out, and takes over."""
        with self._registry.changing(name) as entry:
            if entry is None or entry.hold.allocation is not None or not wants_allocation(entry):
                return
            try:
                job_id = self._slurm.submit(self.script(entry), outside(entry.origin.environ))
            except SlurmSilentError as error:
                self._registry.save(name, entry.job.record, replace(entry.hold, unsure=True))
                again = f"ringweave resume {name} --on slurm"
                do = f"Look again with ringweave status {name} --on slurm, or ask again with {again}"
                raise SlurmSilentError(f"{error} Slurm may have taken job {name}. {do}.") from error
            hold = replace(entry.hold, allocation=job_id, unsure=False)
            self._registry.save(name, entry.job.record, hold)

    def _take_back(self, found: Allocation) -> Allocation | None:
        """Cancel a job of Slurm that still waits; what begins meanwhile is left to its controller."""
        deadline = self._clock() + CANCELLED_S
        self._slurm.cancel(str(found.job_id), only_pending=True)
        latest: Allocation | None = found
        while latest is not None and latest.is_pending and self._clock() < deadline:
            self._sleep(POLL_S)
            latest = self._slurm.allocation(found.job_id)
        return latest

    def _give_up(self, name: str, job_id: int, found: Allocation | None) -> None:
        """The allocation has ended and nobody gave it back: by scancel, its time limit, or whoever runs the cluster."""
        with self._registry.changing(name) as entry:
            if entry is None or entry.hold.allocation != job_id:
                return
            if wants_allocation(entry):
                said = (
                    f"{found.state} {found.reason}".strip() if found is not None else "Slurm does not know it any more"
                )
                text = f"Slurm job {job_id} ended before the job did: {said}. ringweave retry {name} asks for another."
                event = Event(key=f"allocation/{job_id}", kind="AllocationEnded", text=text)
                self._registry.tell(name, [event], self._clock())
                self._registry.ask(name, replace(entry.job.desired, stop_run=entry.job.record.run))
            self._registry.save(name, entry.job.record, replace(entry.hold, allocation=None))

    def _cleared(self, name: str) -> Tended | None:
        """What a controller would do without machines, done here; not beside a controller."""
        folder = self._registry.folder(name).root
        try:
            lock = locks.try_lock(folder / "controller.lock")
        except FileNotFoundError:
            return None
        entry = self._registry.find(name)
        if lock is not None and entry is not None and entry.hold.allocation is None:
            means = means_of(self._slurm, entry.origin.environ, self._patience)
            controller = Controller(self._registry, name, None, means, clock=self._clock)
            deadline = self._clock() + CLEARED_S
            while (wait_s := controller.step()) is not None and self._clock() < deadline:
                self._sleep(wait_s)
        if lock is not None:
            os.close(lock)
        entry = self._registry.find(name)
        if entry is None:
            return None
        return Tended(entry=entry, allocation=self._allocation(entry.hold, fresh=True))

    def _allocation(self, hold: Hold, *, fresh: bool) -> Allocation | None:
        """What Slurm says of a job; the same for a while, so that who follows a job does not ask all the time.

        Not for longer than the same controller leads: one that has begun meanwhile is not in an earlier answer.
        """
        job_id = hold.allocation
        if job_id is None:
            return None
        known = self._answers.get(job_id)
        is_known = known is not None and known[1] == hold.adopted and 0 <= self._clock() - known[0] < ANSWER_S
        if fresh or known is None or not is_known:
            known = self._answers[job_id] = (self._clock(), hold.adopted, self._slurm.allocation(job_id))
        return known[2]

    def _controller(self, folder: Path) -> Sequence[str]:
        words = [str(folder), *patience_words(self._patience)]
        return [sys.executable, "-P", "-m", "ringweave.launch.slurm.controller", *words]


def told(tended: Tended, now: float) -> Job:
    """The job as it is to be shown: what its controller saved last, or why there is none yet."""
    entry, found = tended.entry, tended.allocation
    job, lacks = entry.job, Lack.ROOM
    if not wants_allocation(entry):
        return job
    if found is None and entry.hold.unsure:
        resume = f"ringweave resume {job.request.name}"
        text = f"Slurm did not answer when it was asked, and has no such job by now; {resume} asks again"
    elif found is None:
        text = f"it is recorded, and Slurm was not asked; ringweave resume {job.request.name} asks"
    elif found.is_pending:
        text = waiting.tell(found)
    elif entry.hold.adopted != f"{found.job_id}.{found.restarts}":
        text, lacks = f"Slurm job {found.job_id} ({found.state}): its controller starts", None
    else:
        return advancing.as_asked(job, now)
    if advancing.is_tried_again(job):
        job = advancing.as_asked(job, now)
    elif entry.hold.adopted:
        job = replace(job, record=advancing.regathered(job.record, f"{STOPPED_FROM_OUTSIDE}; {text}"))
        lacks = None  # the new round says what it waits for
    groups = tuple(
        Group(
            node=node,
            attempt=job.record.nodes[node].attempt,
            round=job.record.round,
            phase=Phase.PENDING,
            text=text,
            lacks=lacks,
        )
        for node in job.used_nodes
        if job.record.nodes[node].ended is None
    )
    return replace(job, record=advancing.advance(job, Observed(groups=groups), now))
