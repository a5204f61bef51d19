"""How long a schedule takes by formula: the alpha-beta model, pipelined over segments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringweave.cost.loads import Load, Loads, vertices
from ringweave.cost.network import Ints, Network, network
from ringweave.schedules import Schedule
from ringweave.topology import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What a cluster file does not say. **Assumed**, until they are measured."""

    memory_bytes_per_s: float = 4e9
    """What one rank copies or adds from a rank of its own node; two or three passes over ordinary memory."""
    message_s: float = 30e-6
    """What each message that a rank sends or receives delays the next by, in Python, where processors are free."""
    processor_message_s: float = 62e-6
    """Processor time of all its threads for it, as `sim.Machine.assumed` has it: under a quota that is what counts."""
    cores: float = math.inf
    """Processor time by the second that the rank with the least of it may use."""
    local_piece_bytes: float = 8e6
    """Best size of a piece in a group on one node: large ones wake few ranks up, small ones need less shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a schedule asks of the links and ranks of one group, per byte of message: all that its time follows from."""

    num_rounds: int
    """Rounds of the schedule."""
    num_latencies: int
    """Waves that pass a link: how often a message has to wait for one from another node."""
    waves_s_per_byte: float
    """Time of all waves one after the other, each as long as its most loaded link needs."""
    busiest_s_per_byte: float
    """What the most loaded link needs for all it carries: no number of segments gets below."""
    busiest: str
    """Name of that link, or the rank whose copies inside its node take longer."""
    num_messages: int
    """Messages that the busiest rank sends and receives."""
    num_receives: int
    """Messages that a rank receives at most."""
    streams_meet: bool
    """Whether some rank receives from more than one other rank."""
    largest_piece: float
    """Largest operation as a fraction of the message."""
    message_s: float
    """Processor time per message."""
    local_piece_bytes: float
    """Best size of a piece inside a node."""
    latency_s: float
    """Alpha."""

    def segments_in_flight(self, num_segments: int, lag: int) -> int:
        """Segments that are in different rounds at the same time."""
        return 1 if lag == 0 else min(num_segments, max(1, math.ceil(self.num_rounds / lag)))

    def predicted_s(self, num_bytes: int, *, num_segments: int = 1, lag: int = 0) -> float:
        """Predicted seconds of one run.

        The first segment passes all waves, one after the other. Each further segment adds the longest of: what it puts
        on the most loaded link; its time through all waves divided by the segments in flight; its messages' processor
        time:

        T = L alpha + W S/K + m o + (K-1) max(B S/K, W S/(K F), m o)

        with S bytes in K segments, L, W and B as in this class, m messages of o seconds each, F segments in flight.

        It ignores: that messages of one wave start together and share links unfairly; adding what arrives from other
        nodes (done while the next piece is on the wire); other traffic; stragglers; cores that ranks share.

        Source: the pipelined form of Hockney's alpha-beta model, as in Thakur, Rabenseifner and Gropp, "Optimization
        of collective communication operations in MPICH" (2005); the terms for waves and flight are our own.
        """
        bytes_per_segment = num_bytes / num_segments
        waves_s = self.waves_s_per_byte * bytes_per_segment
        messages_s = self.num_messages * self.message_s
        in_flight = self.segments_in_flight(num_segments, lag)
        next_s = max(self.busiest_s_per_byte * bytes_per_segment, waves_s / in_flight, messages_s)
        return self.num_latencies * self.latency_s + waves_s + messages_s + (num_segments - 1) * next_s


def demand(schedule: Schedule, net: Network, vertex_of_rank: Ints, assumptions: Assumptions | None = None) -> Demand:
    """What a schedule asks of a network.

    Args:
        schedule: Any schedule.
        net: The network between the ranks' nodes.
        vertex_of_rank: The vertex of each rank's node (`vertices`).
        assumptions: None is the default ones.

    Raises:
        PlacementError: Not one vertex per rank.

    Cost:
        One pass over the rounds.
    """
    assumed = assumptions or Assumptions()
    loads = Loads(schedule, net, vertex_of_rank)
    total = Load(np.zeros(len(net)), np.zeros(len(net)), np.zeros(schedule.num_ranks))
    waves_s, num_latencies = 0.0, 0
    last, last_s = None, 0.0
    for load in loads.waves():
        if load is not last:
            last, last_s = load, _busiest(load, net, assumed)[0]
        waves_s += last_s
        num_latencies += bool(load.up.any())
        total = Load(total.up + load.up, total.down + load.down, total.inside + load.inside)
    busiest_s, busiest = _busiest(total, net, assumed)
    return Demand(
        num_rounds=len(schedule.rounds),
        num_latencies=num_latencies,
        waves_s_per_byte=waves_s / loads.num_units,
        busiest_s_per_byte=busiest_s / loads.num_units,
        busiest=busiest,
        num_messages=int((loads.num_sends + loads.num_receives).max()),
        num_receives=int(loads.num_receives.max()),
        streams_meet=loads.streams_meet,
        largest_piece=loads.largest_units / loads.num_units,
        message_s=max(assumed.message_s, assumed.processor_message_s / assumed.cores),
        local_piece_bytes=assumed.local_piece_bytes,
        latency_s=net.latency_s,
    )


def predict(  # noqa: PLR0913 - what is run, where, how
    schedule: Schedule,
    cluster: Cluster,
    node_of_rank: Sequence[str],
    num_bytes: int,
    *,
    num_segments: int = 1,
    lag: int = 0,
    rates: Mapping[str, float] | None = None,
    assumptions: Assumptions | None = None,
) -> float:
    """Predicted seconds of a schedule on a cluster; `Demand.predicted_s` has the formula and what it ignores.

    Args:
        schedule: Any schedule.
        cluster: Where it is run.
        node_of_rank: Name of the node of each rank.
        num_bytes: Size of the message.
        num_segments: Segments that run the schedule independently.
        lag: Rounds by which a segment trails the one before it; 0 ends a round for all before the next.
        rates: Measured bytes per second by directed link name.
        assumptions: What the cluster file does not say.

    Raises:
        PlacementError: Not one node per rank.
        ClusterError: A node or a link is not in the cluster, or a rate is not positive.
    """
    net = network(cluster, node_of_rank, rates)
    asked = demand(schedule, net, vertices(net, node_of_rank), assumptions)
    return asked.predicted_s(num_bytes, num_segments=num_segments, lag=lag)


def _busiest(load: Load, net: Network, assumed: Assumptions) -> tuple[float, str]:
    """Seconds of the link or rank that needs longest, and its name."""
    up, down = load.up / net.up_bytes_per_s, load.down / net.down_bytes_per_s
    inside = load.inside / assumed.memory_bytes_per_s
    leaving, entering, rank = int(up.argmax()), int(down.argmax()), int(inside.argmax())
    longest = max(float(up[leaving]), float(down[entering]), float(inside[rank]))
    if inside[rank] >= longest:
        return longest, f"memory of rank {rank}"
    return longest, net.up_name(leaving) if up[leaving] >= longest else net.down_name(entering)
