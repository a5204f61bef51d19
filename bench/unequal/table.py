"""The table of unequal workers: DDP on Gloo, balanced and ps-hra on seven clusters, held-out loss against wall time.

    python bench/unequal/table.py                    # needs root; at most 90 minutes; make bench-unequal
    python bench/unequal/table.py --short            # fifteen minutes: one seed, few epochs
    python bench/unequal/table.py --rows equal,stalls --seeds 0,1

Each row and seed is a lab of eight nodes with CPU quotas and one job in it, in which the three take turns of epochs.
What it measured is written to OUT/ROW-SEED.json at once; a run that is started again goes on with those that are
missing, and a row whose job fails does not keep the others from theirs. It ends with 1 where a bar is missed or a row
is. The parameter server has a quota of its own. `auto` is what `prepare` would choose there before the first step;
where that is none of the three, it is measured in a second job, beside DDP, with one of the seeds.
"""

import argparse
import json
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
import sizing
import torch
from rows import CONTENDERS, CORES, GLOO, ROWS, SERVER_CORES, Row
from worker import READY, TURNED

from ringweave import lab, topology
from ringweave.lab import Lab, cpu_quotas
from ringweave.lab.cpu_quotas import QUOTA_PERIOD_US
from ringweave.telemetry import read_events

RATE_BITS_PER_S = 400e6
RUN_TIMEOUT_S = 3600
CHANNELS = 64
EPOCHS = {False: 6, True: 4}
"""Epochs of the long and the short table. The long one goes on until the loss hardly changes, since the end is
compared. An epoch is some train steps: at its end all ranks meet at a barrier, which takes 0.2 s in these labs however
short it was."""
LEAST_EPOCHS = 3
"""The first one is a warm-up."""
SEEDS = {False: "0,1,2", True: "0"}


def main() -> None:
    """Run what is missing, then print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which, separated by commas")
    parser.add_argument("--seeds", help="separated by commas; 0,1,2, or 0 with --short")
    parser.add_argument("--short", action="store_true", help="one seed, few epochs")
    for name in ("epochs", "batch", "channels"):
        parser.add_argument(f"--{name}", type=int, help="in the place of the table's own")
    parser.add_argument("--out", type=Path, default=Path("bench/results/unequal"), help="folder for results")
    parser.add_argument("--runs", type=Path, default=Path("runs/unequal"), help="folder for what the jobs leave behind")
    options = parser.parse_args()
    for how in (signal.SIGINT, signal.SIGTERM):  # also where it runs behind a shell, which has it ignore the first
        signal.signal(how, lambda number, _: sys.exit(128 + number))  # so that the job ends, and its lab goes down
    options.out = options.out / "short" if options.short else options.out
    options.out.mkdir(parents=True, exist_ok=True)
    epochs, channels = options.epochs or EPOCHS[options.short], options.channels or CHANNELS
    seeds, names = (options.seeds or SEEDS[options.short]).split(","), options.rows.split(",")
    asked = [(name, int(seed)) for seed in seeds for name in names]
    is_open = not options.batch and any(ROWS[name].batch is None for name in names)
    of_machine = machines_batch(options.out, channels) if is_open else None
    for name, seed in asked:
        row = ROWS[name]
        batch = options.batch or row.batch or of_machine or 0
        sizes = {"batch": batch, "samples": row.steps * batch, "channels": channels}
        sizes["epochs"] = max(LEAST_EPOCHS, epochs // row.epochs_divided)
        measure(name, seed, sizes, options.runs.absolute(), options.out / f"{name}-{seed}.json")
    rows = [json.loads(path.read_text()) for path in sorted(options.out.glob("*-*.json"))]
    if not rows:
        raise SystemExit("rows measured: none, expected one at least. Look at what the jobs printed, above.")
    text = report.to_text(rows, asked, is_short=options.short)
    print(text)
    (options.out / "table.md").write_text(text + "\n")
    report.draw(rows, options.out / "unequal.png")
    if report.missed(rows, asked, is_short=options.short):
        raise SystemExit(1)


def machines_batch(out: Path, channels: int) -> int:
    """Samples in a step of those rows that go by the machine: as in what has been measured already, if anything has."""
    for path in sorted(out.glob("*-*.json")):
        found = json.loads(path.read_text())
        if ROWS[found["row"]].batch is None:
            return found["batch"]
    sample_s = sizing.core_s_per_sample(channels)
    batch = sizing.batch_of(sample_s)
    print(f"{sample_s * 1e6:.1f} us of a core a sample (measured): {batch} samples in a step", file=sys.stderr)
    return batch


def measure(name: str, seed: int, sizes: dict[str, int], root: Path, path: Path) -> None:
    """Measure what of a row is missing in its file; a job that fails is told of, and the others run nevertheless."""

    def run(contenders: Sequence[str]) -> dict[str, Any]:
        started_s = time.monotonic()
        found = run_row(name, seed, sizes, contenders, root)
        found |= {"took_s": round(time.monotonic() - started_s, 1), "machine": machine()}
        print(f"{name}, seed {seed}: {', '.join(contenders)}: {found['took_s']} s", file=sys.stderr, flush=True)
        return found

    try:
        found = json.loads(path.read_text()) if path.exists() else run(CONTENDERS)
        path.write_text(json.dumps(found) + "\n")
        mode, of_row = found["auto"][0], [json.loads(each.read_text()) for each in path.parent.glob(f"{name}-*.json")]
        if mode not in CONTENDERS and report.by_auto(found, of_row) is None:
            path.write_text(json.dumps(found | {"by_auto": run((GLOO, mode))}) + "\n")
    except (RowError, subprocess.TimeoutExpired) as error:
        print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)


class RowError(Exception):
    """The job of a row has failed."""


def machine() -> dict[str, str]:
    """Return the machine and the software."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": commit.stdout.strip(), "machine": platform.machine(), "torch": str(torch.__version__)}


