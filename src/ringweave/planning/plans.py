"""Plans: all choices for a group of ranks, as data and as JSON text; and the pipelining of each schedule."""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ringweave import schedules
from ringweave.cost import ScheduleDemand
from ringweave.errors import ScheduleError, UsageError, explain, shorten
from ringweave.files import file_io
from ringweave.schedules import NATIVE, Domain, Schedule, Stripe
from ringweave.schedules.program import Pipelining

MIN_PIECE_BYTES = 16 * 10**3
MAX_PIECE_BYTES = 1500 * 10**3
MAX_SEGMENTS = 128
MAX_WINDOW = 64
"""Limit on receives posted ahead: each may need a buffer of a piece's size."""
_SEGMENTS_IN_FLIGHT = 8
_NUM_SEGMENT_COUNTS = 12
_PIPELINING_TIE_RATIO = 1.02
"""Where streams meet, the finest pieces within this ratio of the fastest are taken: coarse streams starve each other,
which the prediction ignores (docs/notebook/2026-11.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChoice:
    """One way to run a message."""

    schedule: str
    """A name of `schedules.NAMES`."""
    num_segments: int
    """Segments that run the schedule independently."""
    lag: int
    """Rounds by which a segment trails the one before it in the order of waiting; with 0 a round ends for all segments
    before the next one is waited for."""
    window: int
    """Receives that are posted ahead."""
    predicted_s: float
    """Predicted time; infinite without a prediction."""

    @property
    def pipelining(self) -> Pipelining:
        """Return the division of the message in time, for compiling programs."""
        return Pipelining(num_segments=self.num_segments, lag=self.lag, window=self.window)


def best_pipelining(name: str, demand: ScheduleDemand, num_bytes: int) -> ScheduleChoice:
    """Return the pipelining of the least predicted time, with pieces of 16 kB to 1.5 MB and at most 128 segments.

    Segments always overlap, about eight of them at a time. Small pieces that go round the peers also keep the streams
    that meet at a link even; measurements show that this matters more than the overlap (docs/notebook/2026-11.md). The
    window holds the receives of two segments. Inside one node the plan's assumptions set the size of pieces.
    """
    largest = demand.largest_piece * num_bytes
    lag = max(1, math.ceil(demand.num_rounds / _SEGMENTS_IN_FLIGHT))
    if demand.num_latencies:
        min_segments, max_segments = (
            _clamp_segments(math.ceil(largest / MAX_PIECE_BYTES)),
            _clamp_segments(int(largest / MIN_PIECE_BYTES)),
        )
        ratio = (max(min_segments, max_segments) / min_segments) ** (1 / (_NUM_SEGMENT_COUNTS - 1))
        counts = sorted({round(min_segments * ratio**power) for power in range(_NUM_SEGMENT_COUNTS)})
    else:
        counts = [_clamp_segments(round(largest / demand.local_piece_bytes))]
    times = {count: demand.predicted_s(num_bytes, num_segments=count, lag=lag) for count in counts}
    as_good_s = min(times.values()) * (_PIPELINING_TIE_RATIO if demand.streams_meet else 1)
    best = max(count for count in counts if times[count] <= as_good_s)
    window = max(2, min(MAX_WINDOW, 2 * demand.num_receives))
    return ScheduleChoice(schedule=name, num_segments=best, lag=lag, window=window, predicted_s=times[best])


def _clamp_segments(num_segments: int) -> int:
    return max(1, min(MAX_SEGMENTS, num_segments))


_TIE_RATIO = 1.02
_PREFERENCE = ("ring", "direct", "multi-level", "leader-matrix", "hierarchical", "halving-doubling", "ps")
"""Preference among equals on a network: a ring, in which only one stream meets another at a link at a time."""
_PREFERENCE_WITHIN_NODE = ("direct", *(name for name in _PREFERENCE if name != "direct"))
"""Preference inside a node: the direct schedule, which copies least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plan of one group on its part of the cluster. One rank makes it and sends its text to the others.

    All choices follow from these numbers alone, so every rank with the same text chooses the same.
    """

    nodes: tuple[str, ...]
    """Name of the node of each rank."""
    ring_order: tuple[int, ...]
    """Ranks in the order of the ring."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each node (or NIC), the leader first, in the order of the matrix, row by row."""
    num_columns: int
    """Columns of the matrix of leaders."""
    tiers: tuple[tuple[int, ...], ...]
    """Groups of the hierarchical schedule: of nodes or of racks, by the prediction."""
    root: int
    """Rank that serves as parameter server."""
    direct_shares: tuple[int, ...]
    """Share of each rank in the direct schedule."""
    stripes: tuple[Stripe, ...]
    """Parts of the message with the leaders on every level, for the multi-level schedule; none if that was left out."""
    demands: tuple[tuple[str, ScheduleDemand], ...]
    """Basis of the predicted times of each considered schedule."""
    left_out: tuple[tuple[str, str], ...]
    """Reason why a schedule was not considered, by name."""
    bound_s_per_byte: float
    """Least time of any allreduce of this group, per byte of the message."""
    binding: str
    """Cut or partition that sets this bound."""

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the first rank of each group."""
        return tuple(group[0] for group in self.groups)

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """Return the leaders in rows."""
        return schedules.arrange_leaders(self.leaders, self.num_columns)

    def demand(self, name: str) -> ScheduleDemand:
        """Return the link demands of a schedule that was considered.

        Raises:
            KeyError: It was not considered.
        """
        return dict(self.demands)[name]

    def bound_s(self, num_bytes: int) -> float:
        """Return the least time of any allreduce of that size: a bound, not a prediction."""
        return self.bound_s_per_byte * num_bytes

    def generate(self, name: str) -> Schedule:
        """Return the schedule of that name on this group's part of the cluster.

        Raises:
            UsageError: No such schedule, or `native`, the native backend, which has none.
        """
        schedules.check_schedule_name(name)
        if name == NATIVE:
            do = "'native' names the native backend, which plans its messages itself"
            raise UsageError(explain("schedule", got=name, expected="one that is planned here", do=do))
        return self._generators()[name]()

    def _multi_level(self) -> Schedule:
        if not self.stripes:
            reason = dict(self.left_out).get("multi-level", "no reason is given")
            do = f"Name another one; it was left out: {reason}"
            raise UsageError(explain("schedule", got="multi-level", expected="one that was considered", do=do))
        return schedules.multi_level_striped(self.stripes)

    def choices(self, num_bytes: int) -> list[ScheduleChoice]:
        """Return every considered schedule, at its best pipelining, by predicted time."""
        found = [best_pipelining(name, asked, num_bytes) for name, asked in self.demands]
        return sorted(found, key=lambda choice: choice.predicted_s)

    def choose(self, num_bytes: int, forced: str | None = None) -> ScheduleChoice:
        """Return the fastest choice by prediction, or the forced one.

        Choices predicted to be within 2 % of the fastest count as equal (the model is no more accurate).

        A forced schedule that was left out, and `native`, run without pipelining, with an infinite predicted time.

        Raises:
            UsageError: No schedule has the forced name.
        """
        if forced is None:
            by_name = {choice.schedule: choice for choice in self.choices(num_bytes)}
            return by_name[self.fastest({name: choice.predicted_s for name, choice in by_name.items()})]
        name = schedules.check_schedule_name(forced)
        for candidate, asked in self.demands:
            if candidate == name:
                return best_pipelining(name, asked, num_bytes)
        return ScheduleChoice(schedule=name, num_segments=1, lag=0, window=2, predicted_s=math.inf)

    def fastest(self, seconds: Mapping[str, float]) -> str:
        """Return the schedule of the least time, predicted or simulated; those within 2 % of it count as equal.

        Args:
            seconds: Seconds by name of schedule; at least one.
        """
        near = [name for name in seconds if seconds[name] <= min(seconds.values()) * _TIE_RATIO]
        return min(near, key=(_PREFERENCE if len(set(self.nodes)) > 1 else _PREFERENCE_WITHIN_NODE).index)

    def _generators(self) -> dict[str, Callable[[], Schedule]]:
        count = len(self.nodes)
        return {
            "ring": lambda: schedules.ring(count, self.ring_order),
            "leader-matrix": lambda: schedules.leader_matrix(self.groups, self.num_columns),
            "hierarchical": lambda: schedules.hierarchical(self.tiers),
            "ps": lambda: schedules.parameter_server(count, self.root),
            "direct": lambda: schedules.direct(count, self.direct_shares),
            "multi-level": self._multi_level,
            "halving-doubling": lambda: schedules.halving_doubling(count),
        }

    def __str__(self) -> str:
        pass

        return plan_to_text(self)

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Parse a plan; `Plan.parse(str(plan)) == plan`.

        Raises:
            ScheduleError: The text is no plan.
        """
        pass

        return parse_plan(text)


