"""How unevenly TCP streams that meet at one NIC share it: `python bench/simulation/incast.py --out FILE` (root).

In a lab the first node takes, and throws away, what all others send to it at the same time, each over a connection of
its own that was used before. Two numbers of each round:

- unevenness: the standard deviation of the logarithm of what the streams have got at the moment when the first of them
  has everything. Its median over all rounds is what the simulator takes (`sim.machine.UNEVENNESS`).
- late: how much longer than the streams a link of the same rate would take that passes on what *all* streams have
  delivered, as the root of a star does, as a fraction of their time. Even streams: 0.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ringweave import lab, topology, units
from ringweave.benchmarks import machine
from ringweave.lab import Lab

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
PORT = "5002"
TAKE = """
import json, select, socket, sys, time
address, port, count, size, rounds = sys.argv[1], *map(int, sys.argv[2:])
room = bytearray(1 << 20)
with socket.create_server((address, port), backlog=count) as server:
    print("ready", flush=True)
    peers = [server.accept()[0] for _ in range(count)]
by_number = {peer.fileno(): peer for peer in peers}
for _ in range(rounds):
    time.sleep(0.3)  # what the last round left in queues is gone
    poll, progress = select.epoll(), []
    left = dict.fromkeys(by_number, size)
    for number, peer in by_number.items():
        poll.register(number, select.EPOLLIN)
        peer.sendall(b"!")
    begun_s = time.monotonic()
    while any(left.values()):
        for number, _ in poll.poll():
            left[number] -= by_number[number].recv_into(room, min(len(room), left[number]))
            if not left[number]:
                poll.unregister(number)
        if not progress or time.monotonic() - begun_s > progress[-1][0] + 0.005 or not any(left.values()):
            progress.append((time.monotonic() - begun_s, [size - each for each in left.values()]))
    print(json.dumps(progress), flush=True)
"""
SEND = """
import socket, sys
address, port, size, rounds = sys.argv[1], *map(int, sys.argv[2:])
piece = bytes(1 << 18)
with socket.create_connection((address, port)) as peer:
    for _ in range(rounds):
        peer.recv(1)
        left = size
        while left:
            left -= peer.send(piece[: min(left, len(piece))])
    peer.recv(1)
"""


def main() -> None:
    """Measure each size, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=CLUSTERS / "eight-nodes.yaml")
    parser.add_argument("--sizes", default="1MB,5MB,25MB", help="what each stream carries in a round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    place = lab.up(topology.load(options.cluster), f"incast-{os.getpid()}", quotas="never")
    try:
        sizes = [units.parse_bytes(size) for size in options.sizes.split(",")]
        rows = [row for size in sizes for row in measure(place, size, options.rounds)]
    finally:
        lab.down(place.name)
    found = {
        "kind": "measured",
        "cluster": place.cluster.name,
        "unevenness": statistics.median(row["unevenness"] for row in rows),
        "rounds": rows,
        **machine.describe(),
    }
    for row in rows:
        print(row)
    print(f"unevenness, median of {len(rows)} rounds: {found['unevenness']:.2f}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(place: Lab, size: int, num_rounds: int) -> list[dict[str, Any]]:
    """All rounds of one size."""
    taker, *senders = (node.name for node in place.cluster.nodes)
    address = place.addresses[taker][0]

    def start(node: str, program: str, *arguments: object) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-c", program, address, PORT, *map(str, arguments)]
        return stack.enter_context(subprocess.Popen(place.command(node, argv), stdout=subprocess.PIPE, text=True))

    with ExitStack() as stack:
        taking = start(taker, TAKE, len(senders), size, num_rounds)
        assert taking.stdout is not None
        assert taking.stdout.readline() == "ready\n"
        for sender in senders:
            start(sender, SEND, size, num_rounds)
        return [{"bytes": size, **judged(json.loads(line), size)} for line in taking.stdout]


def judged(progress: Sequence[tuple[float, list[int]]], size: int) -> dict[str, float]:
    """The two numbers of a round, from the seconds and what each stream has delivered by then."""
    seconds, count = progress[-1][0], len(progress[-1][1])
    bytes_per_s = count * size / seconds
    at_first = next(got for _, got in progress if max(got) >= size)
    ends_s = [now_s + (size - min(got)) * count / bytes_per_s for now_s, got in progress]
    return {
        "seconds": round(seconds, 4),
        "unevenness": round(statistics.stdev(math.log(max(1, got)) for got in at_first), 3),
        "late": round(max(ends_s) / seconds - 1, 3),
    }


if __name__ == "__main__":
    main()
