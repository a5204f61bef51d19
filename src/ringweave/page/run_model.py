"""Model of a run: takes its events one by one, and returns the sections of its page as JSON values; pure.

A section is None where the run records nothing about it; then `left_out` says why. Numbers are measured unless their
name begins with `predicted` or `bound`.
"""

import json
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ringweave import cost, topology
from ringweave.errors import RingweaveError
from ringweave.launcher import run_dir
from ringweave.page.aggregation import (
    PARTS,
    BucketedSeries,
    CollectiveCounts,
    Document,
    RunTimeline,
    StepGrid,
    WindowSums,
    is_failure,
)
from ringweave.plots import plan_plot
from ringweave.plots.plan_plot import OutlineItem
from ringweave.schedules import wire_formats
from ringweave.telemetry import EVENT_KINDS, UNLISTED_FIELDS, Event, UnreadRecords, verdict
from ringweave.topology import CORE, Cluster, Device, Nic, Node, Switch

RECENT_S = 60.0
"""Span of the numbers of a run that goes on."""
MAX_EVENTS = 500
"""Newest events that are listed."""
MAX_GROUPS = 64
"""Groups of ranks, and plans of groups, that are kept: those that came last."""
MAX_RANKS = 10_000
"""Ranks with facts of their own."""
MAX_TUNED = 200
"""Results of the autotuner that count for the verdict: the newest."""
MAX_TEXT = 400
"""Characters of an event or a log line."""
MAX_COLLECTIVES = 40
"""Rows of predicted beside measured collectives."""
MAX_SWITCH_LEVELS = 32
"""Switches above each other in a cluster that is drawn."""
MEASUREMENTS = frozenset(
    {
        "collectives",
        "iterations_done",
        "outer_step",
        "params_counted",
        "pipeline_measured",
        "schedule_measured",
        "steps_measured",
        "traffic_measured",
        "train_step_done",
    }
)
"""Kinds that are drawn, and not listed."""
_BROKEN = (ArithmeticError, AttributeError, LookupError, RingweaveError, TypeError, ValueError)
"""Errors of an event that is not as its kind has to be."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def show_text(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text as it can be shown: of limited length, and what a terminal or a browser would obey is visible.

    Control characters, and those that turn the direction of a line, are replaced by their numbers.
    Of a line that a program has written over and over, the last state is left.
    """
    before, _, last = text.rstrip("\r").rpartition("\r")
    shown = _CONTROL.sub(_visible, f"\u2026{last}" if before and last else text)
    return shown if len(shown) <= limit else f"{shown[:limit]}\u2026 ({len(shown) - limit} more characters)"


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code == ord("\t"):
        return "    "
    return f"\\x{code:02x}" if code < 0x100 else f"\u27e8U+{code:04X}\u27e9"


def event_text(event: Event) -> str:
    """Return the fields of an event as a line; those that say nothing are left out."""
    said = {key: value for key, value in event.items() if key not in UNLISTED_FIELDS}
    fields = {key: value for key, value in said.items() if value not in (None, "", [])}
    return ", ".join(f"{key} {_value_text(value)}" for key, value in fields.items())


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value_text(each)}" for key, each in list(value.items())[:12]) + "}"
    if isinstance(value, list):
        more = f" and {len(value) - 12} more" if len(value) > 12 else ""
        return " ".join(map(_value_text, value[:12])) + more
    return str(value)


def _visible_value(value: Any) -> Any:
    """Return a JSON value whose texts can be shown, and whose numbers JSON can carry."""
    if isinstance(value, str):
        return value if len(value) < 80 and value.isprintable() else show_text(value, 2000)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, Mapping):
        return {_visible_value(str(key)): _visible_value(each) for key, each in value.items()}
    return [_visible_value(each) for each in value] if isinstance(value, list | tuple) else value


def dump_sections(sections: Mapping[str, Any]) -> dict[str, str]:
    """Return the JSON text of every section.

    All texts in it can be shown as they are; none has a line break, or ends an element of HTML.
    """
    texts = {name: json.dumps(_visible_value(value), separators=(",", ":")) for name, value in sections.items()}
    return {name: text.replace("<", "\\u003c") for name, text in texts.items()}


