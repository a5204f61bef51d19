"""The comparison: links measured, knobs chosen, then all systems alive at once and taking turns."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ringweave import cost, planning, schedules
from ringweave.benchmarks import confessing, layouts, machine, results, rounds, systems
from ringweave.benchmarks.places import link_rates
from ringweave.benchmarks.places.link_rates import LinkRates
from ringweave.benchmarks.progress import Progress
from ringweave.benchmarks.requests import Request
from ringweave.benchmarks.results import Result
from ringweave.benchmarks.searching import Search, first_line
from ringweave.benchmarks.sessions.opening import Hall
from ringweave.benchmarks.sessions.session import Session
from ringweave.benchmarks.systems import ALL, Knob
from ringweave.errors import LaunchError, PeerError, explain
from ringweave.units import format_bytes

_PARTIAL = "not finished: it was written while sizes or orders had still to be measured"


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
    described: Mapping[str, Any] = field(default_factory=machine.describe)
    """Machine, versions and commit when it began: what is written meanwhile may change files of the commit."""
    is_partial: bool = False
    """It goes on: sizes or orders are missing."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        cluster = self.request.cluster
        rates = self.rates
        return {
            "collective": "allreduce",
            "dtype": "float32",
            "cluster": f"local:{cluster.num_devices}" if self.request.is_local else cluster.name,
            "num_nodes": cluster.num_nodes,
            "num_ranks": cluster.num_devices,
            **self.described,
            "versions": {**self.described["versions"], **self.versions},
            "links": [
                {"link": link, "raw_bytes_per_s": raw, "measured_bytes_per_s": measured}
                for link, raw, measured in (rates.rows() if rates else ())
            ],
            "orders": {order: list(nodes) for order, nodes in self.layouts.items()},
            "search": self.search,
            "results": [result.document() for result in self.results],
            "notes": [*self.notes, *([_PARTIAL] if self.is_partial else [])],
        }


def compare(
    request: Request, hall: Hall, progress: Progress, keep: Callable[[Report], None] = lambda report: None
) -> Report:
    """Measure all that is asked for. Systems that are not here are left out, with a note.

    Args:
        request: What is asked for.
        hall: Where the systems' ranks are.
        progress: Is told what is done.
        keep: Gets the report after each size of each order, so that a failure after hours does not lose them.

    Raises:
        LaunchError: None of the systems is here, or ranks or streams could not be started.
        PeerError: A rank of ringweave failed.
        CommunicationError: A sum was wrong.
    """
    available, notes = _available(request.systems)
    for note in notes:
        progress.step(note)
    rates = None
    if hall.place.is_limited:
        progress.step("measuring what every link delivers")
        rates = link_rates.measure(hall.place)
        notes += rates.notes
    report = Report(request=request, rates=rates, notes=notes, is_partial=True)
    report.notes += confessing.confess(request, ALL, report.described["git_commit"])
    report.layouts, left_out = layouts.distinct(request.cluster, request.orders)
    report.notes += left_out
    for order, node_of_rank in report.layouts.items():
        _Comparison(report, hall, progress, order, node_of_rank).run(available, keep)
    report.is_partial = False
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

    def run(self, names: Sequence[str], keep: Callable[[Report], None]) -> None:
        shape = systems.shape(self._node_of_rank, len(os.sched_getaffinity(0)))
        search = Search(self._hall, self._node_of_rank, self._limits_s, self._report.request.num_search_rounds)
        knobs = search.best(names, shape, self._progress)
        self._report.search += [attempt.document(self._order) for attempt in search.attempts]
        self._report.notes += search.notes
        with _LiveSessions(self._hall, self._node_of_rank, self._progress) as live:
            for size in self._report.request.sizes:
                wanted = {name: knobs[name, size] for name in names if (name, size) in knobs}
                live.exactly(wanted, self._report.notes)
                self._report.versions |= live.versions
                self._measure(size, live)
                keep(self._report)

    def _measure(self, size: int, live: "_LiveSessions") -> None:
        text = f"{format_bytes(size)}, order {self._order}"
        names = list(live.sessions)
        self._progress.step(f"{text}: {self._report.request.num_rounds} rounds of {', '.join(names)}")
        played: dict[str, list[rounds.Round]] = {name: [] for name in names}
        for name in names:
            self._turn(name, 0, size, live, played)  # not measured: connections are made, pages touched
        self._progress.begin_rounds()
        for index, name in rounds.turns(self._report.request.num_rounds, names):
            self._progress.rounds(text, index, self._report.request.num_rounds)
            self._turn(name, index + 1, size, live, played)
        self._report.results += [self._result(size, session, played[name]) for name, session in live.sessions.items()]

    def _turn(
        self, name: str, index: int, size: int, live: "_LiveSessions", played: dict[str, list[rounds.Round]]
    ) -> None:
        """One round of one system. A peer that fails is left out from there on; ringweave may not."""
        session = live.sessions.get(name)
        if session is None:
            return
        try:
            if index == 0:
                rounds.prepare(session, size)
            played[name].append(rounds.play(session, self._hall.place, index, self._limits_s[size]))
        except PeerError as error:
            if name == "ringweave":
                raise
            live.drop(name)
            self._report.notes.append(f"{name} is left out at {format_bytes(size)}: {first_line(error)}")
            self._progress.step(self._report.notes[-1])

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
    def sessions(self) -> dict[str, Session]:
        """System -> its session."""
        return {name: session for name, (session, _) in self._open.items()}

    def drop(self, name: str) -> None:
        """End one system's ranks."""
        self._open.pop(name)[1].close()

    @property
    def versions(self) -> dict[str, str]:
        """System -> what it calls itself."""
        return {name: session.version for name, (session, _) in self._open.items()}

    def exactly(self, knobs: Mapping[str, Knob], notes: list[str]) -> None:
        """Have these systems with these knobs, all up; sessions that fit already are kept."""
        for name in [name for name, (session, _) in self._open.items() if knobs.get(name) != session.knob]:
            self.drop(name)
        for name, knob in knobs.items():
            if name not in self._open:
                self._start(name, knob, notes)
        if not self._open:
            raise LaunchError("systems: none could be started, expected at least one. " + " ".join(notes))
        self._open = {name: self._open[name] for name in knobs if name in self._open}

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
