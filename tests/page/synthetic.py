"""Run directories made up for the page: every kind of fact, hostile texts, and runs as long as wanted."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringweave.launcher.run_dir import RUN_JSON_FORMAT
from ringweave.telemetry import EVENTS_FORMAT

BEGIN_S = 1_795_800_000.0
HOSTILE = "<script>alert(1)</script>\x1b[31m red \u202edesrever\u2066 \x00 & \"'"
CLUSTER = """\
name: two-racks
switches:
{switches}nodes:
{nodes}"""


def cluster_text(num_nodes: int, per_node: int) -> str:
    """Two racks behind thin uplinks; one for a single node."""
    switches = "".join(f"  - name: r{rack}\n    uplink: 100Mbit/s\n" for rack in range(min(2, num_nodes)))
    node = "  - name: n{0}\n    nic: 400Mbit/s\n    switch: r{1}\n    devices: {2}\n"
    nodes = "".join(node.format(index, index * 2 // num_nodes, per_node) for index in range(num_nodes))
    return CLUSTER.format(switches=switches, nodes=nodes)


def steps_event(rank: int, node: str, time_s: float, num_steps: int, step_s: float, *, slow: bool) -> dict[str, Any]:
    """A window of steps; the slow rank computes longer, and the others wait for it."""
    wave = 1 + 0.15 * math.sin(time_s / 300 + rank)
    compute_s = 0.8 * step_s if slow else 0.35 * step_s * wave
    event = {"time": time_s, "kind": "steps_measured", "rank": rank, "node": node, "steps": num_steps}
    event |= {"samples": num_steps * 32, "wall_s": num_steps * step_s, "longest_s": 1.7 * step_s}
    event |= {
        "input_s": 0.01 * step_s * num_steps,
        "compute_s": compute_s * num_steps,
        "update_s": 0.03 * step_s * num_steps,
    }
    event |= {"exchange_s": (0.95 * step_s - compute_s) * num_steps, "processor_s": 0.7 * num_steps * step_s}
    return event | {"throttled_s": 0.0, "collections_s": 0.0, "major_faults": 0, "memory_bytes": 2.1e9 + 1e7 * rank}


def events(num_ranks: int, num_steps: int, *, step_s: float = 0.1, per_node: int = 8) -> Iterator[dict[str, Any]]:
    """Events of a run without an end, as its workers would write them."""
    nodes = [f"n{rank // per_node}" for rank in range(num_ranks)]
    every, slow = max(1, round(10 / step_s)), num_ranks - 1

    def event(kind: str, time_s: float = 0.0, **fields: Any) -> dict[str, Any]:
        return {"time": BEGIN_S + time_s, "kind": kind, **fields}

    file = cluster_text(math.ceil(num_ranks / per_node), per_node)
    started = {"command": ["t.py"], "cluster": "two-racks", "world_size": num_ranks, "cluster_text": file}
    yield event("run_started", format=EVENTS_FORMAT, attempt=1, **started)
    for rank in range(num_ranks):
        yield event("worker_started", 0.1, rank=rank, node=nodes[rank], local_rank=rank % per_node, pid=1000 + rank)
    members = list(range(num_ranks))
    yield event("group_formed", 1.0, rank=0, group="world", node=nodes[0], members=members, nodes=nodes)
    shares = [32] * num_ranks
    prepared = {"mode": "sync", "requested_mode": "sync", "reason": "asked for", "batch_samples": sum(shares)}
    yield event("training_prepared", 2.0, rank=0, **prepared, shares=shares)
    plan = {"rates": {"r0->core": 11.6e6, "core->r0": 11.8e6}, "bound_s_per_byte": 1.6e-7}
    yield event("plan_made", 3.0, rank=0, group="world", version=1, **plan, binding="cut between r0 and core")
    measured = {"rank": 0, "group": "world", "version": 1, "collective": "allreduce", "num_segments": 4, "lag": 1}
    measured |= {"window": 2, "ahead": None, "rounds": 20}
    for name, size, seconds in (("multi-level", 25_000_000, 4.4), ("ring", 1_000_000, 0.31)):
        agreed = {
            "rank": 0,
            "group": "world",
            "collective": "allreduce",
            "schedule": name,
            "digest": "00",
            "bytes": size,
        }
        yield event("schedule_agreed", 4.0, **agreed)
        times = {"predicted_s": seconds * 0.93, "measured_s": seconds}
        yield event("schedule_measured", 30.0, **measured, schedule=name, bytes=size, **times)
    for done in range(every, num_steps + 1, every):
        time_s = 5 + done * step_s
        for part in range(1, 5):
            fields = {"iterations": done - every + every * part // 4, "total": num_steps}
            loss = 4.2 * math.exp(-done / num_steps * 2) + 0.2 + 0.05 * math.sin(done * part)
            yield event("iterations_done", time_s - 10 + 2.5 * part, rank=0, **fields, loss=loss)
        for rank in range(num_ranks):
            yield steps_event(rank, nodes[rank], BEGIN_S + time_s + rank / 100, every, step_s, slow=rank == slow)
    counted = {"multi-level": {"collectives": num_steps, "bytes": num_steps * 25_000_000, "messages": num_steps * 6}}
    for rank in range(num_ranks):
        yield event("collectives", 5 + num_steps * step_s, rank=rank, group="world", by_schedule=counted)


def write_run(folder: Path, num_ranks: int, num_steps: int, *, outcome: str = "running", **sizes: Any) -> Path:
    """Write a run directory; returns it. A failed one has lost a rank, with hostile texts in events and logs."""
    per_node = sizes.setdefault("per_node", 8)
    (folder / "logs").mkdir(parents=True)
    nodes = [{"name": f"n{rank // per_node}", "workers": []} for rank in range(0, num_ranks, per_node)]
    for rank in range(num_ranks):
        nodes[rank // per_node]["workers"].append(rank)
    record = {"format": RUN_JSON_FORMAT, "world_size": num_ranks, "attempt": 1, "outcome": outcome, "wall_s": None}
    record |= {"cluster": {"name": "two-racks", "nodes": nodes}, "started": "2026-11-28T08:00:00+00:00"}
    last_s = BEGIN_S
    with (folder / "events.jsonl").open("w") as file:
        for event in events(num_ranks, num_steps, **sizes):
            last_s = max(last_s, event["time"])
            file.write(json.dumps(event) + "\n")
        if outcome != "running":
            cause = f"rank 1 failed: {HOSTILE}" if outcome == "failed" else None
            for event in ending(num_ranks, per_node, last_s + 1, outcome, cause):
                file.write(json.dumps(event) + "\n")
            record |= {"wall_s": last_s + 1 - BEGIN_S, "exit_code": int(outcome != "done"), "cause": cause}
    (folder / "run.json").write_text(json.dumps(record))
    for rank in range(num_ranks):
        lines = [f"step {number}: loss {4 / number:.3f}" for number in range(1, 41)]
        (folder / "logs" / f"rank-{rank}.log").write_text(
            "\n".join([*lines, f"rank {rank} {HOSTILE}", "0 %\r50 %\r100 %", ""])
        )
    return folder


def ending(num_ranks: int, per_node: int, time_s: float, outcome: str, cause: str | None) -> Iterator[dict[str, Any]]:
    """The last events of a run."""
    is_failed = outcome == "failed"
    if is_failed:
        failed = {"rank": 1, "node": "n0", "group": HOSTILE, "text": f"PeerError: {HOSTILE}"}
        yield {"time": time_s - 0.5, "kind": "communication_failed", **failed}
    for rank in range(num_ranks):
        how = {"exit_code": None if is_failed else 0, "signal": "SIGKILL" if is_failed else None}
        where = {"rank": rank, "node": f"n{rank // per_node}", "stopped": is_failed and rank != 1}
        yield {"time": time_s - 0.4, "kind": "worker_exited", **where, **how}
    done = {"outcome": outcome, "exit_code": int(is_failed), "wall_s": time_s - BEGIN_S, "cause": cause}
    yield {"time": time_s, "kind": "run_ended", **done}
