import os
import subprocess
from pathlib import Path

import pytest

import ringweave
from ringweave import lab, topology
from ringweave.lab import lab_layout
from ringweave_bench import systems
from ringweave_bench.bench_cluster import LabBenchCluster, LocalBenchCluster
from ringweave_bench.systems import SYSTEMS, Knob, RankShape, SessionSetup

FEW = RankShape(num_nodes=1, max_ranks_per_node=2, is_crowded=False, collective="allreduce")
SPREAD = RankShape(num_nodes=4, max_ranks_per_node=2, is_crowded=True, collective="allreduce")
CLUSTER = topology.loads("""
name: c
nodes:
  - {name: a, nics: [{name: eth0, rate: 1Mbit/s}, {name: eth1, rate: 1Mbit/s}], devices: 2}
  - {name: b, nic: 1Mbit/s, devices: 1}
""")


@pytest.fixture
def setup(tmp_path: Path) -> SessionSetup:
    """Ranks in a lab that is only laid out: nothing is started."""
    laid_out = lab.Lab(layout=lab_layout.plan_layout(CLUSTER, "c"), quotas=None)
    return SessionSetup(
        bench_cluster=LabBenchCluster(laid_out),
        node_of_rank=("b", "a", "a"),
        cluster_path=tmp_path / "c.yaml",
        control_path=tmp_path / "control",
        session="7-x",
        folder=tmp_path,
        port=21007,
        schedule="direct",
    )


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both peers' environments are there."""
    for module in (systems, systems):
        monkeypatch.setattr(module, "peer_python", lambda folder: Path("/peers") / folder / "bin/python")


def words(start: systems.ProcessStart) -> str:
    return " ".join(start.argv)


@pytest.mark.parametrize(
    ("name", "shape", "knobs"),
    [
        ("ringweave", SPREAD, 1),
        ("gloo", SPREAD, 2),
        ("openmpi", FEW, 5),
        ("openmpi", SPREAD, 7),
        ("mpich", FEW, 8),
        ("mpich", SPREAD, 9),
    ],
)
def test_knobs_have_names_of_their_own(name: str, shape: RankShape, knobs: int) -> None:
    found = SYSTEMS[name].knobs(shape)
    assert len({knob.name for knob in found}) == len(found) == knobs
    assert len({(str(knob.environ), knob.options, knob.times_named) for knob in found}) == len(found)


def test_only_crowded_ranks_yield() -> None:
    for name in ("openmpi", "mpich"):
        assert not any("yield" in str(knob).lower() for knob in SYSTEMS[name].knobs(FEW))
        assert all("yield" in str(knob).lower() for knob in SYSTEMS[name].knobs(SPREAD)[1:])


def test_shapes() -> None:
    assert systems.rank_shape(("a", "b", "a"), 2) == RankShape(
        num_nodes=2, max_ranks_per_node=2, is_crowded=True, collective="allreduce"
    )
    assert not systems.rank_shape(("a", "b"), 2).is_crowded


