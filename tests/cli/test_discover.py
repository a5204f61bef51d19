import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave import topology
from ringweave.cli import discover, main
from ringweave.errors import PlacementError, RingweaveError

FILE = "tests/topology/discovery/files/hwloc-format-1.xml"


def test_a_file_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["discover", "--from", FILE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["nic"], found["leader"], found["rdma"]) == ("devel09", "ib0", "NUMA 0", True)
    assert {"device": "NUMA 1", "nic": "ib0", "hops": 5, "class": "SYS"} in found["hops"]


def test_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["discover", "--from", FILE]) == 0
    out = capsys.readouterr().out
    assert "NUMA 0 leads: 3 hops to ib0 (PHB" in out
    assert "rdma     present on ib0" in out


def test_a_cluster_file_is_written_and_assumptions_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "cluster.yaml"
    assert main.run_command_line(["discover", "--from", FILE, "--nic", "eth0", "--write", str(target)]) == 0
    node = topology.load(target).nodes[0]
    assert [(nic.name, nic.rdma, nic.numa) for nic in node.nics] == [("eth0", False, 0)]
    assert [device.numa for device in node.devices] == [0, 1]
    assert "the rate of eth0 on devel09 is not known: 1.6Gbit/s is assumed" in capsys.readouterr().err


def test_nowhere_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["discover", "--from", FILE, "--write", str(tmp_path)]) == 2
    assert "expected a file that can be written" in capsys.readouterr().err


def test_one_machine_has_no_network_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["discover", "--probe"]) == 2
    assert "--probe: 'this machine alone', expected several workers. Start it on all" in capsys.readouterr().err


def test_nothing_to_write_without_a_nic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare.xml"
    bare.write_text('<topology version="2.0"><object type="Machine" os_index="0"/></topology>')
    assert main.run_command_line(["discover", "--from", str(bare), "--write", str(tmp_path / "c.yaml")]) == 2
    assert "network interface of bare: 'none', expected one" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_all_workers_of_a_job_make_one_file(tmp_path: Path) -> None:
    target = tmp_path / "cluster.yaml"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    subprocess.run(
        [sys.executable, *command, "-m", "ringweave", "discover", "--write", str(target)], check=True, timeout=300
    )
    cluster = topology.load(target)
    assert (cluster.num_nodes, cluster.num_devices) == (1, 2)


def test_two_machines_of_one_name_are_refused() -> None:
    def told(address: str, host: str) -> dict[str, str | None]:
        nodes = f"[{{name: ubuntu, address: {address}, nic: 1Gbit/s, devices: 1}}]"
        return {"cluster": f"name: told\nnodes: {nodes}", "host": host, "gpu": None}

    one, other = told("10.0.0.5", "x"), told("10.0.0.6", "y")
    assert [(node.name, node.num_devices) for node in discover._merge_hosts([one, one])] == [("ubuntu", 2)]
    with pytest.raises(PlacementError, match=r"node ubuntu: 'two: rank 0 at 10\.0\.0\.5 and rank 2 at 10\.0\.0\.6'"):
        discover._merge_hosts([one, one, other])


SAID = {"gpu": None, "cluster": "name: told", "assumed": ["a rate"], "host": "h"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "{}", "[" * 100_000, "9" * 5000, json.dumps(SAID | {"gpu": "0"})),
        *(json.dumps(SAID | {"assumed": [1]}), json.dumps(SAID | {"cluster": None})),
    ],
    ids=lambda text: text[:12],
)
def test_what_no_worker_says_of_its_host_is_refused(text: str) -> None:
    assert discover._parse_host_report(json.dumps(SAID), 1) == SAID
    with pytest.raises(RingweaveError, match=r"host of a worker: .*, expected the report of discover.* \[rank 1\]"):
        discover._parse_host_report(text, 1)
