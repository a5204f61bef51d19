"""Jobs with a parameter server on a real Slurm: credentials by the shared file system, the server on one machine."""

import json
import os
import signal
from collections import Counter

import pytest

from ringweave.lab import lab_state
from ringweave.param_server.leadership import FolderLeadershipLog
from tests.launcher.small_training import PREPARED, SUM, epoch, prepared
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1200)]
TRAINS = PREPARED
TRAINS += """
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        (model(a) - b).square().mean().backward()
        optimizer.step()
    print("epoch", epoch, os.uname().nodename, flush=True)
    while not Path("go").exists():
        time.sleep(0.05)
print("sum", f"{sum(p.sum().item() for p in model.parameters()):.6f}", flush=True)
torch.distributed.destroy_process_group()
"""


def servers(jobs, machine: str) -> list[int]:
    """Process ids of parameter servers on a machine."""
    there = jobs.cluster.lab.processes()[machine]
    return [pid for pid in there if "ringweave.param_server.main" in lab_state.command_line(pid)]


def test_a_parameter_server_is_on_a_machine_of_the_job(jobs):
    nodes = "[{name: big, capacity: 1}, {name: small, capacity: 1}]"
    jobs.submit(TRAINS, "mode: ps-hra\nmin_per_node: 1\n", gpus=2, nodes=nodes)
    jobs.wait_printed("epoch 0 big", 1)
    jobs.wait_printed("epoch 0 small", 1)
    assert [len(servers(jobs, machine)) for machine in ("big", "small")] == [1, 0]
    assert not list(jobs.folder.rglob("worker-*.0.json")), "credentials are handed over once"
    (jobs.folder / "go").touch()
    view = jobs.wait("Succeeded")
    assert [node.retries for node in view.used_nodes] == [0, 0]
    sums = Counter(line for line in jobs.lines() if line.startswith("sum"))
    assert list(sums.values()) == [2], "all have the same parameters at the end of an epoch"
    jobs.wait_idle()


RINGS = f"""{prepared(num_samples=96, batch=24, lr=0.1, shuffles=True)}
for epoch in loader.epochs(3):
{epoch(indent=4)}
    print("epoch", epoch, os.environ["RANK"], flush=True)
    while epoch == 0 and not Path("go").exists():
        time.sleep(0.05)
{SUM}"""


@pytest.mark.thorough
def test_a_killed_step_with_the_leading_server_is_replaced_while_the_standby_leads(jobs):
    nodes = "[{name: big, capacity: 2}, {name: small, capacity: 1}]"
    extra = "mode: ps-hra\nelastic: {min: 1}\nstandby: true\nmin_per_node: 1\n"
    jobs.submit(RINGS, extra, gpus=3, nodes=nodes)
    for rank in range(3):
        jobs.wait_printed(f"epoch 0 {rank}", 1)
    (job,) = (jobs.folder / "state" / "jobs").iterdir()
    log = FolderLeadershipLog(job / "claims" / "round-1")
    wait_until(lambda: (found := log.latest()) is not None and found.members == (0, 1), jobs.story)
    (pid,) = servers(jobs, "big")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: (found := log.latest()) is not None and (found.leader, found.members) == (1, (1, 0)), jobs.story)
    there = jobs.cluster.lab.processes()["small"]
    (agent,) = [pid for pid in there if "ringweave.platforms.slurm.agent_main" in lab_state.command_line(pid)]
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: (found := log.latest()) is not None and (found.leader, found.term) == (0, 2), jobs.story)
    (jobs.folder / "go").touch()
    view = jobs.wait("Succeeded")
    assert (view.round, [node.retries for node in view.used_nodes]) == (1, [0, 1])
    found = [
        json.loads(line) for path in job.glob("runs/*/*/round-1/events.jsonl") for line in path.read_text().splitlines()
    ]
    accounted = {each["epoch"]: each["samples"] for each in found if each["kind"] == "samples_accounted"}
    assert accounted == dict.fromkeys(range(3), 96)
    assert len({line.split()[-1] for line in jobs.lines() if line.startswith("sum ")}) == 1
    jobs.wait_idle()
