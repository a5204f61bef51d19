"""Stalls of rings on other nodes while the node of the leading parameter server is cut off for half a minute.

    python bench/faults/server_cut.py                       # both ways, inbound, and outbound: six minutes

Jobs in mode ps-hra under --elastic with --standby in a lab, one for each direction. The leading server has a node with
a link of its own rate, and a worker on it; its standby and the coordinators are elsewhere. Stalls are the longest time
between two steps of any worker on another node while the node is cut off, less the usual time of a step. In the end the
parameters of a ring's members are compared bit by bit, push by push. Each push of a ring must have made exactly one
version on the server, and there must be no other version. No more samples may be lost than the worker on the server's
node had.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lab_jobs
import ring_runs
from ring_runs import Run, longest_s, usual_s
from ring_servers import Stall, wait_claim

from ringweave import topology
from ringweave.param_server.leadership import FolderLeadershipLog, LeadershipRecord
from ringweave_bench.chaos import chaos_session
from ringweave_bench.chaos.job_history import parse_member

WAYS = ("both", "in", "out")
BAR_S = 3.0
CUT_S = 30.0
CALM_S = 5.0
SERVER = "server"
"""Node of the first leading server: others can send to it at the highest rate. Its worker is the last one."""


def cluster(options: argparse.Namespace) -> str:
    """Return the cluster file; all nodes but one are equal."""
    return f"""
name: server-cut
nodes:
  - {{name: a, nic: 100Mbit/s, devices: 1, count: {options.workers - 1}}}
  - {{name: {SERVER}, nic: 200Mbit/s, devices: 1}}
"""


def one(options: argparse.Namespace, way: str, folder: Path) -> tuple[Stall, dict[str, Any], str]:
    """Run a job whose server is cut off in that direction; return its stall, its summary, and its output."""
    nodes = topology.loads(cluster(options))
    with chaos_session.signals_as_interrupt(), Run(options, folder, flags=["--standby"], cluster=nodes) as run:
        assert run.lab is not None, "cut off from others, in a lab"
        ring_runs.wait_whole(run, options)
        before = wait_claim(run, -1)
        time.sleep(CALM_S)
        at_s = time.monotonic()
        run.lab.cut(SERVER, way)
        time.sleep(CUT_S)
        newest = FolderLeadershipLog(run.run_dir / "claims").latest()
        run.lab.reconnect(SERVER)
        whole = wait_claim(run, before.number)
        ring_runs.wait_whole(run, options)
        time.sleep(CALM_S)
        printed = run.end()
    steps = ring_runs.read(run.checks)
    elsewhere = [each for name, each in steps.items() if parse_member(name)[0] != options.workers - 1]
    found = [(longest_s(each, at_s, at_s + CUT_S), usual_s(each)) for each in elsewhere if len(each) > 10]
    stalls = [max(0.0, longest - usual) for longest, usual in found if longest is not None]
    leaders = [each.leader for each in (before, newest, whole) if isinstance(each, LeadershipRecord)]
    num_gone = 1  # the worker that is cut off with the server
    said = {"leaders": leaders, **ring_runs.books(run.run_dir, run.checks, steps, num_gone)}
    is_whole = bool(stalls) and len(stalls) == len(found)
    return Stall(victims=way, at_s=at_s, stall_s=max(stalls) if is_whole else None), said, printed


def missed(stall: Stall, said: dict[str, Any]) -> list[str]:
    """Return the missed requirements, in words: the other server takes over in time, and nothing is lost."""
    found = [] if said["leaders"] == [0, 1, 1] else [f"servers {said['leaders']} led, expected [0, 1, 1]"]
    found += ring_runs.missed({**said, "never_went_on": int(stall.stall_s is None)})
    return [f"{stall.victims}: {each}" for each in [*found, *lab_jobs.over("stall in s", stall.stall_s, BAR_S)]]


def main(ways: Sequence[str] = WAYS) -> int:
    """Run each direction once; return 1 if a bar is missed."""
    options = ring_runs.parse(__doc__, workers=5, kills=len(ways), repeat=10)  # so that epochs are complete
    stalls, said, printed = ring_runs.one_by_one(options, ways, one)
    wrong = [each for stall in stalls for each in missed(stall, said[stall.victims])]
    ring_runs.conclude(options, {"bench": "server-cut", "cut_s": CUT_S, **said}, stalls, printed)
    return lab_jobs.verdict(wrong)


if __name__ == "__main__":
    sys.exit(main())
