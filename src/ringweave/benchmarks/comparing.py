"""The comparison: links measured, knobs chosen, then all systems alive at once and taking turns."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ringweave import cost, planning, schedules
from ringweave.benchmarks import layouts, machine, results, rounds, systems
from ringweave.benchmarks.places import link_rates
from ringweave.benchmarks.places.link_rates import LinkRates
from ringweave.benchmarks.progress import Progress
from ringweave.benchmarks.requests import Request
from ringweave.benchmarks.results import Result
from ringweave.benchmarks.searching import Search, first_line
from ringweave.benchmarks.sessions.opening import Hall
from ringweave.benchmarks.sessions.session import Session
from ringweave.benchmarks.systems import ALL, Knob
from ringweave.errors import LaunchError, explain
from ringweave.units import format_bytes


@dataclass(kw_only=True, slots=True)
class Report:
    """Everything that a comparison found."""

    request: Request
    rates: LinkRates | None
    """None where there are no limited links."""
    results: list[Result] = field(default_factory=list)
    search: list[dict[str, Any]] = field(default_factory=list)
    """What each knob gave."""
    layouts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Order -> node of each rank."""
    versions: dict[str, str] = field(default_factory=dict)
    """System -> what it calls itself."""
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        cluster = self.request.cluster
        rates = self.rates
        described = machine.describe()
        described["versions"] |= self.versions
        return {
            "collective": "allreduce",
            "dtype": "float32",
            "cluster": f"local:{cluster.num_devices}" if self.request.is_local else cluster.name,
            "num_nodes": cluster.num_nodes,
            "num_ranks": cluster.num_devices,
            **described,
            "links": [
                {"link": link, "raw_bytes_per_s": raw, "measured_bytes_per_s": measured}
                for link, raw, measured in (rates.rows() if rates else ())
            ],
            "orders": {order: list(nodes) for order, nodes in self.layouts.items()},
            "search": self.search,
            "results": [result.document() for result in self.results],
            "notes": self.notes,
        }


def compare(request: Request, hall: Hall, progress: Progress) -> Report:
    """Measure all that is asked for. Systems that are not here are left out, with a note.

    Raises:
        LaunchError: None of the systems is here, or ranks or streams could not be started.
        CommunicationError: A sum was wrong, or a rank failed.
    """
    available, notes = _available(request.systems)
    for note in notes:
        progress.step(note)
    rates = None
    if hall.place.is_limited:
        progress.step("measuring what every link delivers")
        rates = link_rates.measure(hall.place)
        notes += rates.notes
    report = Report(request=request, rates=rates, notes=notes)
    report.layouts, left_out = layouts.distinct(request.cluster, request.orders)
    report.notes += left_out
    for order, node_of_rank in report.layouts.items():
        _Comparison(report, hall, progress, order, node_of_rank).run(available)
    return report


def _available(names: Sequence[str]) -> tuple[list[str], list[str]]:
    problems = {name: ALL[name].problem() for name in names}
    here = [name for name in names if not problems[name]]
    if not here:
        said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise LaunchError(explain("systems that can run here", got=[], expected="at least one", do=said))
    return here, [f"{name} is left out: {problem}" for name, problem in problems.items() if problem]


