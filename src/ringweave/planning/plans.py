"""Plans: all choices for a group of ranks, as data and as JSON text; and the pipelining of each schedule."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ringweave import schedules
from ringweave.cost import ScheduleDemand
from ringweave.environment import AUTO_WIRE, EXACT, WIRES
from ringweave.errors import ScheduleError, UsageError, shorten
from ringweave.files import file_io
from ringweave.schedules import NATIVE, CollectiveKind, Domain, Schedule, Stripe, WireEncoding
from ringweave.schedules.program import Pipelining

MIN_PIECE_BYTES = 16 * 10**3
MAX_PIECE_BYTES = 1500 * 10**3
_FAST_PIECE_S, _MAX_FAST_PIECE_BYTES = 0.5e-3, 8 * 10**6
"""Time on the busiest link that a piece may take although it is larger than MAX_PIECE_BYTES, and its limit then."""
MAX_SEGMENTS = 128
MAX_WINDOW = 64
"""Limit on receives posted ahead: each may need a buffer of a piece's size."""
_SEGMENTS_IN_FLIGHT = 8
_NUM_SEGMENT_COUNTS = 12
_PIPELINING_TIE_RATIO = 1.02
"""The finest pieces within this ratio of the fastest are taken where streams meet, since coarse ones starve each other,
and where processor time counts: a late rank delays coarse pieces for longer. The prediction ignores both
(docs/notebook/2026-11.md)."""


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
    ahead: int | None = None
    """Rounds, in the order of waiting, by which a send may precede the piece that its rank waits for; None is any
    number."""
    predicted_s: float
    """Predicted time; infinite without a prediction."""
    wire: str = EXACT
    """Format of what passes slow links, a name of `schedules.wire_formats`."""

    @property
    def pipelining(self) -> Pipelining:
        """Return the division of the message in time, for compiling programs."""
        return Pipelining(num_segments=self.num_segments, lag=self.lag, window=self.window, ahead=self.ahead)


_AHEAD_S = 0.025
"""Time by which sends may precede the pieces that a rank waits for, beside four latencies: processors come late."""


def best_pipelining(
    name: str, demand: ScheduleDemand, num_bytes: int, kind: CollectiveKind = "allreduce"
) -> ScheduleChoice:
    """Return the pipelining of the least predicted time, with pieces of 16 kB to 1.5 MB and at most 128 segments.

    Segments always overlap, about eight of them at a time, or as many as there are rounds where a rank receives once.
    The window holds the receives of two segments, and at least eight where nothing is added. Inside one node the plan's
    assumptions set the size of pieces; on fast links they have up to 8 MB.

    Small pieces that go round the peers keep the streams that meet at a link even; measurements show that this matters
    more than the overlap (docs/notebook/2026-11.md). In an allgather and a reduce-scatter each rank could send its own
    block or its contributions to all near ranks at once. Sent so, they take the rank's link from pieces that still have
    a slow uplink to pass; so they are held back. That keeps streams even too. For all collectives but an exact
    allreduce a second of the rank's processor counts like one of the time: whoever calls them computes on the same
    processor.
    """
    largest = demand.largest_piece * num_bytes
    lag = max(1, min(math.ceil(demand.num_rounds / _SEGMENTS_IN_FLIGHT), demand.num_receives))
    if demand.num_latencies:
        min_segments, max_segments = (
            _clamp_segments(math.ceil(largest / _max_piece_bytes(demand))),
            _clamp_segments(int(largest / MIN_PIECE_BYTES)),
        )
        ratio = (max(min_segments, max_segments) / min_segments) ** (1 / (_NUM_SEGMENT_COUNTS - 1))
        counts = sorted({round(min_segments * ratio**power) for power in range(_NUM_SEGMENT_COUNTS)})
    else:
        counts = [_clamp_segments(round(largest / demand.local_piece_bytes))]
    times = {count: demand.predicted_s(num_bytes, num_segments=count, lag=lag) for count in counts}
    is_encoded = demand.coding_s_per_byte > 0
    counts_processor = kind != "allreduce" or is_encoded
    costs = {count: times[count] + (demand.processor_s(count) if counts_processor else 0.0) for count in counts}
    prefers_fine = not is_encoded and (demand.streams_meet or counts_processor)
    as_good_s = min(costs.values()) * (_PIPELINING_TIE_RATIO if prefers_fine else 1)
    best = max(count for count in counts if costs[count] <= as_good_s)
    # What is received where it belongs needs no buffer, so more of it may be expected ahead.
    least_window = 8 if kind in ("allgather", "broadcast") else 2
    window = max(least_window, min(MAX_WINDOW, 2 * demand.num_receives))
    ahead = None
    if demand.num_latencies and demand.streams_meet and kind in ("allgather", "reduce-scatter"):
        segments_ahead = (_AHEAD_S + 4 * demand.latency_s) * best / times[best]
        ahead = lag * max(2, math.ceil(segments_ahead))
    return ScheduleChoice(
        schedule=name, num_segments=best, lag=lag, window=window, ahead=ahead, predicted_s=times[best]
    )


