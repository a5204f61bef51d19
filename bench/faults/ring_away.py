"""Stall of one ring while the other ring, or its representative, is stopped or cut off for half a minute.

    python bench/faults/ring_away.py                        # four faults: eight minutes

Jobs in mode ps-hra under --elastic in a lab, one for each fault, of two rings of two. No connection is closed, so the
absence of the ring must be noticed by its silence. Faults, 30 s each: SIGSTOP to all of a ring; its nodes cut off both
ways, or outbound only; SIGSTOP to its representative, without which the other member may not continue. The ring is on
nodes without the server and the coordinators. Stalls are the longest time between two steps of a worker of the other
ring while the fault lasts, less its usual step. If a pass over the data ends meanwhile the rings meet at a barrier, and
the other one waits for the absent one: that time is reported separately, and has no bar. Afterwards the ring must train
again, the parameters of a ring's members are compared bit by bit, push by push, and each push of a ring must have made
exactly one version on the server, and there must be no other version.
"""

import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lab_jobs
import ring_runs
from ring_runs import Run, longest_apart, usual_s
from ring_servers import Stall

from ringweave import telemetry
from ringweave_bench.chaos import chaos_session
from ringweave_bench.chaos.job_history import parse_member

FAULTS = ("ring stopped", "ring cut both", "ring cut out", "representative stopped")
BAR_S = 2.0
AWAY_S = 30.0
CALM_S = 5.0
BACK_S = 20.0
"""Time within which the ring trains again."""
COORDINATORS = {0, 1}
"""Numbers of the coordinators' nodes, and ranks of the workers there."""


def ring_to_hurt(run: Run) -> list[str]:
    """Return the members of a ring that is on other nodes than the server and the coordinators."""
    events = list(telemetry.read_events(run.run_dir / "events.jsonl"))
    servers = {int(event["node"].rpartition("-")[2]) for event in events if event["kind"] == "server_started"}
    for _, members in sorted(run.members().items()):
        if len(members) > 1 and not {parse_member(each)[0] for each in members} & (servers | COORDINATORS):
            return members
    raise SystemExit(f"each ring has a member on a node with a server ({servers}) or coordinator: {run.members()}")


def hurt(run: Run, fault: str, members: Sequence[str]) -> None:
    """Inject the fault, and lift it."""
    assert run.lab is not None, "cut off from others, in a lab"
    if fault.endswith("stopped"):
        pids = [run.pid(each) for each in (members if fault.startswith("ring") else members[:1])]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(AWAY_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        return
    nodes = [f"a-{parse_member(each)[0]}" for each in members]
    for node in nodes:
        run.lab.cut(node, fault.rpartition(" ")[2])
    time.sleep(AWAY_S)
    for node in nodes:
        run.lab.reconnect(node)


def one(options: Namespace, fault: str, folder: Path) -> tuple[Stall, dict[str, Any], str]:
    """Run a job under that fault; return its stall, its summary, and its output."""
    with chaos_session.signals_as_interrupt(), Run(options, folder) as run:
        ring_runs.wait_whole(run, options)
        members = ring_to_hurt(run)
        time.sleep(CALM_S)
        at_s = time.monotonic()
        hurt(run, fault, members)
        time.sleep(BACK_S)
        ring_runs.wait_whole(run, options)
        time.sleep(CALM_S)
        back_s = time.monotonic() - CALM_S
        printed = run.end()
    steps = ring_runs.read(run.checks)
    slots = {parse_member(each)[0] for each in members}
    others = [each for name, each in steps.items() if parse_member(name)[0] not in slots and len(each) > 10]
    found = [(longest_apart(each, at_s, at_s + AWAY_S), usual_s(each)) for each in others]
    stalls = [max(0.0, waits.inside_s - usual) for waits, usual in found if waits is not None]
    meeting_s = max((waits.meeting_s for waits, _ in found if waits is not None), default=0.0)
    is_whole = bool(stalls) and len(stalls) == len(found)
    back = {parse_member(name)[0] for name, each in steps.items() if each[-1].time_s > back_s}
    said = {"members": members, "slots_back": sorted(slots & back), "met_for_s": round(meeting_s, 3)}
    said |= ring_runs.books(run.run_dir, run.checks, steps, len(members))
    return Stall(victims=fault, at_s=at_s, stall_s=max(stalls) if is_whole else None), said, printed


def missed(stall: Stall, said: dict[str, Any]) -> list[str]:
    """Return the missed requirements, in words."""
    num_away = len(said["members"]) - len(said["slots_back"])
    found = [f"{num_away} workers of the ring do not train again"] if num_away else []
    found += ring_runs.missed({**said, "never_went_on": int(stall.stall_s is None)})
    return [f"{stall.victims}: {each}" for each in [*found, *lab_jobs.over("stall in s", stall.stall_s, BAR_S)]]


def main(faults: Sequence[str] = FAULTS) -> int:
    """Run each fault once; return 1 if a bar is missed."""
    options = ring_runs.parse(__doc__, workers=4, kills=len(faults), repeat=25)  # most of the time within an epoch
    stalls, said, printed = ring_runs.one_by_one(options, faults, one)
    wrong = [each for stall in stalls for each in missed(stall, said[stall.victims])]
    ring_runs.conclude(options, {"bench": "ring-away", "away_s": AWAY_S, **said}, stalls, printed)
    return lab_jobs.verdict(wrong)


if __name__ == "__main__":
    sys.exit(main())
