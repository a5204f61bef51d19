"""A simulation as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process for each node with a thread for each of its ranks, and one for the switches; what each link carries is a
counter of the process at its lower end. Times are simulated.

Source: "Trace Event Format" (Google), JSON object format: events X (complete), C (counter), i (instant), M (names).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ringweave.sim.results import Simulation
from ringweave.topology import Cluster

_US_PER_S = 1e6
_SWITCHES = "switches"
Event = dict[str, Any]


def trace(simulation: Simulation, cluster: Cluster, node_of_rank: Sequence[str], title: str) -> dict[str, Any]:
    """The document, to be written as JSON.

    Args:
        simulation: One whose trace was kept.
        cluster: Where it ran.
        node_of_rank: Name of the node of each rank.
        title: What was simulated, in a line.
    """
    processes = {name: pid for pid, name in enumerate([*dict.fromkeys(node_of_rank), _SWITCHES], start=1)}
    of_rank = [processes[node] for node in node_of_rank]
    events = [*_names(processes, of_rank), *_spans(simulation, of_rank), *_endings(simulation, of_rank)]
    events += _counters(simulation, cluster, processes)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title, "times": "simulated"}}


def _names(processes: dict[str, int], of_rank: Sequence[int]) -> Iterator[Event]:
    for name, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for rank, pid in enumerate(of_rank):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank + 1, "args": {"name": f"rank {rank}"}}


def _spans(simulation: Simulation, of_rank: Sequence[int]) -> Iterator[Event]:
    for span in simulation.spans:
        yield {
            "ph": "X",
            "name": f"{span.what} {span.peer}",
            "cat": span.what,
            "pid": of_rank[span.rank],
            "tid": span.rank + 1,
            "ts": span.begin_s * _US_PER_S,
            "dur": (span.end_s - span.begin_s) * _US_PER_S,
            "args": {"peer": span.peer},
        }


def _endings(simulation: Simulation, of_rank: Sequence[int]) -> Iterator[Event]:
    for rank, time_s in simulation.noticed_s.items():
        at = {"pid": of_rank[rank], "tid": rank + 1, "ts": time_s * _US_PER_S}
        yield {"ph": "i", "name": "gives up", "cat": "fault", "s": "t", **at}


def _counters(simulation: Simulation, cluster: Cluster, processes: dict[str, int]) -> Iterator[Event]:
    """The loads of one link at one time are one event: only the last of them was ever true."""
    switches = {switch.name for switch in cluster.switches}
    last = {(load.link, load.at_s): load for load in simulation.loads}
    for load in last.values():
        src, dst = load.link.split("->")
        node = next((name for name in (src, dst) if name in processes and name not in switches), _SWITCHES)
        args = {"Mbit/s": load.bytes_per_s * 8 / 1e6}
        at = {"pid": processes[node], "tid": 0, "ts": load.at_s * _US_PER_S}
        yield {"ph": "C", "name": load.link, "cat": "link", **at, "args": args}
