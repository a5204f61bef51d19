"""Elastic supervision on a virtual clock, with workers that die when the test says so."""

import signal
from collections.abc import Callable
from typing import cast

from ringweave import environment
from ringweave.launch.causes import Death
from ringweave.launch.elastic.restarting import Restarts
from ringweave.launch.elastic.supervising import ElasticSupervisor
from ringweave.launch.launcher import Exit, WorkerState
from ringweave.launch.local.launcher import LocalLauncher
from ringweave.launch.workers import WorkerGroup, WorkerSpec

SOON_S = 5.0
"""Shorter than what makes a death a quick one, longer than any delay in these tests."""


class Workers:
    """Stands where the launcher does. A script says when, in seconds, which slot ends and how (None: well)."""

    def __init__(self, num_slots: int, script: list[tuple[float, int, str | None]]) -> None:
        self.now_s = 0.0
        self.stops: list[signal.Signals] = []
        self.started: list[tuple[float, str]] = []
        self._script = sorted(script, key=lambda each: each[0])
        self._exits: dict[int, Exit | None] = dict.fromkeys(range(num_slots))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 1000, "it never ends"

    def observe(self) -> list[WorkerState]:
        while self._script and self._script[0][0] <= self.now_s:
            _, slot, signal_name = self._script.pop(0)
            self._end(slot, signal_name, stopped=False)
        return [WorkerState(global_rank=slot, exit=found) for slot, found in self._exits.items()]

    def restart(self, worker: WorkerSpec, argv: tuple[str, ...]) -> None:
        self._exits[worker.global_rank] = None
        self.started.append((self.now_s, worker.environ[environment.MEMBER]))

    def stop(self, how: signal.Signals) -> None:
        self.stops.append(how)
        for slot in [slot for slot, found in self._exits.items() if found is None]:
            self._end(slot, how.name, stopped=True)

    def _end(self, slot: int, signal_name: str | None, *, stopped: bool) -> None:
        code = 0 if signal_name is None else None
        self._exits[slot] = Exit(exit_code=code, signal_name=signal_name, time_s=self.now_s, stopped=stopped)


def supervise(workers: Workers, num_slots: int, on_exit: Callable[[WorkerState], None]) -> list[WorkerState]:
    specs = tuple(WorkerSpec(global_rank=slot, local_rank=slot, node="a", environ={}) for slot in range(num_slots))
    group = WorkerGroup(argv=("python",), workers=specs)

    def death_of(state: WorkerState) -> Death | None:
        is_bad = state.exit is not None and not state.exit.is_good
        return Death(global_rank=state.global_rank, node="a", exit=state.exit) if is_bad and state.exit else None

    supervisor = ElasticSupervisor(
        cast(LocalLauncher, workers),
        group,
        Restarts(),
        death_of=death_of,
        has_begun=lambda: True,
        clock=lambda: workers.now_s,
    )
    found = supervisor.run([], on_exit=on_exit, on_start=lambda spec: None, look=lambda: None, sleep=workers.sleep)
    return list(found)


def test_a_slot_that_is_killed_twice_comes_back_twice_and_nobody_is_stopped() -> None:
    """The second time it waits for longer than a failure is let stand."""
    kills: list[tuple[float, int, str | None]] = [(10.0, 1, "SIGKILL"), (10.0 + SOON_S, 1, "SIGKILL")]
    workers = Workers(3, [*kills, (60.0, 0, None), (60.0, 1, None), (60.0, 2, None)])
    exits: list[tuple[int, str | None]] = []

    def note(state: WorkerState) -> None:
        assert state.exit is not None
        exits.append((state.global_rank, state.exit.signal_name))

    states = supervise(workers, 3, note)
    assert workers.stops == []
    assert [member for _, member in workers.started] == ["1.1", "1.2"]
    assert workers.started[1][0] >= 10.0 + SOON_S + 1.5
    assert all(state.exit is not None and state.exit.is_good for state in states)
    assert exits == [(1, "SIGKILL"), (1, "SIGKILL"), (0, None), (1, None), (2, None)]


def test_who_dies_while_another_is_started_again_comes_back_too() -> None:
    workers = Workers(2, [(10.0, 0, "SIGKILL"), (11.01, 1, "SIGKILL"), (60.0, 0, None), (60.0, 1, None)])
    states = supervise(workers, 2, lambda state: None)
    assert workers.stops == []
    assert [member for _, member in workers.started] == ["0.1", "1.1"]
    assert [state.global_rank for state in states] == [0, 1]
