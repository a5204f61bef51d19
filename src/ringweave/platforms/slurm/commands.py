"""Slurm's command-line tools, run and parsed: sbatch, scancel, scontrol, squeue, sinfo. sacct is not needed."""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringweave.errors import LaunchError, explain

COMMAND_TIMEOUT_S = 60.0
"""A Slurm controller that was just restarted answers late."""
MAX_ERROR_CHARS = 400
"""Maximum characters of Slurm's text in an error; in a long line the cause is often at the end."""
TERMINAL_STATES = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""Final states of a Slurm job. A requeued job is PENDING again."""

_TIMED_OUT_TEXT = "Socket timed out"
"""Text of a command that gave up waiting; its request may still be executed."""
_PAIR_PATTERN = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)")
_GPUS_PATTERN = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")


SlurmResult = subprocess.CompletedProcess[str]
SlurmRunner = Callable[[Sequence[str], str, Mapping[str, str] | None], SlurmResult]
"""(command line, standard input, environment or None for ours) -> result; raises OSError if the command is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Current state of a Slurm job."""

    job_id: int
    """Job number of the first component; it identifies all components."""
    state: str
    """Slurm's state: PENDING, RUNNING, COMPLETING, CANCELLED, ..."""
    reason: str
    """Slurm's reason for the wait or the end."""
    restarts: int
    hosts: tuple[str, ...]
    """Host of each component; empty while the job is pending."""
    start: str = ""
    """Start time that Slurm expects, if it names one."""

    @property
    def is_over(self) -> bool:
        """Return whether no part of the job will run again."""
        return self.state in TERMINAL_STATES

    @property
    def is_pending(self) -> bool:
        """Return whether the job waits, for the first time or again."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmStep:
    """Job step that Slurm believes to be running."""

    step_id: str
    """`12.0`: Slurm job of the component, and the step's number."""
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmHost:
    """Host of the partition that a job would use."""

    name: str
    gpus: int
    cpus: int
    state: str
    """Slurm's state: idle, mix, alloc, down, drain, ...; a * means that the host does not respond."""

    @property
    def is_responding(self) -> bool:
        """Return whether the host's daemon responds, so that Slurm's view of its steps is valid."""
        return not self.state.endswith("*") and not self.state.startswith(("down", "unk", "boot", "power"))


class SlurmTimeoutError(LaunchError):
    """Slurm did not answer in time, and may have executed the request."""


def run_slurm_command(argv: Sequence[str], stdin: str, environ: Mapping[str, str] | None) -> SlurmResult:
    """Run a Slurm command on this host."""
    return subprocess.run(
        list(argv),
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=COMMAND_TIMEOUT_S,
        env=None if environ is None else dict(environ),
    )


def _no_answer_text(command: str, got: str) -> str:
    do = "Run it on a machine with Slurm's commands, and check that slurmctld answers (scontrol ping)"
    return explain(command, got=got, expected="Slurm to answer", do=do, where="slurm")


@contextlib.contextmanager
def _readable(command: str, output: str) -> Iterator[None]:
    """Turn the error of a parser of a command's output into one that shows the output."""
    try:
        yield
    except (ValueError, IndexError) as error:
        do = "Run it by hand: a wrapper or a message of the site may be in its output"
        expected = "what Slurm prints (seen: 22.05)"
        raise LaunchError(f"output of {command}", got=output, expected=expected, do=do, where="slurm") from error


def _parse_host(name: str, row: Sequence[str]) -> SlurmHost:
    gpus = sum(map(int, _GPUS_PATTERN.findall(row[2])))
    return SlurmHost(name=name, cpus=int(row[1].rstrip("+")), gpus=gpus, state=row[3])


