"""Stalls of rings when their parameter server is killed, alone or together with the coordinator.

    python bench/faults/ring_servers.py --kills 6                 # three minutes

A job in a lab in mode ps-hra under --elastic with --standby. Each kill is a SIGKILL from outside at a random
moment for the server that leads; every second time the active coordinator is killed with it, and the other one must
take over. The next kill waits until both servers are up to date again. Stalls are the longest time between two steps of
any worker around the kill, less the usual time of a step. The parameters of a ring's members are compared bit by bit,
push by push; each push of a ring must have made exactly one version on the server, and there must be no other version;
and the accounts of passes have no sample lost, since no worker was killed.
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

from ringweave.param_server.leadership import FolderLeadershipLog, LeadershipRecord
from ringweave_bench.chaos import chaos_session
from ringweave_bench.chaos.member_impacts import quantile

BAR_S = 3.0
WINDOW_S = 6.0
"""Time after a kill in which stalls are attributed to it."""
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Measured effects of one kill."""

    victims: str
    at_s: float
    """Time of the kill, on the clock of the processes."""
    stall_s: float | None
    """Longest stall of a worker; None if one made no step any more."""
    is_replaced: bool | None = None
    """True if the other coordinator took over; None if none was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Target and time of a kill; `is_replaced` as in `Stall`."""

    victims: str
    at_s: float
    is_replaced: bool | None


def wait_claim(run: Run, after: int) -> LeadershipRecord:
    """Wait until both servers are up to date; return the newest leadership record."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s and not run.is_over:
        newest = FolderLeadershipLog(run.run_dir / "claims").latest()
        if newest is not None and newest.number > after and len(newest.members) == 2:
            return newest
        time.sleep(0.05)
    raise SystemExit(f"the servers were not whole within {LIMIT_S:g} s\n{run.end()[-3000:]}")


def pid_of(run: Run, module: str, index: int) -> int:
    """Return the process id of a module with that index."""
    for process in psutil.Process(run.process_id).children(recursive=True):
        words = process.cmdline()
        if module in words and "--index" in words and words[words.index("--index") + 1] == str(index):
            return process.pid
    raise SystemExit(f"no process of {module} with index {index}\n{run.end()[-3000:]}")


def hurt(run: Run, options: argparse.Namespace) -> list[Kill]:
    """Kill servers so many times; return the kills."""
    rng, killed, claim = random.Random(options.seed), [], -1
    ring_runs.wait_whole(run, options)
    for number in range(options.kills):
        newest = wait_claim(run, claim)
        claim = newest.number
        time.sleep(WINDOW_S / 2 + rng.random())
        victims = [pid_of(run, "ringweave.param_server.main", newest.leader)]
        deciding = run.deciding() if number % 2 else None
        if deciding is not None:
            victims.append(pid_of(run, "ringweave.membership.main", deciding))
        at_s = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        time.sleep(WINDOW_S)
        is_replaced = None if deciding is None else run.deciding() != deciding
        what = "server" if deciding is None else f"server and coordinator {deciding}"
        killed.append(Kill(victims=what, at_s=at_s, is_replaced=is_replaced))
    return killed


def judge(kill: Kill, steps: Mapping[str, Sequence[Done]]) -> Stall:
    """Measure the effects of a kill from the steps of all processes that were training."""
    alive = list(ring_runs.alive_at(steps, kill.at_s).values())
    found = [(longest_s(each, kill.at_s, kill.at_s + WINDOW_S), usual_s(each)) for each in alive]
    stalls = [max(0.0, longest - usual) for longest, usual in found if longest is not None]
    is_whole = bool(stalls) and len(stalls) == len(alive)
    stall_s = max(stalls) if is_whole else None
    return Stall(victims=kill.victims, at_s=kill.at_s, stall_s=stall_s, is_replaced=kill.is_replaced)


def summary(stalls: Sequence[Stall]) -> dict[str, Any]:
    """Summarise a run."""
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
    """Return the missed requirements, in words; in every second kill the coordinator dies with the server."""
    found, num_double = ring_runs.missed(said), said["kills"] // 2
    num_replaced = said["coordinators_replaced"]
    found += [f"{num_replaced} coordinators were replaced, not {num_double}"] if num_replaced != num_double else []
    return found + lab_jobs.over("stall in s", said["stall_max_s"], BAR_S)


def main() -> int:
    """Run the kills; return 1 if a bar is missed."""
    options = ring_runs.parse(__doc__, kills=6)
    with tempfile.TemporaryDirectory(prefix="ringweave-servers-") as name:
        with chaos_session.signals_as_interrupt(), Run(options, Path(name), flags=["--standby"]) as run:
            killed = hurt(run, options)
            printed = run.end()
        steps = ring_runs.read(run.checks)
        stalls = [judge(each, steps) for each in killed]
        said = summary(stalls) | ring_runs.books(run.run_dir, run.checks, steps, num_gone=0)
    ring_runs.conclude(options, said, stalls, printed)
    return lab_jobs.verdict(missed(said))


if __name__ == "__main__":
    sys.exit(main())
