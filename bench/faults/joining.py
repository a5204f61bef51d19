"""How fast a newcomer reads the job's state from a peer: from memory to memory over a limited link, by mutual TLS.

    python bench/faults/joining.py --megabytes 25 --rounds 3     # a minute

Two nodes of a lab. One has a model of so many MB with the moments of AdamW, three times as much in all; the other one
pulls it as `ringweave.prepare` does, checks it and takes it over. The rate counts all of that.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lab_jobs
import torch
from torch import nn

from ringweave import lab, units, wire
from ringweave.training.elastic.state import NAME, JobState
from ringweave.wire.states import Shelf

BAR = 0.8
_WIDTH = 1000


def make(num_megabytes: float, num_steps: int) -> tuple[nn.Module, JobState]:
    """A model after so many steps, and its state."""
    torch.manual_seed(num_steps)
    num_layers = max(1, round(num_megabytes * 1e6 / 4 / _WIDTH**2))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(1, _WIDTH)).sum().backward()
        optimizer.step()
    return model, JobState(model, optimizer, {})


def give(address: str, credentials: str, num_megabytes: float) -> None:
    """Offer the state until standard input ends; prints the port."""
    _, state = make(num_megabytes, 2)
    shelf = Shelf()
    with wire.Server(wire.Tls(wire.Credentials.load_from(credentials)), shelf.handlers(), roles=("worker",)).start(
        address
    ) as server:
        shelf.offer(NAME, state.to_buffers())
        print(server.port, flush=True)
        sys.stdin.read()


def take(address: str, port: int, credentials: str, num_megabytes: float, rounds: int) -> None:
    """Pull it so many times; prints what each took."""
    trust = wire.Tls(wire.Credentials.load_from(credentials))
    found = []
    for _ in range(rounds):
        model, state = make(num_megabytes, 0)
        started_s = time.perf_counter()
        num_bytes = state.pull(address, port, trust, timeout_s=300.0)
        found.append({"bytes": num_bytes, "seconds": time.perf_counter() - started_s})
    wanted, _ = make(num_megabytes, 2)
    same = all((own == its).all() for own, its in zip(model.parameters(), wanted.parameters(), strict=True))
    print(json.dumps({"rounds": found, "alike": same}))


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Both processes in a lab of two nodes."""
    options.workers = 2
    authority = wire.Authority("joining")
    place = lab.up(lab_jobs.cluster(options), f"joining-{os.getpid()}")
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


def main() -> int:
    """Measure; 1 if the bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=25.0, help="of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--give", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--take", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.give:
        give(*options.give, options.megabytes)
        return 0
    if options.take:
        address, port, credentials = options.take
        take(address, int(port), credentials, options.megabytes, options.rounds)
        return 0
    found = measure(options)
    link = units.parse_rate(options.rate)
    rates = [each["bytes"] / each["seconds"] for each in found["rounds"]]
    part = statistics.median(rates) / link
    rows: list[tuple[object, ...]] = [("state, MB", "median s", "of the link's raw rate (bar 0.8)", "bit for bit")]
    seconds = statistics.median(each["seconds"] for each in found["rounds"])
    rows.append((round(found["rounds"][0]["bytes"] / 1e6, 1), round(seconds, 3), round(part, 3), found["alike"]))
    lab_jobs.conclude(options, "joining", {"fraction_of_link": part, **found}, rows)
    return 0 if part >= BAR and found["alike"] else 1


if __name__ == "__main__":
    sys.exit(main())
