"""Workers of one node in one round: started, watched and stopped, with their progress from the event log."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ringweave import telemetry
from ringweave.jobs.records import EndCause, GroupPhase, cause_of_exit
from ringweave.launcher.launcher import WorkerState
from ringweave.launcher.outcome import RunRecorder, WorkerFailure, first_cause
from ringweave.launcher.processes import LocalLauncher
from ringweave.launcher.restarts import JOB_FINISHED, JOB_OVER, MEMBERSHIP_ERROR, NO_COORDINATOR
from ringweave.launcher.supervise import MEMBER_INTERRUPT_TIMEOUT_S, StopPolicy, StopTimeouts
from ringweave.launcher.workers import WorkerGroup
from ringweave.membership.records import REASON_FINISHED
from ringweave.telemetry import Event

_READ_EVENT_KINDS = (b'"iterations_done"', b'"epoch_begun"', b'"member_lost"', b'"member_back"')


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeProgress:
    """Training progress of a node, and its knowledge of an elastic job's membership."""

    iterations: int | None = None
    """Train steps done; None if the script reports none."""
    last_loss: float | None = None
    """Loss of the last train step; None if the script reports none."""
    members: tuple[str, ...] = ()
    """Member names of this node's workers, `RANK.INCARNATION`; empty for a job that is not elastic."""
    generation: tuple[int, int] = (0, 0)
    """Term and number of the newest generation that this node's coordinator has reported; zeros if none."""
    evicted: tuple[str, ...] = ()
    """Earlier members that are not in that generation and have not finished, as far as known here."""


class ProgressReader:
    """Reads the new lines of an event log, each once."""

    def __init__(self, path: Path, members: Sequence[str] = ()) -> None:
        """`members` are the member names of this node's workers, if the job is elastic."""
        self._lines = telemetry.LineReader(path)
        self._progress = NodeProgress(members=tuple(members))
        self._known_members: set[str] = set()
        self._current_members: set[str] = set()
        self._finished_members: set[str] = set()
        self._lost_members: set[str] = set()

    def read(self) -> NodeProgress:
        """Return the newest progress without waiting."""
        for line in self._lines.read_new():
            event = telemetry.parse_event(line) if any(kind in line for kind in _READ_EVENT_KINDS) else None
            if event is not None:
                self._apply_event(event)
        return self._progress

    def _apply_event(self, event: Event) -> None:
        try:
            if event["kind"] == "iterations_done":
                self._progress = replace(self._progress, iterations=event["iterations"], last_loss=event["loss"])
            elif event["kind"] == "epoch_begun":
                self._begin_generation(event)
            elif event["kind"] == "member_back" and event["term"] >= self._progress.generation[0]:
                self._lost_members.discard(event["member"])
                self._progress = replace(self._progress, evicted=self._evicted())
            elif event["kind"] == "member_lost":
                (self._finished_members if event["reason"] == REASON_FINISHED else self._lost_members).add(
                    event["member"]
                )
                self._progress = replace(self._progress, evicted=self._evicted())
        except (KeyError, TypeError):  # a line of another program
            return

    def _begin_generation(self, event: Event) -> None:
        generation = (event["term"], event["number"])
        if generation < self._progress.generation:
            return
        self._current_members = set(event["members"])
        self._known_members |= self._current_members
        self._progress = replace(self._progress, generation=generation)
        self._progress = replace(self._progress, evicted=self._evicted())

    def _evicted(self) -> tuple[str, ...]:
        """Return the members excluded from a generation; if no member is left, those that were lost before the end."""
        gone = self._known_members - self._current_members
        if self._current_members <= self._lost_members | self._finished_members:
            gone |= self._lost_members
        slots = {member.partition(".")[0] for member in self._current_members - self._lost_members}
        return tuple(sorted(each for each in gone - self._finished_members if each.partition(".")[0] not in slots))