def _max_piece_bytes(demand: ScheduleDemand) -> float:
    in_time = _FAST_PIECE_S / demand.busiest_s_per_byte if demand.busiest_s_per_byte else 0.0
    return max(MAX_PIECE_BYTES, min(_MAX_FAST_PIECE_BYTES, in_time))


def _takes_any_blocks(name: str, kind: CollectiveKind) -> bool:
    return name in _SCHEDULES_OF_ANY_BLOCKS and kind != "broadcast"


def _clamp_segments(num_segments: int) -> int:
    return max(1, min(MAX_SEGMENTS, num_segments))


_TIE_RATIO = 1.02
_PREFERENCE = ("ring", "direct", "multi-level", "leader-matrix", "hierarchical", "halving-doubling", "ps")
"""Preference among equals on a network: a ring, in which only one stream meets another at a link at a time."""
_PREFERENCE_WITHIN_NODE = ("direct", *(name for name in _PREFERENCE if name != "direct"))
"""Preference inside a node: the direct schedule, which copies least."""


_SCHEDULES_OF_ANY_BLOCKS = ("ring", "direct")
"""Schedules of an allgather and a reduce-scatter whose blocks may have different sizes."""
PLANNED_KINDS: tuple[CollectiveKind, ...] = ("allreduce", "reduce-scatter", "allgather", "broadcast")
"""Collectives that plans know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePlan:
    """Basis of all choices for one collective of a group."""

    demands: tuple[tuple[str, ScheduleDemand], ...]
    """Basis of the predicted times of each considered schedule."""
    left_out: tuple[tuple[str, str], ...]
    """Reason why a schedule was not considered, by name."""
    bound_s_per_byte: float
    """Least time of any such collective of this group, per byte of the message."""
    binding: str
    """Cut or partition that sets this bound."""


_AUTO_FORMATS = ("bf16", "int8")
_MIN_WIRE_GAIN = 1.1
"""Least gain of a less exact format, by forecast, for which `auto` takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WirePlan:
    """Basis of the choices for allreduces that are encoded on slow links."""

    format: str
    zones: tuple[int, ...]
    """Zone of each rank; what passes from zone to zone is encoded."""
    demands: tuple[tuple[str, ScheduleDemand], ...]
    """Basis of the predicted times of each considered schedule, encoded so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plan of one group on its part of the cluster. One rank makes it and sends its text to the others.

    All choices follow from these numbers alone, so every rank with the same text chooses the same. The size of a
    message is that of all blocks together for an allgather and a reduce-scatter: N blocks of equal size, block r of
    which belongs to rank r.
    """

    nodes: tuple[str, ...]
    ring_order: tuple[int, ...]
    """Ranks in the order of the ring."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each node (or NIC), the leader first, in the order of the matrix, row by row."""
    num_columns: int
    """Columns of the matrix of leaders."""
    nests_rings: bool
    """The rings of its rows and columns are nested."""
    tiers: tuple[tuple[int, ...], ...]
    """Groups of the hierarchical schedule: of nodes or of racks, by the prediction."""
    root: int
    """Rank that serves as parameter server."""
    direct_shares: tuple[int, ...]
    """Share of each rank in the direct allreduce."""
    stripes: tuple[Stripe, ...]
    """Parts of the message with the leaders on every level, for the multi-level allreduce; none if that was left
    out."""
    block_stripe: Stripe | None
    """The same for multi-level schedules of the other collectives, in one part; None if these were left out."""
    collectives: tuple[tuple[CollectiveKind, CollectivePlan], ...]
    """Allreduce, and the other collectives that were planned. The demands of a broadcast are those of rank 0 as its
    root."""
    wires: tuple[WirePlan, ...] = ()
    """Encoded allreduces, by growing error; none in a group on one node, or in a very large one."""

    def collective(self, kind: CollectiveKind) -> CollectivePlan | None:
        """Return the basis of the choices for a collective; None if it was not planned."""
        return dict(self.collectives).get(kind)

    @property
    def exact_allreduces(self) -> "Plan":
        """The same plan without other collectives and wire formats."""
        planned = (("allreduce", self._allreduce),)
        return replace(self, block_stripe=None, collectives=planned, wires=())

    @property
    def demands(self) -> tuple[tuple[str, ScheduleDemand], ...]:
        """Basis of the predicted times of each considered allreduce."""
        return self._allreduce.demands

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Reason why an allreduce was not considered, by name."""
        return self._allreduce.left_out

    @property
    def bound_s_per_byte(self) -> float:
        """Least time of any allreduce of this group, per byte of the message."""
        return self._allreduce.bound_s_per_byte

    @property
    def binding(self) -> str:
        """Cut or partition that sets this bound."""
        return self._allreduce.binding

    @property
    def _allreduce(self) -> CollectivePlan:
        return dict(self.collectives)["allreduce"]

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the first rank of each group."""
        return tuple(group[0] for group in self.groups)

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        return schedules.arrange_leaders(self.leaders, self.num_columns)

    def demand(self, name: str, kind: CollectiveKind = "allreduce", wire: str = EXACT) -> ScheduleDemand:
        """Return the link demands of a schedule that was considered, exact or encoded.

        Raises:
            KeyError: It was not considered.
        """
        return self._demands(kind, wire)[name]

    def bound_s(self, num_bytes: int, kind: CollectiveKind = "allreduce") -> float:
        """Return the least time of any such collective of that size: a bound, not a prediction; 0 if not planned."""
        planned = self.collective(kind)
        return planned.bound_s_per_byte * num_bytes if planned else 0.0

    def generate(
        self,
        name: str,
        kind: CollectiveKind = "allreduce",
        root: int | None = None,
        block_shares: Sequence[int] | None = None,
        wire: str = EXACT,
    ) -> Schedule:
        """Return the schedule of that name on this group's part of the cluster.

        Args:
            name: One of `schedules.schedule_names(kind)`.
            kind: The collective.
            root: Rank that broadcasts; only for a broadcast, where None is rank 0.
            block_shares: Relative size of each rank's block, for ring and direct schedules of an allgather or a
                reduce-scatter; None is the same for all.
            wire: Format of what passes slow links, one of `wires`; only for an allreduce.

        Raises:
            UsageError: The collective has no such schedule, or the name is `native`, the native backend, which has
                none; or blocks of different sizes are asked of a schedule that has none.
        """
        schedules.check_schedule_name(name)
        if name == NATIVE:
            do = "'native' names the native backend, which plans its messages itself"
            raise UsageError("schedule", got=name, expected="one that is planned here", do=do)
        if kind == "allreduce":
            zones = next((each.zones for each in self.wires if each.format == wire), ())
            encoding = WireEncoding(wire, zones) if wire != EXACT else None
            return replace(self._generators()[name](), encoding=encoding)
        names = schedules.schedule_names(kind)
        if name not in names or (block_shares is not None and not _takes_any_blocks(name, kind)):
            what = f"schedule of {kind}" + (" with blocks of different sizes" if block_shares is not None else "")
            raise UsageError(what, got=name, expected=f"one of {', '.join(names)}", do="Name another one")
        if kind == "broadcast":
            return self._broadcast(name, root or 0)
        gathered = self._allgather(name, block_shares)
        return gathered if kind == "allgather" else schedules.mirror(gathered)

    def _allgather(self, name: str, block_shares: Sequence[int] | None) -> Schedule:
        count = len(self.nodes)
        if name == "ring":
            return schedules.ring_block_allgather(count, self.ring_order, block_shares)
        if name == "direct":
            return schedules.direct_allgather(count, block_shares)
        stripe = self._block_stripe("allgather")
        return schedules.multi_level_allgather(*stripe, schedules.block_owners(stripe.shares, count))

    def _broadcast(self, name: str, root: int) -> Schedule:
        count = len(self.nodes)
        if name == "ring":
            return schedules.chain_broadcast(count, root, self.ring_order)
        if name == "direct":
            return schedules.direct_broadcast(count, root)
        return schedules.multi_level_broadcast(*self._block_stripe("broadcast"), root)

    def _block_stripe(self, kind: CollectiveKind) -> Stripe:
        if self.block_stripe is None:
            planned = self.collective(kind)
            raise self._left_out_error(planned.left_out if planned else (("multi-level", f"{kind} was not planned"),))
        return self.block_stripe

    def _multi_level(self) -> Schedule:
        if not self.stripes:
            raise self._left_out_error(self.left_out)
        return schedules.multi_level_striped(self.stripes)

    @staticmethod
    def _left_out_error(left_out: tuple[tuple[str, str], ...]) -> UsageError:
        reason = dict(left_out).get("multi-level", "no reason is given")
        do = f"Name another one; it was left out: {reason}"
        return UsageError("schedule", got="multi-level", expected="one that was considered", do=do)

    def choices(self, num_bytes: int, kind: CollectiveKind = "allreduce", wire: str = EXACT) -> list[ScheduleChoice]:
        """Return every considered schedule, at its best pipelining, by predicted time; none if not planned.

        With a format of `wires`, of an allreduce: those considered encoded.
        """
        demands = self._demands(kind, wire).items()
        found = [replace(best_pipelining(name, asked, num_bytes, kind), wire=wire) for name, asked in demands]
        return sorted(found, key=lambda choice: choice.predicted_s)

    def choose(
        self, num_bytes: int, forced: str | None = None, kind: CollectiveKind = "allreduce", wire: str = EXACT
    ) -> ScheduleChoice:
        """Return the fastest choice by prediction, or the forced one.

        Choices predicted to be within 2 % of the fastest count as equal (the model is no more accurate). A rank's
        processor time counts as it does for pieces (`best_pipelining`).

        A forced schedule that was left out, and `native`, run without pipelining, with an infinite predicted time. So
        does `native` where the collective was not planned. A forced schedule that the collective lacks, such as
        leader-matrix for an allgather, leaves the choice to the prediction.

        With a wire format an allreduce is encoded on the links that bind, if the plan has that format. `auto` takes
        bf16, and int8 after it, only where that is forecast to save a tenth of the time; processor time for coding is
        added to the time, since whoever trains computes on the same processor. It never takes int4.

        Raises:
            UsageError: No schedule has the forced name.
        """
        if wire != EXACT and kind == "allreduce":
            return self._choose_wire(num_bytes, forced, wire)
        demands = self._demands(kind)
        name = None if forced is None else schedules.check_schedule_name(forced)
        if name is None or name not in (*schedules.schedule_names(kind), NATIVE):
            if not demands:
                return ScheduleChoice(schedule=NATIVE, num_segments=1, lag=0, window=2, predicted_s=math.inf)
            return self._cheapest(demands, num_bytes, kind)
        if name in demands:
            return best_pipelining(name, demands[name], num_bytes, kind)
        return ScheduleChoice(schedule=name, num_segments=1, lag=0, window=2, predicted_s=math.inf)

    def _choose_wire(self, num_bytes: int, forced: str | None, wire: str) -> ScheduleChoice:
        best = self.choose(num_bytes, forced)
        best_s, needed_gain = best.predicted_s, _MIN_WIRE_GAIN if wire == AUTO_WIRE else 0.0
        for found, found_s in self._encoded_choices(num_bytes, forced):
            if found.wire in (_AUTO_FORMATS if wire == AUTO_WIRE else (wire,)) and best_s >= needed_gain * found_s:
                best, best_s = found, found_s
        return best

    def allreduce_s_by_wire(self, num_bytes: int, forced: str | None = None) -> dict[str, float]:
        """Return the predicted seconds of an allreduce, exact and in each wire format with its time for coding."""
        encoded = {found.wire: seconds for found, seconds in self._encoded_choices(num_bytes, forced)}
        return {EXACT: self.choose(num_bytes, forced).predicted_s, **encoded}

    def _encoded_choices(self, num_bytes: int, forced: str | None) -> Iterator[tuple[ScheduleChoice, float]]:
        """Yield the choice in each format, and its seconds with those of a processor for coding."""
        for planned in self.wires:
            demands = {name: asked for name, asked in planned.demands if forced in (None, name)}
            if demands:
                found = self._cheapest(demands, num_bytes, "allreduce")
                coding_s = demands[found.schedule].coding_s_per_byte * num_bytes
                yield replace(found, wire=planned.format), found.predicted_s + coding_s

    def choose_for_blocks(
        self, num_bytes: int, largest_block_bytes: int, forced: str | None, kind: CollectiveKind
    ) -> ScheduleChoice:
        """Return the choice for an allgather or a reduce-scatter of blocks of different sizes.

        It is a ring or direct: the faster one by the prediction for equal blocks, unless one of them is forced. The
        ring without pipelining where the collective was not planned.
        """
        demands = {name: asked for name, asked in self._demands(kind).items() if name in _SCHEDULES_OF_ANY_BLOCKS}
        name = forced if forced in _SCHEDULES_OF_ANY_BLOCKS else None
        if name is None and demands:
            name = self._cheapest(demands, num_bytes, kind).schedule
        if name is None or name not in demands:
            return ScheduleChoice(schedule=name or "ring", num_segments=1, lag=0, window=2, predicted_s=math.inf)
        asked = replace(demands[name], largest_piece=largest_block_bytes / num_bytes)
        return best_pipelining(name, asked, num_bytes, kind)

    def _cheapest(self, demands: Mapping[str, ScheduleDemand], num_bytes: int, kind: CollectiveKind) -> ScheduleChoice:
        found = {name: best_pipelining(name, asked, num_bytes, kind) for name, asked in demands.items()}
        counts_processor = kind != "allreduce" and len(set(self.nodes)) > 1
        costs = {
            name: choice.predicted_s + (demands[name].processor_s(choice.num_segments) if counts_processor else 0.0)
            for name, choice in found.items()
        }
        return found[self.fastest(costs)]

    def _demands(self, kind: CollectiveKind, wire: str = EXACT) -> dict[str, ScheduleDemand]:
        if wire != EXACT:
            return next(dict(each.demands) for each in self.wires if each.format == wire)
        planned = self.collective(kind)
        return dict(planned.demands) if planned else {}

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
            "leader-matrix": lambda: schedules.leader_matrix(
                self.groups, self.num_columns, nests_rings=self.nests_rings
            ),
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


