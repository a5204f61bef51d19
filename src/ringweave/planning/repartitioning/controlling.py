"""What rank 0 makes of the windows that all ranks measured: blocks move, a move is taken back, or all stays. Pure.

```text
            a move is ruled              blocks have moved
 WATCHING -------------------> MOVING --------------------> TRIAL
    ^  ^                          |                            |  a window later the measured step is
    |  |   it failed: all is      |                            |    shorter:      WATCHING
    |  +-----as it was------------+                            |    not shorter:  MOVING back, then WATCHING
    +----------------------------------------------------------+
```

Time is counted in train steps; no clock is read. The same windows give the same rulings.
"""

import enum
import math
import statistics
from dataclasses import replace
from typing import NamedTuple

from ringweave.planning.repartitioning.estimating import Estimator, newest_agreeing
from ringweave.planning.repartitioning.moves import moved_bytes, moves, pause_s
from ringweave.planning.repartitioning.policies import Policy
from ringweave.planning.repartitioning.rulings import Ruling, Window
from ringweave.planning.repartitioning.searching import Candidate, Splits, num_simulations, search
from ringweave.planning.repartitioning.workloads import FELT, Conditions, Workload

_MOST_DOUBLINGS = 6
"""Of the cooldown: 64 windows."""


class State(enum.Enum):
    """What a controller waits for."""

    WATCHING = "watching"
    MOVING = "moving"
    TRIAL = "trial"


class Note(NamedTuple):
    """An event for the log, without its rank."""

    kind: str
    fields: dict[str, object]


class _Before(NamedTuple):
    """What there was before the last move."""

    splits: Splits
    measured_s: float
    """Of a train step."""
    predicted_s: float
    """The same, simulated under the conditions of then."""


