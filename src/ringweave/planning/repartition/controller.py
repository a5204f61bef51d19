"""Repartition controller: rank 0 moves blocks, reverts a move or changes nothing, by the measured windows. Pure.

```text
            a move is decided            blocks have moved
 WATCHING -------------------> MOVING --------------------> TRIAL
    ^  ^                          |                            |  a window later the measured step is
    |  |   it failed: nothing     |                            |    shorter:      WATCHING
    |  +-----has changed----------+                            |    not shorter:  MOVING back, then WATCHING
    +----------------------------------------------------------+
```

Time is counted in train steps; no clock is read. The same windows give the same decisions. Ranks send their windows to
rank 0 as text (`MeasurementWindow`), and it sends back a `RepartitionDecision`.
"""

import enum
import functools
import json
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import pydantic

from ringweave.errors import ScheduleError, UsageError, shorten
from ringweave.files import file_io
from ringweave.planning.repartition.pipeline_workload import MIN_TRANSFER_FRACTION, PipelineConditions, PipelineWorkload
from ringweave.planning.repartition.search import (
    SimulatedPartition,
    Splits,
    block_moves,
    moved_bytes,
    predicted_pause_s,
    search_stages,
    simulations_within,
)
from ringweave.sim.pipeline_simulation import StageDevices


@dataclass(frozen=True, kw_only=True, slots=True)
class RepartitionPolicy:
    """Settings of the controller.

    Raises:
        UsageError: A value outside of what its field allows.
    """

    window_steps: int = 10
    """Train steps per window, 3 or more. Ranks send their measurements to rank 0 at the end of each."""
    every_steps: int = 100
    """Train steps between two solutions when nothing drifts: the method's own example."""
    drift: float = 1.15
    """A speed or rate that differs from the believed one by more than this factor has changed, and triggers a search.
    Noise of 5 % stays inside, even between a device that seems 5 % faster and one that seems 5 % slower: 1.05 / 0.95 =
    1.105."""
    min_gain: float = 0.03
    """Fraction of the step that a move must be predicted to save."""
    certainty: float = 3.0
    """The saving must also be this many standard errors of the least certain measurement."""
    horizon_steps: int = 1000
    """Train steps over which the saving must pay for the pause."""
    cooldown_windows: int = 1
    """Windows after a move before another; doubled each time a move was reverted or failed."""
    thinking_share: float = 0.002
    """Fraction of the time that rank 0 may search for a better partition; a model of few blocks takes less."""
    probing_share: float = 0.001
    """Fraction of the time that all ranks may time links while they show no sign of trouble."""
    unconditional: bool = False
    """Move to the solution every `every_steps`, whatever the gain, and never back: the method as published."""

    def __post_init__(self) -> None:
        for what, least in (("window_steps", 3), ("every_steps", 1), ("horizon_steps", 1), ("cooldown_windows", 0)):
            _check_policy_value(what, getattr(self, what), getattr(self, what) >= least, f"{least} or more")
        _check_policy_value("drift", self.drift, self.drift > 1, "a factor above 1")
        for what in ("min_gain", "certainty", "thinking_share", "probing_share"):
            _check_policy_value(what, getattr(self, what), getattr(self, what) >= 0, "0 or more")