class RunModel:
    """Everything that the page says about a run, but for its state and its logs."""

    def __init__(self, unread: UnreadRecords | None = None) -> None:
        """`unread` has what the reader of the events has left out."""
        self._timeline = RunTimeline()
        self._num_events, self._unread = 0, unread or UnreadRecords()
        self.begin_attempt()

    def begin_attempt(self, round_: int | None = None) -> None:
        """Forget the measurements of the attempt before; the time line keeps it. Attempts of jobs are rounds."""
        self._timeline.begin_attempt(round_)
        self._begin_s: float | None = None
        self._last: dict[str, Event] = {}
        self._grid: StepGrid | None = None
        self._loss: BucketedSeries | None = None
        self._windows, self._counts = WindowSums(), CollectiveCounts()
        self._rows: deque[Document] = deque(maxlen=MAX_EVENTS)
        self._num_rows = self._num_deaths = 0
        self._death: Event = {}
        self._traffic: dict[int, list[Event]] = {}
        self._progress: deque[tuple[float, int]] = deque(maxlen=1000)
        self._workers: dict[int, Event] = {}
        self._by_key: dict[str, dict[Any, Event]] = {}
        self._rates: dict[str, float] = {}
        self._cluster: Cluster | None = None
        self._probed: Cluster | None = None
        self._losses: tuple[int, list[verdict.Loss]] = (0, [])
        self._num_windows = 0

    def add(self, event: Event) -> None:
        """Add an event of the present attempt; one that is not as its kind has to be is counted."""
        self._num_events += 1
        try:
            self._add(event)
        except _BROKEN as error:
            self._unread.add(f"{event.get('kind')} ({type(error).__name__})")

    def _add(self, event: Event) -> None:
        kind, time_s = event["kind"], float(event["time"])
        if not math.isfinite(time_s):
            raise ValueError("a time that is not finite")
        if self._begin_s is None:
            self._begin_s = time_s
            self._grid, self._loss = StepGrid(time_s), BucketedSeries(time_s)
        is_listed = kind not in MEASUREMENTS
        text = show_text(event_text(event)) if is_listed else ""
        self._timeline.add(event, text)
        add = _ADDERS.get(kind)
        if add is not None:
            add(self, event)
        self._last[kind] = event
        if is_listed:
            row = {"time_s": event["time"], "kind": kind, "rank": event.get("rank"), "text": text}
            self._rows.append(row | {"is_failure": is_failure(event)})
            self._num_rows += 1

    def _add_steps(self, event: Event) -> None:
        assert self._grid is not None
        self._grid.add(event)
        self._windows.add(event)
        self._keep(event, "steps_measured", event["rank"], MAX_RANKS)
        self._num_windows += 1

    def _add_iterations(self, event: Event) -> None:
        first = self._by_key.get("iterations_done")
        if first and event["rank"] > min(first):
            return  # one node reports for all
        self._keep(event, "iterations_done", event["rank"], MAX_RANKS)
        if self._progress and event["iterations"] < self._progress[-1][1]:
            self._progress.clear()  # it goes on from a checkpoint
        self._progress.append((event["time"], event["iterations"]))
        while event["time"] - self._progress[0][0] > RECENT_S:
            self._progress.popleft()
        if event["loss"] is not None and self._loss is not None:
            self._loss.add(event["time"], float(event["loss"]))

    def _add_worker(self, event: Event) -> None:
        self._workers[event["rank"]] = event

    def _add_exit(self, event: Event) -> None:
        self._add_worker(event)
        if event["signal"] and not event["stopped"]:
            self._death, self._num_deaths = event, self._num_deaths + 1

    def _add_rates(self, event: Event) -> None:
        self._rates.update({str(name): float(rate) for name, rate in event["rates"].items()})

    def _add_started(self, event: Event) -> None:
        if event["cluster_text"]:
            self._cluster = _read_cluster(event["cluster_text"])

    def _add_probed(self, event: Event) -> None:
        self._add_rates(event)
        formed = self._by_key.get("group_formed", {}).get(event["group"], {"nodes": event["nodes"]})
        self._probed = _probed_cluster(event, formed["nodes"])

    def _add_memory(self, event: Event) -> None:
        self._keep(event, "memory_limited", event["rank"], MAX_RANKS)

    def _add_group(self, event: Event) -> None:
        self._keep(event, "group_formed", event["group"], MAX_GROUPS)

    def _add_collectives(self, event: Event) -> None:
        self._counts.add(event)

    def _add_measured(self, event: Event) -> None:
        self._keep(event, "schedule_measured", run_dir.measured_key(event), MAX_COLLECTIVES)

    def _add_tuned(self, event: Event) -> None:
        key = tuple(event[name] for name in ("rank", "group", "version", "collective", "bytes"))
        self._keep(event, "schedule_tuned", key, MAX_TUNED)

    def _add_plan(self, event: Event) -> None:
        self._keep(event, "plan_made", (event["group"], event["version"]), MAX_GROUPS)
        self._add_rates(event)

    def _add_traffic(self, event: Event) -> None:
        newest_s, group = event["time"] - RECENT_S, event["group"]
        before = self._traffic.get(event["rank"], ())
        kept = [each for each in before if each["time"] > newest_s and each["group"] != group]
        self._traffic[event["rank"]] = [*kept, event]
        self._windows.add(event)
        self._num_windows += 1

    def _add_agreed(self, event: Event) -> None:
        key = event["collective"], event["schedule"], event["bytes"]
        self._keep(event, "schedule_agreed", key, MAX_COLLECTIVES)

    def _add_generation(self, event: Event) -> None:
        if not event["part"]:
            self._keep(event, "generation_begun", "", 1)

    def _keep(self, event: Event, kind: str, key: Any, most: int) -> None:
        """Keep the last event of each key, of the keys that came last, the newest last."""
        kept = self._by_key.setdefault(kind, {})
        kept.pop(key, None)
        kept[key] = event
        if len(kept) > most:
            kept.pop(next(iter(kept)))

    def _kept(self, kind: str) -> list[Event]:
        return list(self._by_key.get(kind, {}).values())

    def sections(self, *, is_over: bool) -> dict[str, Any]:
        """Return the sections by name; of a run that is over, numbers are of the attempt, else of the last minute."""
        last_s = None if is_over else RECENT_S
        cluster, ranks = self._probed or self._cluster, self._rank_rows(last_s)
        sections = {
            "verdict": self._verdict(is_over=is_over),
            "progress": self._progress_section(is_over=is_over),
            "loss": self._loss.document() if self._loss and "iterations_done" in self._last else None,
            "steps": self._grid.document(self._groups()) if self._grid else None,
            "ranks": {"last_s": last_s, "rows": ranks, "nodes": _node_rows(ranks)},
            "training": self._training(),
            "topology": self._topology(cluster),
            "collectives": self._collectives(cluster),
            "traffic": self._counts.document(),
            "peers": self._peers(),
            "rings": self._rings(),
            "sites": self._sites(),
            "stages": self._stages(),
            "timeline": self._timeline.document(),
            "events": self._event_rows(),
            "counts": {
                "events": self._num_events,
                "unread": self._unread.count,
                "unread_text": show_text(self._unread.text()),
            },
        }
        return sections | {"left_out": self._left_out(sections, is_over=is_over)}

    def _verdict(self, *, is_over: bool) -> Document:
        if self._losses[0] != self._num_windows:
            known = [self._last[kind] for kind in ("training_prepared", "plan_made") if kind in self._last]
            deaths = [self._death] * self._num_deaths  # the last one for all: their number counts
            events = [*self._windows.events(), *known, *self._kept("schedule_tuned"), *deaths]
            events.sort(key=lambda event: event["time"])
            self._losses = (self._num_windows, verdict.find_losses(events))
        least = verdict.MIN_STEPS
        counts = [event.get("steps", event.get("collectives", 0)) for event in self._windows.events()]
        measured = sum(counts)
        if measured < least:
            reports = "steps of ringweave.prepare, or scheduled collectives"
            silence = (
                f"No verdict{'' if is_over else ' yet'}: {measured} {reports}, are reported, and it takes {least}."
            )
        else:
            silence = f"Nothing stands out: no cause takes {verdict.MIN_COST:.0%} of the time or more (measured)."
        rows = [
            {"cause": each.cause, "rank": each.rank, "cost": each.cost, "text": each.text()} for each in self._losses[1]
        ]
        return {"losses": rows, "silence": silence, "is_known": measured >= least}

    def _progress_section(self, *, is_over: bool) -> Document:
        reported = self._last.get("iterations_done")
        total = reported.get("total") if reported else None
        done = max((row["steps"] for row in self._grid.ranks(None).values()), default=None) if self._grid else None
        if reported:
            done = max(event["iterations"] for event in self._kept("iterations_done"))
        rate = None
        if len(self._progress) > 1 and self._progress[-1][0] > self._progress[0][0]:
            (first_s, first), (last_s, last) = self._progress[0], self._progress[-1]
            rate = (last - first) / (last_s - first_s)
        left_s = (total - done) / rate if total is not None and done is not None and rate and not is_over else None
        return {
            "train_step": done,
            "total": total,
            "loss": reported["loss"] if reported else None,
            "samples_per_s": self._grid.samples_per_s(None if is_over else RECENT_S) if self._grid else None,
            "predicted_left_s": left_s,
        }

    def _training(self) -> Document | None:
        prepared = self._last.get("training_prepared")
        if prepared is None:
            return None
        changed = self._last.get("shares_changed", {})
        account = self._last.get("samples_accounted", {})
        keys = ("mode", "requested_mode", "reason", "batch_samples")
        predicted = {key: changed.get(key) for key in ("predicted_before_s", "predicted_after_s")}
        return {key: prepared[key] for key in keys} | predicted | {"is_exact": account.get("exact")}

    def _groups(self) -> Sequence[Sequence[int]]:
        """Return ranks that exchange gradients among themselves at every step."""
        formed = self._last.get("sites_formed", {}).get("sites")
        return formed or self._last.get("rings_formed", {}).get("rings") or ()

    def _shares(self) -> dict[int, int]:
        """Return rank -> samples of it in a batch."""
        known = [self._last[kind] for kind in ("training_prepared", "shares_changed") if kind in self._last]
        if not known:
            return {}
        shares = max(known, key=lambda event: event["time"])["shares"]
        generation = self._by_key.get("generation_begun", {}).get("")
        members = [int(name.partition(".")[0]) for name in generation["members"]] if generation else []
        ranks = members if len(members) == len(shares) else range(len(shares))
        return dict(zip(ranks, shares, strict=True))

    def _rank_rows(self, last_s: float | None) -> list[Document]:
        measured = self._grid.ranks(last_s, self._groups()) if self._grid else {}
        shares, limits = self._shares(), self._by_key.get("memory_limited", {})
        windows = self._by_key.get("steps_measured", {})
        rows = []
        for rank in sorted({*self._workers, *measured}):
            worker, window = self._workers.get(rank, {}), windows.get(rank, {})
            limit = limits.get(rank, {})
            rows.append(
                {
                    "rank": rank,
                    "node": worker.get("node") or window.get("node", ""),
                    "state": _worker_state(worker),
                    "share": shares.get(rank),
                    "memory_bytes": window.get("memory_bytes"),
                    "memory_limit_bytes": limit.get("memory_bytes"),
                    "predicted_samples_at_once": limit.get("samples_at_once"),
                    "step": measured.get(rank),
                }
            )
        return rows

    def _topology(self, cluster: Cluster | None) -> Document | None:
        plan = next(reversed(self._kept("plan_made")), None)
        if cluster is None and not self._rates and plan is None:
            return None
        found: Document = {
            "binding": plan["binding"] if plan else None,
            "bound_s_per_byte": plan["bound_s_per_byte"] if plan else None,
            "group": plan["group"] if plan else None,
            "version": plan["version"] if plan else None,
            "why": self._last.get("plan_changed", {}).get("why"),
            "cluster": cluster.name if cluster else None,
            "tree": None,
            "links": [],
            "agreed": [
                {key: event[key] for key in ("collective", "schedule", "bytes")}
                for event in self._kept("schedule_agreed")
            ][-MAX_COLLECTIVES:],
        }
        described: dict[str, float] = {}
        if cluster is not None:
            described = {link.name: link.bandwidth_bytes_per_s for link in cluster.links()}
            rates = {name: rate for name, rate in self._rates.items() if name in described}
            ranks: dict[str, list[int]] = {}
            for rank, event in sorted(self._workers.items()):
                ranks.setdefault(event["node"], []).append(rank)
            notes = {node: _ranks_text(own) for node, own in ranks.items()}
            root = plan_plot.outline_cluster(cluster, self._binding_links(cluster, rates), notes, rates=rates)
            found["tree"] = _tree_document(root)
        rows = sorted(self._rates.items(), key=lambda row: row[1])
        found["links"] = [
            {"name": name, "bytes_per_s": rate, "described_bytes_per_s": described.get(name)}
            for name, rate in rows[:64]
        ]
        return found

    def _binding_links(self, cluster: Cluster, rates: Mapping[str, float]) -> tuple[str, ...]:
        groups = self._kept("group_formed")
        if not groups:
            return ()
        largest = max(reversed(groups), key=lambda event: len(event["members"]))
        try:
            return cost.bound(cluster, 1, nodes=largest["nodes"], rates=rates).links
        except RingweaveError:
            return ()  # a group of nodes that are not in the cluster file

    def _collectives(self, cluster: Cluster | None) -> list[Document] | None:
        measured = self._kept("schedule_measured")[-MAX_COLLECTIVES:]
        events = [*self._kept("plan_made"), *self._kept("group_formed"), *measured]
        rows = run_dir.compare_measured(events, cluster)
        return [row | {"wire_fraction": _wire_fraction(row)} for row in rows] or None

    def _peers(self) -> list[Document] | None:
        """Return the traffic from rank to rank in each rank's newest windows, the slowest first."""
        rows = []
        for event in (event for windows in self._traffic.values() for event in windows):
            for peer, link in event["links"].items():
                row = {"rank": event["rank"], "peer": int(peer), "sent_bytes": link["sent_bytes"]}
                rows.append(row | {"bytes_per_s": link["sent_bytes"] / link["busy_s"] if link["busy_s"] else None})
        return sorted(rows, key=lambda row: row["bytes_per_s"] or float("inf"))[:MAX_COLLECTIVES] or None

    def _rings(self) -> Document | None:
        formed, counted = self._last.get("rings_formed"), self._last.get("params_counted")
        if formed is None and counted is None:
            return None
        keys = ("version", "staleness", "pushes", "samples", "train_steps", "received_bytes", "sent_bytes")
        document = {key: counted[key] if counted else None for key in keys}
        return document | {
            "rings": formed["rings"] if formed else [],
            "most_staleness_versions": formed["most_staleness_versions"] if formed else None,
        }

    def _sites(self) -> Document | None:
        formed, done = self._last.get("sites_formed"), self._last.get("outer_step")
        if formed is None:
            return None
        keys = ("number", "train_steps", "inner_steps", "computing_s", "wait_s", "exchange_s", "sent_bytes")
        return {"sites": formed["sites"]} | {key: done.get(key) if done else None for key in keys}

    def _stages(self) -> Document | None:
        measured, solved = self._last.get("pipeline_measured"), self._last.get("partition_solved")
        if measured is None:
            return None
        keys = ("blocks", "splits", "compute_s", "speeds", "measured_s", "predicted_s")
        return {key: measured[key] for key in keys} | {"decision": solved["verdict"] if solved else None}

    def _event_rows(self) -> Document:
        rows = list(self._rows)
        meanings = {
            kind: EVENT_KINDS[kind].meaning for kind in sorted({row["kind"] for row in rows}) if kind in EVENT_KINDS
        }
        return {"rows": rows, "num": self._num_rows, "meanings": meanings}

    @staticmethod
    def _left_out(sections: Mapping[str, Any], *, is_over: bool) -> list[str]:
        """Return sentences about what the run does not record."""
        prepared, progress = sections["training"] is not None, sections["progress"]
        has_memory = any(row["memory_bytes"] for row in sections["ranks"]["rows"])
        reports = "ringweave.Iterations"
        texts = (
            (sections["loss"] is None, f"Loss: the script does not report it ({reports})."),
            (
                progress["total"] is None and not is_over,
                f"Time to go: the script does not say how many train steps there will be ({reports}(total=...)).",
            ),
            (
                not prepared and sections["steps"] is None,
                "Steps, shares and waits of ranks: only scripts with ringweave.prepare measure them; pipelines measure "
                "their stages, where they adapt.",
            ),
            (prepared and not has_memory, "Memory: no window of steps with it has been reported."),
            (sections["topology"] is None, "Topology: no event has the cluster file, and nothing was probed."),
            (
                sections["collectives"] is None,
                "Predicted beside measured collectives: none were timed. Small messages, and those on one machine, run "
                "on the native backend.",
            ),
            (
                sections["sites"] is None
                and all(row["wire"] == wire_formats.EXACT.name for row in sections["collectives"] or ()),
                "Bytes saved: gradients are exchanged at every step (not in mode local), and exactly (no --wire).",
            ),
        )
        return [text for is_missing, text in texts if is_missing]