def run_row(name: str, seed: int, sizes: dict[str, int], contenders: Sequence[str], root: Path) -> dict[str, Any]:
    """Return the workers' measurements in a lab of these speeds.

    Raises:
        RowError: The run failed; its output is shown.
        subprocess.TimeoutExpired: It did not end.
    """
    row, out = ROWS[name], root / f"run-{name}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "cluster.yaml").write_text(cluster_of(row))
    place = lab.up(topology.load(out / "cluster.yaml"), f"unequal-{name}-{seed}", quotas="always")
    own = {"row": name, "seed": seed, "out": out, "contenders": ",".join(contenders), **sizes}
    command = [sys.executable, "-m", "ringweave", "lab", "run", "--lab", place.name, "--mode", "ps-hra", "--no-tuning"]
    command += ["--run-dir", str(out / "run"), str(Path(__file__).with_name("worker.py"))]
    server, running = f"{place.name}-server", None
    try:
        hierarchy()
        limit(place, row.speeds, of_one=QUOTA_PERIOD_US)  # importing torch takes minutes on 0.05 of a core
        with (out / "output").open("w") as output:
            argv = [*command, *(f"--{key}={value}" for key, value in own.items())]
            running = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
        for moment, speeds in ((READY, row.speeds), (TURNED, row.later_speeds)):
            if speeds:
                wait_for(out / moment, running)
                limit(place, speeds)
                limit_server(server, out / "run" / "events.jsonl")
                (out / f"{moment}.done").touch()
        code = running.wait(RUN_TIMEOUT_S)
    finally:
        if running is not None and running.poll() is None:
            running.terminate()
            running.wait()
        lab.down(place.name)
        if place.hierarchy is not None:
            cpu_quotas.remove_groups(place.hierarchy, server)
    if code != 0:
        raise RowError(f"workers: exit code {code}, expected 0.\n{(out / 'output').read_text()}")
    events = list(read_events(out / "run" / "events.jsonl"))
    counted = [event for event in events if event["kind"] == "params_counted"][-1]
    rings = [event for event in events if event["kind"] == "rings_formed"][-1]["rings"]
    accounts = [event["exact"] for event in events if event["kind"] == "samples_accounted"]
    said = {"row": name, "seed": seed, **sizes, "server": counted, "rings": rings, "quotas": place.quota_kind}
    said |= {"accounts": len(accounts), "accounts_exact": all(accounts)}
    return said | json.loads((out / "measured.json").read_text())


def cluster_of(row: Row) -> str:
    """The cluster file: quotas are set later, and follow `speed`."""
    lines = ["name: unequal", "nodes:"]
    for index, speed in enumerate(row.speeds):
        rate = RATE_BITS_PER_S * (row.slow_nic if index == len(row.speeds) - 1 else 1.0)
        lines.append(f"  - {{name: n{index}, nic: {rate / 1e6:g}Mbit/s, devices: [{{speed: {speed}}}]}}")
    return "\n".join([*lines, "latency: 50us", ""])


def limit(place: Lab, speeds: tuple[float, ...], of_one: float | None = None) -> None:
    """Give the devices quotas in proportion to these speeds, all of them `CORES` together; or each the same."""
    share = CORES * QUOTA_PERIOD_US / sum(speeds)
    for node, speed in zip(place.cluster.nodes, speeds, strict=True):
        place.set_quota(node.name, 0, int(of_one or max(1000, speed * share)))


def limit_server(name: str, events: Path) -> None:
    """Give the parameter server its quota, in a control group of its own; once, and it stays there."""
    if cpu_quotas.group_pids(hierarchy(), name):
        return
    pid = next(event["pid"] for event in read_events(events) if event["kind"] == "server_started")
    cpu_quotas.make_groups(hierarchy(), name, {"server": (int(SERVER_CORES * QUOTA_PERIOD_US),)})
    (hierarchy().device_folder(name, "server", 0) / "cgroup.procs").write_text(str(pid))


def hierarchy() -> cpu_quotas.CgroupHierarchy:
    """Return the cgroup hierarchy for quotas.

    Raises:
        RowError: There is none, and the server could not be limited.
    """
    found = cpu_quotas.find_hierarchy()
    if found is None:
        raise RowError("control groups: none of this user, expected some. Run it as root.")
    return found


def wait_for(path: Path, running: "subprocess.Popen[bytes]") -> None:
    """Wait until the workers have reached this point, or ended."""
    while not path.exists() and running.poll() is None:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
