"""An elastic run from the start of its workers to the end of the last one."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ringweave import environment
from ringweave.launch.causes import Death
from ringweave.launch.elastic.restarting import Ended, Restarts
from ringweave.launch.launcher import WorkerState
from ringweave.launch.local.launcher import LocalLauncher
from ringweave.launch.supervision import POLL_S, Patience, Supervision
from ringweave.launch.workers import WorkerGroup, WorkerSpec

INTERRUPT_S = 10.0
"""Between a user's SIGTERM and SIGKILL: members finish their step before they leave."""


def name_member(worker: WorkerSpec, incarnation: int) -> WorkerSpec:
    """The worker as a member of its job; one that is started again is another member."""
    member = f"{worker.global_rank}.{incarnation}"
    return replace(worker, environ={**worker.environ, environment.MEMBER: member})


class ElasticSupervisor:
    """Watches workers, starts again those that died, and ends all when the run is over or has no hope."""

    def __init__(
        self,
        launcher: LocalLauncher,
        group: WorkerGroup,
        restarts: Restarts,
        *,
        death_of: Callable[[WorkerState], Death | None],
        has_begun: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_begun` says whether training has; before that, a worker that fails ends the run as any other does."""
        self._launcher, self._group, self._restarts = launcher, group, restarts
        self._death_of, self._has_begun, self._clock = death_of, has_begun, clock
        self._supervision = Supervision(Patience(interrupt_s=INTERRUPT_S))
        self._started_s = dict.fromkeys(range(group.world_size), clock())
        self._incarnations = dict.fromkeys(range(group.world_size), 0)
        self._seen: set[int] = set()
        self._failed: set[int] = set()
        self._excused: set[int] = set()

    def run(
        self,
        interrupts: Sequence[signal.Signals],
        *,
        on_exit: Callable[[WorkerState], None],
        on_start: Callable[[WorkerSpec], None],
        look: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> Sequence[WorkerState]:
        """Until nothing runs and nothing is to be started.

        Args:
            interrupts: Grows with every SIGINT and SIGTERM that this process receives.
            on_exit: Called for each worker that is seen to have ended.
            on_start: Called for each worker that was started again.
            look: Called at every look: what else has to be kept alive.
            sleep: Waits between two looks.

        Returns:
            States of the workers that count for the outcome: those that were given up and those that ended well.
        """
        while True:
            look()
            states, now_s = self._launcher.observe(), self._clock()
            for state in [each for each in states if each.exit and each.global_rank not in self._seen]:
                self._seen.add(state.global_rank)
                on_exit(state)
                self._judge(state, now_s)
            may_start = not interrupts and not self._failed
            due = self._restarts.take_due(now_s) if may_start else ()
            for slot in due:
                on_start(self._start_again(slot, now_s))
            if due:
                continue  # what was seen of those slots was the exit of a process that has a successor now
            counted = [each for each in states if each.global_rank not in self._excused]
            is_pending = bool(self._restarts.pending) and may_start
            if not is_pending and self._supervision.is_over(states, now_s):
                return counted
            how = self._supervision.decide(counted, list(interrupts), now_s)
            if how is not None:
                self._launcher.stop(how)
            sleep(POLL_S)

    def _judge(self, state: WorkerState, now_s: float) -> None:
        slot, death = state.global_rank, self._death_of(state)
        ended = Ended(death=death, lived_s=now_s - self._started_s[slot])
        if not self._has_begun():
            if death is not None:
                self._failed.add(slot)
            return
        verdict = self._restarts.decide(slot, ended, now_s)
        if verdict == "fail":
            self._failed.add(slot)
        elif death is not None:
            self._excused.add(slot)

    def _start_again(self, slot: int, now_s: float) -> WorkerSpec:
        self._incarnations[slot] += 1
        worker = name_member(self._group.workers[slot], self._incarnations[slot])
        self._launcher.restart(worker, self._group.argv)
        self._started_s[slot] = now_s
        self._seen.discard(slot)
        self._excused.discard(slot)
        return worker
