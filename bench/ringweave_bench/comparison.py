"""A benchmark run: bring the lab up, measure links, choose knobs, then let all systems take turns."""

import os
import shutil
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringweave import cost, lab, planning, schedules
from ringweave.cli.echo import ProgressPrinter
from ringweave.errors import LaunchError, PeerError
from ringweave.launcher import processes
from ringweave.units import format_bytes
from ringweave_bench import benchmark_request, link_rates, machine_description, results, rounds, systems
from ringweave_bench.bench_cluster import BenchCluster, LabBenchCluster, LocalBenchCluster
from ringweave_bench.benchmark_request import BenchmarkRequest
from ringweave_bench.knob_search import KnobSearch, error_first_line
from ringweave_bench.link_rates import MeasuredLinkRates
from ringweave_bench.results import BenchmarkResult
from ringweave_bench.system_session import SessionFactory, SystemSession
from ringweave_bench.systems import SYSTEMS, Knob
from ringweave_bench.worker_channel import WorkerListener

MIN_ROUNDS = 9
"""Medians and ranges of fewer rounds depend on other load of the machine."""
_DIRTY_SUFFIX = "-dirty"


def find_caveats(request: BenchmarkRequest, known_systems: Iterable[str], git_commit: str | None) -> list[str]:
    """Return one sentence for each shortcoming of the comparison; none if there is none."""
    notes = []
    missing = [name for name in known_systems if name not in request.systems]
    if missing:
        notes.append(f"not asked for, so not measured: {', '.join(missing)}")
    if request.num_rounds < MIN_ROUNDS:
        notes.append(f"{request.num_rounds} rounds were asked for, fewer than the {MIN_ROUNDS} of a result to rely on")
    if git_commit is not None and git_commit.endswith(_DIRTY_SUFFIX):
        notes.append(f"tracked files other than results differ from the commit ({git_commit})")
    return notes


_PARTIAL_NOTE = "not finished: it was written while sizes or orders had still to be measured"


