"""Metrics of a run, summed from its events: the one place that feeds run.json and all exporters; pure.

No exporter touches training: workers append events, as they do anyway, and whoever exports reads them.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
COUNTER, GAUGE = "counter", "gauge"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricKind:
    """One metric."""

    kind: str
    """`counter` or `gauge`."""
    labels: tuple[str, ...]
    meaning: str


_RANK, _LINK = ("rank", "node"), ("rank", "peer")
METRICS: Mapping[str, MetricKind] = {
    "ringweave_rank_steps_total": MetricKind(kind=COUNTER, labels=_RANK, meaning="Train steps."),
    "ringweave_rank_samples_total": MetricKind(kind=COUNTER, labels=_RANK, meaning="Samples computed by the rank."),
    "ringweave_rank_step_seconds_total": MetricKind(kind=COUNTER, labels=_RANK, meaning="Seconds of train steps."),
    "ringweave_rank_input_seconds_total": MetricKind(
        kind=COUNTER, labels=_RANK, meaning="Seconds of steps until the batch had arrived."
    ),
    "ringweave_rank_compute_seconds_total": MetricKind(
        kind=COUNTER, labels=_RANK, meaning="Seconds of forward and backward passes."
    ),
    "ringweave_rank_update_seconds_total": MetricKind(kind=COUNTER, labels=_RANK, meaning="Seconds of the optimizer."),
    "ringweave_rank_communication_seconds_total": MetricKind(
        kind=COUNTER, labels=_RANK, meaning="Seconds of exchanges, as long as those of the rank that waits least."
    ),
    "ringweave_rank_wait_seconds_total": MetricKind(
        kind=COUNTER, labels=_RANK, meaning="Seconds of exchanges beyond these: waits for other ranks."
    ),
    "ringweave_rank_throttled_seconds_total": MetricKind(
        kind=COUNTER, labels=_RANK, meaning="Seconds for which a CPU quota stopped the rank."
    ),
    "ringweave_rank_collections_seconds_total": MetricKind(
        kind=COUNTER, labels=_RANK, meaning="Seconds of Python's garbage collections."
    ),
    "ringweave_rank_major_faults_total": MetricKind(
        kind=COUNTER, labels=_RANK, meaning="Pages of memory that had to be read from a disk."
    ),
    "ringweave_rank_memory_bytes": MetricKind(kind=GAUGE, labels=_RANK, meaning="Resident memory of the process."),
    "ringweave_rank_share_samples": MetricKind(
        kind=GAUGE, labels=("rank",), meaning="Samples of the rank in a whole batch."
    ),
    "ringweave_rank_collectives_total": MetricKind(
        kind=COUNTER, labels=("rank", "schedule"), meaning="Collectives that the rank has run."
    ),
    "ringweave_rank_collective_bytes_total": MetricKind(
        kind=COUNTER, labels=("rank", "schedule"), meaning="Sizes of their messages, summed."
    ),
    "ringweave_link_sent_bytes_total": MetricKind(
        kind=COUNTER, labels=_LINK, meaning="Bytes sent to a peer on another node, by TCP's count."
    ),
    "ringweave_link_busy_seconds_total": MetricKind(
        kind=COUNTER, labels=_LINK, meaning="Seconds in which some of them were on the way."
    ),
    "ringweave_link_bytes_per_second": MetricKind(
        kind=GAUGE, labels=_LINK, meaning="Rate in these seconds, in the last window."
    ),
    "ringweave_generations_total": MetricKind(
        kind=COUNTER, labels=(), meaning="Generations of the membership of an elastic job."
    ),
    "ringweave_worker_deaths_total": MetricKind(
        kind=COUNTER, labels=("rank",), meaning="Workers that ended badly, by rank."
    ),
    "ringweave_staleness_pushes_total": MetricKind(
        kind=COUNTER, labels=("versions",), meaning="Pushes to the parameter server, by their staleness in versions."
    ),
    "ringweave_iterations": MetricKind(kind=GAUGE, labels=("rank",), meaning="Iterations that the script reported."),
    "ringweave_loss": MetricKind(kind=GAUGE, labels=("rank",), meaning="Loss that the script reported."),
}

_SUMS = {
    "steps": "ringweave_rank_steps_total",
    "samples": "ringweave_rank_samples_total",
    "wall_s": "ringweave_rank_step_seconds_total",
    "input_s": "ringweave_rank_input_seconds_total",
    "compute_s": "ringweave_rank_compute_seconds_total",
    "update_s": "ringweave_rank_update_seconds_total",
    "throttled_s": "ringweave_rank_throttled_seconds_total",
    "collections_s": "ringweave_rank_collections_seconds_total",
    "major_faults": "ringweave_rank_major_faults_total",
}
_COMMUNICATION, _WAIT = "ringweave_rank_communication_seconds_total", "ringweave_rank_wait_seconds_total"
_APART_S = 15.0
"""Seconds after which a window of another rank no longer belongs to the same steps."""

_MAX_GROUPS = 200
"""Number of groups of a rank whose counts are known one by one."""
_ENDED = ""
"""Name for all other groups together."""

Labels = tuple[str, ...]


@dataclass(slots=True)
class RunMetrics:
    """Sums of the events of one attempt, in any order that keeps each rank's own."""

    values: dict[str, dict[Labels, float]] = field(default_factory=lambda: defaultdict(dict))
    """Metric -> labels -> value."""
    _attempt: int = 0
    _exchanges: dict[Labels, deque[tuple[float, float, int]]] = field(default_factory=dict)
    """Rank and node -> (time, seconds of exchanges, steps) of windows that wait for those of the other ranks."""
    _counted: dict[tuple[str, Labels], dict[str, float]] = field(default_factory=dict)
    """Cumulative counts of each group, by metric and labels."""

    def add(self, event: Event) -> None:
        """Add one event; kinds without metrics are passed over. A further attempt starts anew."""
        add = getattr(self, f"_add_{event['kind']}", None)
        if add is not None:
            add(event)

    def finish(self) -> None:
        """Note that no events follow."""
        self._settle(0)

    def clear(self) -> None:
        """Forget all sums."""
        self.values.clear()
        self._exchanges.clear()
        self._counted.clear()

    def by_rank(self) -> dict[str, dict[str, Any]]:
        """Return rank -> sums under the short names of run.json, with `links`: peer -> `sent_bytes` and `busy_s`."""
        self.finish()
        names = {**{metric: name for name, metric in _SUMS.items()}, _COMMUNICATION: "communication_s", _WAIT: "wait_s"}
        names["ringweave_rank_memory_bytes"] = "memory_bytes"
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for metric, name in names.items():
            for (rank, node), value in self.values[metric].items():
                row = found[rank]
                row["node"] = node
                row[name] = round(row.get(name, 0.0) + value, 6)
        links = {"sent_bytes": "ringweave_link_sent_bytes_total", "busy_s": "ringweave_link_busy_seconds_total"}
        for name, metric in links.items():
            for (rank, peer), value in self.values[metric].items():
                found[rank].setdefault("links", {}).setdefault(peer, {})[name] = round(value, 6)
        return dict(sorted(found.items(), key=lambda item: int(item[0])))

    def samples(self) -> Iterator[tuple[str, Labels, float]]:
        """Yield (metric, values of its labels, value)."""
        for metric in METRICS:
            for labels, value in sorted(self.values[metric].items()):
                yield metric, labels, value

    def _increase(self, metric: str, labels: Labels, value: float) -> None:
        row = self.values[metric]
        row[labels] = row.get(labels, 0.0) + value

    def _add_run_started(self, event: Event) -> None:
        if event["attempt"] > self._attempt > 0:
            self.clear()
        self._attempt = event["attempt"]

    def _add_steps_measured(self, event: Event) -> None:
        labels = str(event["rank"]), event["node"]
        for name, metric in _SUMS.items():
            self._increase(metric, labels, event.get(name, 0.0))
        self.values["ringweave_rank_memory_bytes"][labels] = event.get("memory_bytes", 0)
        self._exchanges.setdefault(labels, deque()).append((event["time"], event["exchange_s"], event["steps"]))
        self._settle()

    def _settle(self, num_waiting: int = 1) -> None:
        """Split exchanges into communication and waits, while a rank has more windows than may wait for the others'."""
        while any(len(windows) > num_waiting for windows in self._exchanges.values()):
            first = {labels: windows[0] for labels, windows in self._exchanges.items() if windows}
            begun_s = min(time_s for time_s, _, _ in first.values())
            together = {labels: each for labels, each in first.items() if each[0] - begun_s < _APART_S}
            least_s = min(exchange_s / max(1, steps) for _, exchange_s, steps in together.values())
            for labels, (_, exchange_s, steps) in together.items():
                communication_s = min(exchange_s, least_s * steps)
                self._increase(_COMMUNICATION, labels, communication_s)
                self._increase(_WAIT, labels, exchange_s - communication_s)
                self._exchanges[labels].popleft()

    def _add_traffic_measured(self, event: Event) -> None:
        rank = str(event["rank"])
        for peer, link in event["links"].items():
            self._increase("ringweave_link_sent_bytes_total", (rank, peer), link["sent_bytes"])
            self._increase("ringweave_link_busy_seconds_total", (rank, peer), link["busy_s"])
            if link["busy_s"] > 0:
                rate = link["sent_bytes"] / link["busy_s"]
                self.values["ringweave_link_bytes_per_second"][rank, peer] = rate

    def _add_collectives(self, event: Event) -> None:
        for schedule, row in event["by_schedule"].items():
            labels = str(event["rank"]), schedule
            for name, metric in (
                ("collectives", "ringweave_rank_collectives_total"),
                ("bytes", "ringweave_rank_collective_bytes_total"),
            ):
                groups = self._counted.setdefault((metric, labels), {})
                groups.pop(event["group"], None)
                groups[event["group"]] = row[name]
                if len(groups) > _MAX_GROUPS:  # those of earlier generations count no more
                    oldest = next(group for group in groups if group != _ENDED)
                    groups[_ENDED] = groups.get(_ENDED, 0.0) + groups.pop(oldest)
                self.values[metric][labels] = sum(groups.values())

    def _add_training_prepared(self, event: Event) -> None:
        for rank, share in enumerate(event["shares"]):
            self.values["ringweave_rank_share_samples"][str(rank),] = share

    _add_shares_changed = _add_training_prepared

    def _add_generation_begun(self, event: Event) -> None:
        del event
        self._increase("ringweave_generations_total", (), 1)

    def _add_worker_exited(self, event: Event) -> None:
        if not event["stopped"] and (event["signal"] or event["exit_code"]):
            self._increase("ringweave_worker_deaths_total", (str(event["rank"]),), 1)

    def _add_params_counted(self, event: Event) -> None:
        row: dict[Labels, float] = {(str(versions),): float(pushes) for versions, pushes in event["staleness"].items()}
        self.values["ringweave_staleness_pushes_total"] = row

    def _add_iterations_done(self, event: Event) -> None:
        self.values["ringweave_iterations"][str(event["rank"]),] = event["iterations"]
        if event["loss"] is not None:
            self.values["ringweave_loss"][str(event["rank"]),] = event["loss"]


def to_markdown() -> str:
    """Return the table of metrics in `docs/reference/metrics.md`."""
    rows = [
        f"| `{name}` | {', '.join(metric.labels)} | {metric.kind} | {metric.meaning} |"
        for name, metric in METRICS.items()
    ]
    return "\n".join(["| metric | labels | kind | value |", "|---|---|---|---|", *rows]) + "\n"
