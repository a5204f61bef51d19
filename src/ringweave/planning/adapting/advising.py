"""What the first rank of a group makes of what all ranks report: trials, surveys, new plans. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringweave.planning.adapting.drifting import Verdict, Watch
from ringweave.planning.adapting.expecting import LIKE_HOST, Expectation, Formulas
from ringweave.planning.adapting.reports import Report
from ringweave.planning.adapting.rulings import Ruling
from ringweave.planning.adapting.situations import Situation
from ringweave.planning.adapting.surveys import Phase, Survey
from ringweave.planning.adapting.tuning import Tuner, candidates, size_class
from ringweave.planning.plans import Plan
from ringweave.schedules import HOST

MIN_PERIOD, MAX_PERIOD = 4, 256
"""Collectives of a class between two reports."""
NEVER = 2**62
MAX_AGE_S = 24 * 3600.0
"""What won longer ago is tried again: what disturbed its trials is over by now, in most cases."""

_REPORT_SHARE = 0.005
"""Of the time from one collective of a class to the next, what reports may take."""
_SURVEY_SHARE = 0.01
"""Of the time, what surveys may take that find nothing new, in the long run."""
_FIRST_SHARE = 0.1
"""The same for the first one; each further one that finds nothing has half."""
_MIN_GAIN = 1.05
"""A new plan must be expected to be so much faster than what runs."""
_AS_BUILT = 0.87
"""Of the rate that the cluster says: a link that reaches this has it."""
_IMPOSSIBLE = 0.8
"""Of the bound: what takes less shows that links are faster than is believed."""
_MESSAGE_S = 1e-4
"""What passing a report on costs a rank: a few Python calls and waking up."""
_FAN_OUT = 8


@dataclass(slots=True)
class _Case:
    """What is known of one class of sizes."""

    tuner: Tuner
    watch: Watch = field(default_factory=Watch)
    settled: str = ""
    since_s: float | None = None
    """By the first rank's clock, when it was first seen to be settled."""
    num_bytes: int = 0
    """Newest size."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """What was believed to differ while it was measured."""
    ruled_s: float | None = None
    """By the first rank's clock, when the last ruling was made; it held for `period` collectives."""
    period: int = 1
    each_s: float = 0.0
    """From one collective to the next, what is between them included, since the last ruling."""

    def pass_time(self, now_s: float) -> None:
        """The ranks have come to the next ruling."""
        if self.ruled_s is not None:
            self.each_s = (now_s - self.ruled_s) / self.period
        self.ruled_s = now_s

    @property
    def measured(self) -> dict[str, float]:
        """Seconds per byte by schedule: of the trials, or, where they were in an earlier run, of what won them."""
        tried = self.tuner.warm()
        return tried or ({self.settled: self.watch.usual} if self.settled and self.watch.usual else {})


class Note(NamedTuple):
    """Something that belongs into the event log: kind and fields, without rank and group."""

    kind: str
    fields: dict[str, object]


