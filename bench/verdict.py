"""The verdict on runs with planted causes, and on healthy ones: is the right rank named, with the right cause?

    python bench/verdict.py                                # root; half an hour: 40 causes, 20 healthy runs
    python bench/verdict.py --planted 4 --healthy 2 --seed 7
    python bench/verdict.py --only nic --planted 4 --healthy 0
    python bench/verdict.py --cost                          # what recording costs: with and without, by turns, one run

Four workers in a lab of two racks train for a dozen seconds. A step sleeps for most of its time, as processors are few,
reads a record from the disk, and exchanges half a megabyte of gradients. A seed draws causes, ranks and strengths; each
cause is steady, or on for 1.2 s of every 3 s. Causes: the script of one rank waits in its loader, forward or backward,
or collects garbage; one direction of an uplink is slow, or both of a NIC; the kernel limits the CPU time, the
memory or the reads of one rank's control group (version 1). Exit code 1 if fewer than 19 of 20 verdicts are right, if a
healthy run has one, or if recording costs more than 1 %.
"""

import argparse
import contextlib
import gc
import itertools
import json
import mmap
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ringweave
from ringweave import lab, telemetry, topology
from ringweave.comm.counters import TrafficRecorder
from ringweave.lab import Lab
from ringweave.telemetry import verdict

NUM_RANKS = 4
CLUSTER = """
name: verdict
nodes:
  - {name: a, switch: r0, nic: 1Gbit/s, devices: 1, count: 2}
  - {name: b, switch: r1, nic: 1Gbit/s, devices: 1, count: 2}
switches:
  - {name: r0, uplink: 2Gbit/s}
  - {name: r1, uplink: 2Gbit/s}
latency: 50us
"""
NODES = ("a-0", "a-1", "b-0", "b-1")
SWITCHES = ("r0", "r0", "r1", "r1")
IN_SCRIPT = ("input", "forward", "backward", "collections")
BY_KERNEL = ("link", "nic", "quota", "memory", "disk")
CAUSES = (*IN_SCRIPT, *BY_KERNEL)
HEALTHY = "healthy"
WANTED, ALLOWED_COST = 0.95, 0.01
COST_STEPS, WARM_STEPS = 400, 40
RUN_S, BURST_S, CYCLE_S, WARM_UP_S = 14.0, 1.2, 3.0, 1.5
INPUT_S, FORWARD_S, BACKWARD_S = 0.002, 0.045, 0.075
WIDTH = 360
"""Of two layers: half a megabyte of gradients."""
RECORD_BYTES, DATA_BYTES = 64 * 1024, 16 * 2**20
TABLE_BYTES, PAGES_A_STEP, PAGE_BYTES = 128 * 2**20, 400, 4096
GROUPS = Path("/sys/fs/cgroup")
GROUP = "ringweave-verdict"
RUN_TIMEOUT_S, _CASE = 120.0, "VERDICT_CASE"
_PAIRS = re.compile(r"from rank (\d+) to rank (\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run."""

    cause: str
    rank: int
    is_burst: bool
    strength: float
    """From 0 to 1."""
    folder: str = ""
    """Where data of the ranks go."""
    table: str = ""
    """File that all ranks map; one that is to be short of memory makes its own, for which its control group pays."""

    @property
    def delay_s(self) -> float:
        """Return the seconds that a cause in the script adds to a step while it is on."""
        return (0.12 if self.is_burst else 0.045) * (1 + self.strength)

    @property
    def steps(self) -> int:
        """Return the number of steps of a run."""
        if self.cause == "cost":
            return COST_STEPS
        return int(RUN_S / (INPUT_S + FORWARD_S + BACKWARD_S + 0.02 + (0 if self.cause == HEALTHY else 0.06)))

    @property
    def links(self) -> tuple[str, ...]:
        """Return the links that get slow."""
        node, switch = NODES[self.rank], SWITCHES[self.rank]
        if self.cause == "nic":
            return f"{node}->{switch}", f"{switch}->{node}"
        return (f"{switch}->core",)

    def text(self) -> str:
        """Return it in words."""
        where = self.links[0] if self.cause == "link" else f"rank {self.rank}"
        how = "bursts" if self.is_burst else "steady"
        return self.cause if self.cause == HEALTHY else f"{self.cause}, {where}, {how}"


def draw_cases(options: argparse.Namespace) -> list[Case]:
    """Return planted and healthy runs in a random order; causes as evenly as their number allows."""
    draw = random.Random(options.seed)
    causes = options.only.split(",") if options.only else list(CAUSES)
    kinds = [(cause, is_burst) for is_burst in (False, True) for cause in causes]
    draw.shuffle(kinds)
    planted = list(itertools.islice(itertools.cycle(kinds), options.planted)) + [(HEALTHY, False)] * options.healthy
    draw.shuffle(planted)
    return [
        Case(
            cause=cause,
            rank=draw.randrange(NUM_RANKS),
            is_burst=is_burst,
            strength=round(draw.random(), 3),
        )
        for cause, is_burst in planted
    ]


class Records(Dataset):
    """Records on a disk, read anew each time, with the delays of a slow loader."""

    def __init__(self, path: Path, delay: Callable[[], float]) -> None:
        self._file, self._delay = os.open(path, os.O_RDONLY), delay
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return [WIDTH] numbers."""
        place = index * RECORD_BYTES % DATA_BYTES
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)  # a part would leave larger folios
        content = os.pread(self._file, RECORD_BYTES, place)
        time.sleep(INPUT_S + self._delay())
        return torch.frombuffer(bytearray(content[: 4 * WIDTH]), dtype=torch.int32).remainder(7).float()


class SlowBackward(torch.autograd.Function):
    """Waits in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, delay: Callable[[], float]) -> torch.Tensor:
        ctx.delay = delay
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        time.sleep(BACKWARD_S + ctx.delay())
        return gradients[0], None


