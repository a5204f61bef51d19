"""Clusters brought up in the lab and measured by a job without a cluster file; the results beside their files.

    python bench/probe_recovery.py --rounds 3 --allreduce examples/clusters/two-racks.yaml

Needs root. For each cluster: the lab comes up, `ringweave lab run --no-cluster-file -m ringweave.comm.probing` measures
it (no cluster file; a node is known by its host name alone), and its result is compared with the file:

- edges: the sets of nodes that each switch separates from the others. Only edges that measurements between nodes can
  see count (`ringweave_bench.visible_edges`): links in a row are one, and an uplink that carries all
  that its sides can send never limits anything. Where that is close (up to 1.15 times its rate), both answers count.
- rates: against 0.955 of the file's, which TCP delivers of a shaped rate (see the guide to the lab).
- seconds: of the measuring, and of the whole command.

With --allreduce a job of 25 MB allreduces is timed with the file and without it, in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from ringweave import lab, topology
from ringweave.comm.probing import network_measurement
from ringweave.comm.probing.network_measurement import NetworkMeasurement
from ringweave.topology import Cluster
from ringweave_bench import machine_description
from ringweave_bench.visible_edges import VisibleEdges, visible_edges

GOODPUT = 0.955
_CLEARLY = 1.15
_LIMIT_S = 600
_CLI = "from ringweave.cli.main import main; main()"


def main() -> None:
    """Measure all given clusters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clusters", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=1, help="how often each is measured")
    parser.add_argument("--allreduce", type=int, default=0, metavar="N", help="jobs with and without file, in turn")
    parser.add_argument("--out", type=Path, help="folder for the results; default: only printed")
    options = parser.parse_args()
    for path in options.clusters:
        result = measure(path, options.rounds, options.allreduce)
        print(json.dumps(result), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            name = f"{datetime.now():%Y-%m-%d}-probe-{path.stem}.json"
            (options.out / name).write_text(json.dumps(result, indent=1) + "\n")


def measure(path: Path, num_rounds: int, num_allreduces: int) -> dict[str, Any]:
    """Measure one cluster, brought up and taken down."""
    cluster, name = topology.load(path), f"probe-{path.stem}-{os.getpid()}"
    place = lab.up(cluster, name)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rounds = [_round(place.cluster, name, Path(folder) / f"probe-{n}") for n in range(num_rounds)]
            compared = _allreduces(name, Path(folder), num_allreduces) if num_allreduces else {}
    finally:
        lab.down(name)
    errors = [each["worst_rate_error"] for each in rounds]
    return {
        "kind": "measured",
        "cluster": path.stem,
        "nodes": cluster.num_nodes,
        "goodput": GOODPUT,
        "exact": sum(each["exact"] for each in rounds),
        "rounds": num_rounds,
        "worst_rate_error": max(errors),
        "median_s": statistics.median(each["seconds"] for each in rounds),
        "longest_s": max(each["seconds"] for each in rounds),
        **compared,
        "each": rounds,
        **machine_description.describe_machine(),
    }


def _round(cluster: Cluster, name: str, run_dir: Path) -> dict[str, Any]:
    started = time.monotonic()
    _run(name, run_dir, "--no-cluster-file", "-m", "ringweave.comm.probing", "--json")
    command_s = time.monotonic() - started
    found = network_measurement.measurement_from_json((run_dir / "logs" / "rank-0.log").read_text())
    return compare(cluster, found) | {"command_s": round(command_s, 1)}


def compare(cluster: Cluster, found: NetworkMeasurement) -> dict[str, Any]:
    """Compare the result with the visible part of the cluster; nodes have the same order in both."""
    count = cluster.num_nodes
    truth, seen = visible_edges(cluster), visible_edges(found.cluster(), found.link_rates)
    edges = seen.edges(count, 0.0)
    errors = _rate_errors(truth, seen)
    return {
        "exact": truth.edges(count, _CLEARLY) <= edges <= truth.edges(count, 1.0),
        "switches": [_members(cluster, edge) for edge in sorted(edges)],
        "switches_of_the_file": [_members(cluster, edge) for edge in sorted(truth.edges(count, _CLEARLY))],
        "worst_rate_error": round(max(errors.values()), 4),
        "seconds": found.wall_s,
        "batches": found.num_batches,
        "slow": found.slow,
        "rates_bytes_per_s": dict(found.link_rates),
        "latency_s": found.cluster().latency_s,
    }


def _rate_errors(truth: VisibleEdges, seen: VisibleEdges) -> dict[int, float]:
    """Edge -> how far its rate is from what TCP should get of as much of it as the other links can ask for."""
    return {
        cut: abs(rate / (GOODPUT * truth.rates[cut] * min(1.0, truth.pressures[cut])) - 1)
        for cut, rate in seen.rates.items()
        if cut in truth.rates
    }


def _members(cluster: Cluster, edge: int) -> list[str]:
    return [node.name for index, node in enumerate(cluster.nodes) if edge >> index & 1]


def _allreduces(name: str, folder: Path, num_jobs: int) -> dict[str, Any]:
    """Median seconds of 25 MB, with the file and without, jobs in turn."""
    seconds: dict[str, list[float]] = {"with_file_s": [], "without_file_s": []}
    script = str(Path(__file__).with_name("allreduce_local.py"))
    for number in range(num_jobs):
        for kind, flags in (("with_file_s", []), ("without_file_s", ["--no-cluster-file"])):
            run_dir = folder / f"{kind}-{number}"
            _run(name, run_dir, "--no-tuning", *flags, script, "--rounds", "7")  # trials would be among the rounds
            lines = (run_dir / "logs" / "rank-0.log").read_text().splitlines()
            document = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
            seconds[kind].append(document["ringweave"]["median_s"])
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    ratio = medians["without_file_s"] / medians["with_file_s"]
    return {"allreduce_25MB": {**seconds, "without_over_with": round(ratio, 4)}}


def _run(name: str, run_dir: Path, *arguments: str) -> None:
    """`ringweave lab run`, to its good end; jobs of one lab share what they find out, as jobs of one cluster do."""
    command = [sys.executable, "-c", _CLI, "lab", "run", "--lab", name, "--run-dir", str(run_dir)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(run_dir.parent / "cache")}
    environ.pop("RINGWEAVE_CLUSTER", None)
    done = subprocess.run(
        [*command, *arguments], env=environ, capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )
    if done.returncode:
        raise SystemExit(f"lab run ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