def _check_policy_value(name: str, value: float, is_allowed: bool, expected: str) -> None:
    if not (is_allowed and math.isfinite(value)):
        raise UsageError(f"{name} of the policy", got=value, expected=expected, do="Correct it, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementWindow:
    """Consecutive train steps under one partition, measured. `parse(str(window)) == window`."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(strict=True, extra="forbid")

    first_step: int
    """Number of its first train step."""
    compute_s: tuple[tuple[float, ...], ...]
    """For each device and step: seconds of computing, forward and backward of all microbatches, without waiting."""
    step_s: tuple[float, ...]
    """For each step: seconds from begin to begin on the first rank."""
    rates: tuple[tuple[float, ...], ...] = ()
    """For the link into each stage but the first: bytes per second, timed with the receiver posted; any number of
    values."""

    @property
    def end_step(self) -> int:
        """Return the number of the step after its last."""
        return self.first_step + len(self.step_s)

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "MeasurementWindow":
        """Parse a window.

        Raises:
            ScheduleError: The text is no window.
        """
        return _parse_as(cls, "window of measurements", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepartitionDecision:
    """Decision that follows from a window. `parse(str(decision)) == decision`."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(strict=True, extra="forbid")

    splits: tuple[int, ...]
    """The next partition; the present one if nothing moves."""
    devices: str = ""
    """Devices of the stages with their samples, as `StageDevices` prints them; empty: as they are."""
    is_move: bool = False
    """True if blocks move to it: their state is copied during the next train step, and it holds from the step after
    that."""
    is_return: bool = False
    """True if it reverts a move that did not help."""
    why: str = ""
    """Reason in words."""
    predicted_before_s: float = 0.0
    """Simulated train step of the present partition under the measured conditions."""
    predicted_after_s: float = 0.0
    """The same of the new one."""
    predicted_pause_s: float = 0.0
    """Predicted pause of training."""

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "RepartitionDecision":
        """Parse a decision.

        Raises:
            ScheduleError: The text is no decision.
        """
        return _parse_as(cls, "decision on a partition", text)


@functools.cache
def _adapter_of(kind: type) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


_Message = TypeVar("_Message")


def _parse_as(kind: type[_Message], description: str, text: str) -> _Message:
    """Parse the JSON of a message from another rank.

    Raises:
        ScheduleError: The text is no such message.
    """
    try:
        return _adapter_of(kind).validate_json(file_io.bounded(text))
    except ValueError as cause:
        do = f"Run the same version of ringweave on all ranks ({shorten(cause)})"
        raise ScheduleError(description, got=text, expected="what another rank sent", do=do) from cause


MIN_AGREEING = 3
"""Steps that must agree before they count as another speed; a stall in one or two does not."""
_MAD_TO_SIGMA = 1.4826
"""Standard deviation of normal noise, in median deviations."""
_MEDIAN_TO_MEAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median of normal noise, in those of a mean."""


class WindowedEstimator:
    """Estimator of one positive quantity that is measured again and again."""

    def __init__(self, prior: float, *, drift: float, num_windows: int) -> None:
        """`prior` holds until the first measurement; beyond a factor of `drift` older windows are forgotten."""
        self._prior = prior
        self._drift = drift
        self._windows: deque[tuple[float, float]] = deque(maxlen=num_windows)

    @property
    def value(self) -> float:
        return statistics.median(value for value, _ in self._windows) if self._windows else self._prior

    @property
    def noise(self) -> float:
        """Return the standard error of the value, as a fraction of it; infinite before anything was measured."""
        if not self._windows:
            return math.inf
        within = math.sqrt(sum(error**2 for _, error in self._windows)) / len(self._windows)
        between = _standard_error([value for value, _ in self._windows]) if len(self._windows) > 2 else 0.0
        return max(within, between)

    def observe(self, values: Sequence[float]) -> bool:
        """Record a window of one value for each step.

        Returns:
            True if it differs so much from the estimate that older windows are forgotten.
        """
        agreeing = newest_agreeing([value for value in values if 0 < value < math.inf], self._drift)
        if not agreeing:
            return False
        newest, before = statistics.median(agreeing), self.value
        is_drift = not before / self._drift <= newest <= before * self._drift
        if is_drift:
            self._windows.clear()
        self._windows.append((newest, _standard_error(agreeing)))
        return is_drift

    def restart_from_value(self) -> None:
        """Keep the value only until the next measurement, because other blocks are measured from now on."""
        self._prior = self.value
        self._windows.clear()


def newest_agreeing(values: Sequence[float], ratio: float) -> Sequence[float]:
    """Return the longest end of the row within a factor of its newest values' median, tolerating single outliers.

    Return all of the row if fewer than `MIN_AGREEING` agree: then the newest are a stall, or a change that the next row
    will show.
    """
    if len(values) <= MIN_AGREEING:
        return values
    middle = statistics.median(values[-MIN_AGREEING:])
    agrees = [middle / ratio <= value <= middle * ratio for value in values]
    first = len(values)
    while first > 0 and (agrees[first - 1] or (first > 1 and agrees[first - 2])):
        first -= 1
    return values[first:] if sum(agrees[first:]) >= MIN_AGREEING else values


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of values, as a fraction of it."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return _MEDIAN_TO_MEAN_ERROR * _MAD_TO_SIGMA * deviation / middle / math.sqrt(len(values))


_MAX_COOLDOWN_DOUBLINGS = 6
"""Limit on doublings of the cooldown: 64 windows."""


class RepartitionState(enum.Enum):
    """State of a controller."""

    WATCHING = "watching"
    MOVING = "moving"
    TRIAL = "trial"


class RepartitionEvent(NamedTuple):
    """An event for the log, without its rank."""

    kind: str
    fields: dict[str, object]


class _BeforeMove(NamedTuple):
    """State before the last move."""

    splits: Splits
    measured_s: float
    """Measured seconds of a train step."""
    predicted_s: float
    """The same, simulated under the conditions at that time."""
    workload: PipelineWorkload
    """With the devices' samples at that time."""


class RepartitionController:
    """Decides on the partition of one pipeline."""

    def __init__(
        self,
        workload: PipelineWorkload,
        splits: Splits,
        conditions: PipelineConditions | None = None,
        policy: RepartitionPolicy | None = None,
    ) -> None:
        """`conditions` are assumed until measurements exist: the cluster file's speeds, probed rates."""
        self.workload = workload
        """The blocks, and the schedule of their stages."""
        self._policy = policy or RepartitionPolicy()
        prior = conditions or PipelineConditions(speeds=(1.0,) * workload.num_devices)
        self._speeds = [self._estimator(speed) for speed in prior.speeds]
        self._rates = [self._estimator(rate) for rate in prior.rates]
        self._reduce_rates = prior.reduce_rates
        self.state = RepartitionState.WATCHING
        self.splits = splits
        self._steps_since_solved = 0
        self._pending_reason = "training begins"
        self._rejected: set[tuple[Splits, StageDevices | None]] = set()
        self._decision: RepartitionDecision | None = None
        self._before_move = _BeforeMove(splits, math.inf, math.inf, workload)
        self._cooldown_until_step = 0
        self._search_budget_s = 0.0
        self._num_failed_moves = 0
        self._s_per_byte = 0.0
        self._events: list[RepartitionEvent] = []

    @property
    def conditions(self) -> PipelineConditions:
        """Return the current estimates of devices and links."""
        return PipelineConditions(
            speeds=tuple(each.value for each in self._speeds),
            rates=tuple(each.value for each in self._rates),
            reduce_rates=self._reduce_rates,
        )

    def take_events(self) -> list[RepartitionEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def observe(self, window: MeasurementWindow) -> RepartitionDecision:
        """Return the decision that follows from a window, which has to lie under the current partition.

        Cost: two solutions of the partition and some simulations when it searches, else next to nothing.
        """
        if self.state is RepartitionState.MOVING:
            return self._stay("blocks are moving")
        drifted = self._observe_window(window)
        step_s = statistics.median(newest_agreeing(window.step_s, self._policy.drift))
        self._log_window(window, step_s)
        self._steps_since_solved += len(window.step_s)
        self._accrue_search_budget(len(window.step_s) * step_s)
        self._pending_reason = drifted or self._pending_reason
        if self.state is RepartitionState.TRIAL:
            self.state = RepartitionState.WATCHING
            before_s = self._before_s(is_other=bool(drifted))
            if step_s >= before_s and not self._policy.unconditional:
                return self._revert_move(step_s, before_s)
            self._num_failed_moves = 0 if step_s < before_s else self._num_failed_moves
            self._pending_reason = self._pending_reason or _RECHECK
        elif drifted:
            self._rejected.clear()
        if not self._is_due(window.end_step):
            return self._stay()
        return self._solve_and_decide(step_s)

    def record_move_outcome(self, at_step: int, *, is_done: bool, pause_s: float = 0.0, why: str = "") -> None:
        """Record the outcome of the last decided move.

        Args:
            at_step: Number of the first train step after it.
            is_done: False if it failed; the old partition then still holds.
            pause_s: Measured seconds that training paused.
            why: Reason of the failure.
        """
        decision = self._decision
        if decision is None:
            return
        self._decision = None
        changed_blocks = block_moves(self.splits, decision.splits, self.workload.num_blocks)
        self._log_move(decision, at_step, is_done=is_done, pause_s=pause_s, why=why, blocks=len(changed_blocks))
        if decision.is_return or not is_done:
            self._num_failed_moves = min(self._num_failed_moves + 1, _MAX_COOLDOWN_DOUBLINGS)
        self.state = RepartitionState.WATCHING if decision.is_return or not is_done else RepartitionState.TRIAL
        self._cooldown_until_step = (
            at_step + self._policy.window_steps * self._policy.cooldown_windows * 2**self._num_failed_moves
        )
        if not is_done:
            self._pending_reason = self._pending_reason or decision.why
            return
        self._s_per_byte = max(self._s_per_byte, pause_s / max(1.0, moved_bytes(self.workload, changed_blocks)))
        if decision.is_return:
            self._rejected.add((self.splits, self.workload.devices))
        self.splits = decision.splits
        if decision.devices:
            self.workload = replace(self.workload, devices=StageDevices.parse(decision.devices))
        for each in (*self._speeds, *self._rates):
            each.restart_from_value()

    def _estimator(self, prior: float) -> WindowedEstimator:
        policy = self._policy
        num_windows = max(3, 2 * policy.every_steps // policy.window_steps)
        return WindowedEstimator(prior, drift=policy.drift, num_windows=num_windows)

    def _observe_window(self, window: MeasurementWindow) -> str:
        """Record a window; return in words which quantity has drifted, if any."""
        found = []
        for device, (profiled_s, row) in enumerate(
            zip(self.workload.profiled_s(self.splits), window.compute_s, strict=True)
        ):
            before = self._speeds[device].value
            if self._speeds[device].observe([profiled_s / seconds for seconds in row if seconds > 0]):
                found.append(f"device {device + 1} computes at {self._speeds[device].value / before:.2f} of its speed")
        for link, row in enumerate(window.rates[: len(self._rates)]):
            before = self._rates[link].value
            if self._rates[link].observe(row) and self._link_matters(link, before):
                now = self._rates[link].value / before
                found.append(f"the link into {self._stage_noun} {link + 2} transfers at {now:.2f} of its rate")
        return "; ".join(found)

    @property
    def _stage_noun(self) -> str:
        return "device" if self.workload.devices is None else "stage"

    def _link_matters(self, link: int, before: float) -> bool:
        """Return True if a link's transfers take a relevant part of computing, at the old or the current rate.

        Otherwise its rate may vary freely, as it does inside a busy machine.
        """
        rates = list(self.conditions.rates)
        rates[link] = min(before, rates[link])
        return self._transfer_fraction(link, replace(self.conditions, rates=tuple(rates))) > MIN_TRANSFER_FRACTION

    def _transfer_fraction(self, link: int, conditions: PipelineConditions) -> float:
        """Return a link's transfer time per microbatch, as a fraction of the slowest stage's computing time."""
        times = self.workload.times(self.splits, conditions)
        return max(times.transfer_s(link)) / times.slowest_s if times.slowest_s else 0.0

    def _is_due(self, step: int) -> bool:
        is_period = self._steps_since_solved >= self._policy.every_steps
        if self._policy.unconditional:
            return is_period
        return (is_period or bool(self._pending_reason)) and step >= self._cooldown_until_step

    def _accrue_search_budget(self, trained_s: float) -> None:
        """Grant the search a share of the training time; unused time is kept, up to a period's."""
        share = self._policy.thinking_share
        steps = self._policy.every_steps / self._policy.window_steps
        self._search_budget_s = min(self._search_budget_s + share * trained_s, share * trained_s * max(1.0, steps))

    def _solve_and_decide(self, step_s: float) -> RepartitionDecision:
        """Search for a better partition, and move if it is worth it."""
        why = self._pending_reason or f"{self._policy.every_steps} steps have passed"
        conditions = self.conditions
        most = simulations_within(self.workload, self._search_budget_s)
        best = search_stages(self.workload, conditions, self.splits, self._rejected, most)
        self._search_budget_s = 0.0
        now_s = self.workload.step_s(self.splits, conditions)
        pause = self._pause_s(best.splits, conditions, step_s)
        verdict = self._verdict(best, now_s, pause)
        self._steps_since_solved = 0
        if verdict != _UNCERTAIN:
            self._pending_reason = ""
        self._events.append(
            RepartitionEvent(
                "partition_solved",
                {
                    "splits": list(self.splits),
                    "best": list(best.splits),
                    **(
                        {"devices": str(self.workload.devices), "best_devices": str(best.devices)}
                        if best.devices
                        else {}
                    ),
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
        self._before_move = _BeforeMove(self.splits, step_s, now_s, self.workload)
        return self._start_move(
            RepartitionDecision(
                splits=best.splits,
                devices=str(best.devices or ""),
                is_move=True,
                why=why,
                predicted_before_s=now_s,
                predicted_after_s=best.step_s,
                predicted_pause_s=pause,
            )
        )

    def _verdict(self, best: SimulatedPartition, now_s: float, pause: float) -> str:
        if (best.splits, best.devices) == (self.splits, self.workload.devices):
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
        """Return the standard error of a step, as a fraction: a rate's error counts as far as its transfers matter."""
        conditions = self.conditions
        parts = [min(1.0, self._transfer_fraction(link, conditions)) for link in range(len(self._rates))]
        links = [part * rate.noise for part, rate in zip(parts, self._rates, strict=True) if part]
        return max(noise for noise in (0.0, *links, *(each.noise for each in self._speeds)) if math.isfinite(noise))

    def _pause_s(self, splits: Splits, conditions: PipelineConditions, step_s: float) -> float:
        """Return the pause by formula, or by the slowest move so far per byte if that is more."""
        made = block_moves(self.splits, splits, self.workload.num_blocks)
        by_formula = predicted_pause_s(self.workload, made, conditions, step_s)
        return max(by_formula, self._s_per_byte * moved_bytes(self.workload, made))

    def _before_s(self, *, is_other: bool) -> float:
        """Return the step time before the last move; under changed conditions scaled as simulated."""
        before = self._before_move
        if not is_other or before.predicted_s == math.inf:
            return before.measured_s
        return before.measured_s * before.workload.step_s(before.splits, self.conditions) / before.predicted_s

    def _revert_move(self, step_s: float, before_s: float) -> RepartitionDecision:
        splits, before = self._before_move.splits, self._before_move.workload
        conditions = self.conditions
        return self._start_move(
            RepartitionDecision(
                splits=splits,
                devices=str(before.devices or ""),
                is_move=True,
                is_return=True,
                why=f"measured steps take {step_s:.4g} s, before the move {before_s:.4g} s",
                predicted_before_s=self.workload.step_s(self.splits, conditions),
                predicted_after_s=before.step_s(splits, conditions),
                predicted_pause_s=self._pause_s(splits, conditions, step_s),
            )
        )

    def _start_move(self, decision: RepartitionDecision) -> RepartitionDecision:
        self.state, self._decision = RepartitionState.MOVING, decision
        return decision

    def _stay(self, why: str = "") -> RepartitionDecision:
        return RepartitionDecision(splits=self.splits, why=why)

    def _log_window(self, window: MeasurementWindow, step_s: float) -> None:
        conditions = self.conditions
        fields: dict[str, object] = {
            "first_step": window.first_step,
            "end_step": window.end_step,
            "blocks": self.workload.num_blocks,
            "splits": list(self.splits),
            **({"devices": str(self.workload.devices)} if self.workload.devices else {}),
            "compute_s": [statistics.median(row) for row in window.compute_s],
            "speeds": list(conditions.speeds),
            "rates": list(conditions.rates),
            "measured_s": step_s,
            "predicted_s": self.workload.step_s(self.splits, conditions),
        }
        self._events.append(RepartitionEvent("pipeline_measured", fields))

    def _log_move(
        self, decision: RepartitionDecision, at_step: int, *, is_done: bool, pause_s: float, why: str, blocks: int
    ) -> None:
        fields: dict[str, object] = {
            "at_step": at_step,
            "before": list(self.splits),
            "after": list(decision.splits),
            **({"devices": decision.devices} if decision.devices else {}),
            "blocks": blocks,
            "why": decision.why,
            "is_return": decision.is_return,
        }
        if is_done:
            more = {"predicted_pause_s": decision.predicted_pause_s, "measured_pause_s": pause_s}
            self._events.append(RepartitionEvent("blocks_moved", {**fields, **more}))
        else:
            self._events.append(RepartitionEvent("move_failed", {**fields, "cause": why}))


_MOVE = "move"
_RECHECK = "blocks have moved, and computing was measured anew"
_UNCERTAIN = "not certain yet"


class LinkProbeScheduler:
    """Decides when one pipeline's links are timed."""

    def __init__(self, workload: PipelineWorkload, policy: RepartitionPolicy) -> None:
        self.workload, self._policy = workload, policy
        num_windows = max(3, policy.every_steps // policy.window_steps)
        self._excess: deque[float] = deque(maxlen=num_windows)
        self._before: tuple[float, ...] = ()
        self._best: tuple[float, ...] = ()
        self._is_slow = False
        self._probe_budget_s = 0.0
        self._last_probe_s = 0.0

    def is_due(self, window: MeasurementWindow, splits: Splits, conditions: PipelineConditions) -> bool:
        """Return True if links are to be timed after this window, which has none of their rates.

        They are if the ratio of measured and simulated step has changed since they were timed. If links matter, they
        also are if one is known to be slow, if they were never timed, or if enough time has passed to afford it.

        Cost: one simulation of a train step.
        """
        excess = self._excess_time(window, splits, conditions)
        usual = statistics.median(self._excess) if self._excess else excess
        self._probe_budget_s += self._policy.probing_share * sum(window.step_s)
        has_changed = abs(excess - usual) > self._policy.min_gain * usual
        if not has_changed:
            self._excess.append(excess)
        is_time = self._probe_budget_s >= self._last_probe_s
        return has_changed or ((is_time or self._is_slow) and any(self._links_that_matter(splits, conditions)))

    def record_probe(
        self, window: MeasurementWindow, splits: Splits, conditions: PipelineConditions, duration_s: float
    ) -> None:
        """Record that links were timed after this window, which has their rates; training paused for `duration_s`.

        `conditions` are those before it. A slower rate counts once it has been seen twice in a row.
        """
        pairs = zip(window.rates, conditions.rates, strict=False)
        rates = tuple(max(row, default=believed) for row, believed in pairs)
        before, best = self._before or conditions.rates, self._best or conditions.rates
        self._best = tuple(map(max, best, map(min, before, rates)))
        self._before = rates
        matter = self._links_that_matter(splits, replace(conditions, rates=rates))
        slow = [now * self._policy.drift < best for now, best in zip(rates, self._best, strict=True)]
        self._is_slow = any(is_slow and matters for is_slow, matters in zip(slow, matter, strict=True))
        self._excess.clear()
        self._excess.append(self._excess_time(window, splits, replace(conditions, rates=rates)))
        self._probe_budget_s, self._last_probe_s = 0.0, duration_s

    def _excess_time(self, window: MeasurementWindow, splits: Splits, conditions: PipelineConditions) -> float:
        """Return the measured step over the simulated one with the window's stage times and such links."""
        profiled_s = self.workload.profiled_s(splits)
        measured_s = map(self._usual_s, window.compute_s)
        known = zip(profiled_s, measured_s, conditions.speeds, strict=True)
        speeds = tuple(a / b if a > 0 and b > 0 else believed for a, b, believed in known)
        expected_s = self.workload.step_s(splits, replace(conditions, speeds=speeds))
        return self._usual_s(window.step_s) / expected_s

    def _usual_s(self, row: Sequence[float]) -> float:
        return statistics.median(newest_agreeing(row, self._policy.drift))

    def _links_that_matter(self, splits: Splits, conditions: PipelineConditions) -> list[bool]:
        """Return for each link whether the widest cut would take a relevant part of the slowest stage's computing."""
        load = self.workload
        widest = max((*load.forward_bytes[:-1], *load.backward_bytes[:-1]), default=0.0)
        slowest_s = load.times(splits, conditions).slowest_s
        return [widest / rate > MIN_TRANSFER_FRACTION * slowest_s for rate in conditions.rates]