PLAN_FORMAT = "ringweave-plan-5"
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
    document["stripes"] = [_stripe_document(stripe) for stripe in plan.stripes]
    document["block_stripe"] = plan.block_stripe and _stripe_document(plan.block_stripe)
    document["wires"] = [
        {"format": wire.format, "zones": wire.zones, "demands": {name: asdict(asked) for name, asked in wire.demands}}
        for wire in plan.wires
    ]
    document["collectives"] = {
        kind: asdict(planned)
        | {
            "demands": {name: asdict(asked) for name, asked in planned.demands},
            "left_out": dict(planned.left_out),
        }
        for kind, planned in plan.collectives
    }
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
        document["stripes"] = tuple(map(_parse_stripe, _check_num_leaders(document["stripes"])))
        if document["block_stripe"] is not None:
            document["block_stripe"] = _parse_stripe(*_check_num_leaders([document["block_stripe"]]))
        document["collectives"] = _parse_collectives(document["collectives"])
        document["wires"] = tuple(_parse_wire(wire, len(document["nodes"])) for wire in document["wires"])
        return Plan(**document)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as cause:
        do = f"Pass on what str(plan) gave, from the same version of ringweave ({shorten(cause)})"
        raise ScheduleError("plan", got=text, expected=f"the text of a plan ({PLAN_FORMAT})", do=do) from cause


