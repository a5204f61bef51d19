"""Autotuner: turns the combined reports of all ranks into trials, link surveys and new plans. Pure."""

import enum
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringweave import cost
from ringweave.planning.autotune.link_survey import LinkSurvey, SurveyHistory, SurveyPhase
from ringweave.planning.autotune.tuning_messages import TuningDecision, TuningReport, message_class
from ringweave.planning.group_planner import GroupPlacement
from ringweave.planning.plans import Plan
from ringweave.schedules import NATIVE, CollectiveKind

BASELINE_LENGTH, MAX_BASELINE_LENGTH = 8, 64
"""Number of collectives whose median is the baseline: the minimum at first, the maximum once they are steady."""
DRIFT_WINDOW = 6
"""Newest collectives that are compared with the baseline; all but one have to agree."""
SLOWER_RATIO, FASTER_RATIO = 1.25, 0.8
"""A schedule has drifted beyond these multiples of its baseline. Noise of 10 % stays inside: 1.1 / 0.9 = 1.22."""
HINT_RATIO = 0.92
"""Multiple of the baseline. The newest median may be below it by chance, so it counts only if a speedup is expected."""


class DriftVerdict(enum.Enum):
    """Result of comparing the newest collectives with the baseline."""

    STEADY = "steady"
    SLOWER = "slower"
    FASTER = "faster"


class DriftDetector:
    """Detects drift in the times of one schedule in one message class: five of the newest six lie beyond the limit.

    With a well-known baseline, normal noise of 10 % does that by chance once in 1e10 collectives.
    """

    def __init__(self) -> None:
        self._baseline: list[float] = []
        self._newest: deque[float] = deque(maxlen=DRIFT_WINDOW)

    @property
    def baseline(self) -> float | None:
        """Return the seconds per byte of a collective at the start; None while too few were observed."""
        return statistics.median(self._baseline) if len(self._baseline) >= BASELINE_LENGTH else None

    @property
    def current(self) -> float | None:
        """Return the median of the newest collectives; None while too few were observed."""
        return statistics.median(self._newest) if len(self._newest) == DRIFT_WINDOW else None

    @property
    def difference(self) -> float:
        """Return by how many seconds per byte the newest differ from the baseline; 0 while steady."""
        return 0.0 if self.verdict is DriftVerdict.STEADY else abs((self.current or 0.0) - (self.baseline or 0.0))

    @property
    def may_be_faster(self) -> bool:
        """Return True if the newest are a little faster than usual: a slow link that a plan avoids may be back."""
        now, usual = self.current, self.baseline
        return now is not None and usual is not None and now < HINT_RATIO * usual

    def observe(self, seconds_per_byte: float) -> None:
        """Record the time of one more collective; a value that is not a positive number is ignored."""
        if not seconds_per_byte > 0:
            return
        if len(self._baseline) < BASELINE_LENGTH:
            self._baseline.append(seconds_per_byte)
            return
        if (
            len(self._newest) == DRIFT_WINDOW
            and len(self._baseline) < MAX_BASELINE_LENGTH
            and self.verdict is DriftVerdict.STEADY
        ):
            self._baseline.append(self._newest[0])
        self._newest.append(seconds_per_byte)

    @property
    def verdict(self) -> DriftVerdict:
        """Compare the newest collectives with the baseline."""
        usual = self.baseline
        if usual is None or len(self._newest) < DRIFT_WINDOW:
            return DriftVerdict.STEADY
        if sum(seconds > SLOWER_RATIO * usual for seconds in self._newest) >= DRIFT_WINDOW - 1:
            return DriftVerdict.SLOWER
        if sum(seconds < FASTER_RATIO * usual for seconds in self._newest) >= DRIFT_WINDOW - 1:
            return DriftVerdict.FASTER
        return DriftVerdict.STEADY


NATIVE_EQUIVALENT = "ring"
"""Schedule that models the native backend: Gloo and NCCL pass large messages round a ring."""


