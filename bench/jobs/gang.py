"""Time from the last ready node to the start of the workers, and the lateness of a TTL.

    python bench/jobs/gang.py [--rounds 20] [--out FILE]

Jobs of three nodes with one worker each, which only record when they began. Measured with one clock, from the report of
the last agent that was ready to the first line of the first and of the last worker's script (that includes starting
three interpreters), and to the agents' reports that their workers run.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.api import LogQuery
from ringweave.platforms.local.job_folder import job_folder
from ringweave.platforms.local.platform import LocalPlatform

SCRIPT = "import time\nprint(time.time(), flush=True)\n"
TTL_S = 1.0
START_BAR_S, TTL_BAR_S = 0.2, 1.0
"""Limits: from the last ready node to the last worker's first line; lateness of a TTL."""


class Watch:
    """Records when each group is first seen ready and running, by the times of its report files."""

    def __init__(self, root: Path) -> None:
        self._root, self._ended = root, threading.Event()
        self.times: dict[tuple[str, str], float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.001):
            for path in self._root.glob("jobs/*/groups/*/status.json"):
                try:
                    written_s = path.stat().st_mtime
                    phase = str(agent_channel.STATUS_JSON.parse(path.read_bytes()).phase)
                except (OSError, ValueError):
                    continue
                self.times.setdefault((path.parent.name, phase), written_s)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def last(self, phase: str) -> float:
        """Return the time at which the last group reached the phase."""
        return max(time_s for (_, seen), time_s in self.times.items() if seen == phase)


def measure(service: LocalPlatform, state: Path, folder: Path, name: str) -> dict[str, float]:
    """Run one job, and measure it."""
    nodes = tuple(NodeRequest(name=f"n{index}", capacity=1) for index in range(3))
    asked = {"num_workers": 3, "min_per_node": 1, "device": "cpu", "ttl_s": TTL_S}
    watch = Watch(state)
    service.submit(JobRequest(name=name, script="s.py", nodes=nodes, **asked), base=folder)
    entry = service._registry.find_by_name(name)
    assert entry is not None
    while (job := service.job(name)).state != "Succeeded":
        time.sleep(0.02)
    begun = [float(line.text) for line in service.logs(name, LogQuery())]
    watch.close()
    assert job.ended_s is not None
    root = job_folder(state, entry.id).root
    while root.exists() or service._registry.find_by_name(name):
        time.sleep(0.001)
    ready_s = watch.last("Ready")
    return {
        "to_running_s": watch.last("Running") - ready_s,
        "to_first_worker_s": min(begun) - ready_s,
        "to_last_worker_s": max(begun) - ready_s,
        "ttl_error_s": time.time() - (job.ended_s + TTL_S),
    }


def main() -> None:
    """Run the jobs one after the other, and print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "s.py").write_text(SCRIPT)
        service = LocalPlatform(folder / "state", requester="bench", environ=os.environ)
        rows = [measure(service, folder / "state", folder, f"job-{index}") for index in range(asked.rounds)]
    for key in rows[0]:
        values = sorted(row[key] for row in rows)
        print(
            f"{key:18} median {statistics.median(values):.3f}, most {values[-1]:.3f} s (measured, {len(values)} jobs)"
        )
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if asked.out:
        load = os.getloadavg()[0]
        asked.out.write_text(json.dumps({"machine": platform.platform(), "load": load, "rows": rows}, indent=2) + "\n")
    if any(row["to_last_worker_s"] > START_BAR_S or not 0 <= row["ttl_error_s"] < TTL_BAR_S for row in rows):
        raise SystemExit(f"missed: {START_BAR_S} s to the last worker, a TTL less than {TTL_BAR_S:g} s late")


if __name__ == "__main__":
    main()
