"""The job under faults, by one system or the other: the command lines that start it, and start it again."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from ringweave import environment
from ringweave.benchmarks.chaos.doing import notes
from ringweave.errors import UsageError, explain
from ringweave.files.problems import closest
from ringweave.lab import Lab
from ringweave.launch.local import bootstrap
from ringweave.launch.local.sites import InLab

WATCHED = Path(__file__).parents[2] / "programs" / "watched.py"
LIGHTHOUSE = WATCHED.with_name("lighthouse.py")
RINGWEAVE, TORCHRUN, TORCHFT = "ringweave", "torchrun", "torchft"
SYSTEMS = (RINGWEAVE, TORCHRUN, TORCHFT)
MOST_RESTARTS = 100_000
_END_S = 35.0
"""More than `ringweave run` gives its workers."""
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def check_system(name: str) -> None:
    """Refuse a system that there is not.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in SYSTEMS:
        do = closest(name, SYSTEMS) or "torchrun and torchft are there to compare with"
        raise UsageError(explain("--system", got=name, expected=", ".join(SYSTEMS), do=do))


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
        system: `ringweave`: one `ringweave lab run`. `torchrun`: an agent on each node. `torchft`: its lighthouse on
            the first node, and on each an agent that starts its workers again.
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
    told = {**told, environment.EVENTS: str(out / "events.jsonl"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    made = _by_torchrun(lab, options) if system == TORCHRUN else _by_torchft(lab, options)
    return [
        (lab.command(node, [*argv, *(watched if is_agent else ())]), {**os.environ, **environ, **told})
        for node, argv, environ, is_agent in made
    ]


def _by_torchrun(lab: Lab, options: Sequence[str]) -> "list[_Made]":
    """One agent on each node; those that are left meet again."""
    site, nodes = InLab(lab), lab.cluster.nodes
    meeting = site.meeting(nodes[0].name)
    job_id = f"chaos-{random.SystemRandom().randrange(10**9)}"
    shared = [f"--rdzv-id={job_id}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting.host}:{meeting.port}"]
    found = []
    for node_rank, node in enumerate(nodes):
        agent = [*_TORCHRUN, f"--nnodes={len(nodes)}", f"--node-rank={node_rank}", *shared]
        agent += [f"--nproc-per-node={node.num_devices}", f"--max-restarts={MOST_RESTARTS}", *options]
        mended = {**site.environ(node.name), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        found.append(_Made(node.name, agent, mended, is_agent=True))
    return found


def _by_torchft(lab: Lab, options: Sequence[str]) -> "list[_Made]":
    """Each worker is a replica of its own, with an agent of its own."""
    site, nodes = InLab(lab), lab.cluster.nodes
    meeting = site.meeting(nodes[0].name)
    quick = ["--min_replicas", "1", "--quorum_tick_ms", "50", "--join_timeout_ms", "5000"]
    quick += ["--heartbeat_timeout_ms", "1000"]
    lighthouse = [sys.executable, str(LIGHTHOUSE), "--bind", f"[::]:{meeting.port}", *quick]
    found = [_Made(nodes[0].name, lighthouse, site.environ(nodes[0].name), is_agent=False)]
    workers = [node.name for node in nodes for _ in range(node.num_devices)]
    for rank, node in enumerate(workers):
        own = site.meeting(node)
        agent = [*_TORCHRUN, "--nnodes=1", "--nproc-per-node=1", f"--max-restarts={MOST_RESTARTS}", *options]
        agent += [f"--master-addr={own.host}", f"--master-port={own.port}"]
        told = {"TORCHFT_LIGHTHOUSE": f"http://{meeting.host}:{meeting.port}"}
        told |= {"NUM_WORKERS": str(len(workers)), notes.RANK: str(rank)}
        found.append(_Made(node, agent, {**site.environ(node), **told}, is_agent=True))
    return found


class _Made(NamedTuple):
    """A process on a node."""

    node: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    is_agent: bool
    """The job's script and its arguments follow."""


def _start(argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    tied = [sys.executable, "-I", "-S", bootstrap.__file__, str(os.getpid()), *argv]  # it ends when we are killed
    return subprocess.Popen(
        tied, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