class PlanPredictor:
    """Predicts the seconds of plans, which live as long as it, at any rates; counts link demands once for all sizes."""

    def __init__(self, placement: GroupPlacement) -> None:
        self._placement = placement
        self._demands: dict[tuple[int, str, str, tuple[tuple[str, float], ...]], cost.ScheduleDemand] = {}

    def predicted_s(
        self, plan: Plan, name: str, num_bytes: int, rates: Mapping[str, float], kind: CollectiveKind = "allreduce"
    ) -> float:
        """Return the prediction for a schedule, or for the native backend, as the plan runs it."""
        choice = plan.choose(num_bytes, NATIVE_EQUIVALENT if name == NATIVE else name, kind)
        key = id(plan), kind, choice.schedule, tuple(sorted(rates.items()))
        if key not in self._demands:
            net = self._placement.network(rates)
            where = cost.vertices_of_ranks(net, self._placement.nodes)
            schedule = plan.generate(choice.schedule, kind, 0 if kind == "broadcast" else None)
            self._demands[key] = cost.schedule_demand(schedule, net, where, self._placement.assumptions)
        return self._demands[key].predicted_s(num_bytes, num_segments=choice.num_segments, lag=choice.lag)


class CorrectedPrediction:
    """Predictions corrected by measurements: a schedule that took 1.1 times its prediction will do so again.

    The native backend has no formula: its expected time is its measured time, scaled by the change of a ring's
    predicted time. A schedule that was not measured gets the median correction of those that were.
    """

    def __init__(
        self,
        predictor: PlanPredictor,
        plan: Plan,
        num_bytes: int,
        measured: Mapping[str, float],
        rates: Mapping[str, float],
        kind: CollectiveKind = "allreduce",
    ) -> None:
        """`measured` has the seconds per byte of each schedule, with `plan` and at these link rates."""
        self._predictor, self._plan, self._num_bytes, self._kind = predictor, plan, num_bytes, kind
        self._corrections = {
            name: s_per_byte * num_bytes / predictor.predicted_s(plan, name, num_bytes, rates, kind)
            for name, s_per_byte in measured.items()
        }
        known = [correction for name, correction in self._corrections.items() if name != NATIVE]
        self._median_correction = statistics.median(known) if known else 1.0

    def corrected_s(self, name: str, rates: Mapping[str, float]) -> float:
        """Return the seconds of a schedule of the plan, or of the native backend, at other rates."""
        return self._predicted_s(self._plan, name, rates) * self._correction(name)

    def best_s(self, new_plan: Plan, rates: Mapping[str, float]) -> float:
        """Return the seconds of the best candidate that trials could find with another plan, made for other rates."""
        choices = new_plan.choices(self._num_bytes, self._kind)
        found = [choice.predicted_s * self._correction(choice.schedule) for choice in choices]
        if NATIVE in self._corrections:
            found.append(self._predicted_s(new_plan, NATIVE, rates) * self._corrections[NATIVE])
        return min(found)

    def _predicted_s(self, plan: Plan, name: str, rates: Mapping[str, float]) -> float:
        return self._predictor.predicted_s(plan, name, self._num_bytes, rates, self._kind)

    def _correction(self, name: str) -> float:
        return self._corrections.get(name, self._median_correction)


NUM_CANDIDATES = 3
"""Schedules that are tried besides the native backend."""
NUM_TRIAL_ROUNDS, NUM_UNCLEAR_ROUNDS, MAX_TRIAL_ROUNDS = 3, 6, 9
"""Rounds after the warm-up: of all; of the fastest and its first equal; of all while rounds take next to no time."""

_TRIAL_TIE_RATIO = 1.03
"""Candidates within this ratio of the fastest count as equal; the one that is predicted to be best is taken."""
_TRIAL_TIE_SIGMAS = 1.645
"""Up to `_DROP_RATIO` they do if chance orders their rounds so in over 5 % of cases (one-sided rank-sum test)."""
_DROP_RATIO_WARM_UP, _DROP_RATIO = 2.0, 1.3
"""Candidates slower than this multiple of the fastest are dropped: after the warm-up round, and after later rounds."""
_MIN_DROP_DIFFERENCE_S = 0.05
"""A candidate within this difference of the fastest is never dropped: short times are noisy, and cost nothing."""
_SHORT_TRIALS_S = 2.0
"""While all rounds together took less than this, another one is added: medians of three short rounds are noisy."""


