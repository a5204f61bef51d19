"""Slurm as its commands would answer, in memory, and agents that only follow orders."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

from ringweave.jobs import admission, request
from ringweave.jobs.admission import AccessPolicy
from ringweave.jobs.request import JobRequest
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.job_runtime import AllocationGrant, SlurmDeps
from ringweave.platforms.slurm.lease import SlurmTimeouts
from ringweave.platforms.slurm.platform import SlurmPlatform

PATIENCE = SlurmTimeouts(lease_s=30.0, fence_s=60.0, agent_exit_s=20.0, cancelled_step_s=5.0)


@dataclass
class FakeSlurm:
    """What there is, as its commands print it; `run` is what the commands are called by."""

    hosts: str = "big|20|gpu:10(S:0)|idle|main*\nsmall|10|gpu:5|idle|main*\n"
    states: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    restarts: dict[int, int] = field(default_factory=dict)
    steps: str = ""
    is_silent: bool = False
    """sbatch takes what it is given, and nobody hears its answer."""
    refusal: str = ""
    now_s: float = 1e9
    called: list[Sequence[str]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    """Of the last call of sbatch."""

    def run(self, argv, stdin, environ) -> CompletedProcess[str]:
        self.called.append(argv)
        self.environ = dict(environ or {}) if argv[0] == "sbatch" else self.environ
        return getattr(self, argv[0])(argv, stdin)

    def sbatch(self, argv, stdin) -> CompletedProcess[str]:
        if self.refusal:
            return CompletedProcess([], 1, stdout="", stderr=f"sbatch: error: {self.refusal}\n")
        job_id = 10 * (len(self.scripts) + 1)
        self.scripts.append(stdin)
        self.states[job_id] = "PENDING"
        if self.is_silent:
            raise subprocess.TimeoutExpired(["sbatch"], 60.0)
        return CompletedProcess([], 0, stdout=f"{job_id};here\n", stderr="")

    def scontrol(self, argv, stdin) -> CompletedProcess[str]:
        if argv[1:3] == ["show", "config"]:
            return CompletedProcess(
                [], returncode=0, stdout="Configuration data\nClusterName             = alps\n", stderr=""
            )
        job_id = int(argv[-1])
        if job_id not in self.states:
            return CompletedProcess(
                [], returncode=1, stdout="", stderr="slurm_load_jobs error: Invalid job id specified\n"
            )
        state, reason = self.states[job_id], self.reasons.get(job_id, "None")
        lines = [
            f"JobId={job_id + part} HetJobId={job_id} HetJobOffset={part} JobName=rw-text JobState={state} "
            f"Reason={reason} Restarts={self.restarts.get(job_id, 0)} StartTime=Unknown "
            f"ReqNodeList=(null) NodeList={host if state == 'RUNNING' else '(null)'} Comment=a b=c"
            for part, host in enumerate(("big", "small"))
        ]
        return CompletedProcess([], 0, stdout="\n".join(lines) + "\n", stderr="")

    def squeue(self, argv, stdin) -> CompletedProcess[str]:
        if "--steps" in argv:
            return CompletedProcess([], 0, stdout=self.steps, stderr="")
        name = next(word.partition("=")[2] for word in argv if word.startswith("--name="))
        rows = [
            f"{10 * number}|{comment[1]}\n{10 * number + 1}|(null)\n"
            for number, script in enumerate(self.scripts, 1)
            if f"--job-name={name}" in script
            and self.states[10 * number] in ("PENDING", "RUNNING")
            and (comment := re.search(r"--comment=(\S+)", script))
        ]
        return CompletedProcess([], 0, stdout="".join(rows), stderr="")

    def sinfo(self, argv, stdin) -> CompletedProcess[str]:
        return CompletedProcess([], 0, stdout=self.hosts, stderr="")

    def scancel(self, argv, stdin) -> CompletedProcess[str]:
        job_id = int(argv[-1].split(".")[0])
        if "." not in argv[-1] and self.states.get(job_id) == "PENDING":
            self.states[job_id] = "CANCELLED"
        return CompletedProcess([], 0, stdout="", stderr="")


def a_request(text: str = "", **changes: str) -> JobRequest:
    """15 GPUs on (10, 5), called text."""
    keys = {"name": "text", "gpus": "15", "script": "train.py", "nodes": "[{capacity: 10}, {capacity: 5}]"} | changes
    return request.parse_request("".join(f"{key}: {value}\n" for key, value in keys.items() if value) + text)


def a_service(
    folder: Path, fake: FakeSlurm, requester: str = "ann", rules: AccessPolicy = admission.OPEN_POLICY
) -> SlurmPlatform:
    (folder / "train.py").touch()
    return SlurmPlatform(
        folder / "state",
        SlurmClient(fake.run),
        requester=requester,
        environ={},
        policy_rules=rules,
        timeouts=PATIENCE,
        clock=lambda: fake.now_s,
    )


def a_grant(job_id: int = 10, restarts: int = 0) -> AllocationGrant:
    return AllocationGrant(key=f"{job_id}.{restarts}", job_ids=(job_id, job_id + 1), hosts=("big", "small"))


SRUN = '#!/bin/sh\nwhile [ "$1" != --export=ALL ]; do shift; done; shift; exec "$@"\n'
"""The step runs here."""

AGENT = """
import fcntl, json, os, sys, time
begun, root, node, attempt, key, lease_s = sys.argv[1:]
group = f"{root}/groups/{node}.{attempt}"
alive = open(f"{group}/alive", "w")
fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
with open(begun, "a") as log:
    log.write(f"{node}.{attempt} {os.getpid()}\\n")

def read(path):
    try:
        return json.load(open(path))
    except OSError:
        return None

def tell(phase):
    with open(f"{group}/status.json.new", "w") as file:
        meeting = {"host": "here", "port": 1}
        json.dump({"round": round, "phase": phase, "pid": os.getpid(), "master_address": meeting}, file)
    os.rename(f"{group}/status.json.new", f"{group}/status.json")

round, phase = 0, "Pending"
while phase not in ("Succeeded", "Stopped"):
    orders, gate = read(f"{group}/desired.json"), read(f"{root}/rendezvous.json")
    if orders is None or orders["stop"]:
        phase = "Stopped"
    elif orders["round"] > round:
        round, phase = orders["round"], "Ready"
    elif phase == "Ready" and gate and gate["round"] == round:
        phase = "Running"
    elif phase == "Running" and os.path.exists(f"{root}/go"):
        phase = "Succeeded"
    else:
        time.sleep(0.005)
        continue
    tell(phase)
"""


def means(fake: FakeSlurm, folder: Path, reached=lambda boundary: None) -> SlurmDeps:
    """Steps that really run, here, as agents that do nothing but follow orders."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "srun").write_text(SRUN)
    (folder / "bin" / "srun").chmod(0o755)
    (folder / "agent.py").write_text(AGENT)

    path = f"{folder / 'bin'}:/usr/bin:/bin"
    return SlurmDeps(
        slurm=SlurmClient(fake.run),
        agent=[sys.executable, "-I", "-S", str(folder / "agent.py"), str(folder / "begun")],
        environ={"PATH": path},
        timeouts=PATIENCE,
        on_boundary=reached,
    )
