"""An elastic run from the start of its workers to the end of the last one."""

import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ringweave import environment
from ringweave.errors import LaunchError, explain
from ringweave.launch.causes import Death
from ringweave.launch.elastic.restarting import Ended, Restarts, Verdict
from ringweave.launch.elastic.rolls import Roll
from ringweave.launch.elastic.scaling import Desk
from ringweave.launch.launcher import WorkerState
from ringweave.launch.local.launcher import LocalLauncher
from ringweave.launch.supervision import POLL_S, Patience, Supervision
from ringweave.launch.workers import WorkerGroup, WorkerSpec

INTERRUPT_S = 25.0
"""Between a user's SIGTERM and SIGKILL: members finish their step, and one saves, before they leave. Kubernetes and
Slurm kill half a minute after they have asked."""

_LEAVE_S = 300.0
"""Between SIGTERM and SIGKILL for a worker that is not asked for any more: its train step may be long, or a newcomer
be about to become level, for which the others wait before somebody goes."""

_HUNG_S = 40.0
"""So long a process may live that was put out: it hears so at once, or, where it is cut off, seeks a coordinator for
half a minute and then ends. One that is stopped, or in a call that never ends, hears nothing. Those who are left may
have to wait until another process has its slot, as they cannot know that it is dead: of two, the second one. That they
do for a minute (`Settings.patience_s`), so what is left of it has to be enough for a start."""
_HUNG_LOOK_S = 1.0


def name_member(worker: WorkerSpec, incarnation: int) -> WorkerSpec:
    """The worker as a member of its job; one that is started again is another member."""
    return replace(worker, environ={**worker.environ, environment.MEMBER: _member(worker.global_rank, incarnation)})


def _member(slot: int, incarnation: int) -> str:
    return f"{slot}.{incarnation}"