class _Comparison:
    """All systems on one layout of ranks."""

    def __init__(
        self, report: Report, hall: Hall, progress: Progress, order: str, node_of_rank: tuple[str, ...]
    ) -> None:
        self._report, self._hall, self._progress = report, hall, progress
        self._order, self._node_of_rank = order, node_of_rank
        self._limits_s = {
            size: rounds.timeout_s(size, self._bound_s(size, None) or 0.0) for size in report.request.sizes
        }

    def run(self, names: Sequence[str]) -> None:
        shape = systems.shape(self._node_of_rank, len(os.sched_getaffinity(0)))
        search = Search(self._hall, self._node_of_rank, self._limits_s, self._report.request.num_search_rounds)
        knobs = search.best(names, shape, self._progress)
        self._report.search += [attempt.document(self._order) for attempt in search.attempts]
        self._report.notes += search.notes
        with _LiveSessions(self._hall, self._node_of_rank, self._progress) as live:
            for size in self._report.request.sizes:
                wanted = {name: knobs[name, size] for name in names if (name, size) in knobs}
                self._measure(size, live.exactly(wanted, self._report.notes))
                self._report.versions |= live.versions

    def _measure(self, size: int, sessions: Mapping[str, Session]) -> None:
        played: dict[str, list[rounds.Round]] = {name: [] for name in sessions}
        text = f"{format_bytes(size)}, order {self._order}"
        self._progress.step(f"{text}: {self._report.request.num_rounds} rounds of {', '.join(sessions)}")
        for name, session in sessions.items():
            rounds.prepare(session, size)
            played[name].append(self._play(session, 0, size))  # not measured: connections are made, pages touched
        self._progress.begin_rounds()
        for index, name in rounds.turns(self._report.request.num_rounds, list(sessions)):
            self._progress.rounds(text, index, self._report.request.num_rounds)
            played[name].append(self._play(sessions[name], index + 1, size))
        self._report.results += [self._result(size, sessions[name], found) for name, found in played.items()]

    def _play(self, session: Session, index: int, size: int) -> rounds.Round:
        return rounds.play(session, self._hall.place, index, self._limits_s[size])

    def _result(self, size: int, session: Session, played: Sequence[rounds.Round]) -> Result:
        warm_up, measured = played[0], played[1:]
        schedule = results.schedule_used(warm_up.schedules, measured[-1].schedules)
        num_calls = len(measured) * rounds.calls_per_round(size)
        links = measured[0].bytes_on_links
        return Result(
            system=session.system.name,
            knob=session.knob.name,
            order=self._order,
            num_bytes=size,
            num_ranks=len(self._node_of_rank),
            seconds=tuple(each.seconds for each in measured),
            bound_s=self._bound_s(size, self._report.rates),
            raw_bound_s=self._bound_s(size, None),
            wire_bytes={link: sum(each.bytes_on_links[link] for each in measured) / num_calls for link in links},
            theory_bytes=self._theory(schedule, size),
            schedule=schedule,
        )

    def _bound_s(self, size: int, rates: LinkRates | None) -> float | None:
        if not self._hall.place.is_limited:
            return None
        believed = rates.believed if rates else None
        return cost.bound(self._report.request.cluster, size, rates=believed).seconds or None

    def _theory(self, schedule: str | None, size: int) -> Mapping[str, float] | None:
        """What the schedule asks of the links, planned here as the ranks planned it."""
        if schedule in (None, schedules.HOST) or not self._hall.place.is_limited:
            return None
        plan = planning.plan_group(self._report.request.cluster, self._node_of_rank).generate(schedule)
        return cost.bytes_on_links(plan, self._report.request.cluster, self._node_of_rank, size)


class _LiveSessions:
    """The sessions that are up; a context manager."""

    def __init__(self, hall: Hall, node_of_rank: tuple[str, ...], progress: Progress) -> None:
        self._hall, self._node_of_rank, self._progress = hall, node_of_rank, progress
        self._open: dict[str, tuple[Session, ExitStack]] = {}

    def __enter__(self) -> "_LiveSessions":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as everything:
            for opened in self._open.values():
                everything.callback(opened[1].close)
        self._open = {}

    @property
    def versions(self) -> dict[str, str]:
        """System -> what it calls itself."""
        return {name: session.version for name, (session, _) in self._open.items()}

    def exactly(self, knobs: Mapping[str, Knob], notes: list[str]) -> dict[str, Session]:
        """These systems with these knobs, all up; sessions that fit already are kept."""
        for name in [name for name, (session, _) in self._open.items() if knobs.get(name) != session.knob]:
            self._open.pop(name)[1].close()
        for name, knob in knobs.items():
            if name not in self._open:
                self._start(name, knob, notes)
        if not self._open:
            raise LaunchError("systems: none could be started, expected at least one. " + " ".join(notes))
        return {name: self._open[name][0] for name in knobs if name in self._open}

    def _start(self, name: str, knob: Knob, notes: list[str]) -> None:
        self._progress.step(f"starting {name}: {knob.name}")
        stack = ExitStack()
        try:
            session = stack.enter_context(self._hall.open(ALL[name], knob, self._node_of_rank))
        except LaunchError as error:
            if name == "ringweave":
                raise
            notes.append(f"{name} ({knob.name}) did not start and is left out: {first_line(error)}")
            self._progress.step(notes[-1])
            return
        self._open[name] = session, stack
