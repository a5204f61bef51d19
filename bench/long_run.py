"""A whole run for a long time: do memory, descriptors or threads of any of its processes grow, do its logs stay whole?

    python bench/long_run.py                     # an hour
    python bench/long_run.py --minutes 15 --log-max-size 64KiB --log-max-files 4

Two elastic trainings of a tiny model at as many steps as this machine gives: one by `ringweave run`, in mode sync, with
`ringweave ui` and `ringweave export` on it; one by `ringweave submit`, in mode ps-hra, with supervisor, agents and a
parameter server. Every few seconds a worker is killed and replaced, never rank 0. Every process is sampled: its own
memory, PSS, descriptors, threads; and how many there are. The first quarter counts as warm-up, but at least five
minutes and at most a quarter of an hour; a run of less than ten minutes can show that it works, and no growth. Of the
rest, medians of 20 spans go into a Theil-Sen regression. Its 95 % interval allows for neighbours that are alike and for
steps. A process grows if the whole interval lies above what `LIMITS` allows. It is flat if the whole lies below, and
with one step of the measure more in the measured time, as the next one may be due now, at most one step an hour above.
Else this run was too short or too noisy, and says so (undecided): less than about 45 minutes cannot tell that
descriptors are flat. A follower reads the events of both trainings meanwhile: over all rotations it has to get each
line once, and the steps in run.json have to be those that it has summed. Printed as one JSON document; exit code 1 if a
process grows, a kind of process was not sampled for half of the time, a log is larger than allowed, or a line is
missing. All measured.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from scipy import stats

from ringweave.files import rotation
from ringweave.launcher import processes
from ringweave.telemetry import EventTail
from ringweave.telemetry.events import find_event_files
from ringweave.telemetry.run_metrics import RunMetrics

MEASURES = ("memory_mb", "pss_mb", "descriptors", "threads")
LIMITS: Mapping[str, Callable[[float], float]] = {
    "memory_mb": lambda median: max(2.0, 0.02 * median),
    "pss_mb": lambda median: max(2.0, 0.02 * median),
    "descriptors": lambda median: 1.0,
    "threads": lambda median: 1.0,
    "processes": lambda median: 2.0,
}
"""Measure -> growth in an hour, by its median, up to which a process counts as flat: an hour has more steps and deaths
than a usual day."""
STEPS: Mapping[str, float] = {"memory_mb": 0.13, "pss_mb": 0.13, "descriptors": 1.0, "threads": 1.0, "processes": 1.0}
"""Measure -> least by which it grows at a time; malloc asks the kernel for 128 KiB."""
WARM_UP, MIN_WARM_UP_S, MAX_WARM_UP_S = 0.25, 300.0, 900.0
"""Part of the time that is not judged, and its bounds. Lists of fixed length fill in the first five minutes: a run that
has not twice as many cannot tell warm-up from growth."""
NUM_SPANS, MIN_SPANS, CONFIDENCE = 20, 8, 0.95
SAMPLE_S, MAX_SAMPLES, MIN_LIFE = 2.0, 1800, 0.5
"""Seconds between two samples, more where there would be too many; part of the measured time that a process has to live
to be judged by itself."""
KINDS = ("run", "coordinator", "server", "supervisor", "agent", "worker 0", "ui", "export")
"""Roles of which a process has to be judged."""
_ROLES = {
    "ringweave.membership.main": "coordinator",
    "ringweave.param_server.main": "server",
    "ringweave.platforms.local.supervisor_main": "supervisor",
    "ringweave.platforms.local.agent_main": "agent",
    "launcher/guard.py": "guard",
    "launcher/spares.py": "fork server",
}
"""Word of a command line -> role of the process."""
WORKERS, WIDTH, BATCH = 3, 16, 48


def train() -> None:
    """Train on this worker until it is stopped."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import ringweave

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(100 * BATCH, WIDTH), torch.randn(100 * BATCH, 1))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parallel, optimizer, loader = ringweave.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
    step = 0
    with ringweave.Iterations() as iterations:
        while True:
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(parallel(inputs), targets)
                loss.backward()
                optimizer.step()
                step += 1
                iterations.done(step, loss.item())
                if step % 10 == 0:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)


