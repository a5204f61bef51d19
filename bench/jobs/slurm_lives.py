"""Lives of jobs on a real Slurm whose controller kills itself at a boundary; `slurm_boundaries.py` lives them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

from ringweave.errors import LaunchError
from ringweave.jobs.request import DeletionPolicy, JobRequest, NodeRequest
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.platform import SlurmPlatform
from ringweave.platforms.slurm.registry import SlurmJobRegistry
from tests.fakes.slurm import FakeGpuSlurmCluster

DEADLINE_S = 400.0
"""Longest life; on an idle machine it takes 10 s."""
LOOK_S = 0.2
DYING = Path(__file__).with_name("dying")
SCRIPT = """
import os, pathlib, signal, time
node, attempt, which = pathlib.Path(os.environ["RINGWEAVE_RUN_DIR"]).parts[-3:]
with open("ledger", "a") as ledger:
    ledger.write(f"{node}.{attempt}/{which}\\n")
kind = os.environ["KIND"]
def die():  # once the other node's worker has begun as well: else it may be called back before
    while not any(line.startswith("big.") and line.endswith("/" + which) for line in open("ledger").read().split()):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "replaced" and which == "round-1":
    if node == "small":
        die()
    time.sleep(600)
if kind == "asked":
    time.sleep(600)
if kind == "fails":
    if which == "round-4" and node == "big":
        raise SystemExit(3)
    if which != "round-4" and node == "small":
        die()
    time.sleep(600)
time.sleep(0.3)
"""
"""Script of the workers: each records its start; the rest depends on the life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Events of a job's life, and its required end."""

    ttl_s: float | None
    asks: tuple[tuple[int, str, str], ...] = ()
    """(number of begun workers, state or any, verb): the requests to the job, in order."""
    deletion: DeletionPolicy = DeletionPolicy.DELETE
    """Deletion policy of the large node."""
    begun: tuple[str, ...] = ()
    """`NODE.ATTEMPT/ROUND` of the workers that begin, each once."""
    end: Mapping[str, object] = field(default_factory=dict)


KINDS = {
    "ends": Kind(
        ttl_s=0.0,
        begun=("big.1/round-1", "small.1/round-1"),
        end={"outcome": "Succeeded", "retries": [0, 0]},
    ),
    "replaced": Kind(
        ttl_s=1.0,
        begun=("big.1/round-1", "big.1/round-2", "small.1/round-1", "small.2/round-2"),
        end={"outcome": "Succeeded", "retries": [0, 1]},
    ),
    "asked": Kind(
        ttl_s=None,
        asks=((2, "", "suspend"), (2, "Suspended", "resume"), (4, "", "stop"), (4, "Stopped", "delete")),
        begun=("big.1/round-1", "big.2/round-2", "small.1/round-1", "small.2/round-2"),
        end={"outcome": "Stopped", "retries": [0, 0]},
    ),
    "fails": Kind(
        ttl_s=None,
        asks=((4, "Failed", "retry"), (6, "Failed", "delete")),
        deletion=DeletionPolicy.KEEP_ON_FAILURE,
        begun=(
            *("big.1/round-1", "big.1/round-2", "big.2/round-4"),
            *("small.1/round-1", "small.2/round-2", "small.3/round-4"),
        ),
        end={"outcome": "Failed", "retries": [0, 0]},
    ),
}
"""`ends`: it succeeds. `replaced`: a node is lost, and a TTL ends. `asked`: suspended, resumed, stopped, deleted.
`fails`: a node is lost more often than it may, tried again, a script fails, deleted; one node is kept meanwhile."""