_ADDERS = {
    "run_started": RunModel._add_started,
    "steps_measured": RunModel._add_steps,
    "iterations_done": RunModel._add_iterations,
    "worker_started": RunModel._add_worker,
    "worker_exited": RunModel._add_exit,
    "network_measured": RunModel._add_probed,
    "plan_changed": RunModel._add_rates,
    "plan_made": RunModel._add_plan,
    "memory_limited": RunModel._add_memory,
    "group_formed": RunModel._add_group,
    "collectives": RunModel._add_collectives,
    "schedule_measured": RunModel._add_measured,
    "schedule_tuned": RunModel._add_tuned,
    "schedule_agreed": RunModel._add_agreed,
    "traffic_measured": RunModel._add_traffic,
    "generation_begun": RunModel._add_generation,
}


def _read_cluster(text: str) -> Cluster:
    """Return the cluster of a text, which may have come from another machine.

    Raises:
        ClusterError: It is none.
        ValueError: Its switches are too deep to be drawn.
    """
    cluster = topology.loads(text)
    above = {switch.name: switch.parent or CORE for switch in cluster.switches}
    tops = above
    for _ in range(MAX_SWITCH_LEVELS - 1):
        tops = {name: above.get(top, CORE) for name, top in tops.items()}
    if any(top != CORE for top in tops.values()):
        raise ValueError(f"more than {MAX_SWITCH_LEVELS} levels of switches")
    return cluster