class ElasticSupervisor:
    """Watches workers, starts again those that died, and ends all when the run is over or has no hope."""

    # Longer than a constructor should be: it only keeps what it is given, and what is known of each slot so far.
    def __init__(  # noqa: PLR0913 - what it decides about, and what it asks, each once
        self,
        launcher: LocalLauncher,
        group: WorkerGroup,
        restarts: Restarts,
        *,
        death_of: Callable[[WorkerState], Death | None],
        roll: Callable[[Collection[str]], Roll],
        desk: Desk | None = None,
        put_out: Callable[[], Collection[str]] = frozenset,
        say: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with workers that have been started.

        Args:
            launcher: Has started them.
            group: They, and behind them those that may be asked for.
            restarts: Says what becomes of a slot.
            death_of: How a worker died.
            roll: Who has been a member so far, of these names above all; before the first, a worker that fails ends the
                run as any does.
            desk: Where another number of workers is asked for; None where nobody can.
            put_out: Names of those whom the others have put out so far.
            say: Told of each slot that cannot be started, and is tried again or given up, in words.
            clock: Must be the launcher's.
        """
        self._launcher, self._group, self._restarts = launcher, group, restarts
        self._death_of, self._roll, self._clock = death_of, roll, clock
        self._desk, self._wanted = desk, desk.workers if desk else group.world_size
        self._supervision = Supervision(Patience(interrupt_s=INTERRUPT_S))
        self._say, self._put_out, self._looked_s = say, put_out, clock()
        self._hung_since_s: dict[str, float] = {}
        self._started_s = dict.fromkeys(range(self._wanted), clock())
        self._incarnations = dict.fromkeys(range(self._wanted), 0)
        self._leaving: dict[int, float] = {}
        self._seen: set[int] = set()
        self._failed: set[int] = set()
        self._excused: set[int] = set()
        self._hopeless: set[int] = set()
        self._unstarted: set[int] = set()

    def run(
        self,
        interrupts: Sequence[signal.Signals],
        *,
        on_exit: Callable[[WorkerState], None],
        on_start: Callable[[WorkerSpec], None],
        on_give_up: Callable[[WorkerState, str], None],
        look: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> Sequence[WorkerState]:
        """Until nothing runs and nothing is to be started.

        Args:
            interrupts: Grows with every SIGINT and SIGTERM that this process receives. Whatever the first one is,
                workers get SIGTERM: that is what members finish their step and save their state for.
            on_exit: Called for each worker that is seen to have ended.
            on_start: Called for each worker that was started, again or for the first time.
            on_give_up: Called for each that will not be started again, though the others go on, with the reason.
            look: Called at every look: what else has to be kept alive.
            sleep: Waits between two looks.

        Returns:
            States of the workers that count for the outcome: those with which the run failed and those that ended
            well; where none did, also those that found the job over, or were given up.
        """
        while True:
            look()
            states, now_s = self._launcher.observe(), self._clock()
            for state in [each for each in states if each.exit and each.global_rank not in self._seen]:
                self._seen.add(state.global_rank)
                on_exit(state)
                if self._judge(state, states, now_s) == "give up":
                    on_give_up(state, self._restarts.why_given_up(state.global_rank))
            may_start = not interrupts and not self._failed
            self._look_at_desk(states, now_s, is_ending=not may_start)
            self._end_hung(states, now_s)
            due = self._restarts.take_due(now_s) if may_start else ()
            for worker in self._start_again(due, now_s):
                on_start(worker)
            if due:
                continue  # what was seen of those slots was the exit of a process that has a successor now
            is_pending = bool(self._restarts.pending) and may_start
            if not is_pending and self._supervision.is_over(states, now_s):
                return self._counted(states)
            unexcused = [each for each in states if each.global_rank not in self._excused]
            how = self._supervision.decide(unexcused, [signal.SIGTERM] * len(interrupts), now_s)
            if how is not None:
                self._launcher.stop(how)
            sleep(POLL_S)

    def _judge(self, state: WorkerState, states: Sequence[WorkerState], now_s: float) -> Verdict:
        slot, death = state.global_rank, self._death_of(state)
        roll = self._roll([self._name(each.global_rank) for each in states] if death else ())
        if not roll.members:
            if death is not None:
                self._failed.add(slot)
            return "rest"
        if self._leaving.pop(slot, None) is not None or slot >= self._wanted:
            if slot < self._wanted:  # it was asked for again meanwhile
                self._restarts.begin(slot, now_s)
            self._excused.add(slot)
            return "rest"
        name, others = self._name(slot), [each for each in states if each.global_rank not in (slot, *self._away)]
        ended = Ended(
            death=death,
            lived_s=now_s - self._started_s[slot],
            was_member=name in roll.members,
            has_trained=name in roll.trained,
        )
        trains = {each.global_rank: not each.exit and self._name(each.global_rank) in roll.trained for each in others}
        verdict = self._restarts.decide(slot, ended, now_s, trains)
        if verdict == "fail":
            self._fail(slot)
        elif death is not None:
            self._excused.add(slot)
        if verdict == "give up" or (verdict == "rest" and not (ended.is_finished or ended.has_left)):
            self._hopeless.add(slot)
        return verdict

    @property
    def _away(self) -> range:
        """Slots that are not asked for any more."""
        return range(self._wanted, self._group.world_size)

    def _look_at_desk(self, states: Sequence[WorkerState], now_s: float, *, is_ending: bool) -> None:
        """See whether another number of workers is asked for, and have those end that do not leave."""
        for slot in [slot for slot, until_s in self._leaving.items() if now_s > until_s]:
            self._launcher.ask(slot, signal.SIGKILL)
            self._leaving[slot] = float("inf")
        workers = self._desk.take() if self._desk else None
        if self._desk is None or workers is None:
            return
        if self._desk.refuse(workers, self._why_not(states, is_ending=is_ending)):
            return
        running = _running(states)
        leaving = sorted(slot for slot in running - self._leaving.keys() if slot >= workers)
        absent = [slot for slot in range(workers) if slot not in running]
        self._wanted = workers
        for slot in leaving:
            self._launcher.ask(slot, signal.SIGTERM)
            self._leaving[slot] = now_s + _LEAVE_S
        for slot in self._away:
            self._restarts.forget(slot)
        self._unstarted.difference_update(absent)
        for slot in absent:
            self._restarts.begin(slot, now_s)
        self._desk.grant(workers, starting=absent, leaving=leaving)

    def _end_hung(self, states: Sequence[WorkerState], now_s: float) -> None:
        """Have those end that were put out and do not: else nobody could be started in their place."""
        if now_s - self._looked_s < _HUNG_LOOK_S:
            return
        self._looked_s, put_out = now_s, self._put_out()
        running = {self._name(slot): slot for slot in _running(states)}
        hung = {name: self._hung_since_s.get(name, now_s) for name in put_out if name in running}
        for name in [name for name, since_s in hung.items() if now_s - since_s >= _HUNG_S]:
            self._launcher.ask(running[name], signal.SIGKILL)
        self._hung_since_s = hung

    def _why_not(self, states: Sequence[WorkerState], *, is_ending: bool) -> str:
        """Why workers can neither come nor go now; empty where they can."""
        if is_ending or self._restarts.is_over:
            return explain("run", got="at its end", expected="one that trains", do="Start it again with more workers")
        if not self._roll([self._name(slot) for slot in _running(states)]).members:
            do = "Wait until the event epoch_begun is in its events.jsonl; scripts without prepare keep their workers"
            return explain("run", got="no member yet", expected="workers that have called ringweave.prepare", do=do)
        return ""

    def _fail(self, slot: int) -> None:
        """All who trained have failed by themselves: those count that are not started again yet, this slot's the last.

        Those that were given up before did not end the run.
        """
        self._failed.add(slot)
        self._excused = {each for each in self._excused if each not in self._restarts.pending}
        self._hopeless.clear()

    def _name(self, slot: int) -> str:
        return _member(slot, self._incarnations[slot])

    def _counted(self, states: Sequence[WorkerState]) -> Sequence[WorkerState]:
        """Those that say how it ended: without a good end a job that is over has failed, whoever was excused before."""
        left_out = self._excused
        if not any(state.exit and state.exit.is_good for state in states):
            left_out = left_out - self._hopeless
        return [state for state in states if state.global_rank not in left_out]

    def _start_again(self, due: Iterable[int], now_s: float) -> list[WorkerSpec]:
        """Those of these slots that could be started; what keeps the others from it may be over when they are due."""
        started = []
        for slot in due:
            incarnation = self._incarnations.get(slot, -1) + 1
            worker = name_member(self._group.workers[slot], incarnation)
            try:
                self._launcher.restart(worker, self._group.argv)
            except LaunchError as error:
                self._note_unstarted(worker, error, now_s)
                continue
            self._incarnations[slot], self._started_s[slot] = incarnation, now_s
            for kept in (self._seen, self._excused, self._hopeless, self._unstarted):
                kept.discard(slot)
            started.append(worker)
        return started

    def _note_unstarted(self, worker: WorkerSpec, error: LaunchError, now_s: float) -> None:
        slot = worker.global_rank
        if self._restarts.note_unstarted(slot, now_s) == "give up":
            self._hopeless.add(slot)
            why = f"time after time it could not be started, or died before it could join the others. At last: {error}"
            self._say(f"rank {slot} on node {worker.node} is given up: {why} The others go on without it")
        elif slot not in self._unstarted:
            self._say(f"{error} It is tried again, and later each time; the others go on meanwhile")
        self._unstarted.add(slot)


def _running(states: Sequence[WorkerState]) -> set[int]:
    return {each.global_rank for each in states if not each.exit}