def test_torch_ranks(setup: SessionSetup) -> None:
    starts = SYSTEMS["ringweave"].process_starts(setup, Knob(name="as it chooses"))
    assert [start.node for start in starts] == ["b", "a", "a"]
    environ = starts[2].environ
    assert {key: environ[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": setup.bench_cluster.addresses["b"][0],
        "MASTER_PORT": "21007",
    }
    assert (environ["RINGWEAVE_NODE"], environ["RINGWEAVE_SCHEDULE"], environ["OMP_NUM_THREADS"]) == (
        "a",
        "direct",
        "1",
    )
    gloo = SYSTEMS["gloo"].process_starts(setup, SYSTEMS["gloo"].knobs(SPREAD)[1])
    assert gloo[1].environ["GLOO_SOCKET_IFNAME"] == "eth0,eth0,eth0,eth0"  # b has one interface, so all use one
    assert "RINGWEAVE_SCHEDULE" not in gloo[1].environ


def test_open_mpi_over_nodes(setup: SessionSetup, peers: None) -> None:
    (start,) = SYSTEMS["openmpi"].process_starts(setup, Knob(name="x", options=("--mca", "a", "1")))
    assert start.node == "b"
    line = words(start)
    assert line.startswith("/peers/.venv-openmpi/bin/mpirun --allow-run-as-root --bind-to none --mca pml ob1 -n 3 ")
    assert "--mca btl self,sm,tcp --mca btl_tcp_if_include 10.99.0.0/16,10.100.0.0/16 --mca a 1 /peers" in line
    assert "--prtemca prte_if_include 10.99.0.0/16 " in line
    assert line.endswith(f"mpi_worker.py --control {setup.control_path} --session 7-x")
    addresses = setup.bench_cluster.addresses
    expected = [addresses["b"][0], addresses["a"][0], addresses["a"][0]]
    assert (setup.folder / "hosts").read_text().split() == expected


def test_mpich_over_nodes_may_not_see_the_memory_they_share(setup: SessionSetup, peers: None) -> None:
    (start,) = SYSTEMS["mpich"].process_starts(setup, Knob(name="x", environ={"B": "2", "A": "1"}))
    line = words(start)
    assert "-genv UCX_TLS tcp,self -genv UCX_NET_DEVICES eth0,eth1 -genv A 1 -genv B 2 /peers/.venv-mpich" in line
    assert f"-launcher ssh -launcher-exec {setup.folder}/agent -f {setup.folder}/hosts -iface eth0" in line
    assert (setup.folder / "hosts").read_text().splitlines()[0] == f"{setup.bench_cluster.addresses['b'][0]}:1"


def test_on_one_machine_both_use_shared_memory(tmp_path: Path, peers: None) -> None:
    setup = SessionSetup(
        bench_cluster=LocalBenchCluster(topology.one_machine([2])),
        node_of_rank=("node0", "node0"),
        cluster_path=tmp_path / "c.yaml",
        control_path=tmp_path / "control",
        session="1-x",
        folder=tmp_path,
        port=1,
    )
    (start,) = SYSTEMS["openmpi"].process_starts(setup, Knob(name="default"))
    assert "--map-by :OVERSUBSCRIBE --mca btl self,sm /peers" in words(start)
    (start,) = SYSTEMS["mpich"].process_starts(setup, Knob(name="default"))
    assert words(start).startswith("/peers/.venv-mpich/bin/mpiexec -n 2 /peers/.venv-mpich/bin/python ")


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_a_missing_peer_says_how_to_get_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ringweave, "__file__", str(tmp_path / "a/b/c.py"))
    expected = f"its environment .venv-{name} is not here. Make it: make bench-setup"
    assert SYSTEMS[name].unavailable_reason() == expected
    (tmp_path / f".venv-{name}/bin").mkdir(parents=True)
    (tmp_path / f".venv-{name}/bin/python").touch()
    assert SYSTEMS[name].unavailable_reason() == ""


def test_torch_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SYSTEMS["gloo"].unavailable_reason() == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (
        SYSTEMS["gloo"].unavailable_reason()
        == "PyTorch is not installed here. Install it: pip install 'ringweave[train]'"
    )


def test_the_agent_enters_the_node_of_an_address(tmp_path: Path) -> None:
    entries = {"10.0.0.1": ["env", "NODE=a 'one'"], "10.0.0.2": ["env", "NODE=b"]}
    script = systems.remote_shell_script(entries, os.getpid())
    assert f"exec nsenter --mount=/proc/{os.getpid()}/ns/mnt -- " in script
    path = tmp_path / "agent"
    path.write_text(script.replace(f"nsenter --mount=/proc/{os.getpid()}/ns/mnt --", "env"))

    def run(*argv: str) -> tuple[int, str]:
        done = subprocess.run(["sh", str(path), *argv], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert run("-x", "-q", "10.0.0.1", 'echo "$NODE"', "and", "more;", "exit 4") == (4, "a 'one' and more\n")
    assert run("10.0.0.3", "true") == (255, "agent: no node has the address 10.0.0.3\n")