PLAN_FORMAT = "ringweave-plan-2"
"""First key of the document."""
MAX_PLAN_BYTES = file_io.MAX_JSON_BYTES
"""Limit on a text that is read; plans of ten thousand ranks have some hundred thousand."""
_MAX_PARSED_LEADERS = 1 << 24
"""Limit on leaders in a parsed plan, because a short run can stand for many. Plans are made with four millions at
most."""
_MAX_PARSED_DEPTH = 128
"""Limit on nested domains; plans have 64 at most."""


def plan_to_text(plan: Plan) -> str:
    """Return one line of JSON."""
    document: dict[str, Any] = {PLAN_FORMAT: True}
    for field in fields(plan):
        document[field.name] = getattr(plan, field.name)
    document["stripes"] = [
        {"shares": stripe.shares, "domains": _flatten_domains(stripe.domain)} for stripe in plan.stripes
    ]
    document["demands"] = {name: asdict(asked) for name, asked in plan.demands}
    document["left_out"] = dict(plan.left_out)
    return json.dumps(document, separators=(",", ":"))


def parse_plan(text: str) -> Plan:
    """Parse a plan.

    Raises:
        ScheduleError: The text is no plan.
    """
    try:
        document = file_io.parse_json(text, MAX_PLAN_BYTES)
        del document[PLAN_FORMAT]
        for name in ("nodes", "ring_order", "direct_shares"):
            document[name] = tuple(document[name])
        for name in ("groups", "tiers"):
            document[name] = tuple(map(tuple, document[name]))
        document["stripes"] = tuple(
            Stripe(_parse_domain(stripe["domains"], len(stripe["shares"])), tuple(stripe["shares"]))
            for stripe in _check_num_leaders(document["stripes"])
        )
        document["demands"] = tuple((name, ScheduleDemand(**asked)) for name, asked in document["demands"].items())
        document["left_out"] = tuple(document["left_out"].items())
        return Plan(**document)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as cause:
        do = f"Pass on what str(plan) gave, from the same version of ringweave ({shorten(cause)})"
        raise ScheduleError(explain("plan", got=text, expected=f"the text of a plan ({PLAN_FORMAT})", do=do)) from cause


