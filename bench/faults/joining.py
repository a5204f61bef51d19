"""Cost of a joining worker: its peers' stall, and its rate of reading the state from one of them.

    python bench/faults/joining.py --only peers --joins 4        # two minutes
    python bench/faults/joining.py --only state --rounds 3       # a minute

Peers: in an elastic job one worker after another is killed, and joins again; a stall is the longest step of any peer
until the newcomer has caught up, less the usual one. State: two nodes of a lab. One has a model of so many MB with the
moments of AdamW, three times as much in all. The other one pulls it as `ringweave.prepare` does, with its background
throttle but without other traffic, verifies it and loads it. The rate counts all of that.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import lab_jobs
import torch
from torch import nn

from ringweave import lab, rpc, units
from ringweave.rpc.state_transfer import BackgroundThrottle, StateServer
from ringweave.training.elastic.training_state import TrainingState
from ringweave_bench.chaos import member_impacts

BAR = 0.8
BAR_STEPS = 1.0
"""Longest stall of peers, in steps."""
_CALM_S, _BETWEEN_S = 12.0, 24.0
_WIDTH = 1000
_NAME = "state"


def make(num_megabytes: float, num_steps: int) -> tuple[nn.Module, TrainingState]:
    """Return a model after so many steps, and its state."""
    torch.manual_seed(num_steps)
    num_layers = max(1, round(num_megabytes * 1e6 / 4 / _WIDTH**2))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(1, _WIDTH)).sum().backward()
        optimizer.step()
    return model, TrainingState(model, optimizer, {})


def give(address: str, credentials: str, num_megabytes: float) -> None:
    """Publish the state until standard input ends; print the port."""
    _, kept = make(num_megabytes, 2)
    shelf = StateServer()
    with rpc.RpcServer(
        rpc.TlsAuthentication(rpc.Credentials.load_from(credentials)), shelf.handlers(), roles=("worker",)
    ).start(address) as server:
        shelf.publish(_NAME, kept.to_buffers())
        print(server.port, flush=True)
        sys.stdin.read()


def take(address: str, port: int, credentials: str, num_megabytes: float, rounds: int) -> None:
    """Pull the state so many times; print each time."""
    trust = rpc.TlsAuthentication(rpc.Credentials.load_from(credentials))
    found = []
    for _ in range(rounds):
        _, own = make(num_megabytes, 0)
        started_s = time.perf_counter()
        pace = BackgroundThrottle(lambda: 0.0, threading.Event())
        num_bytes = own.fetch_from_peer(address, port, trust, _NAME, timeout_s=300.0, throttle=pace)
        found.append({"bytes": num_bytes, "seconds": time.perf_counter() - started_s})
    print(json.dumps({"rounds": found, "alike": bool(found) and is_alike(own, make(num_megabytes, 2)[1])}))


def is_alike(one: TrainingState, other: TrainingState) -> bool:
    """Return True if parameters, moments and all other state have the same bits."""
    mine, its = one.to_buffers(), other.to_buffers()
    return mine.keys() == its.keys() and all(bytes(mine[name]) == bytes(its[name]) for name in mine)


def state(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the state transfer between two nodes of a lab."""
    two = argparse.Namespace(**{**vars(options), "workers": 2})
    authority = rpc.CertificateAuthority("joining")
    place = lab.up(lab_jobs.cluster(two), f"joining-{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("donor", "newcomer")]
            for index, path in enumerate(paths):
                authority.issue("worker", f"{index}.0").save(path)
            address = place.addresses["a-0"][0]
            own = [sys.executable, __file__, "--megabytes", str(options.megabytes)]
            donor = subprocess.Popen(
                place.command("a-0", [*own, "--give", str(address), str(paths[0])]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            with donor:
                assert donor.stdout is not None, "it was asked for"
                port = donor.stdout.readline().strip()
                asked = ["--rounds", str(options.rounds), "--take", str(address), port, str(paths[1])]
                said = subprocess.run(
                    place.command("a-1", [*own, *asked]), stdout=subprocess.PIPE, check=True, text=True
                ).stdout
                donor.communicate()
        return json.loads(said)
    finally:
        lab.down(place.name)


def peers(options: argparse.Namespace) -> dict[str, Any]:
    """Run an elastic job whose workers are killed one after another, and join again."""
    lines = [
        f"at {_CALM_S + _BETWEEN_S * number:g}s kill worker {1 + number % (options.workers - 1)}"
        for number in range(options.joins)
    ]
    until_s = _CALM_S + _BETWEEN_S * options.joins
    ended = lab_jobs.run(
        options, lab_jobs.parse(lines, options), until_s=until_s, elastic=lab_jobs.bounds(options), name="peers"
    )
    return lab_jobs.summary(ended, member_impacts.measure_fault_impacts(ended.events))


def rows_of_peers(said: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return a row for each join, the head first."""
    head = (
        "joined",
        "usual step, s",
        "longest stall of a peer, steps (bar 1)",
        "caught up after, s",
        "behind by, steps",
    )
    found = [
        (each["newcomers"], usual_s, each["stall_s"] / usual_s, each["caught_up_s"], each["lost_s"] / usual_s)
        for each in said["joins"]
        if (usual_s := each["usual_s"])
    ]
    return [head, *(tuple(round(cell, 3) if isinstance(cell, float) else cell for cell in row) for row in found)]


def main() -> int:
    """Measure; return 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=25.0, help="of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--joins", type=int, default=4)
    parser.add_argument("--only", choices=["peers", "state"])
    parser.add_argument("--give", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--take", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.give:
        give(*options.give, options.megabytes)  # pyrefly: ignore - two numbers
        return 0
    if options.take:
        address, port, credentials = options.take
        take(address, int(port), credentials, options.megabytes, options.rounds)
        return 0
    found = []
    if options.only != "state":
        said = peers(options)
        table = rows_of_peers(said)
        lab_jobs.conclude(options, "joining-peers", said, [*table, *lab_jobs.summary_rows(said, len(table[0]))])
        found += missed_by_peers(said, options.joins)
    if options.only != "peers":
        moved = state(options)
        part = fraction_of_link(options, moved)
        show_state(options, moved, part)
        found += missed_by_state(moved, part)
    return lab_jobs.verdict(found)


def missed_by_peers(said: dict[str, Any], num_joins: int) -> list[str]:
    """Return the missed requirements of joins, in words."""
    found, joins = lab_jobs.missed(said), said["joins"]
    found += [f"{len(joins)} times workers joined, not {num_joins}"] if not joins or len(joins) < num_joins else []
    for number, each in enumerate(joins, start=1):
        stalled = each["stall_s"] / each["usual_s"] if each["usual_s"] else None
        found += lab_jobs.over(f"join {number}: longest stall of a peer in steps", stalled, BAR_STEPS)
        found += [f"join {number}: the newcomer never caught up"] if each["caught_up_s"] is None else []
    return found


def fraction_of_link(options: argparse.Namespace, found: dict[str, Any]) -> float | None:
    """Return the median rate of the state over the link's raw rate; None if it was never pulled."""
    rates = [each["bytes"] / each["seconds"] for each in found["rounds"]]
    return statistics.median(rates) / units.parse_rate(options.rate) if rates else None


def missed_by_state(found: dict[str, Any], part: float | None) -> list[str]:
    """Return the missed requirements of the state transfer, in words."""
    wrong = [] if found["alike"] else ["the state that was pulled is not that which was offered"]
    is_good = part is not None and part >= BAR
    return wrong + ([] if is_good else [f"state at {part} of the link's raw rate, the bar is {BAR}"])


def show_state(options: argparse.Namespace, found: dict[str, Any], part: float | None) -> None:
    """Print and save the results."""
    rows: list[tuple[object, ...]] = [("state, MB", "s", "of the link's raw rate (bar 0.8)", "bit for bit")]
    rows += [(round(each["bytes"] / 1e6, 1), round(each["seconds"], 3), "", "") for each in found["rounds"]]
    rows.append(("median", "", part, found["alike"]))
    lab_jobs.conclude(options, "joining", {"fraction_of_link": part, **found}, rows)


if __name__ == "__main__":
    sys.exit(main())
