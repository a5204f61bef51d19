"""Measures ringweave on a machine with one GPU, in stages, each with a limit of its own.

    bash bench/gpu/one_gpu.sh --out DIR [--device cpu] [--short] [--stages native,truth] [--total-s 470]

After each stage DIR/results.json is replaced; DIR/one_gpu.log has all output. A stage that fails or runs out of time
does not end the others. The table at the end sets each measured number beside its bar. NCCL runs with several ranks on
the GPU, each under a host id of its own, over sockets; without MPS their kernels share the GPU by time slices.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_bars import BARS, bar_table
from gpu_launch import HERE, ROOT, ProgramLauncher, lab_up, read_json

MB = 1_000_000
DDP_CLUSTER = """name: one-gpu-ddp
nodes:
  - {name: n, nic: 1Gbit/s, devices: 1, count: 4}
latency: 50us
"""


class StageRun:
    """All stages of one call, and their results so far."""

    def __init__(self, options: argparse.Namespace, launcher: ProgramLauncher) -> None:
        self.options, self.launcher = options, launcher
        self.is_short, self.is_cuda = options.short, options.device == "cuda"
        self.results: dict[str, Any] = {}
        self.deadline_s = time.monotonic() + options.total_s

    def left_s(self, limit_s: float) -> float:
        """Return a limit, cut to the time that is left."""
        return max(1.0, min(limit_s, self.deadline_s - time.monotonic()))

    def facts(self, limit_s: float) -> dict[str, Any]:
        return self._facts("facts", limit_s) | {"install": os.environ.get("ONE_GPU_INSTALL_NOTE", "")}

    def ceilings(self, limit_s: float) -> dict[str, Any]:
        return self._facts("ceilings", limit_s)

    def _facts(self, what: str, limit_s: float) -> dict[str, Any]:
        folder = self.launcher.folder()
        argv = self.launcher.program("gpu_facts.py", [what], folder)
        return self.launcher.command(argv, limit_s, result=folder / "result.json").as_json()

    def install(self, limit_s: float) -> dict[str, Any]:
        """Return the text of `ringweave doctor`."""
        done = run_module(["ringweave", "doctor"], limit_s)
        self.launcher.note(f"doctor, exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return {"rc": done.returncode, "doctor": (done.stdout + done.stderr).splitlines()[:60]}

    def tests(self, limit_s: float) -> dict[str, Any]:
        """Run the bridge's tests on CUDA, after everything that is timed."""
        path = ROOT / "tests" / "comm" / "bridge" / "test_on_cuda.py"
        if not path.exists():
            return {"skipped": f"{path.name} is not there"}
        words = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
        done = run_module(["pytest", str(path), *words], limit_s)
        self.launcher.note(f"{path.name}\n{done.stdout[-6000:]}{done.stderr[-2000:]}")
        return {"rc": done.returncode, "last_lines": done.stdout.splitlines()[-5:]}

    def native(self, limit_s: float) -> dict[str, Any]:
        """Run every collective of the native path; after a hang again, without what was begun."""
        folder, deadline_s = self.launcher.folder(), time.monotonic() + limit_s
        found: dict[str, Any] = {}
        for attempt in range(4):
            left_s = deadline_s - time.monotonic()
            if left_s < 5:
                break
            limit = min(left_s, 40.0 if attempt == 0 else 25.0)
            environ = {"RINGWEAVE_DEVICE_PATH": "native"}
            words = ["--what", "native"]
            done = self.launcher.ranks("gpu_truth.py", words, 2, limit, environ=environ, folder=folder)
            found = done.as_json()
            if not done.is_timed_out:
                break
        cases = found.get("cases", {})
        return {"right": sum(each == "right" for each in cases.values()), "of": len(cases), **found}

    def truth(self, limit_s: float) -> dict[str, Any]:
        """Run random collectives with 2 and 4 ranks, and once more with one hardware queue."""
        count = 40 if self.is_short else 2500
        share_s = limit_s * 0.4
        found = {}
        for name, num_ranks, number, part_s, environ in (
            ("2_ranks", 2, count, share_s, {}),
            ("4_ranks", 4, count, share_s, {}),
            ("one_queue", 2, count // 8, limit_s * 0.2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ):
            words = ["--count", str(number), "--seed", str(num_ranks), "--budget-s", f"{max(5, part_s - 14):.0f}"]
            found[name] = self.launcher.ranks("gpu_truth.py", words, num_ranks, part_s, environ=environ).as_json()
        return found

    def racks(self, limit_s: float) -> dict[str, Any]:
        """Measure four systems in the lab of two racks, ranks in order and shuffled; without a lab on loopback."""
        size, rounds = (1 * MB if self.is_short else 25 * MB), (1 if self.is_short else 5)
        words = ["--sizes", str(size), "--without", self._without()]
        parts = (("in_order", "block", rounds, 0.55), ("shuffled", "shuffled:3", min(3, rounds), 0.45))
        cluster = ROOT / "examples" / "clusters" / "two-racks.yaml"

        def run(lab: str | None, order: str, num: int, part_s: float) -> dict[str, Any]:
            own = [*words, "--rounds", str(num), "--budget-s", f"{part_s * 0.6:.0f}"]
            if lab is None:
                return self.launcher.ranks("gpu_rates.py", own, 8, part_s).as_json()
            return self.launcher.in_lab(lab, "gpu_rates.py", own, part_s, order=order).as_json()

        begun_s = time.monotonic()
        try:
            with lab_up(cluster, "one-gpu-racks") as lab:
                limit_s -= time.monotonic() - begun_s
                return {name: run(lab, order, num, limit_s * part) for name, order, num, part in parts}
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:600]
            return {"no_lab": why, "in_order": run(None, "block", rounds, limit_s * 0.5)}

    def local(self, limit_s: float) -> dict[str, Any]:
        """Measure four systems without a limit of the network."""
        sizes = ",".join(str(size) for size in ((MB // 10,) if self.is_short else (MB, 25 * MB, 100 * MB)))
        words = ["--sizes", sizes, "--rounds", "2" if self.is_short else "7", "--without", self._without()]
        found = {}
        for num_ranks in (2, 4):
            part_s = limit_s / 2
            own = [*words, "--budget-s", f"{part_s * 0.5:.0f}"]
            found[f"{num_ranks}_ranks"] = self.launcher.ranks("gpu_rates.py", own, num_ranks, part_s).as_json()
        return found

    def ddp(self, limit_s: float) -> dict[str, Any]:
        """Train a GPT with DDP on four ranks in a lab of 1 Gbit/s; without a lab on loopback."""
        cluster = self.launcher.folder() / "ddp.yaml"
        cluster.write_text(DDP_CLUSTER, encoding="utf-8")
        words = ["--what", "ddp", "--steps", "5" if self.is_short else "30", "--budget-s", f"{limit_s - 25:.0f}"]
        words += ["--measured", "2" if self.is_short else "5"]
        begun_s = time.monotonic()
        try:
            with lab_up(cluster, "one-gpu-ddp") as lab:
                left_s = limit_s - (time.monotonic() - begun_s) - 2
                return self.launcher.in_lab(lab, "gpu_training.py", words, left_s).as_json()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:600]
            done = self.launcher.ranks("gpu_training.py", words, 4, limit_s - (time.monotonic() - begun_s))
            return {"no_lab": why, **done.as_json()}

    def faults(self, limit_s: float) -> dict[str, Any]:
        """Kill a rank in a bucket; then train under --elastic while three workers die."""
        folder = self.launcher.folder()
        words = ["--bytes", str(4 * MB if self.is_short else 100 * MB)]
        killed = self.launcher.ranks("gpu_faults.py", words, 4, limit_s * 0.35, folder=folder).as_json()
        killed["survivors"] = [read_json(folder / f"result.json.{rank}") for rank in range(3)]
        folder = self.launcher.folder()
        program = self.launcher.program("gpu_faults.py", ["--what", "elastic"], folder)[1:]
        verb = [sys.executable, "-m", "ringweave", "run", "--elastic", "2:4", "--workers", "4", "--mode", "sync"]
        argv = [*verb, "--run-dir", str(folder / "run"), *program]
        elastic = self.launcher.command(argv, limit_s * 0.65).as_json()
        logs = sorted(folder.glob("elastic.*"))
        elastic["workers"] = {path.name: read_json(path) for path in logs}
        elastic["kills"] = len(list(folder.glob("killed.*")))
        return {"kill": killed, "elastic": elastic}

    def balanced(self, limit_s: float) -> dict[str, Any]:
        """Train with one slow rank, by equal and by balanced shares."""
        return self.launcher.ranks("gpu_training.py", ["--what", "balanced"], 4, limit_s).as_json()

    def _without(self) -> str:
        """Return the systems that an earlier stage has shown to hang here."""
        cases = self.results.get("native", {}).get("cases", {})
        return "" if cases.get("plain nccl all_reduce", "right") == "right" else "nccl"


def run_module(words: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments in the repository's root, and return its end and output."""
    argv = [sys.executable, "-m", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit_s, cwd=ROOT)


STAGES: dict[str, tuple[float, Callable[[StageRun, float], dict[str, Any]]]] = {
    "facts": (25, StageRun.facts),
    "install": (30, StageRun.install),
    "ceilings": (35, StageRun.ceilings),
    "native": (60, StageRun.native),
    "truth": (100, StageRun.truth),
    "racks": (130, StageRun.racks),
    "local": (50, StageRun.local),
    "ddp": (90, StageRun.ddp),
    "faults": (80, StageRun.faults),
    "balanced": (40, StageRun.balanced),
    "tests": (60, StageRun.tests),
}
"""Name -> limit in seconds, and the function; in the order in which they run."""


def parse_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out) if out else Path("one-gpu-results"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--short", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--stages", default="", help="only these, with commas")
    parser.add_argument("--total-s", type=float, default=470.0, help="limit of all stages together")
    return parser.parse_args()


def main() -> None:
    """Run the stages, save after each, and print the table."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in options.stages.split(",") if name] or list(STAGES)
    work = Path(tempfile.mkdtemp(prefix="stages.", dir=os.environ.get("ONE_GPU_WORK")))
    launcher = ProgramLauncher(work, options.out.absolute() / "one_gpu.log", options.device, is_short=options.short)
    run = StageRun(options, launcher)
    about = {
        "kind": "measured",
        "device": options.device,
        "short": options.short,
        "began": time.strftime("%FT%TZ", time.gmtime()),
    }
    for name in STAGES:
        if name in wanted:
            run_stage(run, name)
            save(options.out / "results.json", {**about, "stages": run.results, "bars": bar_table(run.results)})
    rows = bar_table(run.results)
    print_table(rows)
    print(f"{options.out / 'results.json'} ({HERE.name}: {len(run.results)} stages)")


def run_stage(run: StageRun, name: str) -> None:
    """Run one stage; its failure is its result."""
    limit_s, function = STAGES[name]
    started_s = time.monotonic()
    left_s = run.left_s(limit_s)
    run.launcher.note(f"stage {name}, limit {left_s:.0f} s")
    if left_s < min(limit_s, 10.0):
        found: dict[str, Any] = {"skipped": "no time left"}
    else:
        try:
            found = function(run, left_s)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
    found["stage_wall_s"] = round(time.monotonic() - started_s, 1)
    run.results[name] = found
    state = found.get("error") or found.get("skipped") or ("no lab" if "no_lab" in found else "done")
    print(f"stage {name}: {state}, {found['stage_wall_s']} s", flush=True)


def save(path: Path, document: dict[str, Any]) -> None:
    """Replace the results at once."""
    import json

    fresh = path.with_name(".results.json.new")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def print_table(rows: list[dict[str, str]]) -> None:
    """Print stage, number, measured value, bar and verdict."""
    columns = ("stage", "number", "measured", "bar", "verdict")
    table = [dict(zip(columns, columns, strict=True)), *rows]
    widths = {column: max(len(row[column]) for row in table) for column in columns}
    print()
    for row in table:
        print("  ".join(row[column].ljust(widths[column]) for column in columns).rstrip())
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("met", "missed", "not run")}
    print(f"\n{len(BARS)} bars, all numbers measured: " + ", ".join(f"{num} {name}" for name, num in counts.items()))


if __name__ == "__main__":
    main()
