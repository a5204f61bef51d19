"""An elastic job on the nodes of a lab: network namespaces with links and CPU time of their own, for real."""

import json
from pathlib import Path

import pytest

from ringweave import lab, topology
from ringweave.jobs.request import ElasticRequest
from ringweave.lab import Lab
from tests.launcher import until_back
from tests.platforms.local.conftest import Here
from tests.platforms.local.test_elastic import kill_group, said
from tests.polling import wait_until

# A minute: every day elastic jobs lose a node without a lab, and jobs on a lab train that are not elastic.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.distributed,
    pytest.mark.thorough,
    pytest.mark.timeout(1200),
]
RACK = """
name: rack
nodes:
  - {name: n0, nic: 200Mbit/s, devices: 2}
  - {name: n1, nic: 200Mbit/s, devices: [{kind: cpu, speed: 0.5}, {kind: cpu, speed: 0.5}]}
"""


@pytest.fixture
def rack(lab_name: str) -> Lab:
    return lab.up(topology.loads(RACK), lab_name, "always")


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_of_a_lab_is_replaced_while_the_other_one_trains_on(here: Here, rack: Lab, node: int) -> None:
    """Coordinators listen at addresses of their nodes; that of node 0 is started there again when it was lost."""
    here.submit(until_back.SCRIPT, 2, 2, elastic=ElasticRequest(min=2), mode="sync", max_retries=2, lab=rack.name)
    wait_until(lambda: len(said(here, "n0", 1, 0)) > 5 and len(said(here, "n1", 1, 3)) > 5, "training")
    (folder,) = (here.state / "jobs").glob("job-*")
    gate = json.loads((folder / "rendezvous.json").read_text())
    assert [meeting["host"] for meeting in gate["coordinators"]] == [rack.addresses[name][0] for name in ("n0", "n1")]
    assert {name: len(found) >= 3 for name, found in rack.processes().items()} == {"n0": True, "n1": True}

    kill_group(here, node, 1)
    job = here.wait(lambda job: job.state.is_end)
    assert job.state == "Succeeded", (job, said(here, f"n{1 - node}", 1, 2 * (1 - node))[-3:])
    assert (job.round, [each.retries for each in job.nodes]) == (1, [int(node == 0), int(node == 1)])
    sums = [each["sum"] for path in worker_logs(folder) for each in words_of(path) if "sum" in each]
    assert len(sums) == 4
    assert len(set(sums)) == 1
    wait_until(lambda: not any(rack.processes().values()), "the end of all that ran in the lab")


def worker_logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/*/*/round-1/logs/rank-*.log"))


def words_of(path: Path) -> list[dict]:
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
