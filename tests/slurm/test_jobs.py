"""Jobs on a real Slurm: slurmctld, slurmd, munge, sbatch, srun. GPUs are pretended; they are only counted."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ringweave.errors import JobError
from ringweave.jobs.records import EndCause
from ringweave.lab import lab_state
from ringweave.platforms.api import LogQuery
from tests.launcher import until_back
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

TOGETHER = Path(__file__).parents[1] / "launch" / "together.py"
_AGENT = " -P -m ringweave.platforms.slurm.agent_main "
WAITS = """
print("began", flush=True)
while not Path("go").exists():
    time.sleep(0.05)
"""
"""Workers start in the folder that the job was submitted from."""


def agents(jobs, node: str) -> dict[int, str]:
    """Process id -> command line of the agents on a node."""
    lines = {pid: lab_state.command_line(pid) for pid in jobs.cluster.lab.processes()[node]}
    return {pid: line for pid, line in lines.items() if _AGENT in line and "srun" not in line}


def test_gpus_are_spread_as_the_split_says(jobs):
    jobs.submit("print(os.environ['RANK'], os.uname().nodename, os.environ['CUDA_VISIBLE_DEVICES'])", gpus=11)
    jobs.wait("Succeeded")
    words = sorted((line.split() for line in jobs.lines()), key=lambda each: int(each[0]))
    assert [each[1] for each in words] == ["big"] * 8 + ["small"] * 3
    assert words[0][2] == "0,1,2,3,4,5,6,7"
    assert words[10][2] == "0,1,2"
    jobs.wait_idle()
    jobs.service.act("text", "delete")
    assert jobs.service.jobs() == []
    assert [path.name for path in (jobs.folder / "state").rglob("*") if path.is_file()] == ["submit.lock"]


def test_only_the_node_whose_step_was_killed_is_retried(jobs):
    jobs.submit(WAITS)
    jobs.wait_printed("began", 15)
    before = agents(jobs, "big")
    (pid,) = agents(jobs, "small")
    os.kill(pid, signal.SIGKILL)
    jobs.wait_printed("began", 30)
    assert agents(jobs, "big") == before, "the agent of the other node is still the same"
    (jobs.folder / "go").touch()
    view = jobs.wait("Succeeded")
    assert [node.retries for node in view.used_nodes] == [0, 1]
    assert jobs.attempts() == [1, 2]
    (first, _) = view.used_nodes[1].attempts
    assert first.cause is EndCause.PLATFORM
    assert first.charged
    assert "ended without a status" in first.text
    assert {line.attempt for line in jobs.service.logs("text", LogQuery(node="n1"))} == {1, 2}, (
        "logs of all attempts are kept"
    )


def test_in_an_elastic_job_the_others_train_on_while_a_killed_step_is_replaced(jobs):
    nodes = "[{name: big, capacity: 2}, {name: small, capacity: 2}]"
    jobs.submit(until_back.SCRIPT, "elastic: {min: 2}\nmode: sync\nmin_per_node: 1\n", gpus=4, nodes=nodes)
    wait_until(lambda: any('"step": 5' in line for line in jobs.lines(node="small")), jobs.story)
    (pid,) = agents(jobs, "small")
    os.kill(pid, signal.SIGKILL)
    view = jobs.wait("Succeeded")
    assert (view.round, [node.retries for node in view.used_nodes], jobs.attempts()) == (1, [0, 1], [1, 2])
    said = [json.loads(line) for line in jobs.lines(rank=0) if line.startswith("{")]
    steps = [each["step"] for each in said if "step" in each]
    assert steps == list(range(1, len(steps) + 1)), "no step was lost"
    assert {len(each["members"]) for each in said if "step" in each} >= {2, 4}
    assert len({json.loads(line)["sum"] for line in jobs.lines() if '"sum"' in line}) == 1


def test_a_script_that_fails_is_not_tried_again(jobs):
    jobs.submit("raise SystemExit(3 if os.environ['RANK'] == '12' else 0)")
    view = jobs.wait("Failed")
    assert view.reason is not None
    assert view.reason.code == "NonZeroExitCode"
    assert jobs.attempts() == [1, 1]
    jobs.wait_idle()


def test_its_ttl_removes_it_though_nobody_looks(jobs):
    jobs.submit("pass", "ttl: 1s\n", gpus=3)
    wait_until(lambda: not list((jobs.folder / "state" / "jobs").iterdir()), lambda: jobs.cluster.run_command("squeue"))
    jobs.wait_idle()


def test_what_slurm_waits_for_is_told_and_a_waiting_job_can_be_taken_back(jobs):
    jobs.cluster.run_command("sbatch", "-o", "/dev/null", "-N1", "--gres=gpu:4", "-w", "small", "--wrap", "sleep 300")
    wait_until(
        lambda: "R" in jobs.cluster.run_command("squeue", "-h", "-o", "%t"), lambda: jobs.cluster.run_command("squeue")
    )
    jobs.submit(WAITS)
    wait_until(lambda: "(Resources)" in str(jobs.view().reason), jobs.story)
    reason = jobs.view().reason
    assert reason is not None
    assert reason.code == "Unschedulable"
    assert "the necessary machines are in use" in reason.text
    assert "ringweave stop text" in reason.hint
    assert jobs.service.act("text", "suspend").state == "Suspended"
    assert "rw-text" not in jobs.cluster.run_command("squeue", "-h", "-o", "%j"), (
        "a suspended job holds no place in the queue"
    )
    jobs.service.act("text", "resume")
    jobs.cluster.run_command("scancel", "--name=wrap")
    jobs.wait_printed("began", 15)
    jobs.service.act("text", "stop")
    jobs.wait("Stopped")
    jobs.wait_idle()


def test_suspended_it_goes_on_in_other_machines_and_cancelled_by_slurms_own_command_it_can_be_tried_again(jobs):
    jobs.submit(WAITS)
    jobs.wait_printed("began", 15)
    jobs.service.act("text", "suspend")
    jobs.wait_idle()
    assert jobs.view().state == "Suspended"
    jobs.service.act("text", "resume")
    jobs.wait_printed("began", 30)
    assert [node.retries for node in jobs.view().used_nodes] == [0, 0]
    jobs.cluster.run_command("scancel", "--name=rw-text")
    view = jobs.wait("Stopped")
    assert any(event.kind == "AllocationEnded" and "CANCELLED" in event.text for event in view.events)
    (jobs.folder / "go").touch()
    assert not jobs.service.act("text", "retry").state.is_end
    assert jobs.wait("Succeeded").run == 2


def test_a_task_that_outlives_its_slurmd_is_gone_before_it_is_replaced(jobs):
    # Slurm declares the node down and requeues the job; on the node all goes on. The old workers end all the same, and
    # the next ones begin when Slurm has the machines again. Nobody pays for it with a retry.
    jobs.submit(WAITS)
    jobs.wait_printed("began", 15)
    (old,) = agents(jobs, "small")
    jobs.cluster.kill_daemon("small")
    # As its timeout would.
    jobs.cluster.run_command("scontrol", "update", "nodename=small", "state=down", "reason=test")
    wait_until(lambda: old not in agents(jobs, "small"), jobs.story)
    assert jobs.wait("Retrying").reason.text.startswith("Slurm revoked its allocation; Slurm job")
    jobs.cluster.revive("small")
    jobs.wait_printed("began", 30)
    assert len(agents(jobs, "small")) == 1
    (jobs.folder / "go").touch()
    view = jobs.wait("Succeeded")
    assert [node.retries for node in view.used_nodes] == [0, 0]
    assert jobs.attempts() == [2, 2]
    assert len(jobs.lines(node="n1", attempt=2)) == 5


def test_what_cannot_be_is_refused_with_what_can(jobs):
    with pytest.raises(JobError, match=r"Ask for 15, the nearest possible totals"):
        jobs.submit("", gpus=16)
    there = r"expected at most the capacity of the machines: GPUs of big 10, small 5\."
    with pytest.raises(JobError, match=rf"GPUs of job text: '20', {there} Ask for 15\. \[slurm\]") as caught:
        jobs.submit("", gpus=20, nodes="[{capacity: 20}]")
    mend = r"Correct the capacities of the nodes: 13 can be shared as 13 on \(10, 5\) -> 10, 3"
    with pytest.raises(JobError, match=rf"'10\+3', {there} {mend}"):
        jobs.submit("", gpus=13, nodes="[{name: small, capacity: 10}, {name: big, capacity: 3}]")
    with pytest.raises(JobError, match=r"node: 'bigg', expected a machine of Slurm: GPUs of big 10, small 5\. .*big"):
        jobs.submit("", gpus=10, nodes="[{name: bigg, capacity: 10}]")
    assert caught.value.exit_code == 2
    assert jobs.service.jobs() == []


@pytest.mark.thorough
def test_of_64_processes_one_wins_and_63_are_refused(jobs):
    (jobs.folder / "train.py").write_text("pass")
    (jobs.folder / "job.yaml").write_text(
        "name: text\ngpus: 15\nscript: train.py\nnodes: [{capacity: 10}, {capacity: 5}]\n"
    )
    environ = jobs.environ | {"XDG_STATE_HOME": str(jobs.folder / "home")}
    command = jobs.cluster.wrap_command([sys.executable, str(TOGETHER), "64", "slurm", str(jobs.folder / "job.yaml")])
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(each["code"] for each in told) == {0: 1, 2: 63}, told
    refusal = re.compile(
        r"ringweave: error: job name text: 'taken by \w+ \d+ s ago \(\w+\)', expected a free name\. "
        r"Choose another name, or remove that job first with ringweave delete text --on slurm\."
    )
    assert all(refusal.fullmatch(each["err"].splitlines()[-1]) for each in told if each["code"] == 2), told
    (batch,) = (jobs.folder / "home").rglob("job.json")
    assert batch.parent.name == "text"
    known = jobs.cluster.run_command("squeue", "-h", "--states=all", "--name=rw-text", "-o", "%A %k").splitlines()
    mine = {line.split()[0] for line in known if json.loads(batch.read_text())["id"] in line}
    assert len(mine) == 2, "Slurm was asked once, and has a job of two components"


def test_six_workers_on_four_and_two_train(jobs):
    nodes = "[{name: big, capacity: 4}, {name: small, capacity: 2}]"
    jobs.submit(TRAINS, "min_per_node: 1\n", gpus=6, nodes=nodes)
    jobs.wait("Succeeded")
    losses = {line.split()[1] for line in jobs.lines() if line.startswith("loss ")}
    (loss,) = losses
    assert float(loss) == pytest.approx(one_worker_loss(), abs=1e-5)


TRAINS = """
import torch
import torch.distributed as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
weight = torch.zeros(4, dtype=torch.float64, requires_grad=True)
numbers = torch.arange(24, dtype=torch.float64).reshape(6, 4) / 24
for _ in range(4):
    loss = (numbers[rank] @ weight - 1.0).square()
    (gradient,) = torch.autograd.grad(loss, weight)
    dist.all_reduce(gradient)
    with torch.no_grad():
        weight -= 0.1 * gradient / size
total = loss.detach().clone()
dist.all_reduce(total)
print(f"loss {total.item() / size:.9f}", flush=True)
dist.destroy_process_group()
"""
"""Without DDP and an optimizer, each of which loads a compiler in each of the workers."""


def one_worker_loss() -> float:
    """What one worker with the whole batch comes to."""
    numbers, weight = np.arange(24.0).reshape(6, 4) / 24, np.zeros(4)
    for _ in range(4):
        errors = numbers @ weight - 1.0
        weight = weight - 0.1 * 2 * errors @ numbers / 6
    return float((errors**2).mean())
