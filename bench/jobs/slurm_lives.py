"""Lives of jobs on a real Slurm whose controller kills itself at a boundary; `slurm_boundaries.py` lives them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ringweave.errors import LaunchError
from ringweave.jobs.requests.request import DeletionPolicy, NodeRequest, Request
from ringweave.launch.slurm.asking.commands import Done, Slurm
from ringweave.launch.slurm.registry import Registry
from ringweave.launch.slurm.service import SlurmService
from ringweave.testing.slurm import SlurmCluster

DEADLINE_S = 400.0
"""Of a life; on a machine with nothing else to do it takes 10 s."""
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
"""Says who it is; what it does else depends on the life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What happens to a job, and how it has to end."""

    ttl_s: float | None
    asks: tuple[tuple[int, str, str], ...] = ()
    """(so many workers have begun, state or any, verb): what is asked of the job, in order."""
    deletion: DeletionPolicy = DeletionPolicy.DELETE
    """Of the large node."""
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
    """One job, in a folder of its own; its name is its own too, so that several can be lived at once."""

    def __init__(self, cluster: SlurmCluster, home: Path, kind: str, dies_at: str = "") -> None:
        home.mkdir()
        (home / "s.py").write_text(SCRIPT)
        self.cluster, self.home, self.kind, self.dies_at = cluster, home, kind, dies_at
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        path = os.pathsep.join([str(DYING), *sys.path[1:]])
        environ = kept | {"PYTHONPATH": path, "LIFE": f"{home}:{dies_at}", "OMP_NUM_THREADS": "1"}
        self.service = SlurmService(home / "state", Slurm(self._run), requester="bench", environ=environ)
        self._asks = list(KINDS[kind].asks)
        self._registry = Registry(home / "state")
        self._seen: dict[str, object] = {}

    def live(self) -> dict[str, object]:
        """From submit until nothing is left; how it ended, and whether that is as it has to be."""
        policies = {"big": KINDS[self.kind].deletion}
        nodes = tuple(
            NodeRequest(name=name, capacity=1, max_retries=1, deletion=policies.get(name, DeletionPolicy.DELETE))
            for name in self.cluster.gpus
        )
        environment = {"KIND": self.kind}
        shape = {"num_workers": len(nodes), "min_per_node": 1, "device": "cpu", "ttl_s": KINDS[self.kind].ttl_s}
        request = Request(name=self.home.name, script="s.py", nodes=nodes, environment=environment, **shape)
        begun_s = time.monotonic()
        self.service.submit(request, base=self.home)
        while (left := self._left()) and time.monotonic() < begun_s + DEADLINE_S:
            self._look()
            self._ask()
            time.sleep(LOOK_S)
        told = {"left": left, "begun": sorted(self._ledger()), **self._end()}
        kind = KINDS[self.kind]
        return {
            "killed_at": self.dies_at if self.dies_at in self.reached() else None,
            "is_same": told == {"left": [], "begun": sorted(kind.begun), **kind.end},
            **told,
            "took_s": round(time.monotonic() - begun_s, 1),
        }

    def reached(self) -> list[str]:
        """The boundaries that were reached, in order, each with how often it had been by then; until the kill."""
        path = self.home / "boundaries"
        names = path.read_text().splitlines() if path.exists() else []
        numbered = [f"{name}#{names[: index + 1].count(name)}" for index, name in enumerate(names)]
        return numbered[: numbered.index(self.dies_at) + 1] if self.dies_at in numbered else numbered

    def story(self) -> str:
        """What the controller could not tell anybody, and the record as it is; for a life that ended otherwise."""
        texts = [f"{path}: {path.read_text(errors='replace')}" for path in self._files()]
        return "\n".join([self.cluster.call("scontrol", "show", "job"), *texts])

    def _files(self) -> Iterator[Path]:
        for pattern in ("boundaries", "state/jobs/*/*.log", "state/jobs/*/*.json*", "state/jobs/*/groups/*/*.json"):
            yield from sorted(self.home.glob(pattern))

    def _look(self) -> None:
        """How the job ended, where it is there for a while after its end."""
        entry = self._registry.find(self.home.name)
        if entry is not None and entry.job.record.outcome is not None:
            record = entry.job.record
            self._seen = {"outcome": str(record.outcome), "retries": [node.retries for node in record.nodes]}

    def _ask(self) -> None:
        """What is to be asked of the job next, if it has come to that."""
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
        """What there is of the job; Slurm and processes are looked at when its folder is gone."""
        files = [path.name for path in (self.home / "state" / "jobs").iterdir()]
        return files or self._of_slurm() or self._processes()

    def _of_slurm(self) -> list[str]:
        names = f"--name=rw-{self.home.name},rw-ttl-{self.home.name}"
        return self.cluster.call("squeue", "-h", names, "-o", "%j").split()

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

    def _run(self, argv: list[str], stdin: str, environ: dict[str, str] | None) -> Done:
        """A command of Slurm, where people log in."""
        command = self.cluster.command(argv)
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=environ)
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)
