"""How long rings stand still when their parameter server is killed, alone or with the coordinator at once.

    python bench/faults/ring_servers.py --kills 6                 # three minutes

A job in a lab in mode ps-hra under --elastic with --standby. Each kill is a SIGKILL from outside at a random
moment for the server that leads; every second time the coordinator that decides is killed with it, and the other one
has to take over. The next one waits until both servers have everything again. Stalls are the longest time between two
steps of any worker around the kill, less the usual time of a step. Parameters of a ring's members are compared bit by
bit, push by push; each push of a ring must have made one version on the server, and no other one; and the accounts of
epochs have no sample lost, since no worker was killed.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lab_jobs
import psutil
import ring_runs
from ring_runs import Done, Run, longest_s, usual_s

from ringweave.benchmarks.chaos import session
from ringweave.benchmarks.chaos.quantiles import quantile
from ringweave.params.rules.succession import Claim
from ringweave.params.standby.claims import Claims

BAR_S = 3.0
WINDOW_S = 6.0
"""After a kill: what workers do in it is laid to the kill."""
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """What one kill cost; measured."""

    victims: str
    at_s: float
    """On the clock of the processes."""
    stall_s: float | None
    """Of the worker that it was longest for; None if one made no step any more."""
    is_replaced: bool | None = None
    """The other coordinator decides since; None where none was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """What was killed, and when; `is_replaced` as in a stall."""

    victims: str
    at_s: float
    is_replaced: bool | None


def wait_claim(run: Run, after: int) -> Claim:
    """The newest claim, once both servers have everything."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s and not run.is_over:
        newest = Claims(run.run_dir / "claims").newest()
        if newest is not None and newest.number > after and len(newest.members) == 2:
            return newest
        time.sleep(0.05)
    raise SystemExit(f"the servers were not whole within {LIMIT_S:g} s\n{run.end()[-3000:]}")


def pid_of(run: Run, module: str, index: int) -> int:
    """Of the process of that module and index."""
    for process in psutil.Process(run.process_id).children(recursive=True):
        words = process.cmdline()
        if module in words and "--index" in words and words[words.index("--index") + 1] == str(index):
            return process.pid
    raise SystemExit(f"no process of {module} with index {index}\n{run.end()[-3000:]}")


def hurt(run: Run, options: argparse.Namespace) -> list[Kill]:
    """Kill so often."""
    rng, killed, claim = random.Random(options.seed), [], -1
    ring_runs.wait_whole(run, options)
    for number in range(options.kills):
        newest = wait_claim(run, claim)
        claim = newest.number
        time.sleep(WINDOW_S / 2 + rng.random())
        victims = [pid_of(run, "ringweave.params.serving.main", newest.leader)]
        deciding = run.deciding() if number % 2 else None
        if deciding is not None:
            victims.append(pid_of(run, "ringweave.membership.serving.main", deciding))
        at_s = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        time.sleep(WINDOW_S)
        is_replaced = None if deciding is None else run.deciding() != deciding
        what = "server" if deciding is None else f"server and coordinator {deciding}"
        killed.append(Kill(victims=what, at_s=at_s, is_replaced=is_replaced))
    return killed


def judge(kill: Kill, steps: Mapping[str, Sequence[Done]]) -> Stall:
    """What a kill cost, by the steps of all processes that were training."""
    alive = list(ring_runs.alive_at(steps, kill.at_s).values())
    found = [(longest_s(each, kill.at_s, kill.at_s + WINDOW_S), usual_s(each)) for each in alive]
    stalls = [max(0.0, longest - usual) for longest, usual in found if longest is not None]
    is_whole = bool(stalls) and len(stalls) == len(alive)
    stall_s = max(stalls) if is_whole else None
    return Stall(victims=kill.victims, at_s=kill.at_s, stall_s=stall_s, is_replaced=kill.is_replaced)


def summary(stalls: Sequence[Stall]) -> dict[str, Any]:
    """What is said of a run."""
    known = [each.stall_s for each in stalls if each.stall_s is not None]
    return {
        "bench": "ring-servers",
        "kills": len(stalls),
        "stall_p50_s": quantile(known, 0.5),
        "stall_max_s": round(max(known), 3) if known else None,
        "coordinators_replaced": sum(each.is_replaced is True for each in stalls),
        "never_went_on": len(stalls) - len(known),
    }


def missed(said: Mapping[str, Any]) -> list[str]:
    """What was not as it has to be, in words; every second time the coordinator goes with the server."""
    found, num_double = ring_runs.missed(said), said["kills"] // 2
    num_replaced = said["coordinators_replaced"]
    found += [f"{num_replaced} coordinators were replaced, not {num_double}"] if num_replaced != num_double else []
    return found + lab_jobs.over("stall in s", said["stall_max_s"], BAR_S)


def main() -> int:
    """So many kills; 1 if a bar is missed."""
    options = ring_runs.parse(__doc__, kills=6)
    with tempfile.TemporaryDirectory(prefix="ringweave-servers-") as name:
        with session.ended_cleanly(), Run(options, Path(name), flags=["--standby"]) as run:
            killed = hurt(run, options)
            printed = run.end()
        steps = ring_runs.read(run.checks)
        stalls = [judge(each, steps) for each in killed]
        said = summary(stalls) | ring_runs.books(run.run_dir, run.checks, steps, num_gone=0)
    ring_runs.conclude(options, said, stalls, printed)
    return lab_jobs.verdict(missed(said))


if __name__ == "__main__":
    sys.exit(main())
