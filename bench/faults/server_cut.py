"""The node of the parameter server that leads is cut off for half a minute: how long rings on other nodes stand still.

    python bench/faults/server_cut.py                       # both ways, deaf, and not heard: six minutes

Jobs in mode ps-hra under --elastic with --standby in a lab, one for each way. The server that leads has a node with a
link of its own rate, and a worker on it; its standby and the coordinators are elsewhere. Stalls are the longest time
between two steps of any worker on another node while the node is cut off, less the usual time of a step. In the end
parameters of a ring's members are compared bit by bit, push by push; and each push of a ring must have made one version
on the server, and no other one.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ring_kills import Run, check_alike, conclude, longest_s, lost_pushes, parse, read, usual_s, wait_whole
from ring_servers import Stall, wait_claim

from ringweave import lab, telemetry, topology
from ringweave.lab import Lab
from ringweave.params.rules.succession import Claim
from ringweave.params.standby.claims import Claims

WAYS = ("both", "in", "out")
BAR_S = 3.0
CUT_S = 30.0
CALM_S = 5.0
SERVER = "server"
"""The node of the server that leads at first: others can send to it at the highest rate. Its worker is the last one."""


def cluster(options: argparse.Namespace) -> str:
    """All but one node alike."""
    return f"""
name: server-cut
nodes:
  - {{name: a, nic: 100Mbit/s, devices: 1, count: {options.workers - 1}}}
  - {{name: {SERVER}, nic: 200Mbit/s, devices: 1}}
"""


def one(options: argparse.Namespace, where: Lab, way: str, folder: Path) -> tuple[Stall, dict[str, Any], str]:
    """A job whose server is cut off in that way; what it cost, what is said of it, and what was printed."""
    run = Run(options, folder, flags=["--standby"], place=["ringweave", "lab", "run", "--lab", where.name])
    wait_whole(run, options)
    before = wait_claim(run, -1)
    time.sleep(CALM_S)
    at_s = time.monotonic()
    where.cut(SERVER, way)
    time.sleep(CUT_S)
    newest = Claims(run.run_dir / "claims").newest()
    where.mend(SERVER)
    whole = wait_claim(run, before.number)
    wait_whole(run, options)
    time.sleep(CALM_S)
    printed = run.end()
    steps = read(run.checks)
    counted = [each for each in telemetry.read(run.run_dir / "events.jsonl") if each["kind"] == "params_counted"]
    elsewhere = [each for name, each in steps.items() if name.partition(".")[0] != str(options.workers - 1)]
    found = [(longest_s(each, at_s, at_s + CUT_S), usual_s(each)) for each in elsewhere if len(each) > 10]
    stalls = [max(0.0, longest - usual) for longest, usual in found if longest is not None]
    pushes: dict[int, int] = {}
    for done in (each[-1] for each in steps.values()):
        pushes[done.ring] = max(done.num_pushed, pushes.get(done.ring, 0))
    said = {
        "leaders": [each.leader for each in (before, newest, whole) if isinstance(each, Claim)],
        "pushes_of_rings": sum(pushes.values()),
        "versions_of_the_server": max(each["version"] for each in counted),
        "pushes_lost": lost_pushes(steps),
        "parameters_alike": check_alike(steps),
    }
    is_whole = bool(stalls) and len(stalls) == len(found)
    return Stall(victims=way, at_s=at_s, stall_s=max(stalls) if is_whole else None), said, printed


def is_right(stall: Stall, said: dict[str, Any]) -> bool:
    """Whether the other server went on, in time, and nothing was lost."""
    has_changed = said["leaders"] == [0, 1, 1] and not said["pushes_lost"]
    is_counted = said["pushes_of_rings"] == said["versions_of_the_server"]
    return has_changed and is_counted and stall.stall_s is not None and stall.stall_s <= BAR_S


def main(ways: Sequence[str] = WAYS) -> int:
    """Each way once; 1 if a bar is missed."""
    options = parse(__doc__, workers=5, kills=len(ways))
    stalls, said, printed = [], {}, ""
    where = lab.up(topology.loads(cluster(options)), f"server-cut-{os.getpid()}", quotas="never")
    try:
        for way in ways[: options.kills]:
            with tempfile.TemporaryDirectory(prefix="ringweave-server-cut-") as name:
                stall, found, printed = one(options, where, way, Path(name))
            stalls.append(stall)
            said[way] = found
    finally:
        lab.down(where.name)
    document = {"kind": "measured", "bench": "server_cut", "workers": options.workers, "cut_s": CUT_S, **said}
    conclude(options, document, stalls, printed)
    return 0 if all(is_right(stall, said[stall.victims]) for stall in stalls) else 1


if __name__ == "__main__":
    sys.exit(main())