def _parse_collectives(document: Mapping[str, dict[str, Any]]) -> tuple[tuple[CollectiveKind, CollectivePlan], ...]:
    found: dict[CollectiveKind, CollectivePlan] = {}
    for kind in PLANNED_KINDS:
        if (planned := document.get(kind)) is not None:
            demands = tuple((name, ScheduleDemand(**asked)) for name, asked in planned["demands"].items())
            left_out = tuple(planned["left_out"].items())
            found[kind] = CollectivePlan(**planned | {"demands": demands, "left_out": left_out})
    if set(document) != set(found) or "allreduce" not in found:
        raise ValueError(f"collectives {', '.join(document)}")
    return tuple(found.items())


def _parse_wire(document: Mapping[str, Any], num_ranks: int) -> WirePlan:
    demands = tuple((name, ScheduleDemand(**asked)) for name, asked in document["demands"].items())
    wire = WirePlan(format=document["format"], zones=tuple(document["zones"]), demands=demands)
    if wire.format not in WIRES[1:-1] or len(wire.zones) != num_ranks:
        raise ValueError(f"wire {wire.format} with {len(wire.zones)} zones")
    return wire


def _stripe_document(stripe: Stripe) -> dict[str, Any]:
    return {"shares": stripe.shares, "domains": _flatten_domains(stripe.domain)}


def _parse_stripe(document: Mapping[str, Any]) -> Stripe:
    return Stripe(_parse_domain(document["domains"], len(document["shares"])), tuple(document["shares"]))


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