def _probed_cluster(event: Event, nodes_of_ranks: Sequence[str]) -> Cluster:
    """Return the cluster that probing found: its links are named in both directions, `a->r0` and `r0->a`."""
    rates, parents, level = event["rates"], {}, [CORE]
    ends = [tuple(name.split("->")) for name in rates]
    while level:
        below = {src: dst for src, dst in ends if dst in level and src not in (*parents, CORE)}
        parents.update(below)
        level = list(below)

    def switch_of(name: str) -> str | None:
        return None if parents[name] == CORE else parents[name]

    def rate_of(name: str) -> float:
        return float(rates[f"{name}->{parents[name]}"])

    nodes = tuple(
        Node(
            name=name,
            devices=(Device(),) * max(1, list(nodes_of_ranks).count(name)),
            nics=(Nic(name="nic", rate_bytes_per_s=rate_of(name)),),
            switch=switch_of(name),
        )
        for name in event["nodes"]
    )
    switches = [
        Switch(name=name, uplink_bytes_per_s=rate_of(name), parent=switch_of(name)) for name in event["switches"]
    ]
    return Cluster(name="probed", nodes=nodes, switches=tuple(switches))


def _wire_fraction(row: Mapping[str, Any]) -> float | None:
    """Return the part of a message's bytes that passes the links which bind; None where it passes exactly."""
    wire = wire_formats.FORMATS.get(row["wire"], wire_formats.EXACT)
    num_values = row["bytes"] // 4
    return wire.encoded_bytes(num_values) / row["bytes"] if wire is not wire_formats.EXACT and num_values else None