@dataclass
class Follower:
    """Reads the events of a training as they come."""

    folder: Path
    metrics: RunMetrics = field(default_factory=RunMetrics)
    kinds: Counter[str] = field(default_factory=Counter)
    pids: dict[int, int] = field(default_factory=dict)
    """Rank -> process id of its worker."""
    tails: dict[Path, EventTail] = field(default_factory=dict)

    def read(self) -> None:
        """Read what is new."""
        tails = [self.tails.setdefault(path, EventTail(path)) for path in find_event_files(self.folder)[1]]
        for event in (event for tail in tails for event in tail.iter_new()):
            self.metrics.add(event)
            self.kinds[event["kind"]] += 1
            if event["kind"] == "worker_started":
                self.pids[event["rank"]] = event["pid"]

    def document(self) -> dict[str, Any]:
        """Return what it has read, beside what the names of the files say that there is."""
        logs = [path for pattern in PLACES for path in rotation.find_logs(self.folder, pattern)]
        steps = sum(row["steps"] for row in self.metrics.by_rank().values())
        return {
            "events": sum(self.kinds.values()),
            "events_written": sum(map(count_lines, logs)),
            "gone": self.kinds["records_gone"],
            "steps": steps,
            "generations": self.kinds["generation_begun"],
            "deaths": sum(self.metrics.values["ringweave_worker_deaths_total"].values()),
        }


PLACES = ("events.jsonl", "*/*/round-*/events.jsonl")


def count_lines(log: Path) -> int:
    """Return the lines that a log has ever had."""
    segments, kept = rotation.find_segments(log)
    last = max([each.last for each in (*segments, *([kept] if kept else []))], default=0)
    return last + (log.read_bytes().count(b"\n") if log.exists() else 0)