class SlurmClient:
    """Client of the Slurm cluster that the commands on this host reach."""

    def __init__(self, run: SlurmRunner = run_slurm_command) -> None:
        self._run_command = run

    def submit_script(self, script: str, environ: Mapping[str, str]) -> int:
        """Submit a batch script and return its job number.

        `environ`: environment that the job inherits, with the settings of sbatch (SBATCH_PARTITION, ...).

        Raises:
            LaunchError: Slurm refuses the job; the text is Slurm's.
        """
        out = self._call_slurm(["sbatch", "--parsable"], script, environ)
        with _readable("sbatch", out):
            return int(out.strip().split(";")[0])

    def find_job_id(self, name: str, comment: str) -> int | None:
        """Return the number of the job with this name and comment; None if Slurm has no unfinished one.

        Raises:
            LaunchError: Slurm does not answer.
        """
        out = self._call_slurm(["squeue", "--noheader", f"--name={name}", "--format=%A|%k"])
        rows = [line.strip().partition("|") for line in out.splitlines()]
        with _readable("squeue", out):
            return min((int(number) for number, _, job_comment in rows if job_comment.strip() == comment), default=None)

    def cancel(self, name: str, *, only_pending: bool = False) -> None:
        """Cancel a job (`12`) or a step (`12.0`); no effect if it is gone."""
        state = ["--state=PENDING"] if only_pending else []
        self._call_slurm(["scancel", "--quiet", *state, name], may_fail=True)

    def get_allocation(self, job_id: int) -> Allocation | None:
        """Return the job; None if Slurm does not know it, or not any more."""
        out = self._call_slurm(["scontrol", "--oneliner", "show", "job", str(job_id)], may_fail=True)
        lines = [dict(_PAIR_PATTERN.findall(line)) for line in out.splitlines() if line.startswith("JobId=")]
        if not lines:
            return None
        with _readable("scontrol show job", out):
            lines.sort(key=lambda pairs: int(pairs.get("HetJobOffset", 0)))
            restarts = int(lines[0].get("Restarts", 0))
        first = lines[0]
        hosts = tuple(pairs.get("NodeList", "") for pairs in lines)
        start = first.get("StartTime", "")
        return Allocation(
            job_id=job_id,
            state=first.get("JobState", ""),
            reason=next((r for pairs in lines if (r := pairs.get("Reason", "None")) not in ("None", "")), ""),
            restarts=restarts,
            hosts=() if any(host in ("", "(null)") for host in hosts) else hosts,
            start="" if start in ("Unknown", "N/A") else start,
        )

    def list_steps(self, job_ids: Sequence[int]) -> list[SlurmStep]:
        """Return the steps of these jobs that Slurm believes to be running."""
        named = ",".join(map(str, job_ids))
        out = self._call_slurm(["squeue", "--noheader", "--steps", f"--jobs={named}", "--format=%i %j"], may_fail=True)
        words = [line.split(maxsplit=1) for line in out.splitlines()]
        return [SlurmStep(step_id=pair[0], name=pair[1].strip()) for pair in words if len(pair) == 2]

    def list_hosts(self, environ: Mapping[str, str] | None = None) -> list[SlurmHost]:
        """Return the hosts of the partition that sbatch would use: SBATCH_PARTITION, else the default, else all."""
        chosen = (environ or {}).get("SBATCH_PARTITION", "")
        only = [f"--partition={chosen}"] if chosen else []
        out = self._call_slurm(["sinfo", "--noheader", "--Node", *only, "--format=%N|%c|%G|%t|%P"])
        with _readable("sinfo", out):
            rows = [line.split("|") for line in out.splitlines()]
            defaults = [row for row in rows if row[4].strip().endswith("*")]
            named = {row[0].strip(): row for row in (rows if chosen or not defaults else defaults)}
            return [_parse_host(name, row) for name, row in named.items()]

    def cluster_name(self) -> str:
        out = self._call_slurm(["scontrol", "show", "config"])
        found = re.search(r"^ClusterName\s*=\s*(\S+)", out, re.MULTILINE)
        return found[1] if found else "slurm"

    def _call_slurm(
        self, argv: list[str], stdin: str = "", environ: Mapping[str, str] | None = None, *, may_fail: bool = False
    ) -> str:
        try:
            result = self._run_command(argv, stdin, environ)
        except OSError as error:
            raise LaunchError(_no_answer_text(argv[0], str(error))) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmTimeoutError(_no_answer_text(argv[0], f"nothing in {error.timeout:.0f} s")) from error
        if result.returncode and _TIMED_OUT_TEXT in result.stderr:
            raise SlurmTimeoutError(_no_answer_text(argv[0], _TIMED_OUT_TEXT))
        if result.returncode and (
            not may_fail or "Unable to contact" in result.stderr or "Unexpected message" in result.stderr
        ):
            error_text = " ".join(
                line.partition("error: ")[2] or line for line in result.stderr.split("\n") if line.strip()
            )
            do = "See Slurm's manual for the message, and sinfo for the machines"
            raise LaunchError(f"{argv[0]}: {error_text[:MAX_ERROR_CHARS]}, expected Slurm to accept it. {do}. [slurm]")
        return result.stdout
