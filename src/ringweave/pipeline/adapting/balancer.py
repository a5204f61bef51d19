"""Measures a pipeline's train steps, asks rank 0's controller, and moves blocks as it rules."""

import time
from collections.abc import Callable

import torch

from ringweave.pipeline.adapting.probing import Prober
from ringweave.pipeline.moving import Mover, Outcome
from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.telling import tell
from ringweave.planning.repartitioning import Conditions, Controller, Policy, Ruling, Window, Workload
from ringweave.telemetry import EventLog

_WARM_UP_STEPS = 2
"""The first steps connect and allocate; so does the first one behind a move."""


class Balancer:
    """Keeps the partition of one pipeline the best one. All ranks make it, and train as before.

    It works at the end of the optimizer's step: there it ends a train step's measurement, at the end of a window ranks
    put their times together, and rank 0 rules for all. A train step may consist of several forwards and backwards.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        workload: Workload,
        conditions: Conditions,
        policy: Policy,
        *,
        log: EventLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`log` gets rank 0's events; `conditions` are those under which the workload was profiled."""
        self._pipeline, self._workload, self._policy, self._log = pipeline, workload, policy, log
        self._clock = clock
        self.mover = Mover(pipeline, self._moved, clock=clock)
        rates = conditions.rates or (0.0,) * (pipeline.layout.num_stages - 1)
        self._prober = Prober(pipeline, rates, policy.drift, clock)
        splits = pipeline.layout.splits
        self.controller = Controller(workload, splits, conditions, policy) if pipeline.rank == 0 else None
        """Rank 0's; None on the others."""
        self.outcomes: list[Outcome] = []
        """Of all moves so far."""
        self._steps: list[tuple[float, float]] = []
        self._num_done = pipeline.train_step_index
        self._num_left_out = _WARM_UP_STEPS
        pipeline.stopwatch.clock, pipeline.stopwatch.is_on = clock, True
        pipeline.stopwatch.lap()
        pipeline.optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        """A train step has ended."""
        lap, now_s = self._pipeline.stopwatch.lap(), self._clock()
        self._num_done += 1
        if self.mover.is_moving or lap.num_forwards == 0:
            return
        if self._num_left_out:
            self._num_left_out -= 1
            return
        parts = lap.num_forwards / self._workload.num_microbatches
        self._steps.append((lap.compute_s / parts, (now_s - lap.begun_s) / parts))
        if len(self._steps) == self._policy.window_steps:
            self._end_window()

    def _end_window(self) -> None:
        """Put together what all ranks measured, and do what rank 0 rules."""
        window = self._gather()
        self._steps.clear()
        text = ""
        if self.controller is not None:
            text = str(self.controller.observe(window))
            self._write_notes()
        ruling = Ruling.parse(tell(text, self._pipeline.groups.control))
        if ruling.is_move:
            self.mover.begin(ruling.splits)

    def _gather(self) -> Window:
        """The same on all ranks; of replicas the slowest counts."""
        layout, size = self._pipeline.layout, len(self._steps)
        table = torch.zeros(layout.num_stages + 1, size, dtype=torch.float64)
        compute_s, step_s = zip(*self._steps, strict=True)
        table[self._pipeline.stage] = torch.tensor(compute_s)
        if self._pipeline.rank == 0:
            table[-1] = torch.tensor(step_s)
        rows = self._pipeline.groups.greatest(table).tolist()
        return Window(
            first_step=self._num_done - size,
            compute_s=tuple(map(tuple, rows[:-1])),
            step_s=tuple(rows[-1]),
            rates=tuple(self._rate(link, seconds) for link, seconds in enumerate(self._prober.probe())),
        )

    def _rate(self, link: int, seconds: float) -> tuple[float, ...]:
        """Bytes per second of a message that took so long with its answer; none where that is nearly all latency."""
        latency_s = self._workload.latency_s[link] if self._workload.latency_s else 0.0
        left_s = seconds - 2 * latency_s
        return (self._prober.num_bytes[link] / left_s,) if left_s > 0.1 * seconds else ()

    def _moved(self, outcome: Outcome) -> None:
        """The mover's word, on all ranks in the same step."""
        self.outcomes.append(outcome)
        self._steps.clear()
        self._num_left_out = 2 if outcome.is_done else 1
        if self.controller is not None:
            done = {"is_done": outcome.is_done, "pause_s": outcome.pause_s, "why": outcome.cause}
            self.controller.moved(self._num_done + 1, **done)
            self._write_notes()

    def _write_notes(self) -> None:
        if self.controller is None:
            return
        for note in self.controller.take_notes():
            if self._log is not None:
                self._log.write(note.kind, rank=0, **note.fields)