def pick_candidates(
    plan: Plan,
    num_bytes: int,
    estimates: Mapping[str, float] | None = None,
    kind: CollectiveKind = "allreduce",
) -> tuple[str, ...]:
    """Return the candidates for a message: the three best schedules, and the native backend.

    `estimates` are simulated seconds by name of schedule; None uses the formulas alone. The first candidate is the
    plan's own choice in any case.
    """
    ranked = [plan.choose(num_bytes, None, kind).schedule]
    ranked += [plan.fastest(estimates), *sorted(estimates, key=estimates.__getitem__)] if estimates else []
    ranked += [choice.schedule for choice in plan.choices(num_bytes, kind)]
    return (*list(dict.fromkeys(ranked))[:NUM_CANDIDATES], NATIVE)


class CandidateTrials:
    """Trials of one message class.

    The first round warms up (connections, programs, memory). Every other round runs the candidates in reverse, so that
    slow changes affect all of them alike. After each round, candidates slower than a multiple of the fastest are
    dropped: trials are the user's own collectives.
    """

    def __init__(self, candidates: Sequence[str]) -> None:
        """`candidates` are distinct names, the predicted best first.

        Raises:
            ValueError: `candidates` is empty.
        """
        if not candidates:
            raise ValueError("candidates: none, expected one or more")
        self._remaining = list(candidates)
        self._seconds: dict[str, list[float]] = {name: [] for name in candidates}
        self._warm_up: dict[str, float] = {}
        self._queue = list(candidates)
        self._round = 0
        self._spent_s = 0.0
        self._num_bytes = 1
        self.num_trials, self.trials_s = 0, 0.0
        """Trials so far, and their seconds; with the warm-up round."""

    @property
    def next_trial(self) -> str | None:
        """Return the candidate to run next; None once the fastest one is clear."""
        is_enough = self._round > (NUM_UNCLEAR_ROUNDS if self._spent_s > _SHORT_TRIALS_S else MAX_TRIAL_ROUNDS)
        return None if len(self._remaining) == 1 or is_enough else self._queue[0]

    @property
    def chosen(self) -> str:
        """Return the fastest candidate so far; before any measurement, the predicted best."""
        return self._finalists()[0]

    def _finalists(self) -> tuple[str, str]:
        """Return the fastest candidate, after the first that counts as equal to it."""
        times = {name: self.median_s_per_byte(name) for name in self._remaining}
        fastest = min(self._remaining, key=times.__getitem__)

        def is_equal(name: str) -> bool:
            ratio = _DROP_RATIO if _may_be_chance(self._seconds[fastest], self._seconds[name]) else _TRIAL_TIE_RATIO
            return times[name] <= times[fastest] * ratio

        return next(filter(is_equal, self._remaining)), fastest

    def median_s_per_byte(self, name: str) -> float:
        """Return a candidate's median seconds per byte; the warm-up round counts only while there is no other."""
        seconds = self._seconds[name]
        return statistics.median(seconds) if seconds else self._warm_up.get(name, math.inf)

    def measured(self) -> dict[str, float]:
        """Return the median seconds per byte of each candidate that was tried, dropped ones too."""
        return {name: self.median_s_per_byte(name) for name in self._seconds if self.median_s_per_byte(name) < math.inf}

    def measured_warm(self) -> dict[str, float]:
        """Return the same for candidates that were tried after the warm-up round."""
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items() if seconds}

    def observe(self, seconds: float, num_bytes: int) -> None:
        """Record the seconds of the trial of `next_trial`; it is repeated if they are not a number (not measured)."""
        if self.next_trial is None or not seconds > 0:
            return
        seconds_per_byte = seconds / num_bytes
        self._num_bytes = num_bytes
        self._spent_s += seconds if self._round else 0.0
        self.num_trials, self.trials_s = self.num_trials + 1, self.trials_s + seconds
        name = self._queue.pop(0)
        if self._round:
            self._seconds[name].append(seconds_per_byte)
        else:
            self._warm_up[name] = seconds_per_byte
        if not self._queue:
            self._end_round()

    def _end_round(self) -> None:
        fastest = min(self.median_s_per_byte(name) for name in self._remaining)
        limit = max(
            fastest * (_DROP_RATIO if self._round else _DROP_RATIO_WARM_UP),
            fastest + _MIN_DROP_DIFFERENCE_S / self._num_bytes,
        )
        self._remaining = [name for name in self._remaining if self.median_s_per_byte(name) <= limit]
        if self._round >= NUM_TRIAL_ROUNDS and self._spent_s > _SHORT_TRIALS_S:
            self._remaining = list(dict.fromkeys(self._finalists()))
        self._round += 1
        self._queue = self._remaining[::-1] if self._round % 2 else list(self._remaining)


