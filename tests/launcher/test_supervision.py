"""Supervision in virtual time, with workers that behave as the test says."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from ringweave.launcher.outcome import RunRecorder
from ringweave.launcher.processes import LocalLauncher
from ringweave.launcher.supervise import NodePlan, NodeWorkers, StopTimeouts
from ringweave.launcher.workers import WorkerExit, WorkerGroup, WorkerSpec, WorkerState
from tests.clock import Clock

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
PATIENCE = StopTimeouts()


@dataclass
@dataclass
class Fake:
    """A worker: when it ends by itself and with what, and which signals it obeys."""

    ends_s: float = 1e9
    exit_code: int | None = 0
    signal_name: str | None = None
    obeys: tuple[signal.Signals, ...] = (INT, TERM, KILL)
    ended: WorkerExit | None = None


@dataclass
class FakeLauncher:
    workers: list[Fake]
    clock: Clock
    sent: list[tuple[str, float]] = field(default_factory=list)

    def __enter__(self) -> "FakeLauncher":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left anyway."""

    def start(self, group: WorkerGroup) -> None:
        """They run from the beginning."""

    def pid(self, global_rank: int) -> int:
        return global_rank

    def logs(self, global_rank: int, num_lines: int) -> list[str]:
        return []

    def observe(self) -> list[WorkerState]:
        for worker in self.workers:
            if worker.ended is None and self.clock() >= worker.ends_s:
                worker.ended = self.end(worker.exit_code, worker.signal_name)
        return [WorkerState(global_rank=rank, exit=worker.ended) for rank, worker in enumerate(self.workers)]

    def stop(self, how: signal.Signals) -> None:
        self.sent.append((how.name, round(self.clock(), 1)))
        for worker in self.workers:
            if worker.ended is None and how in worker.obeys:
                worker.ended = self.end(None, how.name)

    def end(self, exit_code: int | None, signal_name: str | None) -> WorkerExit:
        return WorkerExit(
            exit_code=exit_code, signal_name=signal_name, time_s=self.clock(), was_stopped=bool(self.sent)
        )


class Exits:
    """Stands where the recorder does: the order of exits."""

    def __init__(self) -> None:
        self.exits: list[int] = []

    def workers_started(self, pid_of: Callable[[int], int]) -> None:
        """Not of interest here."""

    def worker_exited(self, state: WorkerState) -> None:
        self.exits.append(state.global_rank)


def watch(*workers: Fake, interrupts: dict[float, signal.Signals] | None = None):
    """Supervise to the end; what was sent when, the seconds it took, and the order of exits."""
    clock, received = Clock(), []
    due = dict(interrupts or {})

    def deliver() -> None:
        for at_s in [at_s for at_s in due if clock() >= at_s]:
            received.append(due.pop(at_s))

    clock.on_sleep = deliver
    launcher = FakeLauncher(list(workers), clock)
    specs = [WorkerSpec(global_rank=rank, local_rank=rank, node="a", environ={}) for rank in range(len(workers))]
    plan = NodePlan(group=WorkerGroup(argv=("python",), workers=tuple(specs)), environ={})
    recorder = Exits()
    crew = NodeWorkers(plan, cast(LocalLauncher, launcher), cast(RunRecorder, recorder), received, clock)
    crew.wait(clock.sleep)
    return launcher.sent, round(clock(), 1), recorder.exits, launcher.observe()


def test_all_end_well_and_nothing_is_sent() -> None:
    sent, took_s, exits, states = watch(Fake(ends_s=2), Fake(ends_s=1), Fake(ends_s=30))
    assert (sent, took_s, exits) == ([], 30.0, [1, 0, 2])
    assert all(state.exit and state.exit.is_success for state in states)


def test_after_a_failure_the_rest_gets_sigterm_when_the_grace_is_over() -> None:
    sent, took_s, exits, states = watch(Fake(), Fake(ends_s=1, exit_code=1), Fake())
    assert sent == [("SIGTERM", 2.5)]
    assert took_s == 2.5
    assert exits == [1, 0, 2]
    assert [bool(state.exit and state.exit.was_stopped) for state in states] == [True, False, True]


def test_who_dies_in_the_grace_died_by_itself() -> None:
    *_, states = watch(Fake(ends_s=1.3, exit_code=None, signal_name="SIGSEGV"), Fake(ends_s=1, exit_code=1), Fake())
    assert states[0].exit
    assert not states[0].exit.was_stopped


def test_nobody_waits_for_the_grace_when_all_have_ended() -> None:
    sent, took_s, *_ = watch(Fake(ends_s=1, exit_code=1), Fake(ends_s=1.1, exit_code=1))
    assert (sent, took_s) == ([], 1.1)


def test_who_ignores_sigterm_is_killed_well_within_five_seconds() -> None:
    sent, took_s, *_ = watch(Fake(obeys=(KILL,)), Fake(ends_s=1, exit_code=1))
    assert sent == [("SIGTERM", 2.5), ("SIGKILL", 4.0)]
    assert took_s - 1 < 4


def test_an_interrupt_is_passed_on_at_once() -> None:
    sent, took_s, *_ = watch(Fake(), Fake(), interrupts={2.0: INT})
    assert (sent, took_s) == ([("SIGINT", 2.0)], 2.0)


def test_who_ignores_an_interrupt_is_killed_after_a_while() -> None:
    sent, *_ = watch(Fake(obeys=(KILL,)), interrupts={2.0: TERM})
    assert sent == [("SIGTERM", 2.0), ("SIGKILL", 5.0)]


def test_a_second_interrupt_kills() -> None:
    sent, *_ = watch(Fake(obeys=(KILL,)), interrupts={2.0: INT, 2.5: INT})
    assert sent == [("SIGINT", 2.0), ("SIGKILL", 2.5)]


def test_an_interrupt_while_a_failure_is_handled_kills() -> None:
    sent, took_s, *_ = watch(Fake(obeys=(KILL,)), Fake(ends_s=1, exit_code=1), interrupts={2.8: INT})
    assert sent == [("SIGTERM", 2.5), ("SIGKILL", 2.8)]
    assert took_s == 2.8


def test_what_even_sigkill_does_not_end_is_given_up() -> None:
    sent, took_s, _, states = watch(Fake(obeys=()), interrupts={1.0: INT, 1.1: INT, 1.2: INT, 1.3: INT})
    assert sent == [("SIGINT", 1.0), ("SIGKILL", 1.1)]
    assert states[0].exit is None
    assert took_s == round(1.1 + PATIENCE.sigkill_s, 1)