def _node_rows(ranks: Sequence[Document]) -> list[Document]:
    """Return a row for each node: sums of shares and memory, and the mean of its ranks' steps."""
    by_node: dict[str, list[Document]] = {}
    for row in ranks:
        by_node.setdefault(row["node"], []).append(row)
    return [
        {
            "name": name,
            "ranks": _ranks_text([row["rank"] for row in rows]),
            **{key: sum(known) if (known := _known(rows, key)) else None for key in ("share", "memory_bytes")},
            "step": _mean_step(_known(rows, "step")),
        }
        for name, rows in by_node.items()
    ]


def _known(rows: Sequence[Document], key: str) -> list[Any]:
    return [row[key] for row in rows if row[key] is not None]


def _mean_step(steps: Sequence[Document]) -> Document | None:
    names = [f"{part}_s" for part in (*PARTS, "wall")]
    known = [step for step in steps if step["wall_s"]]
    return {name: sum(step[name] or 0.0 for step in known) / len(known) for name in names} if known else None


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _worker_state(worker: Event) -> str:
    if not worker:
        return ""
    if worker["kind"] == "worker_started":
        return "running"
    if worker["stopped"] and (worker["signal"] or worker["exit_code"]):
        return "stopped"
    return f"killed by {worker['signal']}" if worker["signal"] else _exit_text(worker["exit_code"])


def _exit_text(code: int) -> str:
    return "done" if code == 0 else f"failed, exit code {code}"


def _tree_document(item: OutlineItem) -> Document:
    return {
        "label": item.label,
        "rate": item.rate_text,
        "bytes_per_s": item.rate_bytes_per_s,
        "is_switch": item.is_switch,
        "is_binding": item.is_binding,
        "is_measured": item.is_measured,
        "children": [_tree_document(child) for child in item.children],
    }
