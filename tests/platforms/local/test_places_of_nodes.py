"""Jobs with a parameter server, and jobs whose nodes are those of a lab; with real processes."""

import signal

import pytest

from ringweave import lab, topology
from ringweave.errors import JobError, UsageError
from ringweave.lab import Lab
from ringweave.platforms.api import LogQuery
from tests.launcher.small_training import PREPARED
from tests.platforms.local.conftest import Here, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
TORCH_S = 300.0
"""Until three processes have imported torch on a machine that is busy."""
TRAINS = PREPARED
TRAINS += """
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        (model(a) - b).square().mean().backward()
        optimizer.step()
    print("epoch", epoch, flush=True)
    deadline = time.monotonic() + 250
    while not pathlib.Path("go").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
print("sum", f"{sum(p.sum().item() for p in model.parameters()):.6f}", flush=True)
torch.distributed.destroy_process_group()
"""
RACK = """
name: rack
nodes:
  - {name: a, nic: 200Mbit/s, devices: 2}
  - {name: b, nic: 100Mbit/s, devices: 1}
  - {name: c, nic: 100Mbit/s, devices: 1}
"""
WHERE = """
import os, socket
print(os.environ["RANK"], socket.gethostname(), os.environ["RINGWEAVE_NODE"], os.environ["MASTER_ADDR"])
"""


def text_of(here: Here, **query: object) -> list[str]:
    return [line.text for line in here.service.logs("job", LogQuery(**query))]


@pytest.mark.thorough
@pytest.mark.timeout(1000)
def test_a_parameter_server_belongs_to_its_node_and_is_replaced_with_it(here: Here) -> None:
    here.submit(TRAINS, 1, 1, mode="ps-hra")
    here.wait(lambda job: text_of(here).count("epoch 0") == 2, deadline_s=TORCH_S)
    (server,) = [each for each in processes_of(here.state) if "ringweave.param_server.main" in each.command]
    assert not list(here.state.rglob("worker-*.0.json")), "credentials are handed over once"
    server.process.send_signal(signal.SIGKILL)
    here.wait(lambda job: text_of(here).count("epoch 0") == 4, deadline_s=TORCH_S)
    (here.folder / "go").touch()
    job = here.wait(lambda job: job.state == "Succeeded", deadline_s=TORCH_S)
    assert [node.retries for node in job.nodes] == [1, 0]
    assert job.nodes[0].attempts[0].text == "the parameter server on node n0 was killed by SIGKILL"
    sums = {line for line in text_of(here) if line.startswith("sum")}
    assert len(sums) == 1, "all rings have the same parameters at the end of an epoch"


@pytest.fixture
def rack(lab_name: str) -> Lab:
    return lab.up(topology.loads(RACK), lab_name, "always")


def test_nodes_of_a_lab_are_nodes_of_a_job(here: Here, rack: Lab) -> None:
    here.submit(WHERE, 2, 1, names=("a", "c"), lab=rack.name)
    job = here.wait_state("Succeeded")
    host = rack.addresses["a"][0]
    assert sorted(text_of(here)) == [f"0 a a {host}", f"1 a a {host}", f"2 c c {host}"]
    assert [node.name for node in job.used_nodes] == ["a", "c"]
    (path, *_) = here.state.glob("jobs/*/runs/c/1/round-1/cluster.yaml")
    cluster = topology.load(path)
    assert [(node.name, node.num_devices) for node in cluster.nodes] == [("a", 2), ("c", 1)]
    assert cluster.node("a").rate_bytes_per_s == 25e6


def test_what_a_lab_cannot_give_is_refused(here: Here, rack: Lab) -> None:
    with pytest.raises(JobError, match=rf"node: 'd', expected a node of lab {rack.name}: a, b, c\. .* \[job\]"):
        here.submit(WHERE, 1, names=("d",), lab=rack.name)
    with pytest.raises(JobError, match=rf"capacity of node b: 2, expected at most 1, its devices in lab {rack.name}\."):
        here.submit(WHERE, 2, names=("b",), lab=rack.name)
    with pytest.raises(UsageError, match="nosuch"):
        here.submit(WHERE, 1, names=("a",), lab="nosuch")
    assert here.service.jobs() == []
