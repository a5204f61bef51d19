"""The trace is what Perfetto and chrome://tracing take: every event with the fields of its kind, numbers finite."""

import dataclasses
import itertools
import json
import math
from collections import defaultdict

from ringweave import schedules, sim, topology
from ringweave.sim import HostModel, RankFailure

FIELDS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "cat", "pid", "tid", "ts", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
}


def document(*faults) -> dict:
    cluster = topology.load("examples/clusters/two-ranks-a-node.yaml")
    nodes = [node.name for node in cluster.nodes for _ in node.devices]
    machine = dataclasses.replace(HostModel.assumed(), num_processors=2)
    schedule = schedules.leader_matrix([[rank, rank + 1] for rank in range(0, 8, 2)])
    found = sim.simulate(schedule, cluster, nodes, 1_000_000, machine=machine, faults=faults, keeps_trace=True)
    return json.loads(json.dumps(sim.trace_document(found, cluster, nodes, "a title"), allow_nan=False))


def test_every_event_has_the_fields_of_its_kind() -> None:
    found = document(RankFailure(rank=0, at_s=0.05))
    assert found["displayTimeUnit"] == "ms"
    assert {event["ph"] for event in found["traceEvents"]} == set(FIELDS)
    for event in found["traceEvents"]:
        assert set(event) == FIELDS[event["ph"]] | {"ph"}
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert 0 <= event.get("ts", 0) < math.inf
        assert event.get("dur", 1) > 0
        if event["ph"] == "C":
            assert all(isinstance(value, float) and value >= 0 for value in event["args"].values())


def test_a_process_for_each_node_and_a_thread_for_each_rank() -> None:
    events = document()["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert list(processes.values()) == ["a-0", "a-1", "a-2", "a-3", "switches"]
    assert {(processes[pid], name) for pid, name in threads} == {(f"a-{r // 2}", f"rank {r}") for r in range(8)}


def test_what_a_rank_does_does_not_overlap() -> None:
    of_thread = defaultdict(list)
    for event in document()["traceEvents"]:
        if event["ph"] == "X":
            of_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(of_thread) == 8
    for spans in of_thread.values():
        spans.sort()
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in itertools.pairwise(spans))


def test_counters_end_at_zero_and_never_pass_the_rate() -> None:
    last = {}
    for event in document()["traceEvents"]:
        if event["ph"] == "C":
            last[event["name"]] = event["args"]["Mbit/s"]
            assert last[event["name"]] <= 200 * (1 + 1e-9)
    assert last == dict.fromkeys(last, 0.0)
    assert "a-0->core" in last
