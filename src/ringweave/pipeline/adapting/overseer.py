"""Rank 0's part of adapting: it makes windows of what all ranks tell, and says what they are to do."""

from collections.abc import Sequence
from dataclasses import replace

from ringweave.pipeline.adapting.numbers import Ask
from ringweave.pipeline.layouts import Layout
from ringweave.pipeline.moving import Outcome
from ringweave.planning.repartitioning import Controller, Lookout, Policy, Ruling, Window
from ringweave.telemetry import EventLog


class Overseer:
    """Sees every train step one step after its end, when all ranks' numbers of it have arrived."""

    def __init__(self, controller: Controller, layout: Layout, policy: Policy, log: EventLog | None) -> None:
        self.controller = controller
        self._layout, self._policy, self._log = layout, policy, log
        self._lookout = Lookout(controller.workload, policy)
        self._travelling: tuple[int, float] | None = None
        self._steps: list[tuple[tuple[float, ...], float]] = []
        self._window: Window | None = None
        self.ruling = ""
        """What all are to hear, as text."""

    def begin(self, train_step: int, step_s: float | None) -> None:
        """The numbers of a train step travel now; None: it does not count."""
        self._travelling = None if step_s is None else (train_step, step_s)

    def end(self, compute_s: Sequence[float]) -> Ask:
        """The numbers that travelled have arrived from each rank; what follows."""
        if self._travelling is None:
            return Ask.NOTHING
        train_step, step_s = self._travelling
        stages = map(self._layout.ranks_of_stage, range(self._layout.num_stages))
        self._steps.append((tuple(max(compute_s[rank] for rank in ranks) for ranks in stages), step_s))
        if len(self._steps) < self._policy.window_steps:
            return Ask.NOTHING
        rows, steps_s = zip(*self._steps, strict=True)
        first = train_step + 1 - len(self._steps)
        self._window = Window(first_step=first, compute_s=tuple(zip(*rows, strict=True)), step_s=steps_s)
        self._steps.clear()
        if self._lookout.is_due(self._window, self.controller.splits, self.controller.conditions):
            return Ask.PROBE
        return Ask.LISTEN if self._rule(self._window).is_move else Ask.NOTHING

    def probed(self, rates: Sequence[tuple[float, ...]], took_s: float) -> None:
        """The links behind the newest window."""
        assert self._window is not None
        window = replace(self._window, rates=tuple(rates))
        self._lookout.looked(window, self.controller.splits, self.controller.conditions, took_s)
        self._rule(window)

    def moved(self, outcome: Outcome, at_step: int) -> None:
        """How a move ended; windows begin anew."""
        self._steps.clear()
        self._travelling = None
        self.controller.moved(at_step, is_done=outcome.is_done, pause_s=outcome.pause_s, why=outcome.cause)
        self._write_notes()

    def _rule(self, window: Window) -> Ruling:
        ruling = self.controller.observe(window)
        self.ruling = str(ruling)
        self._write_notes()
        return ruling

    def _write_notes(self) -> None:
        for note in self.controller.take_notes():
            if self._log is not None:
                self._log.write(note.kind, rank=0, **note.fields)