class Life:
    """One job in its own folder, with its own name, so that several can run at once."""

    def __init__(self, cluster: FakeGpuSlurmCluster, home: Path, kind: str, dies_at: str = "") -> None:
        home.mkdir()
        (home / "s.py").write_text(SCRIPT)
        self.cluster, self.home, self.kind, self.dies_at = cluster, home, kind, dies_at
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        path = os.pathsep.join([str(DYING), *sys.path[1:]])
        environ = kept | {"PYTHONPATH": path, "LIFE": f"{home}:{dies_at}", "OMP_NUM_THREADS": "1"}
        self.service = SlurmPlatform(home / "state", SlurmClient(self._run), requester="bench", environ=environ)
        self._asks = list(KINDS[kind].asks)
        self._registry = SlurmJobRegistry(home / "state")
        self._seen: dict[str, object] = {}

    def live(self) -> dict[str, object]:
        """Run from submission until nothing is left; return its end, and whether that is the required one."""
        policies = {"big": KINDS[self.kind].deletion}
        nodes = tuple(
            NodeRequest(name=name, capacity=1, max_retries=1, deletion=policies.get(name, DeletionPolicy.DELETE))
            for name in self.cluster.gpus
        )
        environment = {"KIND": self.kind}
        shape = {"num_workers": len(nodes), "min_per_node": 1, "device": "cpu", "ttl_s": KINDS[self.kind].ttl_s}
        request = JobRequest(name=self.home.name, script="s.py", nodes=nodes, environment=environment, **shape)
        begun_s = time.monotonic()
        self.service.submit(request, base=self.home)
        while (left := self._left()) and time.monotonic() < begun_s + DEADLINE_S:
            self._look()
            self._ask()
            time.sleep(LOOK_S)
        told = {"left": left, "begun": sorted(self._ledger()), **self._end()}
        kind = KINDS[self.kind]
        return {
            "killed_at": self.dies_at if self.dies_at in self.on_boundary() else None,
            "is_same": told == {"left": [], "begun": sorted(kind.begun), **kind.end},
            **told,
            "took_s": round(time.monotonic() - begun_s, 1),
        }

    def on_boundary(self) -> list[str]:
        """Return the boundaries reached until the kill, in order, each with its count so far."""
        path = self.home / "boundaries"
        names = path.read_text().splitlines() if path.exists() else []
        numbered = [f"{name}#{names[: index + 1].count(name)}" for index, name in enumerate(names)]
        return numbered[: numbered.index(self.dies_at) + 1] if self.dies_at in numbered else numbered

    def story(self) -> str:
        """Return the controller's unreported errors and its record, for a life with a wrong end."""
        texts = [f"{path}: {path.read_text(errors='replace')}" for path in self._files()]
        return "\n".join([self.cluster.run_command("scontrol", "show", "job"), *texts])

    def _files(self) -> Iterator[Path]:
        for pattern in ("boundaries", "state/jobs/*/*.log", "state/jobs/*/*.json*", "state/jobs/*/groups/*/*.json"):
            yield from sorted(self.home.glob(pattern))

    def _look(self) -> None:
        """Read the job's end, if its record is kept after its end."""
        entry = self._registry.find_by_name(self.home.name)
        if entry is not None and entry.job.record.outcome is not None:
            record = entry.job.record
            self._seen = {"outcome": str(record.outcome), "retries": [node.retries for node in record.nodes]}

    def _ask(self) -> None:
        """Make the next request to the job, if it is time."""
        if not self._asks or len(self._ledger()) < self._asks[0][0]:
            return
        name, (_, state, verb) = self.home.name, self._asks[0]
        if state and self.service.job(name).state != state:
            return
        self._look()  # at what it has come to just now: after this it may be gone
        try:
            self.service.act(name, verb)
        except LaunchError as error:  # Slurm was busy; the next look asks again
            print(f"{verb} of {name}: {error}", file=sys.stderr, flush=True)
            return
        self._asks.pop(0)

    def _ledger(self) -> list[str]:
        path = self.home / "ledger"
        return path.read_text().split() if path.exists() else []

    def _end(self) -> dict[str, object]:
        path = self.home / "end.json"
        return dict(json.loads(path.read_text())) if path.exists() else self._seen

    def _left(self) -> list[str]:
        """Return everything left of the job; Slurm and processes are checked once its folder is gone."""
        files = [path.name for path in (self.home / "state" / "jobs").iterdir()]
        return files or self._of_slurm() or self._processes()

    def _of_slurm(self) -> list[str]:
        names = f"--name=rw-{self.home.name},rw-ttl-{self.home.name}"
        return self.cluster.run_command("squeue", "-h", names, "-o", "%j").split()

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

    def _run(self, argv: list[str], stdin: str, environ: dict[str, str] | None) -> CompletedProcess[str]:
        """Run a command of Slurm on the login node."""
        command = self.cluster.wrap_command(argv)
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=environ)
