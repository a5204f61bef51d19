"""Lateness of a TTL on a real Slurm, without a client that polls.

    PYTHONPATH=. python bench/jobs/slurm_ttl.py [--jobs 5] [--ttl 10] [--out FILE]     (root; a minute and a half)

Jobs of three pretended GPUs that do nothing, one after the other, on an empty cluster. Measured with one clock, from
the time at which a job's outcome was decided, in its record, to the time at which its folder is gone. No command asks
for the job meanwhile: a small Slurm job that waits for the TTL removes it. In the end Slurm has no job left.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from ringweave.jobs import request
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.lease import SlurmTimeouts
from ringweave.platforms.slurm.platform import SlurmPlatform
from ringweave.platforms.slurm.registry import SlurmJobRegistry
from tests.fakes.slurm import FakeGpuSlurmCluster

LIMIT_S = 120.0
LOOK_S = 0.01


def service_of(cluster: FakeGpuSlurmCluster, state: Path) -> SlurmPlatform:
    """Return the service of a user who has logged in there."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}

    def run(argv: Sequence[str], stdin: str | None, environ: Mapping[str, str] | None) -> CompletedProcess[str]:
        return subprocess.run(
            cluster.wrap_command(argv), input=stdin, capture_output=True, text=True, check=False, env=environ
        )

    return SlurmPlatform(state, SlurmClient(run), requester="bench", environ=environ, timeouts=SlurmTimeouts())


def lateness_s(service: SlurmPlatform, state: Path, home: Path, name: str, ttl_s: float) -> float:
    """Submit one job; how long after its TTL its folder was gone."""
    text = f"name: {name}\ngpus: 3\nscript: pass.py\nnodes: [{{name: big, capacity: 10}}]\nttl: {ttl_s:g}s\n"
    service.submit(request.parse_request(text), base=home)
    registry, ended_s, deadline_s = SlurmJobRegistry(state), None, time.time() + LIMIT_S + ttl_s
    while (entry := registry.find_by_name(name)) is not None:
        ended_s = entry.job.record.ended_s or ended_s
        if time.time() > deadline_s:
            raise SystemExit(f"{name} is still there: {entry.job.record.state}")
        time.sleep(LOOK_S)
    gone_s = time.time()
    if ended_s is None:
        raise SystemExit(f"{name} was removed before it had ended")
    return gone_s - (ended_s + ttl_s)


def main() -> None:
    """Run the jobs, and print the lateness of their TTLs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--ttl", type=float, default=10.0, help="seconds")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        FakeGpuSlurmCluster({"big": 10, "small": 5}, name=f"ttl-{os.getpid()}") as up,
    ):
        home = Path(folder)
        (home / "pass.py").touch()
        up.wait_ready(["big", "small"])
        service = service_of(up, home / "state")
        late_s = []
        for index in range(asked.jobs):
            late_s.append(round(lateness_s(service, home / "state", home, f"job-{index}", asked.ttl), 3))
            print(f"{index + 1} of {asked.jobs} jobs: {late_s[-1]:.3f} s after its TTL", flush=True)
        deadline_s = time.time() + LIMIT_S
        while (left := up.run_command("squeue", "-h")) and time.time() < deadline_s:
            time.sleep(LOOK_S)
        if left:
            raise SystemExit(f"Slurm has jobs left: {left}")
    load = round(os.getloadavg()[0], 1)
    print(
        f"measured: {len(late_s)} jobs, TTL {asked.ttl:g} s: gone {min(late_s):.3f} to {max(late_s):.3f} s after it, "
        f"median {statistics.median(late_s):.3f} s (wanted: never early, under 1 s late); load of the machine {load}"
    )
    if asked.out:
        said = {"kind": "measured", "machine": platform.platform(), "load": load, "ttl_s": asked.ttl, "late_s": late_s}
        asked.out.write_text(json.dumps(said, indent=2) + "\n")
    if not 0 <= min(late_s) <= max(late_s) < 1:
        raise SystemExit("missed")


if __name__ == "__main__":
    main()
