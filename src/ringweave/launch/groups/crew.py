"""The workers of one round of a group: started, watched, ended."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringweave.jobs.life.observing import Cause, Phase, cause_of_exit
from ringweave.launch.books import Books
from ringweave.launch.causes import Death, first_cause
from ringweave.launch.groups.results import Result, Results
from ringweave.launch.groups.serving import RoundServer
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


class Crew:
    """Running workers; when `look` has returned an outcome nothing of them is left."""

    def __init__(
        self,
        group: WorkerGroup,
        launcher: LocalLauncher,
        books: Books,
        results: Results,
        server: RoundServer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts them, after the parameter server of this round where it is this node's.

        Raises:
            LaunchError: One could not be started; none is left then.
        """
        self._nodes = {worker.global_rank: worker.node for worker in group.workers}
        self._launcher, self._books, self._results, self._clock = launcher, books, results, clock
        self._server = server
        self._server_death = ""
        self._supervision = Supervision(Patience())
        self._interrupts: list[signal.Signals] = []
        self._reported: set[int] = set()
        try:
            if server is not None:
                server.start()
            launcher.start(group)
        except BaseException as error:
            try:
                self._end_all()
            finally:
                books.close(outcome="failed", exit_code=1, cause=str(error))
            raise
        books.workers_started(launcher.pid)

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
        self._watch_server()
        if self._supervision.is_over(states, now_s) and not self._is_server_wanted(states, now_s):
            return self._close(states)
        if any(_is_settled(state) for state in states):
            self.end(signal.SIGKILL)
        how = self._supervision.decide(states, self._interrupts, now_s)
        if how is not None:
            self._launcher.stop(how)
        return None

    def _watch_server(self) -> None:
        """Its death is the round's: nobody can go on."""
        if self._server is not None and not self._server_death and (death := self._server.death):
            self._server_death = death
            self.end(signal.SIGKILL)

    def _is_server_wanted(self, states: Sequence[WorkerState], now_s: float) -> bool:
        """All is well here, and workers of other nodes still train with the server that is here."""
        if self._server is None or self._interrupts or not all(state.exit and state.exit.is_good for state in states):
            return False
        return self._server.is_wanted(now_s)

    def _end_all(self) -> None:
        """The server first: to the launcher it would be something that the workers left behind."""
        try:
            if self._server is not None:
                self._server.end()
        finally:
            self._launcher.__exit__(None, None, None)

    def _close(self, states: Sequence[WorkerState]) -> Outcome:
        self._end_all()
        deaths = [self._death(state) for state in states if state.exit and not state.exit.is_good]
        outcome = conclude(deaths)
        if self._server_death:
            outcome = Outcome(phase=Phase.FAILED, cause=Cause.PLACE, text=self._server_death)
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


def _is_settled(state: WorkerState) -> bool:
    """Killed from outside: the first cause, whatever the others say. SIGABRT may be C++ that lost a peer."""
    ended = state.exit
    return ended is not None and not ended.stopped and ended.signal_name not in (None, "SIGABRT")
