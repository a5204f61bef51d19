"""Many `ringweave submit` at once on this machine: how many are recorded, in what time, and whether all jobs run.

    python bench/jobs/many_submits.py [--jobs 200] [--out FILE]

Each job is one worker that prints a line. All commands are started in one loop. Prints the time until the last command
has returned and until the last job has ended, the commands by outcome (recorded, refused in one line, anything else),
the processor time of a command, and how long the registry's lock was held at most, as seen by a writer that asks for it
all the time. All measured.
"""

import argparse
import json
import os
import platform
import resource
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

BAR_S = 60.0
MAX_END_S = 900.0
RINGWEAVE = str(Path(sys.executable).with_name("ringweave"))


class LockProbe(threading.Thread):
    """Takes the registry's write lock again and again, and notes the longest wait for it."""

    def __init__(self, registry: Path) -> None:
        super().__init__(daemon=True)
        self._registry, self._is_over = registry, threading.Event()
        self.longest_s = 0.0

    def run(self) -> None:
        while not self._is_over.wait(0.05):
            if self._registry.exists():
                with closing(sqlite3.connect(self._registry, timeout=0.0, isolation_level=None)) as connection:
                    self._wait_for_lock(connection)

    def _wait_for_lock(self, connection: sqlite3.Connection) -> None:
        """Poll every half a millisecond, more often than SQLite does, so that a free lock is seen at once."""
        begun_s = time.monotonic()
        while not self._is_over.is_set():
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                time.sleep(0.0005)
                continue
            connection.execute("ROLLBACK")
            break
        self.longest_s = max(self.longest_s, time.monotonic() - begun_s)

    def end(self) -> None:
        self._is_over.set()
        self.join()


def submit_all(folder: Path, num_jobs: int, environ: dict[str, str]) -> tuple[Counter[str], list[str]]:
    """Start all commands at once; return the number of each outcome, and the texts of those that were not recorded."""
    script = folder / "job.py"
    script.write_text("print('trained')\n")
    argv = [RINGWEAVE, "submit", "-y", "--detach", "--cpu-workers", "1", "--capacity", "1", "--min-per-node", "1"]
    started = [
        subprocess.Popen(
            [*argv, "--script", str(script), "--name", f"job-{index}"],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(num_jobs)
    ]
    outcomes, texts = Counter[str](), []
    for each in started:
        text = each.communicate()[1]
        is_one_line = len(text.splitlines()) == 1 and text.startswith("ringweave: error: ")
        outcome = "recorded" if each.returncode == 0 else "refused in one line" if is_one_line else "anything else"
        outcomes[outcome] += 1
        texts += [text] if outcome != "recorded" else []
    return outcomes, texts


def read_states(environ: dict[str, str]) -> Counter[str]:
    """Return the number of jobs in each state."""
    done = subprocess.run([RINGWEAVE, "jobs", "--json"], env=environ, capture_output=True, text=True, check=True)
    return Counter(job["state"] for job in json.loads(done.stdout)["jobs"])


def measure(num_jobs: int) -> dict[str, object]:
    """Submit, wait until all jobs have ended, and return what was measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        probe = LockProbe(folder / "state" / "ringweave" / "jobs.sqlite")
        probe.start()
        begun_s = time.monotonic()
        outcomes, texts = submit_all(folder, num_jobs, environ)
        submitted_s = time.monotonic() - begun_s
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        while (states := read_states(environ))["Succeeded"] + states["Failed"] < outcomes["recorded"]:
            if time.monotonic() - begun_s > MAX_END_S:
                break
            time.sleep(2.0)
        ended_s = time.monotonic() - begun_s
        probe.end()
        return {
            "jobs": num_jobs,
            "outcomes": dict(outcomes),
            "submitted_s": submitted_s,
            "ended_s": ended_s,
            "cpu_s_per_command": (used.ru_utime + used.ru_stime) / num_jobs,
            "states": dict(states),
            "longest_lock_s": probe.longest_s,
            "texts": texts[:5],
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    found = measure(asked.jobs)
    print(json.dumps(found, indent=2))
    if asked.out:
        asked.out.write_text(json.dumps({"kind": "measured", "machine": platform.platform(), **found}) + "\n")
    if found["outcomes"] != {"recorded": asked.jobs} or found["states"] != {"Succeeded": asked.jobs}:
        raise SystemExit("missed: all are recorded, and all jobs succeed")
    if found["submitted_s"] > BAR_S:
        raise SystemExit(f"missed: {BAR_S:g} s until the last command has returned")


if __name__ == "__main__":
    main()
