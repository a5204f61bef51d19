"""Alpha-beta cost model: predicts the time of a schedule that is pipelined over segments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringweave.cost.loads import ScheduleLoads, WaveLoad, vertices_of_ranks
from ringweave.cost.network import GroupNetwork, Ints, group_network
from ringweave.schedules import Schedule
from ringweave.topology import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Values that a cluster file does not contain. **Assumed**, until they are measured."""

    memory_bytes_per_s: float = 4e9
    """Rate at which a rank copies or adds data of a rank of its own node; two or three passes over ordinary memory."""
    message_s: float = 30e-6
    """Delay of the next message by each message that a rank sends or receives, in Python, on a free processor."""
    processor_message_s: float = 62e-6
    """CPU time of all its threads for a message, as `sim.HostModel.assumed` has it; it matters under a CPU quota."""
    cores: float = math.inf
    """CPU seconds per second that the rank with the least of them may use."""
    local_piece_bytes: float = 8e6
    """Best piece size in a group on one node: large pieces wake few ranks, small ones need less shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleDemand:
    """Needs of a schedule on the links and ranks of one group, per byte of message; its time follows from them."""

    num_rounds: int
    """Rounds of the schedule."""
    num_latencies: int
    """Waves that pass a link: how often a message waits for one from another node."""
    waves_s_per_byte: float
    """Time of all waves in sequence, each as long as its most loaded link needs."""
    busiest_s_per_byte: float
    """Time of the most loaded link for all its traffic: a lower limit for any number of segments."""
    busiest: str
    """Name of that link, or of the rank whose copies inside its node take longer."""
    num_messages: int
    """Messages that the busiest rank sends and receives."""
    num_receives: int
    """Largest number of messages that a rank receives."""
    streams_meet: bool
    """Some rank receives from more than one other rank."""
    largest_piece: float
    """Largest operation as a fraction of the message."""
    message_s: float
    """Processor time per message."""
    local_piece_bytes: float
    """Best size of a piece inside a node."""
    latency_s: float
    """Alpha."""

    def segments_in_flight(self, num_segments: int, lag: int) -> int:
        """Return the number of segments that are in different rounds at the same time."""
        return 1 if lag == 0 else min(num_segments, max(1, math.ceil(self.num_rounds / lag)))

    def predicted_s(self, num_bytes: int, *, num_segments: int = 1, lag: int = 0) -> float:
        """Return the predicted seconds of one run.

        The first segment passes all waves, one after the other. Each further segment adds the longest of: its time on
        the most loaded link; its time through all waves divided by the segments in flight; its messages' CPU time:

        T = L alpha + W S/K + m o + (K-1) max(B S/K, W S/(K F), m o)

        with S bytes in K segments, L, W and B as in this class, m messages of o seconds each, F segments in flight.

        It ignores that messages of one wave start together and share links unfairly; adding what arrives from other
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


def schedule_demand(
    schedule: Schedule, net: GroupNetwork, vertex_of_rank: Ints, assumptions: Assumptions | None = None
) -> ScheduleDemand:
    """Return the needs of a schedule on a network.

    Args:
        schedule: Any schedule.
        net: The network between the ranks' nodes.
        vertex_of_rank: The vertex of each rank's node (`vertices_of_ranks`).
        assumptions: None is the default ones.

    Raises:
        PlacementError: Not one vertex per rank.

    Cost:
        One pass over the rounds.
    """
    assumed = assumptions or Assumptions()
    loads = ScheduleLoads(schedule, net, vertex_of_rank)
    total = WaveLoad(np.zeros(len(net)), np.zeros(len(net)), np.zeros(schedule.num_ranks))
    waves_s, num_latencies = 0.0, 0
    last, last_s = None, 0.0
    for load in loads.wave_loads():
        if load is not last:
            last, last_s = load, _busiest_part(load, net, assumed)[0]
        waves_s += last_s
        num_latencies += bool(load.up.any())
        total = WaveLoad(total.up + load.up, total.down + load.down, total.inside + load.inside)
    busiest_s, busiest = _busiest_part(total, net, assumed)
    return ScheduleDemand(
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


def predict(  # noqa: PLR0913 - schedule, network, options
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
    """Return the predicted seconds of a schedule; `ScheduleDemand.predicted_s` has the formula and its limits.

    Args:
        schedule: Any schedule.
        cluster: Cluster that runs it.
        node_of_rank: Name of the node of each rank.
        num_bytes: Size of the message.
        num_segments: Segments that run the schedule independently.
        lag: Rounds by which a segment trails the one before it; 0 ends a round for all before the next.
        rates: Measured bytes per second by directed link name.
        assumptions: Values that the cluster file does not contain.

    Raises:
        PlacementError: Not one node per rank.
        ClusterError: A node or a link is not in the cluster, or a rate is not positive.
    """
    net = group_network(cluster, node_of_rank, rates)
    needed = schedule_demand(schedule, net, vertices_of_ranks(net, node_of_rank), assumptions)
    return needed.predicted_s(num_bytes, num_segments=num_segments, lag=lag)


def _busiest_part(load: WaveLoad, net: GroupNetwork, assumed: Assumptions) -> tuple[float, str]:
    """Return the seconds of the slowest link or rank, and its name."""
    up, down = load.up / net.up_bytes_per_s, load.down / net.down_bytes_per_s
    inside = load.inside / assumed.memory_bytes_per_s
    leaving, entering, rank = int(up.argmax()), int(down.argmax()), int(inside.argmax())
    longest = max(float(up[leaving]), float(down[entering]), float(inside[rank]))
    if inside[rank] >= longest:
        return longest, f"memory of rank {rank}"
    return longest, net.up_name(leaving) if up[leaving] >= longest else net.down_name(entering)