class Model(nn.Module):
    """Two layers between sleeps; a forward pass also reads pages of a table that is mapped into memory."""

    def __init__(self, table: np.ndarray, forward: Callable[[], float], backward: Callable[[], float]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self._table, self._forward, self._backward = table, forward, backward
        self._random = np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [samples, 1]."""
        pages = self._random.integers(0, TABLE_BYTES // PAGE_BYTES, PAGES_A_STEP)
        used = float(self._table[pages * PAGE_BYTES].sum()) * 0.0
        time.sleep(FORWARD_S + self._forward())
        return SlowBackward.apply(self.second(torch.tanh(self.first(x))), self._backward) + used


def work(case: Case) -> None:
    """Train one case; a rank of it."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    is_meant = rank == case.rank
    if is_meant and case.cause in ("quota", "memory", "disk"):
        controller = {"quota": "cpu", "memory": "memory", "disk": "blkio"}[case.cause]
        (GROUPS / controller / GROUP / "cgroup.procs").write_text(str(os.getpid()))
    began = [0.0]

    def delay_in(part: str) -> Callable[[], float]:
        return lambda: case.delay_s if is_meant and case.cause == part and is_on(case, began[0]) else 0.0

    path = Path(case.folder) / f"rank-{rank}.bin"
    make_data(path, DATA_BYTES)
    table_path = Path(case.table)
    if is_meant and case.cause == "memory":
        table_path = make_data(path.with_name(f"rank-{rank}-table.bin"), TABLE_BYTES)
    table = map_data(table_path)
    torch.manual_seed(0)
    model = Model(table, delay_in("forward"), delay_in("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = DataLoader(Records(path, delay_in("input")), batch_size=NUM_RANKS)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader, mode="sync")
    heap = [[index] for index in range(int(1e6 * case.delay_s * 6))] if is_meant and case.cause == "collections" else []
    turns = Turns(model, loader) if case.cause == "cost" else None
    began[0] = time.monotonic()
    for number, batch in enumerate(itertools.islice(iter(loader), case.steps)):
        optimizer.zero_grad()
        model(batch).mean().backward()
        if heap and is_on(case, began[0]):
            gc.collect()
        optimizer.step()
        if turns is not None:
            turns.end_step(number)
    if turns is not None and rank == 0:
        (Path(case.folder) / "cost.json").write_text(json.dumps(turns.laps))
    dist.barrier()
    dist.destroy_process_group()


def is_on(case: Case, began_s: float) -> bool:
    """Return whether the cause is at work, so long after training has begun."""
    elapsed_s = time.monotonic() - began_s - WARM_UP_S
    return elapsed_s >= 0 and (not case.is_burst or elapsed_s % CYCLE_S < BURST_S)


def make_data(path: Path, num_bytes: int) -> Path:
    """Write random bytes; the control group of this process pays for the cache."""
    with path.open("wb") as file:
        file.write(np.random.default_rng(1).bytes(num_bytes))
        os.fsync(file.fileno())
    return path


def map_data(path: Path) -> np.ndarray:
    """Return the bytes of a table, mapped for random access: the kernel reads no page ahead."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), TABLE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype=np.uint8)


class Turns:
    """Recording on and off by turns of two steps; wall time and processor time of the steps of both."""

    def __init__(self, model: Any, loader: Any) -> None:
        self.laps: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
        self._timer, self._module = loader.timer, model.module
        self._listeners, self._pre_hooks = list(self._timer._listeners), dict(self._module._forward_pre_hooks)
        self._hooks = dict(self._module._forward_hooks)
        self._calls = {name: getattr(TrafficRecorder, name) for name in ("begin_collective", "end_collective")}
        self._begun, self._is_on = self._now(), True

    def end_step(self, number: int) -> None:
        """Note the step, and turn recording on or off after two."""
        now = self._now()
        if number >= WARM_STEPS:
            wall_s, processor_s = (after - before for after, before in zip(now, self._begun, strict=True))
            self.laps["on" if self._is_on else "off"].append((wall_s, processor_s))
        self._begun = now
        if number % 2:
            self._switch(not self._is_on)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def _switch(self, is_on: bool) -> None:
        self._is_on = is_on
        self._timer._listeners[:] = self._listeners if is_on else []
        for hooks, saved in (
            (self._module._forward_pre_hooks, self._pre_hooks),
            (self._module._forward_hooks, self._hooks),
        ):
            hooks.clear()
            hooks.update(saved if is_on else {})
        for name, call in self._calls.items():
            setattr(TrafficRecorder, name, call if is_on else lambda *_: None)


class Plant:
    """Causes that the kernel makes: applied and taken back from outside, while a run goes on."""

    def __init__(self, case: Case, place: Lab) -> None:
        self._case, self._place = case, place
        self._rates = {link: place.rate(link) for link in case.links}
        self._memory_limit_bytes = 0

    def apply(self) -> None:
        """Begin."""
        case = self._case
        match case.cause:
            case "link" | "nic":
                for link in self._rates:
                    self._place.set_rate(link, (6 - 3 * case.strength) * 1e6)
            case "quota":
                _write("cpu", "cpu.cfs_quota_us", int((1500 if case.is_burst else 2200) - 500 * case.strength))
            case "memory":
                self._limit_memory(int(TABLE_BYTES * (0.35 + 0.15 * case.strength)))
            case "disk":
                # A reader may save up what it does not use between two reads.
                self._limit_reads(int(RECORD_BYTES / (FORWARD_S + BACKWARD_S + 1.5 * case.delay_s)))

    def lift(self) -> None:
        """End, and let all be as before."""
        match self._case.cause:
            case "link" | "nic":
                for link, rate in self._rates.items():
                    self._place.set_rate(link, rate)
            case "quota":
                _write("cpu", "cpu.cfs_quota_us", -1)
            case "memory":
                _write("memory", "memory.limit_in_bytes", -1)
            case "disk":
                self._limit_reads(0)

    def _limit_memory(self, less_bytes: int) -> None:
        """Take so much from what the group uses at first, or half as much where the kernel finds no more to give up."""
        if not self._memory_limit_bytes:
            used = (GROUPS / "memory" / GROUP / "memory.usage_in_bytes").read_text()
            self._memory_limit_bytes = int(used) - less_bytes
        try:
            _write("memory", "memory.limit_in_bytes", self._memory_limit_bytes)
        except OSError:
            self._memory_limit_bytes += less_bytes // 2
            _write("memory", "memory.limit_in_bytes", self._memory_limit_bytes)

    def _limit_reads(self, bytes_per_s: int) -> None:
        """Limit the reads of the group from the disk that has the data; 0 is no limit."""
        device = Path(self._case.folder).stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        _write("blkio", "blkio.throttle.read_bps_device", f"{number} {bytes_per_s}")

    def run(self, events: Path, is_over: threading.Event) -> None:
        """Apply and lift, from the first steps on until the run is over."""
        while not is_over.wait(0.1) and not _has_begun(events):
            pass
        is_over.wait(WARM_UP_S)
        while not is_over.is_set():
            self.apply()
            is_over.wait(BURST_S if self._case.is_burst else RUN_TIMEOUT_S)
            self.lift()
            is_over.wait(CYCLE_S - BURST_S)


def _write(controller: str, name: str, value: object) -> None:
    (GROUPS / controller / GROUP / name).write_text(f"{value}\n")


def _has_begun(events: Path) -> bool:
    return any(event["kind"] == "training_prepared" for event in telemetry.read_events(events))


@contextlib.contextmanager
def control_groups() -> Iterator[None]:
    """Groups that the workers join, with a short period of the CPU quota; removed at the end."""
    folders = [GROUPS / controller / GROUP for controller in ("cpu", "memory", "blkio")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    _write("cpu", "cpu.cfs_period_us", 40000)
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def run_case(case: Case, place: Lab, folder: Path) -> list[verdict.Loss]:
    """Run one case; return its losses.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    folder.mkdir()
    case = replace(case, folder=str(folder), table=str(folder.with_name("table.bin")))
    run_dir, is_over = folder / "run", threading.Event()
    plant = threading.Thread(target=Plant(case, place).run, args=(run_dir / "events.jsonl", is_over))
    if case.cause in BY_KERNEL:
        plant.start()
    command = [sys.executable, "-m", "ringweave", "lab", "run", "--lab", place.name]
    command += ["--run-dir", str(run_dir), __file__]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", _CASE: json.dumps(asdict(case))},
        )
    finally:
        is_over.set()
        if case.cause in BY_KERNEL:
            plant.join()
    if done.returncode != 0 and case.cause != "memory":  # the kernel may kill a rank that is short of it
        raise SystemExit(f"{case.text()}: exit code {done.returncode}, expected 0.\n{done.stdout}{done.stderr}")
    for path in folder.glob("rank-*.bin"):
        path.unlink()
    return verdict.find_losses(telemetry.read_last_attempt(run_dir / "events.jsonl"))


def is_right(case: Case, losses: Sequence[verdict.Loss]) -> bool:
    """Return whether the largest loss has the planted cause and rank; of a healthy run, whether there is none.

    A slow uplink is no single rank's. It shows on the pairs of ranks in different racks, which the verdict lists.
    """
    if case.cause == HEALTHY or not losses:
        return case.cause == HEALTHY and not losses
    first = losses[0]
    if case.cause == "link":
        named = [(int(sender), int(receiver)) for sender, receiver in _PAIRS.findall(first.evidence)]
        return first.cause == "link" and bool(named) and all(SWITCHES[a] != SWITCHES[b] for a, b in named)
    return (first.cause, first.rank) == (case.cause, case.rank)


def run_all(options: argparse.Namespace, place: Lab, folder: Path) -> list[dict[str, Any]]:
    """Run all cases and print each; return the rows."""
    rows: list[dict[str, Any]] = []
    for number, case in list(enumerate(draw_cases(options)))[options.first :]:
        begun_s = time.monotonic()
        losses = run_case(case, place, folder / str(number))
        row = {"case": asdict(case), "is_right": is_right(case, losses), "losses": [asdict(each) for each in losses]}
        rows.append({**row, "wall_s": round(time.monotonic() - begun_s, 1)})
        first = losses[0].text() if losses else "nothing"
        print(f"{number:3} {'right' if rows[-1]['is_right'] else 'WRONG'}  {case.text():32} {first}", flush=True)
    return rows


def measure_cost(place: Lab, folder: Path) -> dict[str, float]:
    """Return what recording costs, of the time of a step: processor time beyond that of steps without it.

    Means, as a window is written in few steps. Medians of wall times are shown beside; where other programs run, they
    do not show one per cent.
    """
    run_case(Case(cause="cost", rank=0, is_burst=False, strength=0.0), place, folder / "cost")
    laps = json.loads((folder / "cost" / "cost.json").read_text())
    found: dict[str, float] = {"steps": len(laps["on"]) + len(laps["off"])}
    for way, rows in laps.items():
        found[f"{way}_s"] = statistics.median(wall_s for wall_s, _ in rows)
        found[f"{way}_processor_s"] = statistics.fmean(processor_s for _, processor_s in rows)
    return {**found, "cost": (found["on_processor_s"] - found["off_processor_s"]) / found["off_s"]}


def main() -> None:
    """Under a launcher a worker; else bring the lab up and run the cases in it."""
    if _CASE in os.environ and "RANK" in os.environ:
        work(Case(**json.loads(os.environ[_CASE])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=int, default=40)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--only", default="", help="causes, with commas between them")
    parser.add_argument("--first", type=int, default=0, help="leave out the runs before this one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cost", action="store_true", help="measure the cost of recording, and nothing else")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("--out", type=Path, help="where the JSON document goes")
    options = parser.parse_args()
    place = lab.up(topology.loads(CLUSTER), "verdict-cost" if options.cost else "verdict", quotas="never")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            make_data(folder / "table.bin", TABLE_BYTES)
            with contextlib.nullcontext() if options.cost else control_groups():
                rows = [] if options.cost else run_all(options, place, folder)
            cost = measure_cost(place, folder) if options.cost else None
    finally:
        lab.down(place.name)
    if options.out:
        options.out.write_text(json.dumps({"seed": options.seed, "runs": rows, "cost": cost}, indent=1) + "\n")
    sys.exit(conclude(rows, cost))


def conclude(rows: Sequence[dict[str, Any]], cost: dict[str, float] | None) -> int:
    """Print the sums; return the exit code."""
    if cost is not None:
        print(", ".join(f"{name} {value:.5g}" for name, value in cost.items()))
        return int(cost["cost"] > ALLOWED_COST)
    planted = [row["is_right"] for row in rows if row["case"]["cause"] != HEALTHY]
    healthy = [row["is_right"] for row in rows if row["case"]["cause"] == HEALTHY]
    print(f"planted causes named with rank: {sum(planted)} of {len(planted)}; healthy runs without a verdict: ", end="")
    print(f"{sum(healthy)} of {len(healthy)}")
    return int(sum(planted) < WANTED * len(planted) or not all(healthy))


if __name__ == "__main__":
    main()
