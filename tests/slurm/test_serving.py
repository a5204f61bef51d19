"""Jobs with a parameter server on a real Slurm: credentials by the shared file system, the server on one machine."""

from collections import Counter

import pytest

from ringweave.lab import lab_processes
from tests.launch.small_training import PREPARED

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
    return [pid for pid in there if "ringweave.param_server.main" in lab_processes.command_line(pid)]


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
