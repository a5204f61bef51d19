"""The job under faults: command lines that start it with ringweave, torchrun or torchft."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from ringweave import environment
from ringweave.errors import UsageError
from ringweave.files.problems import suggest_closest
from ringweave.lab import Lab
from ringweave.launcher import bootstrap
from ringweave.launcher.node_context import LabContext
from ringweave_bench.chaos import kill_requests

WATCHED_PROGRAM = Path(__file__).parents[1] / "programs" / "watched.py"
LIGHTHOUSE_PROGRAM = WATCHED_PROGRAM.with_name("lighthouse.py")
RINGWEAVE, TORCHRUN, TORCHFT = "ringweave", "torchrun", "torchft"
JOB_SYSTEMS = (RINGWEAVE, TORCHRUN, TORCHFT)
MAX_RESTARTS = 100_000
_END_TIMEOUT_S = 35.0
"""Longer than the time that `ringweave run` gives its workers to end."""
_TORCHRUN_COMMAND = (sys.executable, "-m", "torch.distributed.run")


def check_system(name: str) -> None:
    """Refuse an unknown system.

    Raises:
        UsageError: There is no system of that name.
    """
    if name not in JOB_SYSTEMS:
        do = suggest_closest(name, JOB_SYSTEMS) or "torchrun and torchft are there to compare with"
        raise UsageError("--system", got=name, expected=", ".join(JOB_SYSTEMS), do=do)


class ChaosJob:
    """One attempt of a job: the processes that we started, which own the workers' processes."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path) -> None:
        with log.open("ab") as output:
            self._processes = [_start_process(argv, environ, output) for argv, environ in commands]

    def exit_code(self) -> int | None:
        """Return the exit code, the first nonzero one of several; None while one of the processes runs."""
        codes = [process.poll() for process in self._processes]
        if any(code is None for code in codes):
            return None
        return next((code for code in codes if code), 0)

    def stop(self) -> None:
        """End all processes of the attempt and their descendants."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(how)
            for process in self._processes:
                try:
                    process.wait(_END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    continue


def job_commands(
    system: str,
    lab: Lab,
    script: Sequence[str],
    out: Path,
    options: Sequence[str],
    extra_environ: Mapping[str, str],
) -> list[tuple[list[str], dict[str, str]]]:
    """Return (command line, environment) of each process of the job.

    Args:
        system: `ringweave`: one `ringweave lab run`. `torchrun`: an agent on each node. `torchft`: its lighthouse on
            the first node, and on each node an agent that restarts its workers.
        lab: Lab in which it runs.
        script: Path of the script, and its arguments.
        out: Folder for events and logs.
        options: Further options of `ringweave lab run` or torchrun.
        extra_environ: Further environment variables.
    """
    watched = [str(WATCHED_PROGRAM), *script]
    if system == RINGWEAVE:
        run = [sys.executable, "-m", "ringweave", "lab", "run", "--lab", lab.name, "--run-dir", str(out), *options]
        return [([*run, *watched], {**os.environ, **extra_environ})]
    extra_environ = {
        **extra_environ,
        environment.EVENTS: str(out / "events.jsonl"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    node_processes = _torchrun_processes(lab, options) if system == TORCHRUN else _torchft_processes(lab, options)
    return [
        (lab.command(node, [*argv, *(watched if is_agent else ())]), {**os.environ, **environ, **extra_environ})
        for node, argv, environ, is_agent in node_processes
    ]


def _torchrun_processes(lab: Lab, options: Sequence[str]) -> "list[_NodeProcess]":
    """Return one agent on each node; the agents that remain after a failure rendezvous again."""
    site, nodes = LabContext(lab), lab.cluster.nodes
    meeting = site.pick_address(nodes[0].name)
    job_id = f"chaos-{random.SystemRandom().randrange(10**9)}"
    shared = [f"--rdzv-id={job_id}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting.host}:{meeting.port}"]
    found = []
    for node_rank, node in enumerate(nodes):
        agent = [*_TORCHRUN_COMMAND, f"--nnodes={len(nodes)}", f"--node-rank={node_rank}", *shared]
        agent += [f"--nproc-per-node={node.num_devices}", f"--max-restarts={MAX_RESTARTS}", *options]
        agent_environ = {**site.node_environ(node.name), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        found.append(_NodeProcess(node.name, agent, agent_environ, is_agent=True))
    return found


def _torchft_processes(lab: Lab, options: Sequence[str]) -> "list[_NodeProcess]":
    """Return an agent for each worker, which is a replica of its own."""
    site, nodes = LabContext(lab), lab.cluster.nodes
    meeting = site.pick_address(nodes[0].name)
    quick = ["--min_replicas", "1", "--quorum_tick_ms", "50", "--join_timeout_ms", "5000"]
    quick += ["--heartbeat_timeout_ms", "1000"]
    lighthouse = [sys.executable, str(LIGHTHOUSE_PROGRAM), "--bind", f"[::]:{meeting.port}", *quick]
    found = [_NodeProcess(nodes[0].name, lighthouse, site.node_environ(nodes[0].name), is_agent=False)]
    workers = [node.name for node in nodes for _ in range(node.num_devices)]
    for rank, node in enumerate(workers):
        own = site.pick_address(node)
        agent = [*_TORCHRUN_COMMAND, "--nnodes=1", "--nproc-per-node=1", f"--max-restarts={MAX_RESTARTS}", *options]
        agent += [f"--master-addr={own.host}", f"--master-port={own.port}"]
        worker_environ = {"TORCHFT_LIGHTHOUSE": f"http://{meeting.host}:{meeting.port}"}
        worker_environ |= {"NUM_WORKERS": str(len(workers)), kill_requests.RANK_VARIABLE: str(rank)}
        found.append(_NodeProcess(node, agent, {**site.node_environ(node), **worker_environ}, is_agent=True))
    return found


class _NodeProcess(NamedTuple):
    """One process on a node."""

    node: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    is_agent: bool
    """True if the job's script and its arguments follow."""


def _start_process(argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    tied = [sys.executable, "-I", "-S", bootstrap.__file__, str(os.getpid()), *argv]  # it ends when we are killed
    return subprocess.Popen(
        tied, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