def _flatten_domains(top: Domain) -> list[dict[str, Any]]:
    """Return domains from the whole group down; a member is a rank, or "#3" for the third entry after the first."""
    listed, entries = [top], []
    for domain in listed:
        members: list[int | str] = []
        for member in domain.members:
            if isinstance(member, Domain):
                members.append(f"#{len(listed)}")
                listed.append(member)
            else:
                members.append(member)
        runs = [[rank, len(list(run))] for rank, run in itertools.groupby(domain.leaders)]
        entries.append({"members": members, "leaders": runs})
    return entries


def _check_num_leaders(stripes: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `stripes` unless they have too many leaders to expand."""
    num_leaders = sum(len(stripe["domains"]) * len(stripe["shares"]) for stripe in stripes)
    if num_leaders > _MAX_PARSED_LEADERS:
        raise ValueError(f"{num_leaders} leaders")
    return stripes


def _parse_domain(entries: list[Mapping[str, Any]], num_chunks: int) -> Domain:
    built: dict[str, Domain] = {}
    depths: dict[str, int] = {}
    for index in range(len(entries) - 1, -1, -1):
        listed, runs, name = entries[index]["members"], entries[index]["leaders"], f"#{index}"
        if sum(count for _, count in runs) != num_chunks or any(count < 1 for _, count in runs):
            raise ValueError(f"leaders of domain {name} are not one for each of {num_chunks} shares")
        depths[name] = 1 + max((depths[member] for member in listed if isinstance(member, str)), default=0)
        if depths[name] > _MAX_PARSED_DEPTH:
            raise ValueError(f"domains in domains, more than {_MAX_PARSED_DEPTH}")
        # Removed from the table: a domain in several others would be visited as often.
        members = tuple(built.pop(member) if isinstance(member, str) else member for member in listed)
        built[name] = Domain(members, tuple(rank for rank, count in runs for _ in range(count)))
    if list(built) != ["#0"]:
        raise ValueError("domains that are in no other")
    return built["#0"]
