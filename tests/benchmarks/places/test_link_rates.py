import subprocess

import pytest

from ringweave import lab, topology
from ringweave.errors import LaunchError
from ringweave_bench import link_rates
from ringweave_bench.bench_cluster import LabBenchCluster, LocalBenchCluster
from ringweave_bench.link_rates import LinkTrialPlan, TcpStream


def test_what_cannot_be_true_is_left_out() -> None:
    raw = {"a->core": 100.0, "core->a": 100.0, "b->core": 100.0, "core->b": 100.0}
    measured = {"a->core": 95.6, "core->a": 101.0, "b->core": 40.0}
    found = link_rates.discard_unfilled(raw, measured, LinkTrialPlan((), ("core->b",)))
    assert found.measured == {"a->core": 95.6, "core->a": 100.0}
    assert found.best_known == {"a->core": 95.6, "core->a": 100.0, "b->core": 100.0, "core->b": 100.0}
    assert found.notes == (
        "link core->b cannot be filled by any traffic; its raw rate is taken",
        "link b->core got only 40% of its rate through; its raw rate is taken",
    )
    assert found.rows()[2] == ("b->core", 100.0, None)


def test_a_stream_on_this_machine() -> None:
    place = LocalBenchCluster(topology.one_machine([1, 1]))
    found = link_rates._run_streams(place, [TcpStream("node0", "node1")])
    assert found[TcpStream("node0", "node1")] > 10e6


def test_a_stream_that_does_not_come_through() -> None:
    class Cut(LocalBenchCluster):
        def command(self, node, argv):
            return ["true"]

    place = Cut(topology.one_machine([1, 1]))
    expected = (
        r"measuring a link: 'no stream from node0 to node1', expected bytes to arrive\. "
        r"See whether the nodes reach each other: ringweave lab exec\."
    )
    with pytest.raises(LaunchError, match=expected):
        link_rates._run_streams(place, [TcpStream("node0", "node1")])


@pytest.mark.slow
@pytest.mark.distributed
def test_links_of_a_lab_deliver_most_of_their_rate(lab_name: str) -> None:
    cluster = topology.loads(f"""
name: {lab_name}
nodes:
  - {{name: a, nic: 40Mbit/s, devices: 1}}
  - {{name: b, switch: r, nic: 100Mbit/s, devices: 1}}
switches: [{{name: r, uplink: 80Mbit/s}}]
""")
    found = link_rates.measure_link_rates(LabBenchCluster(lab.up(cluster, lab_name)))
    assert set(found.measured) == {"a->core", "core->a"}
    assert all(0.9 <= found.measured[link] / found.raw[link] <= 1 for link in found.measured)
    assert len(found.notes) == 4


def test_the_stream_program_says_how_it_is_used() -> None:
    from ringweave_bench.systems import PROGRAMS_FOLDER

    command = ["python3", "-I", "-S", str(PROGRAMS_FOLDER / "stream.py"), "sideways"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "stream.py receive ADDRESS WARM_UP_S WINDOW_S" in done.stderr
