"""The job under faults, by one system or the other: the command lines that start it, and start it again."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ringweave import environment
from ringweave.errors import UsageError, explain
from ringweave.files.problems import closest
from ringweave.lab import Lab
from ringweave.launch.local import bootstrap
from ringweave.launch.local.sites import InLab

WATCHED = Path(__file__).parents[1] / "programs" / "watched.py"
RINGWEAVE, TORCHRUN = "ringweave", "torchrun"
SYSTEMS = (RINGWEAVE, TORCHRUN)
MOST_RESTARTS = 100_000
_END_S = 20.0


def check_system(name: str) -> None:
    """Refuse a system that there is not.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in SYSTEMS:
        do = closest(name, SYSTEMS) or "torchrun is the one to compare with"
        raise UsageError(explain("--system", got=name, expected=" or ".join(SYSTEMS), do=do))


class Job:
    """One attempt of a job: its processes that we started; those of the workers are theirs."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path) -> None:
        with log.open("ab") as output:
            self._processes = [_start(argv, environ, output) for argv, environ in commands]

    def ended(self) -> int | None:
        """The exit code, the first bad one of several; None while one of them runs."""
        codes = [process.poll() for process in self._processes]
        if any(code is None for code in codes):
            return None
        return next((code for code in codes if code), 0)

    def stop(self) -> None:
        """End it, with all that it started."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(how)
            for process in self._processes:
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    continue


def commands(
    system: str,
    lab: Lab,
    script: Sequence[str],
    out: Path,
    options: Sequence[str],
    told: Mapping[str, str],
) -> list[tuple[list[str], dict[str, str]]]:
    """(command line, environment) of each process that the job consists of.

    Args:
        system: `ringweave`: one `ringweave lab run`. `torchrun`: an agent on each node.
        lab: Where it runs.
        script: Path of the script, and its arguments.
        out: Where the events and logs go.
        options: Further ones of `ringweave lab run`, or of torchrun.
        told: Further variables of the environment.
    """
    watched = [str(WATCHED), *script]
    if system == RINGWEAVE:
        run = [sys.executable, "-m", "ringweave", "lab", "run", "--lab", lab.name, "--run-dir", str(out), *options]
        return [([*run, *watched], {**os.environ, **told})]
    site, nodes = InLab(lab), lab.cluster.nodes
    meeting = site.meeting(nodes[0].name)
    job_id = f"chaos-{random.SystemRandom().randrange(10**9)}"
    found = []
    for node_rank, node in enumerate(nodes):
        agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", f"--node-rank={node_rank}"]
        agent += [f"--nproc-per-node={node.num_devices}", f"--rdzv-id={job_id}", "--rdzv-backend=c10d"]
        agent += [f"--rdzv-endpoint={meeting.host}:{meeting.port}", f"--max-restarts={MOST_RESTARTS}", *options]
        mended = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        events = {environment.EVENTS: str(out / "events.jsonl")}
        environ = {**os.environ, **site.environ(node.name), **mended, **events, **told}
        found.append((lab.command(node.name, [*agent, *watched]), environ))
    return found


def _start(argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    tied = [sys.executable, "-I", "-S", bootstrap.__file__, str(os.getpid()), *argv]  # it ends when we are killed
    return subprocess.Popen(
        tied, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
