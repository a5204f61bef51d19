"""The controller of a job on a real Slurm killed by SIGKILL at every boundary of a life; its batch script restarts it.

    python bench/jobs/slurm_boundaries.py [--first 1] [--step 1] [--most 0] [--out FILE]     (root; about 10 s a life)

A life of its own finds the boundaries: every action before and after, and inside of those of several steps. Then one
life for each of them, in which the real process of the controller kills itself there. Ends with 1 if a life ended
otherwise: something is left (files, processes, jobs of Slurm), or a worker began twice.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

from ringweave.jobs.requests.request import NodeRequest, Request
from ringweave.launch.slurm.asking.commands import Done, Slurm
from ringweave.launch.slurm.service import SlurmService
from ringweave.testing.slurm import SlurmCluster

DEADLINE_S = 900.0
"""Of a life; on a machine with nothing else to do it takes 10 s."""
ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, pathlib, time
with open("ledger", "a") as ledger:
    ledger.write(os.environ["RANK"] + "\\n")
time.sleep(0.5)
"""
DYING = '''
"""Makes the controller of a job die at a boundary; of every other process nothing changes."""
import os, signal, sys

if "ringweave.launch.slurm.controller" in sys.orig_argv and os.environ.get("LIFE"):
    from ringweave.launch.slurm.place import SlurmPlace
    from ringweave.launch.slurm.registry import Registry

    home, dies_at = os.environ["LIFE"].rsplit(":", 1)

    def reached(name):
        with open(home + "/boundaries", "a+") as log:
            log.write(name + "\\n")
            log.flush()
            log.seek(0)
            if len(log.readlines()) == int(dies_at):
                os.kill(os.getpid(), signal.SIGKILL)

    def bounded(kind, method, name):
        inner = getattr(kind, method)

        def call(self, *given, **named):
            reached("before " + name(given))
            result = inner(self, *given, **named)
            reached("after " + name(given))
            return result

        setattr(kind, method, call)

    bounded(SlurmPlace, "do", lambda given: type(given[0]).__name__)
    bounded(Registry, "save", lambda given: "save")
    bounded(Registry, "tell", lambda given: "tell")
    bounded(Registry, "forget", lambda given: "forget")
    make = SlurmPlace.__init__

    def making(self, *given, **named):
        make(self, *given, **named)
        self._reached = reached

    SlurmPlace.__init__ = making
'''


class Life:
    """One job, in a folder of its own."""

    def __init__(self, cluster: SlurmCluster, home: Path, dies_at: int) -> None:
        home.mkdir()
        (home / "site").mkdir()
        (home / "site" / "sitecustomize.py").write_text(DYING)
        (home / "s.py").write_text(SCRIPT)
        self.cluster, self.home = cluster, home
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        path = os.pathsep.join([str(home / "site"), *sys.path[1:]])
        environ = kept | {"PYTHONPATH": path, "LIFE": f"{home}:{dies_at}"}
        self.service = SlurmService(home / "state", Slurm(self.run), requester="bench", environ=environ)

    def run(self, argv: list[str], stdin: str, environ: dict[str, str] | None) -> Done:
        """A command of Slurm, where people log in."""
        command = self.cluster.command(argv)
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=environ)
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    def lead(self) -> dict[str, object]:
        """The life, and what is left after it."""
        nodes = tuple(NodeRequest(name=name, capacity=3) for name in self.cluster.gpus)
        request = Request(name="job", num_workers=6, script="s.py", nodes=nodes, device="cpu", ttl_s=0.0)
        self.service.submit(request, base=self.home)
        deadline = time.monotonic() + DEADLINE_S
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.2)
        begun = Counter((self.home / "ledger").read_text().split()) if (self.home / "ledger").exists() else Counter()
        return {"left": self._left(), "begun": dict(sorted(begun.items()))}

    def boundaries(self) -> list[str]:
        """All that were reached, in order."""
        path = self.home / "boundaries"
        return path.read_text().splitlines() if path.exists() else []

    def _left(self) -> list[str]:
        files = [path.name for path in (self.home / "state" / "jobs").iterdir()]
        jobs = self.cluster.call("squeue", "-h", "-o", "%j").split()
        return files + jobs + self._processes()

    def _processes(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if str(self.home) in " ".join(words) and int(path.parent.name) != os.getpid():
                found.append(" ".join(words))
        return found


def commit() -> str:
    """Of the sources that were run."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Live all lives, and say how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=1, help="number of the first boundary")
    parser.add_argument("--step", type=int, default=1, help="every so manieth of them")
    parser.add_argument("--most", type=int, default=0, help="so many lives; 0 for all")
    parser.add_argument("--out", type=Path, help="where the lives go, as JSON")
    asked = parser.parse_args()
    good = {"left": [], "begun": {str(rank): 1 for rank in range(6)}}
    ends: list[bool] = []
    lives: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, SlurmCluster({"big": 10, "small": 5}, name=f"b-{os.getpid()}") as up:
        whole = Life(up, Path(folder, "whole"), 0)
        end, names = whole.lead(), whole.boundaries()
        print(f"without a kill, {len(names)} boundaries: {json.dumps(end)}", flush=True)
        ends.append(end == good)
        numbers = range(asked.first, len(names) + 1, asked.step)
        for number in numbers[: asked.most or None]:
            life = Life(up, Path(folder, str(number)), number)
            end = life.lead()
            was_killed = len(life.boundaries()) >= number
            print(f"killed {'' if was_killed else 'nowhere, not '}at {number} ({names[number - 1]}): {json.dumps(end)}")
            ends.append(end == good)
            lives.append({"killed_at": number if was_killed else None, "boundary": names[number - 1], **end})
    if asked.out:
        about = {"date": str(date.today()), "commit": commit(), "boundaries": len(names)}
        asked.out.write_text(json.dumps({**about, "lives": lives}, indent=1) + "\n")
    print(f"{len(ends) - 1} kills, {ends.count(True)} of {len(ends)} lives with one and the same end")
    return 0 if all(ends) else 1


if __name__ == "__main__":
    sys.exit(main())