@dataclass(kw_only=True, slots=True)
class ComparisonReport:
    """Results of a comparison."""

    request: BenchmarkRequest
    rates: MeasuredLinkRates | None
    """Link rates; None without limited links."""
    results: list[BenchmarkResult] = field(default_factory=list)
    search: list[dict[str, Any]] = field(default_factory=list)
    """Results of each knob."""
    layouts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Order -> node of each rank."""
    versions: dict[str, str] = field(default_factory=dict)
    """System -> its version."""
    notes: list[str] = field(default_factory=list)
    machine_description: Mapping[str, Any] = field(default_factory=machine_description.describe_machine)
    """Machine, versions and commit at the beginning, since files of the commit may change meanwhile."""
    is_partial: bool = False
    """True while sizes or orders are missing."""

    def document(self) -> dict[str, Any]:
        cluster = self.request.cluster
        rates = self.rates
        return {
            "collective": self.request.collective,
            "dtype": "float32",
            "cluster": f"local:{cluster.num_devices}" if self.request.is_local else cluster.name,
            "num_nodes": cluster.num_nodes,
            "num_ranks": cluster.num_devices,
            **self.machine_description,
            "versions": {**self.machine_description["versions"], **self.versions},
            "links": [
                {"link": link, "raw_bytes_per_s": raw, "measured_bytes_per_s": measured}
                for link, raw, measured in (rates.rows() if rates else ())
            ],
            "orders": {order: list(nodes) for order, nodes in self.layouts.items()},
            "search": self.search,
            "results": [result.document() for result in self.results],
            "notes": [*self.notes, *([_PARTIAL_NOTE] if self.is_partial else [])],
        }


def compare(
    request: BenchmarkRequest,
    session_factory: SessionFactory,
    progress: ProgressPrinter,
    save_partial: Callable[[ComparisonReport], None] = lambda report: None,
) -> ComparisonReport:
    """Measure everything requested. Systems that are not installed are left out, with a note.

    Args:
        request: Options of the comparison.
        session_factory: Opens sessions of the systems' ranks.
        progress: Prints the progress.
        save_partial: Called with the report after each size of each order, so that a failure after hours does not
            lose them.

    Raises:
        LaunchError: None of the systems is installed, or ranks or streams could not be started.
        PeerError: A rank of ringweave failed.
        CommunicationError: A sum was wrong.
    """
    available, notes = _available_systems(request.systems)
    for note in notes:
        progress.print_step(note)
    rates = None
    if session_factory.bench_cluster.is_limited:
        progress.print_step("measuring what every link delivers")
        rates = link_rates.measure_link_rates(session_factory.bench_cluster)
        notes += rates.notes
    report = ComparisonReport(request=request, rates=rates, notes=notes, is_partial=True)
    report.notes += find_caveats(request, SYSTEMS, report.machine_description["git_commit"])
    report.layouts, left_out = benchmark_request.distinct_layouts(request.cluster, request.orders)
    report.notes += left_out
    for order, node_of_rank in report.layouts.items():
        _LayoutComparison(report, session_factory, progress, order, node_of_rank).run(available, save_partial)
    report.is_partial = False
    return report


def _available_systems(names: Sequence[str]) -> tuple[list[str], list[str]]:
    problems = {name: SYSTEMS[name].unavailable_reason() for name in names}
    here = [name for name in names if not problems[name]]
    if not here:
        said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise LaunchError("systems that can run here", got=[], expected="at least one", do=said)
    return here, [f"{name} is left out: {problem}" for name, problem in problems.items() if problem]


class _LayoutComparison:
    """Comparison of all systems on one layout of ranks."""

    def __init__(
        self,
        report: ComparisonReport,
        session_factory: SessionFactory,
        progress: ProgressPrinter,
        order: str,
        node_of_rank: tuple[str, ...],
    ) -> None:
        self._report, self._session_factory, self._progress = report, session_factory, progress
        self._order, self._node_of_rank = order, node_of_rank
        self._limits_s = {
            size: rounds.round_timeout_s(size, self._bound_s(size, None) or 0.0) for size in report.request.sizes
        }

    def run(self, names: Sequence[str], save_partial: Callable[[ComparisonReport], None]) -> None:
        request = self._report.request
        shape = systems.rank_shape(self._node_of_rank, len(os.sched_getaffinity(0)), request.collective)
        search = KnobSearch(
            self._session_factory, self._node_of_rank, self._limits_s, request.num_search_rounds, request.collective
        )
        knobs = search.best_knobs(names, shape, self._progress)
        self._report.search += [attempt.document(self._order) for attempt in search.attempts]
        self._report.notes += search.notes
        with _OpenSessions(self._session_factory, self._node_of_rank, self._progress) as live:
            for size in self._report.request.sizes:
                wanted = {name: knobs[name, size] for name in names if (name, size) in knobs}
                live.ensure_open(wanted, self._report.notes)
                self._report.versions |= live.versions
                self._measure(size, live)
                save_partial(self._report)

    def _measure(self, size: int, live: "_OpenSessions") -> None:
        text = f"{format_bytes(size)}, order {self._order}"
        names = list(live.sessions)
        self._progress.print_step(f"{text}: {self._report.request.num_rounds} rounds of {', '.join(names)}")
        played: dict[str, list[rounds.BenchmarkRound]] = {name: [] for name in names}
        for name in names:
            self._play_turn(name, 0, size, live, played)  # not measured: connections are made, pages touched
        self._progress.begin_rounds()
        for index, name in rounds.alternate_systems(self._report.request.num_rounds, names):
            self._progress.print_rounds(text, index, self._report.request.num_rounds)
            self._play_turn(name, index + 1, size, live, played)
        self._report.results += [self._result(size, session, played[name]) for name, session in live.sessions.items()]

    def _play_turn(
        self, name: str, index: int, size: int, live: "_OpenSessions", played: dict[str, list[rounds.BenchmarkRound]]
    ) -> None:
        """Play one round of one system. A peer that fails is left out from there on; ringweave's failure is raised."""
        session = live.sessions.get(name)
        if session is None:
            return
        try:
            if index == 0:
                rounds.prepare_buffers(session, self._report.request.collective, size)
            played[name].append(
                rounds.play_round(session, self._session_factory.bench_cluster, index, self._limits_s[size])
            )
        except PeerError as error:
            if name == "ringweave":
                raise
            live.close_session(name)
            self._report.notes.append(f"{name} is left out at {format_bytes(size)}: {error_first_line(error)}")
            self._progress.print_step(self._report.notes[-1])

    def _result(self, size: int, session: SystemSession, played: Sequence[rounds.BenchmarkRound]) -> BenchmarkResult:
        warm_up, measured = played[0], played[1:]
        schedule = results.schedule_used(warm_up.schedules, measured[-1].schedules)
        num_calls = len(measured) * rounds.calls_per_round(size)
        links = measured[0].bytes_on_links
        return BenchmarkResult(
            system=session.system.name,
            knob=session.knob.name,
            order=self._order,
            num_bytes=size,
            num_ranks=len(self._node_of_rank),
            seconds=tuple(each.seconds for each in measured),
            processor_s=statistics.median(each.processor_s for each in measured),
            bound_s=self._bound_s(size, self._report.rates),
            raw_bound_s=self._bound_s(size, None),
            wire_bytes={link: sum(each.bytes_on_links[link] for each in measured) / num_calls for link in links},
            theory_bytes=self._theory_bytes(schedule, size),
            schedule=schedule,
        )

    def _bound_s(self, size: int, rates: MeasuredLinkRates | None) -> float | None:
        if not self._session_factory.bench_cluster.is_limited:
            return None
        link_rates = rates.best_known if rates else None
        request, nodes = self._report.request, self._node_of_rank
        return cost.bound(request.cluster, size, nodes=nodes, rates=link_rates, kind=request.collective).seconds or None

    def _theory_bytes(self, schedule: str | None, size: int) -> Mapping[str, float] | None:
        """Return the bytes per link of the schedule, planned here as the ranks planned it."""
        if schedule in (None, schedules.NATIVE) or not self._session_factory.bench_cluster.is_limited:
            return None
        request = self._report.request
        plan = planning.plan_group(request.cluster, self._node_of_rank)
        planned = plan.generate(schedule, request.collective, 0 if request.collective == "broadcast" else None)
        return cost.bytes_on_links(planned, request.cluster, self._node_of_rank, size)


