"""The workers of one round of a group: started, watched, ended."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringweave.jobs.life.observing import Cause, Phase, cause_of_exit
from ringweave.launch.books import Books
from ringweave.launch.causes import Death, first_cause
from ringweave.launch.elastic.restarting import ALL_DONE, MEMBERSHIP, NOBODY_DECIDES, OVER
from ringweave.launch.elastic.supervising import INTERRUPT_S
from ringweave.launch.groups.results import Result, Results
from ringweave.launch.launcher import WorkerState
from ringweave.launch.local.launcher import LocalLauncher
from ringweave.launch.supervision import Patience, Supervision
from ringweave.launch.workers import WorkerGroup

NUM_LINES = 200
"""Last lines of a worker's log in which an exception is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the workers of a round ended."""

    phase: Phase
    """SUCCEEDED, FAILED, INTERRUPTED (they blame a peer), or STOPPED."""
    cause: Cause | None = None
    exit_code: int | None = None
    text: str = ""


class Attendant(Protocol):
    """What this node runs beside its workers in a round: the job's parameter server, or a coordinator."""

    @property
    def death(self) -> str:
        """How it died, in words, where that ends the round; else empty."""
        ...

    def start(self) -> None:
        """Run it from now on."""
        ...

    def tend(self) -> None:
        """Do what it needs to live on; called every now and then."""
        ...

    def is_wanted(self, now_s: float) -> bool:
        """Workers of other nodes still need it, though those of this node have ended well."""
        ...

    def end(self) -> None:
        """End it, if it has not ended by itself."""
        ...


class Crew:
    """Running workers; when `look` has returned an outcome nothing of them is left."""

    def __init__(
        self,
        group: WorkerGroup,
        launcher: LocalLauncher,
        books: Books,
        results: Results,
        attendant: Attendant | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_elastic: bool = False,
    ) -> None:
        """Starts them, after what attends to those of all nodes where that is this node's.

        Args:
            group: This node's workers.
            launcher: Starts them.
            books: Of the round.
            results: How far they are.
            attendant: A parameter server or a coordinator; None where this node has none.
            clock: Seconds that never go back.
            is_elastic: They are members of an elastic job, which finish their step before they leave.

        Raises:
            LaunchError: One could not be started; none is left then.
        """
        self._nodes = {worker.global_rank: worker.node for worker in group.workers}
        self._launcher, self._books, self._results, self._clock = launcher, books, results, clock
        self._attendant, self._is_elastic = attendant, is_elastic
        self._death_beside = ""
        self._supervision = Supervision(Patience(interrupt_s=INTERRUPT_S) if is_elastic else Patience())
        self._interrupts: list[signal.Signals] = []
        self._reported: set[int] = set()
        self._start(group)

    def _start(self, group: WorkerGroup) -> None:
        try:
            if self._attendant is not None:
                self._attendant.start()
            self._launcher.start(group)
        except BaseException as error:
            try:
                self._end_all()
            finally:
                self._books.close(outcome="failed", exit_code=1, cause=str(error))
            raise
        self._books.workers_started(self._launcher.pid)

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Have them end, by force if need be; once is enough."""
        if not self._interrupts:
            self._interrupts.append(how)

    def result(self) -> Result:
        """How far they are."""
        return self._results.look()

    def look(self) -> Outcome | None:
        """How they ended; None while one of them runs. Has to be called every now and then."""
        states, now_s = self._launcher.observe(), self._clock()
        for state in states:
            if state.exit and state.global_rank not in self._reported:
                self._reported.add(state.global_rank)
                self._books.worker_exited(state)
        self._watch_attendant()
        if self._supervision.is_over(states, now_s) and not self._is_attendant_wanted(states, now_s):
            return self._close(states)
        if any(_is_settled(state) for state in states):
            self.end(signal.SIGTERM if self._is_elastic else signal.SIGKILL)
        how = self._supervision.decide(states, self._interrupts, now_s)
        if how is not None:
            self._launcher.stop(how)
        return None

    def _watch_attendant(self) -> None:
        """The death of a parameter server is the round's: nobody can go on."""
        if self._attendant is None:
            return
        self._attendant.tend()
        if not self._death_beside and (death := self._attendant.death):
            self._death_beside = death
            self.end(signal.SIGKILL)

    def _is_attendant_wanted(self, states: Sequence[WorkerState], now_s: float) -> bool:
        """All is well here, and workers of other nodes still need what is here."""
        all_well = all(state.exit and state.exit.is_good for state in states)
        if self._attendant is None or self._interrupts or not all_well:
            return False
        return self._attendant.is_wanted(now_s)

    def _end_all(self) -> None:
        """The attendant first: to the launcher it would be something that the workers left behind."""
        try:
            if self._attendant is not None:
                self._attendant.end()
        finally:
            self._launcher.__exit__(None, None, None)

    def _close(self, states: Sequence[WorkerState]) -> Outcome:
        self._end_all()
        deaths = [self._death(state) for state in states if state.exit and not state.exit.is_good]
        outcome = conclude_elastic(deaths) if self._is_elastic else conclude(deaths)
        if self._death_beside:
            outcome = Outcome(phase=Phase.FAILED, cause=Cause.PLACE, text=self._death_beside)
        told = {Phase.SUCCEEDED: "done", Phase.STOPPED: "interrupted"}.get(outcome.phase, "failed")
        self._books.close(outcome=told, exit_code=int(told != "done"), cause=outcome.text or None)
        return outcome

    def _death(self, state: WorkerState) -> Death:
        assert state.exit is not None
        lines = self._launcher.logs(state.global_rank, NUM_LINES)
        node = self._nodes[state.global_rank]
        return Death(global_rank=state.global_rank, node=node, exit=state.exit, last_lines=tuple(lines))


def conclude(deaths: Sequence[Death]) -> Outcome:
    """What the deaths among the workers of a node come to; none means that all went well."""
    if not deaths:
        return Outcome(phase=Phase.SUCCEEDED, exit_code=0)
    first = first_cause(deaths)
    if first is None:
        return Outcome(phase=Phase.STOPPED, text="its workers were ended")
    ended = first.exit
    cause = cause_of_exit(ended.exit_code, ended.signal_name, complains_of_peer=first.blames_a_peer)
    phase = Phase.INTERRUPTED if cause is Cause.PEER else Phase.FAILED
    text = f"rank {first.global_rank} {first.reason}"
    return Outcome(phase=phase, cause=cause, exit_code=ended.exit_code, text=text)


def conclude_elastic(deaths: Sequence[Death]) -> Outcome:
    """The same of members of an elastic job: what they were told by its membership says whose doing it is."""
    first = first_cause(deaths)
    said = (first.exception if first else None) or ""
    if first is None or MEMBERSHIP not in said:
        return conclude(deaths)
    if ALL_DONE in said:
        return Outcome(phase=Phase.SUCCEEDED, exit_code=0, text="the others had finished")
    text = f"rank {first.global_rank} {first.reason}"
    if OVER in said or NOBODY_DECIDES in said:
        return Outcome(phase=Phase.INTERRUPTED, cause=Cause.PEER, exit_code=first.exit.exit_code, text=text)
    return Outcome(phase=Phase.FAILED, cause=Cause.PLACE, exit_code=first.exit.exit_code, text=text)


def _is_settled(state: WorkerState) -> bool:
    """Killed from outside: the first cause, whatever the others say. SIGABRT may be C++ that lost a peer."""
    ended = state.exit
    return ended is not None and not ended.stopped and ended.signal_name not in (None, "SIGABRT")
