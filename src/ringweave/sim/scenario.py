"""Inputs and results of a simulation: host costs, faults, routes between ranks, link loads and rank spans."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ringweave import units
from ringweave.cost import Assumptions, GroupNetwork, vertices_of_ranks
from ringweave.cost.network import Ints
from ringweave.errors import PlacementError, UsageError
from ringweave.files import file_io
from ringweave.files.problems import suggest_closest


@dataclass(frozen=True, kw_only=True, slots=True)
class StartDelay:
    """A rank starts late."""

    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSlowdown:
    """All work of a node's processors and memory takes longer."""

    node: str
    times: float
    """Factor on the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRateChange:
    """A link has another rate from some time on."""

    link: str
    bytes_per_s: float
    """0: the link is cut without a notice; ranks that depend on it wait until their timeout."""
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """A rank is killed; its kernel closes its connections."""

    rank: int
    at_s: float = 0.0


Fault = StartDelay | NodeSlowdown | LinkRateChange | RankFailure


RANK_PREFIX = "rank:"
STRAGGLER_FORMS = (
    "NODE=2 (twice as slow), LINK=50Mbit/s or LINK=50Mbit/s@0.5s (from then on), rank:3=20ms (begins late)"
)
FAILURE_FORMS = "rank:3@0.1s, LINK@0.1s, or either without @ for the beginning"


def parse_straggler(text: str) -> Fault:
    """Parse a straggler.

    Raises:
        UsageError: It cannot be read.
    """
    what, equals, value = text.partition("=")
    if not what or not equals or not value:
        raise _fault_text_error("straggler", text, STRAGGLER_FORMS)
    if what.startswith(RANK_PREFIX):
        return StartDelay(
            rank=_parse_rank(what, "straggler", text, STRAGGLER_FORMS), seconds=units.parse_seconds(value)
        )
    if "->" in what:
        rate, _, at = value.partition("@")
        return LinkRateChange(link=what, bytes_per_s=units.parse_rate(rate), at_s=units.parse_seconds(at or "0"))
    try:
        times = float(value)
    except ValueError:
        times = 0.0
    if not 0 < times < float("inf"):
        raise _fault_text_error("straggler", text, STRAGGLER_FORMS)
    return NodeSlowdown(node=what, times=times)


def parse_failure(text: str) -> Fault:
    """Parse a failure.

    Raises:
        UsageError: It cannot be read.
    """
    what, _, at = text.partition("@")
    at_s = units.parse_seconds(at or "0")
    if what.startswith(RANK_PREFIX):
        return RankFailure(rank=_parse_rank(what, "failure", text, FAILURE_FORMS), at_s=at_s)
    if "->" not in what:
        raise _fault_text_error("failure", text, FAILURE_FORMS)
    return LinkRateChange(link=what, bytes_per_s=0.0, at_s=at_s)


def _parse_rank(what: str, what_for: str, text: str, expected: str) -> int:
    number = what.removeprefix(RANK_PREFIX)
    if not number.isdecimal() or len(number) > 9:
        raise _fault_text_error(what_for, text, expected)
    return int(number)


def _fault_text_error(what_for: str, text: str, expected: str) -> UsageError:
    return UsageError(what_for, got=text, expected=expected, do="Write it in one of these forms")


MESSAGE_S, INSIDE_MESSAGE_S, WAKE_S, KERNEL_S_PER_BYTE, START_S = 48e-6, 30e-6, 14.5e-6, 0.24e-9, 0.85e-3
"""Fitted to the measured CPU time of 189 kinds of allreduce in labs (bench/simulation/processor_costs.py): each end of
a message and of its bytes, each wake-up (as often as in the simulation), and the start of each rank. Half of the kinds
are off by more than 15 % of that, one in twenty by more than 37 %. Nothing is fitted to their wall time."""
SEND_BUFFER_BYTES, RECEIVE_BUFFER_BYTES = 1e6, 4e6
"""Approximate buffer sizes that Linux chooses on links of some 100 Mbit/s to some Gbit/s."""
WINDOW_BYTES, BURST_BYTES = 128 * 2**10, 4 * 2**10
"""Approximate bytes in flight on such links in Linux, and three packets."""
UNEVENNESS = 0.43
"""Measured without a schedule: seven streams into one NIC of a lab, 1 to 25 MB each, 18 rounds
(bench/simulation/incast.py)."""
UNEVEN_TURNS, REDEAL_S = 0.65, 1.3
"""Measured: three streams out of the slow NIC of a lab, half a MB each, 6 rounds (bench/simulation/outcast.py); with 8
MB each 0.37, as if turns were dealt anew so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostModel:
    """Costs of processors and memory, buffers of the kernel, queues. The defaults cost nothing: the network alone."""

    message_s: float = 0.0
    """CPU time of a rank for each message that it sends to or receives from another node."""
    inside_message_s: float = 0.0
    """CPU time of a rank for each message inside its node."""
    kernel_s_per_byte: float = 0.0
    """CPU time of a rank for each byte that it sends to or receives from another node."""
    wake_s: float = 0.0
    """CPU time of a rank for each wake-up: a message or a burst of one has come, or one has left."""
    start_s: float = 0.0
    """CPU time of a rank before its first message."""
    combine_s_per_byte: float = 0.0
    """Time to add a byte from another node to the message."""
    coding_s_per_byte: float = 0.0
    """Time to encode or decode a byte of what travels encoded, counted as it is when decoded."""
    coding_message_s: float = 0.0
    """Further time of each piece that is encoded, decoded or rounded."""
    inside_s_per_byte: float = 0.0
    """Time to move a byte from rank to rank inside a node: half of it to copy it in, half to read it."""
    send_buffer_bytes: float = math.inf
    """Send buffer of a connection in the kernel: so many bytes may have left a rank's memory and not be on the wire
    yet."""
    receive_buffer_bytes: float = math.inf
    """Receive buffer of a connection in the kernel without a posted receive; beyond it the sender has to wait."""
    burst_bytes: float = math.inf
    """Bytes that go from link to link in one piece, and wait in a switch while the next link is busy. Infinite: there
    are no queues, and a stream moves on all links of its route at once."""
    window_bytes: float = math.inf
    """Bytes that a stream may have in flight, where there are queues."""
    unevenness: float = 0.0
    """Standard deviation of the logarithm of the windows of streams that meet, where there are queues. 0: they share
    links evenly. The same streams get the same windows each time, spread like random draws."""
    uneven_turns: float = 0.0
    """Standard deviation of the logarithm of the turns of streams that leave one node by a link slower than their last
    one."""
    redeal_s: float = math.inf
    """Interval at which those turns are dealt anew."""
    bucket_bytes: float = 0.0
    """Bytes that a link passes at once after a long idle time, where there are queues: the token buckets of a lab do.
    """
    num_processors: int | None = None
    """Number of processors that *all* nodes share, as in a lab on one machine; None: each rank has its own."""

    def __post_init__(self) -> None:
        costs = (self.message_s, self.inside_message_s, self.kernel_s_per_byte, self.wake_s, self.start_s)
        costs += (self.combine_s_per_byte, self.inside_s_per_byte, self.coding_s_per_byte, self.coding_message_s)
        sizes = (self.send_buffer_bytes, self.receive_buffer_bytes, self.bucket_bytes)
        if any(not 0 <= cost < math.inf for cost in costs) or any(not size >= 0 for size in sizes):
            raise ValueError(f"machine: {self}, expected finite times and sizes, none negative")
        if not (self.burst_bytes > 0 and self.window_bytes > 0):
            raise ValueError(f"machine: {self}, expected bursts and windows of more than 0 bytes")
        for name in ("unevenness", "uneven_turns"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"machine: {name} {value}, expected a finite number, not negative")
        if not self.redeal_s > 0:
            raise ValueError(f"machine: redeal_s {self.redeal_s}, expected more than 0 s")
        if self.num_processors is not None and self.num_processors < 1:
            raise ValueError(f"machine: {self.num_processors} processors, expected at least one, or None")

    @classmethod
    def assumed(cls, assumptions: Assumptions | None = None) -> Self:
        """Return the assumed costs of Linux and of this program; memory as in planning, by default with its defaults.

        CPU time is split into messages and bytes here, while planning counts pieces of a usual size. With less than a
        whole processor, all of it lasts longer.
        """
        assumed = assumptions or Assumptions()
        slowness = max(1.0, 1 / assumed.cores)
        s_per_byte = slowness / assumed.memory_bytes_per_s
        return cls(
            message_s=MESSAGE_S * slowness,
            inside_message_s=INSIDE_MESSAGE_S * slowness,
            kernel_s_per_byte=KERNEL_S_PER_BYTE * slowness,
            wake_s=WAKE_S * slowness,
            start_s=START_S * slowness,
            combine_s_per_byte=s_per_byte,
            coding_s_per_byte=slowness / assumed.coding_bytes_per_s,
            coding_message_s=assumed.coding_message_s * slowness,
            inside_s_per_byte=s_per_byte,
            send_buffer_bytes=SEND_BUFFER_BYTES,
            receive_buffer_bytes=RECEIVE_BUFFER_BYTES,
            burst_bytes=BURST_BYTES,
            window_bytes=WINDOW_BYTES,
            unevenness=UNEVENNESS,
            uneven_turns=UNEVEN_TURNS,
            redeal_s=REDEAL_S,
        )