NUM_SEARCHED_LINES = 200
"""Number of last lines of a worker's log in which an exception is searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOutcome:
    """Outcome of a node's workers in a round."""

    phase: GroupPhase
    """SUCCEEDED, FAILED, INTERRUPTED (they blame a peer), or STOPPED."""
    cause: EndCause | None = None
    exit_code: int | None = None
    text: str = ""


class Sidecar(Protocol):
    """A service that this node runs beside its workers in a round: the job's parameter server, or a coordinator."""

    @property
    def failure_text(self) -> str:
        """Failure of the service that ends the round, in words; else empty."""
        ...

    def start(self) -> None: ...

    def keep_alive(self) -> None:
        """Keep it alive; called regularly."""
        ...

    def is_needed(self, now_s: float) -> bool:
        """Return whether workers of other nodes still need it, after this node's workers have ended well."""
        ...

    def stop(self) -> None:
        """Stop it, if it has not ended by itself."""
        ...


class NodeWorkers:
    """Workers of this node in one round; when `poll` has returned an outcome, none of their processes is left."""

    def __init__(
        self,
        group: WorkerGroup,
        launcher: LocalLauncher,
        recorder: RunRecorder,
        progress_reader: ProgressReader,
        sidecar: Sidecar | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_elastic: bool = False,
    ) -> None:
        """Start the workers, and before them the sidecar of this node, if there is one.

        Args:
            group: This node's workers.
            launcher: Launcher that starts them.
            recorder: Recorder of the round.
            progress_reader: Reader of their progress.
            sidecar: Parameter server or coordinator; None if this node has none.
            clock: Monotonic seconds.
            is_elastic: The workers are members of an elastic job, which finish their step before they leave.

        Raises:
            LaunchError: A process could not be started; none is left then.
        """
        self._nodes = {worker.global_rank: worker.node for worker in group.workers}
        self._launcher, self._recorder, self._progress_reader, self._clock = launcher, recorder, progress_reader, clock
        self._sidecar, self._is_elastic = sidecar, is_elastic
        self._sidecar_failure = ""
        self._stop_policy = StopPolicy(
            StopTimeouts(interrupt_s=MEMBER_INTERRUPT_TIMEOUT_S) if is_elastic else StopTimeouts()
        )
        self._interrupts: list[signal.Signals] = []
        self._reported: set[int] = set()
        self._start(group)

    def _start(self, group: WorkerGroup) -> None:
        try:
            if self._sidecar is not None:
                self._sidecar.start()
            self._launcher.start(group)
        except BaseException as error:
            try:
                self._stop_all()
            finally:
                self._recorder.close(outcome="failed", exit_code=1, cause=str(error))
            raise
        self._recorder.workers_started(self._launcher.pid)

    def request_stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Request the end of the workers, later by force if needed; further calls have no effect."""
        if not self._interrupts:
            self._interrupts.append(signum)

    def progress(self) -> NodeProgress:
        return self._progress_reader.read()

    def poll(self) -> NodeOutcome | None:
        """Return the outcome of the workers, or None while one of them runs; it has to be called regularly."""
        states, now_s = self._launcher.observe(), self._clock()
        for state in states:
            if state.exit and state.global_rank not in self._reported:
                self._reported.add(state.global_rank)
                self._recorder.worker_exited(state)
        self._watch_sidecar()
        if self._stop_policy.is_over(states, now_s) and not self._is_sidecar_needed(states, now_s):
            return self._close_round(states)
        if any(_was_killed_from_outside(state) for state in states):
            self.request_stop(signal.SIGTERM if self._is_elastic else signal.SIGKILL)
        signum = self._stop_policy.decide(states, self._interrupts, now_s)
        if signum is not None:
            self._launcher.stop(signum)
        return None

    def _watch_sidecar(self) -> None:
        """Keep the sidecar alive; if it fails, the round fails, because no worker can go on."""
        if self._sidecar is None:
            return
        self._sidecar.keep_alive()
        if not self._sidecar_failure and (failure_text := self._sidecar.failure_text):
            self._sidecar_failure = failure_text
            self.request_stop(signal.SIGKILL)

    def _is_sidecar_needed(self, states: Sequence[WorkerState], now_s: float) -> bool:
        """Return whether this node's workers all succeeded and other nodes' workers still need the sidecar."""
        all_well = all(state.exit and state.exit.is_success for state in states)
        if self._sidecar is None or self._interrupts or not all_well:
            return False
        return self._sidecar.is_needed(now_s)

    def _stop_all(self) -> None:
        """Stop the sidecar, then the workers.

        Otherwise the launcher would treat the sidecar as left behind by workers.
        """
        try:
            if self._sidecar is not None:
                self._sidecar.stop()
        finally:
            self._launcher.__exit__(None, None, None)

    def _close_round(self, states: Sequence[WorkerState]) -> NodeOutcome:
        self._stop_all()
        failures = [self._worker_failure(state) for state in states if state.exit and not state.exit.is_success]
        outcome = conclude_elastic_node(failures) if self._is_elastic else conclude_node(failures)
        if self._sidecar_failure:
            outcome = NodeOutcome(phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text=self._sidecar_failure)
        run_outcome = {GroupPhase.SUCCEEDED: "done", GroupPhase.STOPPED: "interrupted"}.get(outcome.phase, "failed")
        self._recorder.close(outcome=run_outcome, exit_code=int(run_outcome != "done"), cause=outcome.text or None)
        return outcome

    def _worker_failure(self, state: WorkerState) -> WorkerFailure:
        assert state.exit is not None
        lines = self._launcher.logs(state.global_rank, NUM_SEARCHED_LINES)
        node = self._nodes[state.global_rank]
        return WorkerFailure(global_rank=state.global_rank, node=node, exit=state.exit, last_lines=tuple(lines))


def conclude_node(failures: Sequence[WorkerFailure]) -> NodeOutcome:
    """Return the outcome of a node from the failures of its workers; without any it succeeded."""
    if not failures:
        return NodeOutcome(phase=GroupPhase.SUCCEEDED, exit_code=0)
    first = first_cause(failures)
    if first is None:
        return NodeOutcome(phase=GroupPhase.STOPPED, text="its workers were ended")
    worker_exit = first.exit
    cause = cause_of_exit(worker_exit.exit_code, worker_exit.signal_name, blames_peer=first.is_peer_error)
    phase = GroupPhase.INTERRUPTED if cause is EndCause.PEER else GroupPhase.FAILED
    text = f"rank {first.global_rank} {first.reason}"
    return NodeOutcome(phase=phase, cause=cause, exit_code=worker_exit.exit_code, text=text)


def conclude_elastic_node(failures: Sequence[WorkerFailure]) -> NodeOutcome:
    """Return the outcome of an elastic job's node; errors of its membership decide who is responsible."""
    first = first_cause(failures)
    exception = (first.exception if first else None) or ""
    if first is None or MEMBERSHIP_ERROR not in exception:
        return conclude_node(failures)
    if JOB_FINISHED in exception:
        return NodeOutcome(phase=GroupPhase.SUCCEEDED, exit_code=0, text="the others had finished")
    text = f"rank {first.global_rank} {first.reason}"
    if JOB_OVER in exception or NO_COORDINATOR in exception:
        return NodeOutcome(phase=GroupPhase.INTERRUPTED, cause=EndCause.PEER, exit_code=first.exit.exit_code, text=text)
    return NodeOutcome(phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, exit_code=first.exit.exit_code, text=text)


def _was_killed_from_outside(state: WorkerState) -> bool:
    """Return whether it was killed from outside, which is always the first cause.

    SIGABRT does not count: C++ may have aborted because it lost a peer.
    """
    worker_exit = state.exit
    return worker_exit is not None and not worker_exit.was_stopped and worker_exit.signal_name not in (None, "SIGABRT")