class _OpenSessions:
    """The open sessions; a context manager."""

    def __init__(
        self, session_factory: SessionFactory, node_of_rank: tuple[str, ...], progress: ProgressPrinter
    ) -> None:
        self._session_factory, self._node_of_rank, self._progress = session_factory, node_of_rank, progress
        self._open: dict[str, tuple[SystemSession, ExitStack]] = {}

    def __enter__(self) -> "_OpenSessions":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as everything:
            for opened in self._open.values():
                everything.callback(opened[1].close)
        self._open = {}

    @property
    def sessions(self) -> dict[str, SystemSession]:
        return {name: session for name, (session, _) in self._open.items()}

    def close_session(self, name: str) -> None:
        self._open.pop(name)[1].close()

    @property
    def versions(self) -> dict[str, str]:
        return {name: session.version for name, (session, _) in self._open.items()}

    def ensure_open(self, knobs: Mapping[str, Knob], notes: list[str]) -> None:
        """Open sessions of these systems with these knobs; matching sessions are kept."""
        for name in [name for name, (session, _) in self._open.items() if knobs.get(name) != session.knob]:
            self.close_session(name)
        for name, knob in knobs.items():
            if name not in self._open:
                self._open_session(name, knob, notes)
        if not self._open:
            raise LaunchError("systems: none could be started, expected at least one. " + " ".join(notes))
        self._open = {name: self._open[name] for name in knobs if name in self._open}

    def _open_session(self, name: str, knob: Knob, notes: list[str]) -> None:
        self._progress.print_step(f"starting {name}: {knob.name}")
        stack = ExitStack()
        try:
            session = stack.enter_context(self._session_factory.open_session(SYSTEMS[name], knob, self._node_of_rank))
        except LaunchError as error:
            if name == "ringweave":
                raise
            notes.append(f"{name} ({knob.name}) did not start and is left out: {error_first_line(error)}")
            self._progress.print_step(notes[-1])
            return
        self._open[name] = session, stack


LAB_PREFIX = "bench-"
_MAX_LAB_NAME = 40
EXIT_WAIT_S, TERM_WAIT_S = 1.0, 1.0


def run_benchmark(
    request: BenchmarkRequest, progress: ProgressPrinter, save_partial: Callable[[ComparisonReport], None]
) -> ComparisonReport:
    """Run the requested comparison.

    All its processes are descendants of this one, even if their parents end early; they are gone afterwards.
    `save_partial` gets the report after each size of each order.

    Raises:
        LabError: The cluster could not be brought up here.
        LaunchError: None of the systems is installed, or a process could not be started.
        CommunicationError: A sum was wrong, or a rank failed.
        KeyboardInterrupt: Interrupted by Ctrl-C, SIGTERM or SIGHUP.
    """
    with ExitStack() as stack:
        stack.enter_context(_signals_as_interrupt())
        stack.enter_context(_end_leftovers())
        folder = Path(tempfile.mkdtemp(prefix="ringweave-bench-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        bench_cluster = stack.enter_context(_open_cluster(request, progress))
        listener = stack.enter_context(WorkerListener(folder / "control"))
        return compare(
            request, SessionFactory(bench_cluster, listener, folder, request.schedule), progress, save_partial
        )


@contextmanager
def _open_cluster(request: BenchmarkRequest, progress: ProgressPrinter) -> Iterator[BenchCluster]:
    if request.is_local:
        yield LocalBenchCluster(request.cluster)
        return
    name = (LAB_PREFIX + request.cluster.name)[:_MAX_LAB_NAME]
    progress.print_step(f"bringing up lab {name}")
    # No quotas: the benchmark is about networks, and a library that starts its own ranks could not be given any.
    up = lab.up(request.cluster, name, quotas="never")
    try:
        yield LabBenchCluster(up)
    finally:
        lab.down(name)


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the benchmark as Ctrl-C does: everything is taken down."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {how: signal.signal(how, interrupt) for how in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for how, handler in before.items():
            signal.signal(how, handler)


@contextmanager
def _end_leftovers() -> Iterator[None]:
    processes.adopt_orphans()
    spared = processes.descendants()
    try:
        yield
    finally:
        left = processes.end_descendants(spared, exit_s=EXIT_WAIT_S, term_s=TERM_WAIT_S)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise LaunchError(f"processes {pids} do not end, even after SIGKILL. Look at them with ps. [benchmarks]")