class Adviser:
    """Rules on what comes next, from the reports of all ranks; only the first rank has one."""

    def __init__(
        self,
        situation: Situation,
        plan: Plan,
        tuned: Mapping[int, str] | None = None,
        estimate: Callable[[Plan, int, Mapping[str, float]], Mapping[str, float]] | None = None,
    ) -> None:
        """What is known at the start.

        Args:
            situation: Where the group runs.
            plan: Made for it.
            tuned: Which schedule won which class of sizes in an earlier run with the same plan.
            estimate: What simulations say of a plan's candidates for a size, at rates that differ from what was known;
                asked once for each class that is to be tried. None is `situation.estimate`.
        """
        self._estimate = estimate or situation.estimate
        self.tuned = dict(tuned or {})
        self._tuned_as_built = dict(tuned or {})
        self._notes: list[Note] = []
        self._situation = situation
        self._plan = plan
        self._version = 1
        self._cases: dict[int, _Case] = {}
        self._trial: tuple[int, str, int] | None = None
        self._rates: dict[str, float] = {}
        self._phases: tuple[Phase, ...] = ()
        self._why = ""
        self._suspects: tuple[str, ...] = ()
        self._num_vain = 0
        self._num_doubts = 0
        self._next_alarm_s = self._next_look_s = -math.inf
        self._note("plan_made", rates={}, **self._facts())

    @property
    def rates(self) -> Mapping[str, float]:
        """Links that were found to differ from what was known before, in bytes per second."""
        return self._rates

    @property
    def plan(self) -> Plan:
        """The plan that holds."""
        return self._plan

    def take_notes(self) -> list[Note]:
        """What happened since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def rule(self, report: Report, now_s: float) -> Ruling:
        """What the message of the report takes, or which survey has to come first.

        Args:
            report: That of all ranks together.
            now_s: The first rank's clock.
        """
        self._learn(report)
        case = self._case(report.num_bytes)
        case.pass_time(now_s)
        self._age(case, now_s)
        if self._is_survey_due(case, now_s):
            return Ruling(num_bytes=report.num_bytes, phases=self._begin_survey())
        return self._proceed(report.num_bytes, case)

    def resolve(self, num_bytes: int, measured: Sequence[float], now_s: float, took_s: float) -> Ruling:
        """What follows from a survey.

        Args:
            num_bytes: Size of the message that waits for it.
            measured: Bytes per second of each stream.
            now_s: The first rank's clock.
            took_s: What the survey took.
        """
        survey = self._survey()
        revised = survey.revised(self._phases, measured) if all(rate > 0 for rate in measured) else {}
        self._next_look_s = now_s + took_s / _SURVEY_SHARE
        self._next_alarm_s = now_s + took_s / max(_SURVEY_SHARE, _FIRST_SHARE / 2**self._num_vain)
        self._num_vain += 1
        is_new = self._believe(revised)
        fresh = self._situation.plan(self._rates) if is_new else self._plan
        before_s, after_s = self._compare(fresh)
        if not is_new or before_s < after_s * _MIN_GAIN:
            for case in self._cases.values():
                case.watch = Watch()  # what was seen is the usual now
                if not case.tuner.warm():
                    case.rates = dict(self._rates)
            return self._proceed(num_bytes, self._case(num_bytes))
        self._num_vain, self._next_alarm_s = 0, now_s
        self._version += 1
        self._plan = fresh
        self._cases.clear()
        self.tuned = dict(self._tuned_as_built) if not self._rates else {}
        self._trial = None
        self._note("plan_made", rates=dict(self._rates), **self._facts())
        self._note("plan_changed", version=self._version, why=self._why, rates=revised, old_s=before_s, new_s=after_s)
        ruling = self._proceed(num_bytes, self._case(num_bytes))
        return Ruling(
            num_bytes=num_bytes,
            schedule=ruling.schedule,
            is_trial=ruling.is_trial,
            next_in=ruling.next_in,
            plan=str(fresh),
        )

    def _learn(self, report: Report) -> None:
        """Take in what was measured since the last report."""
        if self._trial is not None:
            number, name, num_bytes = self._trial
            case = self._cases[number]
            if case.tuner.next_trial == name:
                case.tuner.observe(report.trial_s, num_bytes)
            self._trial = None
        if self._situation.num_nodes > 1:
            watch = self._case(report.num_bytes).watch
            for seconds in report.window:
                watch.observe(seconds)

    def _case(self, num_bytes: int) -> _Case:
        number = size_class(num_bytes)
        if number not in self._cases:
            known = self.tuned.get(number, "")
            tuner = Tuner((known,) if known else self._candidates(num_bytes))
            self._cases[number] = _Case(tuner, settled=known, rates=dict(self._rates))
        self._cases[number].num_bytes = num_bytes
        return self._cases[number]

    def _candidates(self, num_bytes: int) -> tuple[str, ...]:
        return candidates(self._plan, num_bytes, self._estimate(self._plan, num_bytes, self._rates))

    def _age(self, case: _Case, now_s: float) -> None:
        """Begin trials anew where the last ones are too long ago."""
        if not case.settled:
            return
        if case.since_s is None:
            case.since_s = now_s
        elif now_s - case.since_s > MAX_AGE_S:
            case.tuner = Tuner(self._candidates(case.num_bytes))
            case.settled, case.since_s, case.rates = "", None, dict(self._rates)

    def _proceed(self, num_bytes: int, case: _Case) -> Ruling:
        """A trial, or what has won."""
        trial = None if case.settled else case.tuner.next_trial
        if trial is not None:
            self._trial, case.period = (size_class(num_bytes), trial, num_bytes), 1
            return Ruling(num_bytes=num_bytes, schedule=trial, is_trial=True)
        if not case.settled:
            self._settle(num_bytes, case)
        case.period = self._period(num_bytes, case) if self._situation.num_nodes > 1 else NEVER
        return Ruling(num_bytes=num_bytes, schedule=case.settled, next_in=case.period)

    def _settle(self, num_bytes: int, case: _Case) -> None:
        case.settled, case.watch = case.tuner.chosen, Watch()
        self.tuned[size_class(num_bytes)] = case.settled
        if not self._rates:
            self._tuned_as_built[size_class(num_bytes)] = case.settled
        predicted = {name: self._predicted_s(name, num_bytes) for name in case.tuner.measured()}
        measured = {name: seconds * num_bytes for name, seconds in case.tuner.measured().items()}
        self._note(
            "schedule_tuned",
            version=self._version,
            schedule=case.settled,
            bytes=num_bytes,
            predicted_s=predicted,
            measured_s=measured,
        )

    def _predicted_s(self, name: str, num_bytes: int) -> float | None:
        """None where nothing is predicted, as for the host library."""
        seconds = math.inf if name == HOST else self._plan.choose(num_bytes, name).predicted_s
        return seconds if seconds < math.inf else None

    def _period(self, num_bytes: int, case: _Case) -> int:
        """Collectives until the next report: often enough to see drift, rarely enough to cost nothing."""
        levels = math.ceil(math.log(max(2, len(self._plan.nodes)), _FAN_OUT))
        report_s = 2 * levels * (self._situation.cluster.latency_s + _FAN_OUT * _MESSAGE_S)
        known = case.tuner.measured().get(case.settled) or case.watch.now or case.watch.usual
        alike = LIKE_HOST if case.settled == HOST else case.settled
        took_s = known * num_bytes if known else self._predicted_s(alike, num_bytes) or report_s
        return max(MIN_PERIOD, min(MAX_PERIOD, math.ceil(report_s / (_REPORT_SHARE * max(took_s, case.each_s)))))

    def _is_survey_due(self, case: _Case, now_s: float) -> bool:
        verdict, self._suspects = case.watch.verdict, ()
        if verdict != Verdict.STEADY and now_s >= self._next_alarm_s:
            now_and_usual = f"{case.watch.now or 0:.3g} s per byte, it was {case.watch.usual or 0:.3g}"
            self._why = f"collectives are {verdict.value}: {now_and_usual}"
            return True
        if self._num_doubts < self._version and self._is_impossible(case):
            self._num_doubts = self._version  # once for each plan: short messages may profit from bursts
            self._why = "collectives are faster than the links that were measured before"
            return True
        self._why, self._suspects = "some links were slow: is it over?", self._slow()
        is_hoped = case.watch.may_be_faster and now_s >= self._next_alarm_s
        return bool(case.settled and self._suspects) and (is_hoped or now_s >= self._next_look_s)

    def _slow(self) -> tuple[str, ...]:
        """Links that are slower than they were before anything ran."""
        nominal = self._nominal() if self._rates else {}
        return tuple(name for name, rate in self._rates.items() if rate < nominal[name])

    def _is_impossible(self, case: _Case) -> bool:
        """Whether what won took less than links allow that were measured before: others may have used them then."""
        took = case.tuner.measured().get(case.settled)
        return bool(self._situation.rates) and took is not None and took < _IMPOSSIBLE * self._plan.bound_s_per_byte

    def _nominal(self) -> dict[str, float]:
        """Bytes per second of all links, as they were known before anything ran."""
        net = self._situation.network({})
        ups = {net.up_name(vertex): float(net.up_bytes_per_s[vertex]) for vertex in range(1, len(net))}
        downs = {net.down_name(vertex): float(net.down_bytes_per_s[vertex]) for vertex in range(1, len(net))}
        return ups | downs

    def _believe(self, revised: Mapping[str, float]) -> bool:
        """Take in what a survey found; False if nothing is new.

        No link is believed to be faster than a cluster file says: short streams profit from bursts. One whose rate was
        measured is, since others may have used it then. One that has nearly the rate again that was known before counts
        as having it, so that the first plan comes back.
        """
        before = dict(self._rates)
        for name, rate in self._nominal().items():
            if name not in revised:
                continue
            is_faster = name in self._situation.rates and revised[name] * _AS_BUILT > rate
            if revised[name] < _AS_BUILT * rate or is_faster:
                self._rates[name] = revised[name]
            else:
                self._rates.pop(name, None)
        return self._rates != before

    def _survey(self) -> Survey:
        return Survey(self._situation.network(self._rates), tuple(dict.fromkeys(self._situation.nodes)))

    def _begin_survey(self) -> tuple[Phase, ...]:
        self._phases = self._survey().phases(self._suspects)
        return self._phases

    def _compare(self, fresh: Plan) -> tuple[float, float]:
        """Expected seconds of all classes in use, as they run now and with a new plan, at the rates of now."""
        before_s = after_s = 0.0
        formulas = Formulas(self._situation)
        for case in self._cases.values():
            expected = Expectation(formulas, self._plan, case.num_bytes, case.measured, case.rates)
            runs = case.settled or self._plan.choose(case.num_bytes).schedule
            before_s += expected.now_s(runs, self._rates)
            after_s += expected.best_s(fresh, self._rates)
        return before_s, after_s

    def _facts(self) -> dict[str, object]:
        return {
            "version": self._version,
            "bound_s_per_byte": self._plan.bound_s_per_byte,
            "binding": self._plan.binding,
        }

    def _note(self, kind: str, **fields: object) -> None:
        self._notes.append(Note(kind, fields))