class Controller:
    """Decides on the partition of one pipeline."""

    def __init__(
        self, workload: Workload, splits: Splits, conditions: Conditions | None = None, policy: Policy | None = None
    ) -> None:
        """`conditions` is what is believed before anything is measured: the cluster file's speeds, probed rates."""
        self.workload = workload
        """What is partitioned."""
        self._policy = policy or Policy()
        prior = conditions or Conditions(speeds=(1.0,) * workload.num_devices)
        self._speeds = [self._estimator(speed) for speed in prior.speeds]
        self._rates = [self._estimator(rate) for rate in prior.rates]
        self.state = State.WATCHING
        self.splits = splits
        self._since_solved = 0
        self._pending = "training begins"
        self._refused: set[Splits] = set()
        self._ruling: Ruling | None = None
        self._before = _Before(splits, math.inf, math.inf)
        self._quiet_until = 0
        self._thinking_s = 0.0
        self._num_vain = 0
        self._s_per_byte = 0.0
        self._notes: list[Note] = []

    @property
    def conditions(self) -> Conditions:
        """What is believed of devices and links."""
        speeds, rates = self._speeds, self._rates
        return Conditions(speeds=tuple(each.value for each in speeds), rates=tuple(each.value for each in rates))

    def take_notes(self) -> list[Note]:
        """What happened since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def observe(self, window: Window) -> Ruling:
        """What follows from a window, which has to lie under the partition that holds.

        Cost: two solutions of the partition and some simulations where it is thought over, else next to nothing.
        """
        if self.state is State.MOVING:
            return self._stay("blocks are moving")
        drifted = self._learn(window)
        step_s = statistics.median(newest_agreeing(window.step_s, self._policy.drift))
        self._note_window(window, step_s)
        self._since_solved += len(window.step_s)
        self._save_up(len(window.step_s) * step_s)
        self._pending = drifted or self._pending
        if self.state is State.TRIAL:
            self.state = State.WATCHING
            before_s = self._before_s(is_other=bool(drifted))
            if step_s >= before_s and not self._policy.unconditional:
                return self._return(step_s, before_s)
            self._num_vain = 0 if step_s < before_s else self._num_vain
            self._pending = self._pending or _SECOND_LOOK
        elif drifted:
            self._refused.clear()
        if not self._is_due(window.end_step):
            return self._stay()
        return self._think(step_s)

    def moved(self, at_step: int, *, is_done: bool, pause_s: float = 0.0, why: str = "") -> None:
        """How the move that was ruled last has ended.

        Args:
            at_step: Number of the first train step behind it.
            is_done: False: it failed, and the old partition still holds.
            pause_s: Measured seconds that training stood still.
            why: What failed.
        """
        ruling = self._ruling
        if ruling is None:
            return
        self._ruling = None
        made = moves(self.splits, ruling.splits, self.workload.num_blocks)
        self._note_move(ruling, at_step, is_done=is_done, pause_s=pause_s, why=why, blocks=len(made))
        if ruling.is_return or not is_done:
            self._num_vain = min(self._num_vain + 1, _MOST_DOUBLINGS)
        self.state = State.WATCHING if ruling.is_return or not is_done else State.TRIAL
        self._quiet_until = at_step + self._policy.window_steps * self._policy.cooldown_windows * 2**self._num_vain
        if not is_done:
            self._pending = self._pending or ruling.why
            return
        self._s_per_byte = max(self._s_per_byte, pause_s / max(1.0, moved_bytes(self.workload, made)))
        if ruling.is_return:
            self._refused.add(self.splits)
        self.splits = ruling.splits
        for each in (*self._speeds, *self._rates):
            each.rebase()

    def _estimator(self, prior: float) -> Estimator:
        policy = self._policy
        num_windows = max(3, 2 * policy.every_steps // policy.window_steps)
        return Estimator(prior, drift=policy.drift, num_windows=num_windows)

    def _learn(self, window: Window) -> str:
        """Take in a window; in words what has drifted, if anything has."""
        found = []
        for device, (profiled_s, row) in enumerate(
            zip(self.workload.profiled_s(self.splits), window.compute_s, strict=True)
        ):
            before = self._speeds[device].value
            if self._speeds[device].observe([profiled_s / seconds for seconds in row if seconds > 0]):
                found.append(f"device {device + 1} computes at {self._speeds[device].value / before:.2f} of its speed")
        for link, row in enumerate(window.rates[: len(self._rates)]):
            before = self._rates[link].value
            if self._rates[link].observe(row) and self._is_felt(link, before):
                now = self._rates[link].value / before
                found.append(f"the link into device {link + 2} transfers at {now:.2f} of its rate")
        return "; ".join(found)

    def _is_felt(self, link: int, before: float) -> bool:
        """A link's transfers take a part of what stages compute, at the rate that was or at that of now.

        Where they do not, its rate may jump as it likes: as it does inside of a busy machine.
        """
        rates = list(self.conditions.rates)
        rates[link] = min(before, rates[link])
        return self._part_of_computing(link, replace(self.conditions, rates=tuple(rates))) > FELT

    def _part_of_computing(self, link: int, conditions: Conditions) -> float:
        """A link's transfer for a microbatch, of what the slowest stage computes for it."""
        times = self.workload.times(self.splits, conditions)
        return max(times.transfer_s(link)) / times.slowest_s if times.slowest_s else 0.0

    def _is_due(self, step: int) -> bool:
        is_period = self._since_solved >= self._policy.every_steps
        if self._policy.unconditional:
            return is_period
        return (is_period or bool(self._pending)) and step >= self._quiet_until

    def _save_up(self, trained_s: float) -> None:
        """Thinking may take a share of the time; what was not used is kept, up to a period's."""
        share = self._policy.thinking_share
        steps = self._policy.every_steps / self._policy.window_steps
        self._thinking_s = min(self._thinking_s + share * trained_s, share * trained_s * max(1.0, steps))

    def _think(self, step_s: float) -> Ruling:
        """Solve, and move if it is worth it."""
        why = self._pending or f"{self._policy.every_steps} steps have passed"
        conditions = self.conditions
        most = num_simulations(self.workload, self._thinking_s)
        best = search(self.workload, conditions, self.splits, self._refused, most)
        self._thinking_s = 0.0
        now_s = self.workload.step_s(self.splits, conditions)
        pause = self._pause_s(best.splits, conditions, step_s)
        verdict = self._verdict(best, now_s, pause)
        self._since_solved = 0
        if verdict != _UNCERTAIN:
            self._pending = ""
        self._notes.append(
            Note(
                "partition_solved",
                {
                    "splits": list(self.splits),
                    "best": list(best.splits),
                    "why": why,
                    "speeds": list(conditions.speeds),
                    "rates": list(conditions.rates),
                    "predicted_before_s": now_s,
                    "predicted_after_s": best.step_s,
                    "predicted_pause_s": pause,
                    "verdict": verdict,
                },
            )
        )
        if verdict != _MOVE:
            return self._stay(verdict)
        self._before = _Before(self.splits, step_s, now_s)
        return self._rule(
            Ruling(
                splits=best.splits,
                is_move=True,
                why=why,
                predicted_before_s=now_s,
                predicted_after_s=best.step_s,
                predicted_pause_s=pause,
            )
        )

    def _verdict(self, best: Candidate, now_s: float, pause: float) -> str:
        if best.splits == self.splits:
            return "the present partition is the best"
        if self._policy.unconditional:
            return _MOVE
        gain = 1 - best.step_s / now_s
        if gain < self._policy.min_gain:
            return "too little is gained"
        if (now_s - best.step_s) * self._policy.horizon_steps <= pause:
            return "the pause costs more than is gained"
        return _MOVE if gain >= self._policy.certainty * self._noise() else _UNCERTAIN

    def _noise(self) -> float:
        """Standard error of a step, as a fraction: a rate's shows in it as far as its transfers do."""
        conditions = self.conditions
        parts = [min(1.0, self._part_of_computing(link, conditions)) for link in range(len(self._rates))]
        links = [part * rate.noise for part, rate in zip(parts, self._rates, strict=True) if part]
        return max(noise for noise in (0.0, *links, *(each.noise for each in self._speeds)) if math.isfinite(noise))

    def _pause_s(self, splits: Splits, conditions: Conditions, step_s: float) -> float:
        """By formula, or by what the slowest move so far took for a byte if that is more."""
        made = moves(self.splits, splits, self.workload.num_blocks)
        by_formula = pause_s(self.workload, made, conditions, step_s)
        return max(by_formula, self._s_per_byte * moved_bytes(self.workload, made))

    def _before_s(self, *, is_other: bool) -> float:
        """What a step took before the last move; under other conditions changed as much as it is simulated to be."""
        before = self._before
        if not is_other or before.predicted_s == math.inf:
            return before.measured_s
        return before.measured_s * self.workload.step_s(before.splits, self.conditions) / before.predicted_s

    def _return(self, step_s: float, before_s: float) -> Ruling:
        """Take the last move back."""
        splits = self._before.splits
        conditions = self.conditions
        return self._rule(
            Ruling(
                splits=splits,
                is_move=True,
                is_return=True,
                why=f"measured steps take {step_s:.4g} s, before the move {before_s:.4g} s",
                predicted_before_s=self.workload.step_s(self.splits, conditions),
                predicted_after_s=self.workload.step_s(splits, conditions),
                predicted_pause_s=self._pause_s(splits, conditions, step_s),
            )
        )

    def _rule(self, ruling: Ruling) -> Ruling:
        self.state, self._ruling = State.MOVING, ruling
        return ruling

    def _stay(self, why: str = "") -> Ruling:
        return Ruling(splits=self.splits, why=why)

    def _note_window(self, window: Window, step_s: float) -> None:
        conditions = self.conditions
        fields: dict[str, object] = {
            "first_step": window.first_step,
            "end_step": window.end_step,
            "blocks": self.workload.num_blocks,
            "splits": list(self.splits),
            "compute_s": [statistics.median(row) for row in window.compute_s],
            "speeds": list(conditions.speeds),
            "rates": list(conditions.rates),
            "measured_s": step_s,
            "predicted_s": self.workload.step_s(self.splits, conditions),
        }
        self._notes.append(Note("pipeline_measured", fields))

    def _note_move(self, ruling: Ruling, at_step: int, *, is_done: bool, pause_s: float, why: str, blocks: int) -> None:
        fields: dict[str, object] = {
            "at_step": at_step,
            "before": list(self.splits),
            "after": list(ruling.splits),
            "blocks": blocks,
            "why": ruling.why,
            "is_return": ruling.is_return,
        }
        if is_done:
            more = {"predicted_pause_s": ruling.predicted_pause_s, "measured_pause_s": pause_s}
            self._notes.append(Note("blocks_moved", {**fields, **more}))
        else:
            self._notes.append(Note("move_failed", {**fields, "cause": why}))


_MOVE = "move"
_SECOND_LOOK = "blocks have moved, and computing was measured anew"
_UNCERTAIN = "not certain yet"
