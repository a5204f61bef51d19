"""A real Prometheus scrapes eight ranks that train for a minute: is every series there, with the values of run.json?

    PYTHONPATH=. python bench/scrapes.py                # a minute and a half; Debian's prometheus
    PYTHONPATH=. python bench/scrapes.py --seconds 20

Two nodes of four workers on this machine; a step sleeps, as processors are few, and exchanges a quarter of a
megabyte of gradients. Prometheus has deploy/monitoring's configuration and rules, and scrapes each second. Exit code 1
if a series of `ringweave export` or a rank is missing, if a value differs from run.json's by more than 1e-6 of it, if
there were fewer scrapes than two thirds of the seconds, or if promtool finds something. All numbers are measured.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringweave.telemetry.run_metrics import METRICS
from tests.telemetry.test_exporters import prometheus, query

NODES, NUM_RANKS, STEP_S, WIDTH, LEAST_SCRAPED = "4,4", 8, 0.05, 250, 2 / 3
RANK_SERIES = {
    "steps": "ringweave_rank_steps_total",
    "samples": "ringweave_rank_samples_total",
    "wall_s": "ringweave_rank_step_seconds_total",
    "compute_s": "ringweave_rank_compute_seconds_total",
    "wait_s": "ringweave_rank_wait_seconds_total",
    "communication_s": "ringweave_rank_communication_seconds_total",
    "memory_bytes": "ringweave_rank_memory_bytes",
}
"""Name in run.json -> metric."""


def train(seconds: float) -> None:
    """Train on this worker, for about so long."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import ringweave

    torch.manual_seed(0)
    num_samples = round(seconds / STEP_S) * NUM_RANKS
    data = TensorDataset(torch.randn(num_samples, WIDTH), torch.randn(num_samples, WIDTH))
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parallel, optimizer, loader = ringweave.prepare(model, optimizer, DataLoader(data, NUM_RANKS), "balanced")
    iterations = ringweave.Iterations(total=len(loader))
    for number, (inputs, targets) in enumerate(loader, start=1):
        time.sleep(STEP_S)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        iterations.done(number, loss.item())
    iterations.close()


@contextlib.contextmanager
def exported(run: Path, port: int) -> Iterator[None]:
    """Export the run to that port, also after its end."""
    command = [sys.executable, "-m", "ringweave", "export", str(run), "--prometheus", str(port), "--keep-serving"]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.terminate()  # not SIGINT, which is ignored below nohup


def wait_for_run(process: "subprocess.Popen[bytes]", run: Path) -> None:
    """Wait until the run has a run.json, which an export needs."""
    while not (run / "run.json").is_file():
        if process.poll() is not None:
            sys.exit(f"ringweave run: ended with {process.returncode}, expected a training. Look at what it printed.")
        time.sleep(0.1)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def scraped_values(address: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return what Prometheus has now: (metric, values of its labels) -> value."""
    found = {}
    for row in query(address, '{__name__=~"ringweave_.+"}'):
        name = row["metric"]["__name__"]
        if name in METRICS:
            found[name, tuple(row["metric"][label] for label in METRICS[name].labels)] = float(row["value"][1])
    return found


def served_values(port: int) -> tuple[str, int]:
    """Return the text of the export and the number of its series."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return text, sum(not line.startswith("#") for line in text.splitlines())


def find_problems(
    found: Mapping[tuple[str, tuple[str, ...]], float], record: Mapping[str, Any], num_served: int
) -> list[str]:
    """Compare with run.json's `ranks`."""
    problems = [] if len(found) == num_served else [f"{len(found)} series in Prometheus, {num_served} exported"]
    for rank in map(str, range(NUM_RANKS)):
        row = record["ranks"].get(rank)
        if row is None:
            problems.append(f"rank {rank} is not in run.json")
            continue
        wanted = {(metric, (rank, row["node"])): row[name] for name, metric in RANK_SERIES.items()}
        for peer, link in row.get("links", {}).items():
            wanted["ringweave_link_sent_bytes_total", (rank, peer)] = link["sent_bytes"]
        for key, value in wanted.items():
            if key not in found or abs(found[key] - value) > max(1e-6, 1e-6 * abs(value)):
                problems.append(f"{key}: {found.get(key)} in Prometheus, {value} in run.json")
    return problems


def measure(seconds: float, folder: Path) -> list[str]:
    """Train, scrape, compare; return what is wrong."""
    run, port = folder / "run", free_port()
    command = [sys.executable, "-m", "ringweave", "run", "--workers", NODES, "--run-dir", str(run)]
    with subprocess.Popen([*command, __file__, "--train", str(seconds)]) as process:
        wait_for_run(process, run)
        with exported(run, port), prometheus(folder, port) as address:
            code = process.wait()
            time.sleep(5)  # the export has read the last events, and Prometheus has scraped them
            found, (text, num_served) = scraped_values(address), served_values(port)
            (counted,) = query(address, "count_over_time(up[10m])") or [{"value": [0, "0"]}]
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    problems = find_problems(found, json.loads((run / "run.json").read_text()), num_served)
    num_scrapes = int(counted["value"][1])
    if code:
        problems.append(f"training ended with {code}")
    if num_scrapes < LEAST_SCRAPED * seconds:
        problems.append(f"{num_scrapes} scrapes in {seconds:.0f} s")
    if checked.returncode or checked.stderr:
        problems.append(f"promtool: {checked.stderr}")
    names = {name for name, _ in found}
    print(f"| ranks | seconds | scrapes | metrics | series | problems |\n|{'---|' * 6}")
    print(f"| {NUM_RANKS} | {seconds:.0f} | {num_scrapes} | {len(names)} | {len(found)} | {len(problems)} |")
    print(f"Metrics of other kinds of runs: {', '.join(sorted(METRICS.keys() - names))}.")
    return problems


def main() -> None:
    """Print a table, and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    with tempfile.TemporaryDirectory() as folder:
        problems = measure(options.seconds, Path(folder))
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