def _may_be_chance(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether the first rounds are not faster than the others beyond chance, by a rank-sum test."""
    num_pairs = len(some) * len(others)
    num_faster = sum((one < other) + (one == other) / 2 for one in some for other in others)
    deviation = math.sqrt(num_pairs * (len(some) + len(others) + 1) / 12)
    return num_pairs > 0 and num_faster < num_pairs / 2 + _TRIAL_TIE_SIGMAS * deviation


MIN_PERIOD, MAX_PERIOD = 4, 256
"""Collectives of a message class between two reports."""
NEVER = 2**62
MAX_AGE_S = 24 * 3600.0
"""Age at which a winner is tried again: its trials' disturbances have mostly passed by then."""

_REPORT_TIME_FRACTION = 0.005
"""Fraction of the time between two collectives of a class that reports may take."""
_MIN_PLAN_GAIN = 1.05
"""Gain that a new plan must promise over the current one."""
_NOMINAL_FRACTION = 0.87
"""A link that reaches this fraction of the cluster file's rate counts as having that rate."""
_IMPOSSIBLE_FRACTION = 0.8
"""A collective below this fraction of the bound proves that links are faster than believed."""
_MESSAGE_S = 1e-4
"""Cost of forwarding a report, per rank: a few Python calls and a wake-up."""
_FAN_OUT = 8


@dataclass(slots=True)
class _ClassTuning:
    """Tuning state of one message class."""

    kind: CollectiveKind
    is_on_device: bool
    trials: CandidateTrials
    drift: DriftDetector = field(default_factory=DriftDetector)
    chosen: str = ""
    chosen_at_s: float | None = None
    """First rank's clock at the time when the choice was first settled."""
    num_bytes: int = 0
    """Newest size."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Differing link rates that were believed during the measurements."""
    decided_at_s: float | None = None
    """First rank's clock at the last decision, which held for `period` collectives."""
    period: int = 1
    interval_s: float = 0.0
    """Seconds from one collective to the next, including everything in between, since the last decision."""
    drifted_s: float = 0.0
    """Seconds by which collectives together have differed from the baseline since they began to."""

    def record_decision_time(self, now_s: float) -> None:
        """Record that the ranks have reached the next decision."""
        if self.decided_at_s is not None:
            self.interval_s = (now_s - self.decided_at_s) / self.period
        self.decided_at_s = now_s
        more_s = self.drift.difference * self.num_bytes * self.period
        self.drifted_s = self.drifted_s + more_s if more_s else 0.0

    @property
    def measured(self) -> dict[str, float]:
        """Return seconds per byte by schedule: those of the trials, or the winner's from an earlier run."""
        tried = self.trials.measured_warm()
        return tried or ({self.chosen: self.drift.baseline} if self.chosen and self.drift.baseline else {})


class TuningEvent(NamedTuple):
    """An entry of the event log: kind and fields, without rank and group."""

    kind: str
    fields: dict[str, object]


class Autotuner:
    """Decides the next action from the reports of all ranks; only the first rank has one."""

    def __init__(
        self,
        placement: GroupPlacement,
        plan: Plan,
        known_winners: Mapping[str, str] | None = None,
        estimate: Callable[[Plan, int, Mapping[str, float]], Mapping[str, float]] | None = None,
        history: SurveyHistory | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        """Start from the known facts.

        Args:
            placement: The group's nodes on the cluster.
            plan: The plan for this placement.
            known_winners: Winning schedule of each message class in an earlier run with the same plan.
            estimate: Simulates a plan's candidates for a size at changed rates; called once for each class that is to
                be tried. None is `placement.simulate_candidates`.
            history: Surveys of the groups before this one, on the same clock; None is one of its own.
            rates: Links of the placement that were found to differ; the plan is for these rates.
        """
        self._history = history or SurveyHistory()
        self._estimate = estimate or placement.simulate_candidates
        self.winners = dict(known_winners or {})
        self._rates = dict(rates or {})
        self._winners_at_nominal_rates = {} if self._rates else dict(known_winners or {})
        self._events: list[TuningEvent] = []
        self._placement, self._plan, self._plan_version = placement, plan, 1
        self._classes: dict[str, _ClassTuning] = {}
        self._trial: tuple[str, str, int] | None = None
        self._survey_phases: tuple[SurveyPhase, ...] = ()
        self._suspects, self._survey_reason = tuple[str, ...](), ""
        self._last_doubted_version = 0
        self._add_event("plan_made", rates=dict(self._rates), **self._plan_facts())

    @property
    def rates(self) -> Mapping[str, float]:
        """Return the links whose rate differs from the one known before, in bytes per second."""
        return self._rates

    @property
    def plan(self) -> Plan:
        return self._plan

    def complete_plan(self, whole: Plan) -> None:
        """Take the whole plan in place of the same one with exact allreduces only."""
        if len(whole.collectives) > len(self._plan.collectives):
            self._plan = whole

    def take_events(self) -> list[TuningEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def decide(self, report: TuningReport, now_s: float) -> TuningDecision:
        """Return the message's schedule, or the survey that has to come first."""
        self._observe_report(report)
        case = self._case_of(report.num_bytes, report.kind, report.is_on_device)
        case.record_decision_time(now_s)
        self._expire_winner(case, now_s)
        if self._is_survey_due(case, now_s):
            return TuningDecision(num_bytes=report.num_bytes, phases=self._begin_survey())
        return self._decide_next(case)

    # Long: a third is its docstring; one sequence from a survey's measurements to what follows from them.
    def decide_after_survey(
        self,
        num_bytes: int,
        measured: Sequence[float],
        now_s: float,
        duration_s: float,
        kind: CollectiveKind = "allreduce",
        *,
        is_on_device: bool = False,
    ) -> TuningDecision:
        """Return the decision that follows from a survey.

        Args:
            num_bytes: Size of the message that waits for it.
            measured: Bytes per second of each stream.
            now_s: The first rank's clock.
            duration_s: Duration of the survey.
            kind: The message's collective.
            is_on_device: The message has a class of a device.
        """
        survey = self._make_survey()
        revised_rates = (
            survey.revised_rates(self._survey_phases, measured) if all(rate > 0 for rate in measured) else {}
        )
        self._history.record_survey(now_s, duration_s, is_whole=not self._suspects)
        is_new = self._update_rates(revised_rates)
        new_plan = self._placement.plan(self._rates) if is_new else self._plan
        before_s, after_s = self._compare_plans(new_plan)
        if not is_new or before_s < after_s * _MIN_PLAN_GAIN:
            for case in self._classes.values():
                case.drift = DriftDetector()  # the newest measurements become the baseline
                if not case.trials.measured_warm():
                    case.rates = dict(self._rates)
            return self._decide_next(self._case_of(num_bytes, kind, is_on_device))
        self._history.record_change(now_s)
        self._plan_version += 1
        self._plan = new_plan
        self._classes.clear()
        self.winners = dict(self._winners_at_nominal_rates) if not self._rates else {}
        self._trial = None
        self._add_event("plan_made", rates=dict(self._rates), **self._plan_facts())
        self._add_event(
            "plan_changed",
            version=self._plan_version,
            why=self._survey_reason,
            rates=revised_rates,
            old_s=before_s,
            new_s=after_s,
        )
        decision = self._decide_next(self._case_of(num_bytes, kind, is_on_device))
        return TuningDecision(
            num_bytes=num_bytes,
            schedule=decision.schedule,
            is_trial=decision.is_trial,
            next_in=decision.next_in,
            plan=str(new_plan),
        )

    def _observe_report(self, report: TuningReport) -> None:
        """Record the measurements since the last report."""
        if self._trial is not None:
            key, name, num_bytes = self._trial
            case = self._classes[key]
            if case.trials.next_trial == name:
                case.trials.observe(report.trial_s, num_bytes)
            self._trial = None
        if self._placement.num_nodes > 1:
            watch = self._case_of(report.num_bytes, report.kind, report.is_on_device).drift
            for seconds in report.window:
                watch.observe(seconds)

    def _case_of(self, num_bytes: int, kind: CollectiveKind, is_on_device: bool) -> _ClassTuning:
        key = message_class(num_bytes, kind, is_on_device=is_on_device)
        if key not in self._classes:
            known = self.winners.get(key, "")
            trials = CandidateTrials((known,) if known else self._candidates(num_bytes, kind))
            self._classes[key] = _ClassTuning(kind, is_on_device, trials, chosen=known, rates=dict(self._rates))
        self._classes[key].num_bytes = num_bytes
        return self._classes[key]

    def _candidates(self, num_bytes: int, kind: CollectiveKind) -> tuple[str, ...]:
        """Return the candidates; the other kinds have three schedules, all of which are tried without a simulation."""
        estimates = self._estimate(self._plan, num_bytes, self._rates) if kind == "allreduce" else None
        return pick_candidates(self._plan, num_bytes, estimates, kind)

    def _expire_winner(self, case: _ClassTuning, now_s: float) -> None:
        """Begin trials anew if the last ones are too old."""
        if not case.chosen:
            return
        if case.chosen_at_s is None:
            case.chosen_at_s = now_s
        elif now_s - case.chosen_at_s > MAX_AGE_S:
            case.trials = CandidateTrials(self._candidates(case.num_bytes, case.kind))
            case.chosen, case.chosen_at_s, case.rates = "", None, dict(self._rates)

    def _decide_next(self, case: _ClassTuning) -> TuningDecision:
        """Return a trial, or the winner."""
        num_bytes = case.num_bytes
        trial = None if case.chosen else case.trials.next_trial
        if trial is not None:
            key = message_class(num_bytes, case.kind, is_on_device=case.is_on_device)
            self._trial, case.period = (key, trial, num_bytes), 1
            return TuningDecision(num_bytes=num_bytes, schedule=trial, is_trial=True)
        if not case.chosen:
            self._record_winner(case)
        case.period = self._period(case) if self._placement.num_nodes > 1 else NEVER
        return TuningDecision(num_bytes=num_bytes, schedule=case.chosen, next_in=case.period)

    def _record_winner(self, case: _ClassTuning) -> None:
        case.chosen, case.drift = case.trials.chosen, DriftDetector()
        num_bytes = case.num_bytes
        key = message_class(num_bytes, case.kind, is_on_device=case.is_on_device)
        self.winners[key] = case.chosen
        if not self._rates:
            self._winners_at_nominal_rates[key] = case.chosen
        predicted = {name: self._predicted_s(name, case) for name in case.trials.measured()}
        measured = {name: seconds * num_bytes for name, seconds in case.trials.measured().items()}
        fields = {"version": self._plan_version, "collective": case.kind, "schedule": case.chosen, "bytes": num_bytes}
        trials = {"trials": case.trials.num_trials, "trials_s": case.trials.trials_s}
        self._add_event("schedule_tuned", **fields, predicted_s=predicted, measured_s=measured, **trials)

    def _predicted_s(self, name: str, case: _ClassTuning) -> float | None:
        """Return None if nothing is predicted, as for the native backend."""
        seconds = math.inf if name == NATIVE else self._plan.choose(case.num_bytes, name, case.kind).predicted_s
        return seconds if seconds < math.inf else None

    def _period(self, case: _ClassTuning) -> int:
        """Return the collectives until the next report: often enough to see drift, rarely enough to cost nothing."""
        levels = math.ceil(math.log(max(2, len(self._plan.nodes)), _FAN_OUT))
        report_s = 2 * levels * (self._placement.cluster.latency_s + _FAN_OUT * _MESSAGE_S)
        known = case.trials.measured().get(case.chosen) or case.drift.current or case.drift.baseline
        alike = NATIVE_EQUIVALENT if case.chosen == NATIVE else case.chosen
        took_s = known * case.num_bytes if known else self._predicted_s(alike, case) or report_s
        return max(
            MIN_PERIOD, min(MAX_PERIOD, math.ceil(report_s / (_REPORT_TIME_FRACTION * max(took_s, case.interval_s))))
        )

    def _is_survey_due(self, case: _ClassTuning, now_s: float) -> bool:
        verdict, self._suspects = case.drift.verdict, ()
        if verdict == DriftVerdict.FASTER and not self._rates and not self._placement.rates:
            # No link is slower than the cluster file says: other work has delayed the ranks before.
            case.drift, verdict = DriftDetector(), DriftVerdict.STEADY
        is_worth_it = verdict != DriftVerdict.STEADY and case.drifted_s >= self._survey_s()
        if is_worth_it and now_s >= self._history.next_drift_survey_s:
            now_and_usual = f"{case.drift.current or 0:.3g} s per byte, it was {case.drift.baseline or 0:.3g}"
            self._survey_reason = f"collectives are {verdict.value}: {now_and_usual}"
            return True
        if self._last_doubted_version < self._plan_version and self._is_faster_than_links(case):
            self._last_doubted_version = self._plan_version  # once for each plan: short messages may profit from bursts
            self._survey_reason = "collectives are faster than the links that were measured before"
            return True
        self._survey_reason, self._suspects = "some links were slow: is it over?", self._slow_links()
        is_hoped = case.drift.may_be_faster and now_s >= self._history.next_drift_survey_s
        return bool(case.chosen and self._suspects) and (is_hoped or now_s >= self._history.next_recheck_s)

    def _slow_links(self) -> tuple[str, ...]:
        """Return the links that are slower than they were before anything ran."""
        nominal = self._placement.link_rates() if self._rates else {}
        return tuple(name for name, rate in self._rates.items() if rate < nominal[name])

    def _is_faster_than_links(self, case: _ClassTuning) -> bool:
        """Return True if the winner beat the bound of links measured before: other traffic may have used them then."""
        took = case.trials.measured().get(case.chosen)
        return (
            bool(self._placement.rates)
            and took is not None
            and took * case.num_bytes < _IMPOSSIBLE_FRACTION * self._plan.bound_s(case.num_bytes, case.kind)
        )

    def _update_rates(self, revised_rates: Mapping[str, float]) -> bool:
        """Apply a survey's rates; return False if nothing is new.

        No link is believed to be faster than the cluster file says: short streams profit from bursts. A link whose rate
        was measured may be faster, since other traffic may have used it then. A link that nearly regains its earlier
        rate counts as having it, so that the first plan returns.
        """
        before = dict(self._rates)
        for name, rate in self._placement.link_rates().items():
            if name not in revised_rates:
                continue
            is_faster = name in self._placement.rates and revised_rates[name] * _NOMINAL_FRACTION > rate
            for rates in (self._rates, self._history.rates):
                if revised_rates[name] < _NOMINAL_FRACTION * rate or is_faster:
                    rates[name] = revised_rates[name]
                else:
                    rates.pop(name, None)
        return self._rates != before

    def _survey_s(self) -> float:
        """Return the expected duration of a survey: what a drift has to cost before it is worth one."""
        self._history.duration_s = self._history.duration_s or self._make_survey().intended_s()
        return self._history.duration_s

    def _make_survey(self) -> LinkSurvey:
        return LinkSurvey(self._placement.network(self._rates), tuple(dict.fromkeys(self._placement.nodes)))

    def _begin_survey(self) -> tuple[SurveyPhase, ...]:
        self._survey_phases = self._make_survey().phases(self._suspects)
        return self._survey_phases

    def _compare_plans(self, new_plan: Plan) -> tuple[float, float]:
        """Return the expected seconds of all classes in use, with the current and a new plan, at current rates."""
        before_s = after_s = 0.0
        formulas = PlanPredictor(self._placement)
        for case in self._classes.values():
            expected = CorrectedPrediction(formulas, self._plan, case.num_bytes, case.measured, case.rates, case.kind)
            runs = case.chosen or self._plan.choose(case.num_bytes, None, case.kind).schedule
            before_s += expected.corrected_s(runs, self._rates)
            after_s += expected.best_s(new_plan, self._rates)
        return before_s, after_s

    def _plan_facts(self) -> dict[str, object]:
        plan = self._plan
        return {"version": self._plan_version, "bound_s_per_byte": plan.bound_s_per_byte, "binding": plan.binding}

    def _add_event(self, kind: str, **fields: object) -> None:
        self._events.append(TuningEvent(kind, fields))
