"""Streams between one node of a lab, the hub, and all others at the same time; for incast.py and outcast.py."""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringweave import lab, topology, units
from ringweave.lab import Lab
from ringweave_bench import machine_description

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
PORT = "5002"


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """Programs of the nodes; Python sources, called with the hub's address, the port, and numbers."""

    hub: str
    """Numbers: streams, bytes of each, rounds, own ones. Says `ready`, then a line of JSON a round: its progress."""
    others: str
    """Numbers: bytes, rounds, own ones."""


def parser(text: str, sizes: str) -> argparse.ArgumentParser:
    """The options of both benches."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cluster", type=Path, default=CLUSTERS / "eight-nodes.yaml")
    made.add_argument("--node", help="the hub; default: the first")
    made.add_argument("--sizes", default=sizes, help="what each stream carries in a round")
    made.add_argument("--rounds", type=int, default=6)
    made.add_argument("--out", type=Path, help="JSON file for the results")
    return made


def measure(name: str, programs: Programs, options: argparse.Namespace, **own: int) -> None:
    """Measure each size, print and write what was found; `own` numbers are passed to both programs."""
    place = lab.up(topology.load(options.cluster), f"{name}-{os.getpid()}", quotas="never")
    hub = options.node or place.cluster.nodes[0].name
    try:
        sizes = [units.parse_bytes(size) for size in options.sizes.split(",")]
        rows = [
            row for size in sizes for row in _measure_size(place, hub, programs, (size, options.rounds, *own.values()))
        ]
    finally:
        lab.down(place.name)
    found = {
        "kind": "measured",
        "cluster": place.cluster.name,
        "node": hub,
        **own,
        "unevenness": statistics.median(row["unevenness"] for row in rows),
        "rounds": rows,
        **machine_description.describe_machine(),
    }
    for row in rows:
        print(row)
    print(f"unevenness, median of {len(rows)} rounds: {found['unevenness']:.2f}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def _measure_size(place: Lab, hub: str, programs: Programs, numbers: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measure all rounds of one size, which comes first among the numbers."""
    others = [node.name for node in place.cluster.nodes if node.name != hub]
    address = place.addresses[hub][0]

    def start(node: str, program: str, *arguments: int) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-c", program, address, PORT, *map(str, arguments)]
        return stack.enter_context(subprocess.Popen(place.command(node, argv), stdout=subprocess.PIPE, text=True))

    with ExitStack() as stack:
        at_hub = start(hub, programs.hub, len(others), *numbers)
        assert at_hub.stdout is not None
        assert at_hub.stdout.readline() == "ready\n"
        for other in others:
            start(other, programs.others, *numbers)
        return [{"bytes": numbers[0], **_judged(json.loads(line), numbers[0])} for line in at_hub.stdout]


def _judged(progress: Sequence[tuple[float, list[int]]], size: int) -> dict[str, float]:
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
