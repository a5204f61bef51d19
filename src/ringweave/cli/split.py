"""`ringweave split`: divides a number of GPUs over unequal nodes."""

import json
from typing import Any

import click

from ringweave.cli.echo import echo
from ringweave.errors import UsageError
from ringweave.jobs import split
from ringweave.jobs.split import MIN_PER_NODE, WorkerSplit


@click.command
@click.option("--gpus", type=int, metavar="N", required=True, help="GPUs (or CPU workers) in all.")
@click.option("--capacity", metavar="A,B,..", required=True, help="Capacity of each node, in node order.")
@click.option(
    "--min-per-node", type=int, metavar="M", default=MIN_PER_NODE, show_default=True, help="Minimum of a used node."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(gpus: int, capacity: str, min_per_node: int, as_json: bool) -> int:
    """Split N GPUs over unequal nodes: the fewest nodes that hold them, with at least M GPUs on each.

    Exit code 2 if there is no such split; then the nearest possible totals are printed.
    """
    found = split.split_workers(gpus, parse_capacities(capacity), min_per_node=min_per_node)
    if as_json:
        echo(json.dumps(_split_document(found)))
    elif found.is_feasible:
        echo("\n".join(_split_lines(found)))
    if not found.is_feasible:
        echo(f"ringweave: error: {found.refusal_text()}", err=True)
    return 0 if found.is_feasible else 2


def parse_capacities(text: str) -> list[int]:
    """Parse the value of `--capacity`: `10,5`.

    Raises:
        UsageError: It is no list of whole numbers.
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        expected = "whole numbers separated by commas, one for each node"
        raise UsageError("--capacity", got=text, expected=expected, do="Write it like 10,5") from error


def _split_document(found: WorkerSplit) -> dict[str, Any]:
    document: dict[str, Any] = {
        "gpus": found.total,
        "capacity": list(found.capacities),
        "min_per_node": found.min_per_node,
        "nodes": None if found.counts is None else list(found.counts),
    }
    if not found.is_feasible:
        nearest = {"nearest_below": found.nearest_below, "nearest_above": found.nearest_above}
        document |= nearest | {"error": found.refusal_text()}
    return document


def _split_lines(found: WorkerSplit) -> list[str]:
    rows = [
        f"node {node}: {count} of {capacity}" if count else f"node {node}: not used, of {capacity}"
        for node, (count, capacity) in enumerate(zip(found.counts or (), found.capacities, strict=True))
    ]
    return [f"{found.total} on {found.num_nodes} of {len(found.capacities)} nodes", *rows]