@dataclass
class Samples:
    """Samples of all processes below this one."""

    begun_s: float = field(default_factory=time.monotonic)
    series: dict[tuple[str, int], list[tuple[float, dict[str, float]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Role and process id -> times in seconds with the figures."""
    totals: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def take(self, workers: Mapping[int, str]) -> None:
        """Sample all; `workers` maps process ids to roles."""
        now_s, found = time.monotonic() - self.begun_s, 0
        for process in processes.reap_children(psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                figures = read_figures(process)
                role = workers.get(process.pid) or role_of(process.cmdline())
                self.series[role, process.pid].append((now_s, figures))
                found += 1
        self.totals.append((now_s, {"processes": found}))

    def rows(self) -> list[dict[str, Any]]:
        """Return slopes of each process that lived for long, and of their number."""
        end_s = self.totals[-1][0]
        since_s = min(max(WARM_UP * end_s, min(MIN_WARM_UP_S, end_s / 2)), MAX_WARM_UP_S)
        is_warm = since_s > 0.9 * MIN_WARM_UP_S
        rows = []
        for (role, pid), samples in sorted(self.series.items()):
            late = [each for each in samples if each[0] >= since_s]
            if late and late[-1][0] - late[0][0] >= MIN_LIFE * (end_s - since_s):
                rows.append({"role": role, "pid": pid, "slopes": [slope(late, name, is_warm) for name in MEASURES]})
        late = [each for each in self.totals if each[0] >= since_s]
        return [*rows, {"role": "all processes", "pid": 0, "slopes": [slope(late, "processes", is_warm)]}]


def read_figures(process: psutil.Process) -> dict[str, float]:
    """Return memory, PSS, descriptors and threads of a process."""
    proc = Path(f"/proc/{process.pid}")
    status = (proc / "status").read_text(encoding="ascii").splitlines()
    pss = (proc / "smaps_rollup").read_text(encoding="ascii").splitlines()
    return {
        "memory_mb": _sum_kb(status, ("RssAnon:", "RssShmem:")),
        "pss_mb": _sum_kb(pss, ("Pss_Anon:", "Pss_Shmem:")),
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
    }


def _sum_kb(rows: Sequence[str], names: tuple[str, ...]) -> float:
    return sum(int(row.split()[1]) for row in rows if row.startswith(names)) * 1024 / 1e6


def role_of(command: Sequence[str]) -> str:
    """Return the role of a process by its command line."""
    words = " ".join(command)
    verb = next((each for each in ("run", "ui", "export") if f"-m ringweave {each}" in words), None)
    return verb or next((role for word, role in _ROLES.items() if word in words), "other")


def slope(samples: Sequence[tuple[float, Mapping[str, float]]], name: str, is_warm: bool) -> dict[str, Any]:
    """Return the growth of a figure in an hour, with its interval, and whether it is none."""
    size = max(1, len(samples) // NUM_SPANS)
    spans = [samples[start : start + size] for start in range(0, len(samples) - size + 1, size)]
    hours = [statistics.median(time_s for time_s, _ in span) / 3600 for span in spans]
    values = [statistics.median(figures[name] for _, figures in span) for span in spans]
    median = statistics.median(values)
    allowed = LIMITS[name](median)
    if len(values) < MIN_SPANS:
        return {"name": name, "median": round(median, 2), "allowed": allowed, "verdict": "undecided"}
    found, low, high = fit(hours, values)
    unseen = STEPS[name] / (hours[-1] - hours[0])
    numbers = {"median": median, "per_hour": found, "low": low, "high": high + unseen, "allowed": allowed}
    rounded = {key: round(float(value), 2) for key, value in numbers.items()}
    grows = bool(is_warm and low > allowed)
    is_flat = bool(high <= allowed and high + unseen <= allowed + STEPS[name])
    return {"name": name, **rounded, "verdict": "grows" if grows else "flat" if is_flat else "undecided"}


def fit(hours: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the slope by Theil and Sen, and the narrower one of two intervals.

    One suits noise about a line: it is that of independent values, as few of them as values whose neighbours are alike
    are worth (Yue and Wang, Water Resources Management 18, 2004; the correlation of few values as by Kendall,
    Biometrika 41, 1954). The other one suits steps at any time: by Student's distribution of the growth in each span.
    """
    found, start, *_ = stats.theilslopes(values, hours)
    rests = [value - start - found * at for at, value in zip(hours, values, strict=True)]
    spread, num, alike = sum(rest * rest for rest in rests), len(values), 0.0
    if spread > 1e-12:
        alike = sum(one * other for one, other in itertools.pairwise(rests)) / spread
        alike = min(max(alike + (1 + 4 * alike) / num, 0.0), 0.95)
    quantile = stats.norm.ppf((1 + CONFIDENCE) / 2) * math.sqrt((1 + alike) / (1 - alike))
    _, _, low, high = stats.theilslopes(values, hours, 2 * stats.norm.sf(quantile))
    hours_each = (hours[-1] - hours[0]) / (num - 1)
    growths = [(later - value) / hours_each for value, later in itertools.pairwise(values)]
    mean = statistics.mean(growths)
    error = statistics.stdev(growths) / math.sqrt(len(growths)) * stats.t.ppf((1 + CONFIDENCE) / 2, len(growths) - 1)
    intervals = ((float(low), float(high)), (float(mean - error), float(mean + error)))
    return float(found), *min(intervals, key=lambda each: each[1] - each[0])


@contextlib.contextmanager
def started(
    arguments: Sequence[str], environ: Mapping[str, str], **settings: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `ringweave` with these arguments until the block ends."""
    command = [sys.executable, "-m", "ringweave", *arguments]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, **settings) as process:
        try:
            yield process
        finally:
            process.terminate()  # not SIGINT, which is ignored below nohup


def submit(environ: Mapping[str, str]) -> Path:
    """Submit the second training; return the folder of its runs."""
    script = [*SELF, "--train"]
    job = ["--name", "soak", "--cpu-workers", str(WORKERS), "--capacity", str(WORKERS), "--elastic", "1"]
    limits = [word for name in LOG_VARIABLES for word in ("--env", f"{name}={environ[name]}")]
    options = ["--mode", "ps-hra", "--max-retries", "1000", *limits]
    ringweave(environ, "submit", "-y", "--detach", *job, *options, "--script", script[0], "--arguments", "--train")
    return Path(json.loads(ringweave(environ, "status", "soak", "-o", "json"))["files"])


LOG_VARIABLES = ("RINGWEAVE_LOG_MAX_SIZE", "RINGWEAVE_LOG_MAX_FILES")
SELF = (str(Path(__file__).absolute()),)


def ringweave(environ: Mapping[str, str], *arguments: str) -> str:
    """Return the output of a command."""
    command = [sys.executable, "-m", "ringweave", *arguments]
    return subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def kill_one(followers: Sequence[Follower], choice: random.Random) -> bool:
    """Kill a worker of one of the trainings; return whether there was one."""
    follower = choice.choice(followers)
    ranks = [rank for rank in follower.pids if rank > 0]
    if not ranks:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(follower.pids[choice.choice(ranks)], signal.SIGKILL)
        return True
    return False


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both trainings and return what was found."""
    limits = dict(zip(LOG_VARIABLES, (options.log_max_size, str(options.log_max_files)), strict=True))
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **limits}
    run, choice, samples = folder / "run", random.Random(options.seed), Samples()
    arguments = ["run", "--elastic", f"1:{WORKERS}", "--workers", str(WORKERS), "--run-dir", str(run), *SELF, "--train"]
    processes.adopt_orphans()
    num_killed, killed_s = 0, time.monotonic() + 20
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(started(arguments, environ, stderr=subprocess.DEVNULL))
        job = submit(environ)
        stack.callback(ringweave, environ, "stop", "soak")
        followers = [Follower(run), Follower(job)]
        while not (run / "run.json").exists():
            time.sleep(0.1)
        stack.enter_context(started(["ui", str(run)], environ))
        stack.enter_context(started(["export", str(run), "--prometheus", "0"], environ))
        end_s, due_s = time.monotonic() + 60 * options.minutes, 0.0
        while launcher.poll() is None and (time.monotonic() < end_s or not samples.totals):
            for each in followers:
                each.read()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + max(0.0, 60 * options.minutes / MAX_SAMPLES - SAMPLE_S)
                samples.take({pid: f"worker {rank}" for each in followers for rank, pid in each.pids.items()})
            if time.monotonic() - killed_s >= options.kill_every:
                killed_s, num_killed = time.monotonic(), num_killed + kill_one(followers, choice)
            time.sleep(SAMPLE_S)
        has_lasted = launcher.poll() is None
    time.sleep(5.0)
    launcher.wait(60)
    for each in followers:
        each.read()
    return {
        "has_lasted": has_lasted,
        "killed": num_killed,
        "trainings": [each.document() for each in followers],
        "run_json_steps": sum(row["steps"] for row in json.loads((run / "run.json").read_text())["ranks"].values()),
        "log_bytes": largest_logs(folder, rotation.LogLimits.from_environ(environ)),
        "processes": samples.rows(),
    }


def largest_logs(folder: Path, limits: rotation.LogLimits) -> dict[str, float]:
    """Return the bytes of the largest log on the disk, and those that are allowed."""
    logs = {path for pattern in ("events.jsonl", "*.log") for path in rotation.find_logs(folder, f"**/{pattern}")}
    sizes = [sum(each.stat().st_size for each in log.parent.glob(f"{log.name}*")) for log in logs]
    return {"logs": len(logs), "largest": max(sizes), "allowed": limits.max_bytes * limits.max_files}


def missed(found: Mapping[str, Any]) -> list[str]:
    """Return what is not as it has to be."""
    faults = [] if found["has_lasted"] else ["the run ended early"]
    judged = {row["role"] for row in found["processes"]}
    faults += [f"no {kind} was sampled for half of the measured time" for kind in KINDS if kind not in judged]
    for row in found["processes"]:
        faults += [
            f"{row['role']} ({row['pid']}): {each['name']} grows by {each['low']:g} to {each['high']:g} an hour, "
            f"allowed {each['allowed']:g}"
            for each in row["slopes"]
            if each["verdict"] == "grows"
        ]
    for each in found["trainings"]:
        if each["events"] != each["events_written"] or each["gone"]:
            faults.append(f"{each['events']} events read of {each['events_written']}, {each['gone']} times some gone")
    if found["run_json_steps"] != found["trainings"][0]["steps"]:
        faults.append(f"run.json has {found['run_json_steps']} steps, its follower {found['trainings'][0]['steps']}")
    if found["log_bytes"]["largest"] > found["log_bytes"]["allowed"]:
        faults.append(f"a log of {found['log_bytes']['largest']} bytes, allowed {found['log_bytes']['allowed']}")
    return faults


def _minutes(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} minutes, expected more than none")
    return float(text)


def main() -> None:
    """Soak, or train as a worker of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=_minutes, default=60.0, help="how long")
    parser.add_argument("--kill-every", type=float, default=15.0, metavar="SECONDS", help="time between two deaths")
    parser.add_argument("--log-max-size", default="1MiB", help="of a file of a log")
    parser.add_argument("--log-max-files", type=int, default=4, help="files of a log")
    parser.add_argument("--seed", type=int, default=1, help="of the deaths")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train()
        return
    with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
        found = soak(options, Path(folder))
    print(json.dumps({"kind": "measured", "minutes": options.minutes, **found}, indent=2))
    if faults := missed(found):
        raise SystemExit("missed: " + "; ".join(faults))


if __name__ == "__main__":
    main()
