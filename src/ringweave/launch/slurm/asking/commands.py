"""Slurm's own commands, run and read: sbatch, scancel, scontrol, squeue, sinfo. sacct is not needed."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringweave.errors import LaunchError, explain

TIMEOUT_S = 60.0
"""A controller of Slurm that is restarted answers late."""
MAX_SAID = 400
"""Characters of what Slurm says in an error; the cause is at the end of a long line as often as not."""
ENDS = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""States in which a job of Slurm stays. One that is requeued is PENDING again."""

_TIMED_OUT = "Socket timed out"
"""What a command says that gave up waiting; its request may still be on the way."""
_PAIR = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a command came to."""

    code: int
    out: str
    err: str


Run = Callable[[Sequence[str], str, Mapping[str, str] | None], Done]
"""(command line, standard input, environment or None for ours) -> what it came to; an OSError where it is absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A job of Slurm as it is now."""

    job_id: int
    """Of its first component, by which all are named."""
    state: str
    """In Slurm's words: PENDING, RUNNING, COMPLETING, CANCELLED, ..."""
    reason: str
    """Why it waits, or how it ended, in Slurm's words."""
    restarts: int
    """How often it was requeued."""
    hosts: tuple[str, ...]
    """Host of each component; empty while it waits."""
    start: str = ""
    """When Slurm expects to start it, if it says so."""

    @property
    def is_over(self) -> bool:
        """Nothing of it will run again."""
        return self.state in ENDS

    @property
    def is_pending(self) -> bool:
        """It waits, for the first time or again."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step that Slurm believes to run."""

    step_id: str
    """`12.0`: the component's job and the number."""
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine of the partition that a job would go to."""

    name: str
    gpus: int
    cpus: int
    state: str
    """In Slurm's words: idle, mix, alloc, down, drain, ...; a * means that it does not answer."""

    @property
    def answers(self) -> bool:
        """Its daemon is there, so what Slurm says of its steps is true."""
        return not self.state.endswith("*") and not self.state.startswith(("down", "unk", "boot", "power"))


class SlurmSilentError(LaunchError):
    """Slurm did not answer in time, and may have done what it was asked for."""


def run_command(argv: Sequence[str], stdin: str, environ: Mapping[str, str] | None) -> Done:
    """Run it here."""
    done = subprocess.run(
        list(argv),
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=TIMEOUT_S,
        env=None if environ is None else dict(environ),
    )
    return Done(code=done.returncode, out=done.stdout, err=done.stderr)


def _no_answer(command: str, got: str) -> str:
    do = "Run it where Slurm's commands are, and see whether slurmctld answers (scontrol ping)"
    return explain(command, got=got, expected="Slurm to answer", do=do, where="slurm")


class Slurm:
    """The cluster that Slurm's commands reach from here."""

    def __init__(self, run: Run = run_command) -> None:
        self._run = run

    def submit(self, script: str, environ: Mapping[str, str]) -> int:
        """Hand a batch script in; the number of its job.

        Args:
            script: Its text.
            environ: Where sbatch finds its settings (SBATCH_PARTITION, ...), and what the job inherits.

        Raises:
            LaunchError: Slurm refuses it, in its own words.
        """
        out = self._call(["sbatch", "--parsable"], script, environ)
        return int(out.strip().split(";")[0])

    def find(self, name: str, comment: str) -> int | None:
        """The number of the job with this name and comment; None if Slurm has none that has not ended.

        Raises:
            LaunchError: Slurm does not answer.
        """
        out = self._call(["squeue", "--noheader", f"--name={name}", "--format=%A|%k"])
        rows = [line.strip().partition("|") for line in out.splitlines()]
        return min((int(number) for number, _, said in rows if said.strip() == comment), default=None)

    def cancel(self, name: str, *, only_pending: bool = False) -> None:
        """End a job (`12`) or a step (`12.0`); nothing happens if it is gone."""
        state = ["--state=PENDING"] if only_pending else []
        self._call(["scancel", "--quiet", *state, name], may_fail=True)

    def allocation(self, job_id: int) -> Allocation | None:
        """The job; None if Slurm does not know it, or not any more."""
        out = self._call(["scontrol", "--oneliner", "show", "job", str(job_id)], may_fail=True)
        lines = [dict(_PAIR.findall(line)) for line in out.splitlines() if line.startswith("JobId=")]
        if not lines:
            return None
        lines.sort(key=lambda pairs: int(pairs.get("HetJobOffset", 0)))
        first = lines[0]
        hosts = tuple(pairs.get("NodeList", "") for pairs in lines)
        start = first.get("StartTime", "")
        return Allocation(
            job_id=job_id,
            state=first.get("JobState", ""),
            reason=next((r for pairs in lines if (r := pairs.get("Reason", "None")) not in ("None", "")), ""),
            restarts=int(first.get("Restarts", 0)),
            hosts=() if any(host in ("", "(null)") for host in hosts) else hosts,
            start="" if start in ("Unknown", "N/A") else start,
        )

    def steps(self, job_ids: Sequence[int]) -> list[Step]:
        """Steps of these jobs that Slurm believes to run."""
        named = ",".join(map(str, job_ids))
        out = self._call(["squeue", "--noheader", "--steps", f"--jobs={named}", "--format=%i %j"], may_fail=True)
        words = [line.split(maxsplit=1) for line in out.splitlines()]
        return [Step(step_id=pair[0], name=pair[1].strip()) for pair in words if len(pair) == 2]

    def hosts(self, environ: Mapping[str, str] | None = None) -> list[Host]:
        """Machines of the partition that sbatch would use: SBATCH_PARTITION, else the default one, else all."""
        chosen = (environ or {}).get("SBATCH_PARTITION", "")
        only = [f"--partition={chosen}"] if chosen else []
        out = self._call(["sinfo", "--noheader", "--Node", *only, "--format=%N|%c|%G|%t|%P"])
        rows = [line.split("|") for line in out.splitlines()]
        defaults = [row for row in rows if row[4].strip().endswith("*")]
        named = {row[0].strip(): row for row in (rows if chosen or not defaults else defaults)}
        return [
            Host(name=name, cpus=int(row[1].rstrip("+")), gpus=sum(map(int, _GPUS.findall(row[2]))), state=row[3])
            for name, row in named.items()
        ]

    def cluster_name(self) -> str:
        """What the cluster is called."""
        out = self._call(["scontrol", "show", "config"])
        found = re.search(r"^ClusterName\s*=\s*(\S+)", out, re.MULTILINE)
        return found[1] if found else "slurm"

    def _call(
        self, argv: list[str], stdin: str = "", environ: Mapping[str, str] | None = None, *, may_fail: bool = False
    ) -> str:
        try:
            done = self._run(argv, stdin, environ)
        except OSError as error:
            raise LaunchError(_no_answer(argv[0], str(error))) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmSilentError(_no_answer(argv[0], f"nothing in {error.timeout:.0f} s")) from error
        if done.code and _TIMED_OUT in done.err:
            raise SlurmSilentError(_no_answer(argv[0], _TIMED_OUT))
        if done.code and (not may_fail or "Unable to contact" in done.err or "Unexpected message" in done.err):
            said = " ".join(line.partition("error: ")[2] or line for line in done.err.split("\n") if line.strip())
            do = "See what Slurm means in its manual, and what it has with sinfo"
            raise LaunchError(f"{argv[0]}: {said[:MAX_SAID]}, expected Slurm to take it. {do}. [slurm]")
        return done.out