HOST_COST_FIELDS = (
    *("message_s", "inside_message_s", "wake_s", "kernel_s_per_byte"),
    *("inside_s_per_byte", "combine_s_per_byte", "start_s"),
)
"""Keys that such a file may have; all other costs are assumed."""


def load_host_costs(path: str | Path) -> HostModel:
    """Return the assumed host model, with the costs of a file.

    Raises:
        UsageError: The file cannot be read, has no costs, or one that is none or not a time.
    """
    where = str(path)
    try:
        document = file_io.load_json(path)
        costs = document["costs"]
        named = dict(costs.items())
    except OSError as cause:
        do = "Name a file, or take none or assumed"
        raise UsageError("costs of processors", got=where, expected="a file", do=f"{do} ({cause})") from cause
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
        expected, do = 'a JSON document with "costs"', "Write one with bench/simulation/processor_costs.py --out"
        raise UsageError("costs of processors", got=where, expected=expected, do=do) from cause
    for name, value in named.items():
        _check_host_cost(name, value, where)
    return dataclasses.replace(HostModel.assumed(), **named)


def _check_host_cost(name: str, value: object, where: str) -> None:
    if name not in HOST_COST_FIELDS:
        do = suggest_closest(name, HOST_COST_FIELDS) or "Leave it out"
        raise UsageError("cost of processors", got=name, expected=", ".join(HOST_COST_FIELDS), do=do, where=where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        expected, do = "seconds, not negative", "Measure it again"
        raise UsageError(name, got=value, expected=expected, do=do, where=where)


ProgressCallback = Callable[[int, int], None]
"""Called with the amount done and the total."""


def ignore_progress(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class RankSpan:
    """An activity of a rank with its time span."""

    rank: int
    what: str
    peer: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Load of a link from some time on."""

    link: str
    at_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """Result of a simulation; all numbers are simulated."""

    finish_s: tuple[float, ...]
    """Finish time of each rank; infinite for one that never finishes."""
    bytes_on_link: Mapping[str, float]
    """Link -> bytes that it carried, without headers."""
    died: tuple[int, ...] = ()
    """Ranks that were killed before they finished."""
    noticed_s: Mapping[int, float] = field(default_factory=dict)
    """Rank that gives up -> time at which it notices that a peer is gone, or at which its timeout ends."""
    num_wakes: int = 0
    """Number of wake-ups of all ranks; 0 where a schedule was simulated round by round."""
    spans: tuple[RankSpan, ...] = ()
    """Activities of the ranks, if the trace was kept."""
    loads: tuple[LinkLoad, ...] = ()
    """Loads of the links, if the trace was kept."""

    @property
    def seconds(self) -> float:
        """Finish time of the slowest rank; infinite if one never finishes."""
        return max(self.finish_s)


class Routes:
    """Numbered links of a group's network: link 2 v leaves vertex v upwards, link 2 v + 1 enters it.

    Raises:
        PlacementError: Not one node per rank.
    """

    def __init__(self, net: GroupNetwork, node_of_rank: Sequence[str], num_ranks: int) -> None:
        if len(node_of_rank) != num_ranks:
            got, expected = len(node_of_rank), f"{num_ranks}, one per rank of the schedule"
            raise PlacementError("nodes of ranks", got=got, expected=expected, do="Name each rank's node")
        self.latency_s = net.latency_s
        self.nodes = tuple(node_of_rank)
        self.capacities = [
            float(rate) for pair in zip(net.up_bytes_per_s, net.down_bytes_per_s, strict=True) for rate in pair
        ]
        """Bytes per second by number; the first two are the root's, which nothing passes."""
        self.names = [name for vertex in range(1, len(net)) for name in (net.up_name(vertex), net.down_name(vertex))]
        """Names from number 2 on."""
        self._vertices = vertices_of_ranks(net, node_of_rank)
        self._parents = net.parents

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Return the links from rank to rank, upwards and then downwards; empty inside a node."""
        up, down = list[int](), list[int]()
        left, right = int(self._vertices[src]), int(self._vertices[dst])
        while left != right:  # in preorder the larger of two is never above the other one
            if left > right:
                up.append(2 * left)
                left = int(self._parents[left])
            else:
                down.append(2 * right + 1)
                right = int(self._parents[right])
        return (*up, *reversed(down))

    def flow_link_pairs(self, src: NDArray[np.integer], dst: NDArray[np.integer]) -> tuple[Ints, Ints]:
        """Return the routes of many messages at once: the message index of each pair, and its link."""
        left, right = self._vertices[src], self._vertices[dst]
        flows, links = list[Ints](), list[Ints]()
        while (apart := np.flatnonzero(left != right)).size:
            up, down = apart[left[apart] > right[apart]], apart[left[apart] < right[apart]]
            flows += [up, down]
            links += [2 * left[up], 2 * right[down] + 1]
            left[up], right[down] = self._parents[left[up]], self._parents[right[down]]
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *flows]), np.concatenate([none, *links])

    def link_number(self, link: str) -> int:
        """Return the number of a link by its name.

        Raises:
            UsageError: No route of this group passes such a link.
        """
        if link not in self.names:
            expected = f"a link between nodes of this group, such as {self.names[0]}" if self.names else "none"
            do = suggest_closest(link, self.names) or "Name it by what it connects, sender first"
            raise UsageError("link of a fault", got=link, expected=expected, do=do)
        return 2 + self.names.index(link)

    def checked_rank(self, number: int) -> int:
        """Return the rank, if the group has it.

        Raises:
            UsageError: This group has no such rank.
        """
        if not 0 <= number < len(self.nodes):
            expected = f"0 to {len(self.nodes) - 1}"
            raise UsageError("rank of a fault", got=number, expected=expected, do="Name a rank of the group")
        return number

    def ranks_on_node(self, node: str) -> list[int]:
        """Return the ranks on a node.

        Raises:
            UsageError: The node has none.
        """
        if node not in self.nodes:
            do = suggest_closest(node, sorted(set(self.nodes))) or "Name one of them"
            raise UsageError("node of a fault", got=node, expected="a node with ranks of this group", do=do)
        return [rank for rank, name in enumerate(self.nodes) if name == node]

    def values_by_link(self, values: Sequence[float]) -> dict[str, float]:
        return dict(zip(self.names, values[2:], strict=True))
