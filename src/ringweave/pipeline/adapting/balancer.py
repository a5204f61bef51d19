"""Measures a pipeline's train steps, asks rank 0's controller, and moves blocks as it rules."""

import time
from collections.abc import Callable

from ringweave.pipeline.adapting.numbers import Ask, Numbers
from ringweave.pipeline.adapting.overseer import Overseer
from ringweave.pipeline.adapting.probing import Prober
from ringweave.pipeline.moving import Mover, Outcome
from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.running.stopwatch import Lap
from ringweave.pipeline.telling import tell
from ringweave.planning.repartitioning import Conditions, Controller, Policy, Ruling, Workload
from ringweave.telemetry import EventLog

_WARM_UP_STEPS = 2
"""The first steps connect and allocate; so does the first one behind a move."""


class Balancer:
    """Keeps the partition of one pipeline the best one. All ranks make it, and train as before.

    It works at the end of the optimizer's step, where it ends a train step's measurement. What ranks have to say goes
    along with the losses of the next train step, and so does rank 0's word that all are to time the links or to hear
    its ruling: else nobody waits for anybody. A train step may consist of several forwards and backwards.
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
        self._pipeline, self._num_microbatches, self._clock = pipeline, workload.num_microbatches, clock
        self.mover = Mover(pipeline, self._moved, clock=clock)
        rates = conditions.rates or (0.0,) * (pipeline.layout.num_stages - 1)
        self._prober = Prober(pipeline, rates, policy.drift, clock)
        self._overseer: Overseer | None = None
        if pipeline.rank == 0:
            controller = Controller(workload, pipeline.layout.splits, conditions, policy)
            self._overseer = Overseer(controller, pipeline.layout, policy, log)
        self._numbers = pipeline.rider = Numbers(pipeline.rank, pipeline.layout.world_size)
        self.outcomes: list[Outcome] = []
        """Of all moves so far."""
        self._num_done, self._num_left_out = pipeline.train_step_index, _WARM_UP_STEPS
        pipeline.stopwatch.clock, pipeline.stopwatch.is_on = clock, True
        pipeline.stopwatch.lap()
        pipeline.optimizer.register_step_post_hook(lambda *_: self._after_step())

    @property
    def controller(self) -> Controller | None:
        """Rank 0's; None on the others."""
        return self._overseer.controller if self._overseer else None

    def _after_step(self) -> None:
        """A train step has ended: hear what came with its losses, and have its own numbers ready for the next one."""
        lap, now_s = self._pipeline.stopwatch.lap(), self._clock()
        self._num_done += 1
        told = self._numbers.take()
        if told is not None and self._overseer is not None:
            self._numbers.ask = self._overseer.end(told.compute_s)
        self._have_ready(lap, now_s)
        if told is not None and told.ask is Ask.PROBE:
            self._probe()
        if told is not None and told.ask is not Ask.NOTHING:
            self._listen()

    def _have_ready(self, lap: Lap, now_s: float) -> None:
        """The newest train step's numbers, if it counts."""
        counts = not (self.mover.is_moving or lap.num_forwards == 0 or self._num_left_out)
        parts = lap.num_forwards / self._num_microbatches if counts else 1.0
        self._numbers.compute_s = lap.compute_s / parts if counts else 0.0
        if self._overseer is not None:
            self._overseer.begin(self._num_done - 1, (now_s - lap.begun_s) / parts if counts else None)
        if self._num_left_out and lap.num_forwards and not self.mover.is_moving:
            self._num_left_out -= 1

    def _probe(self) -> None:
        """Time all links, together."""
        begun_s = self._clock()
        rates = self._prober.probe()
        if self._overseer is not None:
            self._overseer.probed(rates, self._clock() - begun_s)

    def _listen(self) -> None:
        """Hear what rank 0 rules, and do it."""
        text = self._overseer.ruling if self._overseer else ""
        ruling = Ruling.parse(tell(text, self._pipeline.groups.control))
        if ruling.is_move:
            self.mover.begin(ruling.splits)

    def _moved(self, outcome: Outcome) -> None:
        """The mover's word, on all ranks in the same step."""
        self.outcomes.append(outcome)
        self._num_left_out = 2 if outcome.is_done else 1
        if self._overseer is not None:
            self._overseer.moved(outcome, self._num_done + 1)
