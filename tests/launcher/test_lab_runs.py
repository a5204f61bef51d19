"""`ringweave lab run`: workers of a run inside the nodes of a lab, with real processes."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringweave import lab, topology
from ringweave.environment import WorkerEnvironment
from ringweave.errors import LaunchError
from ringweave.jobs import worker_options
from ringweave.lab import Lab
from ringweave.launcher import node_context
from ringweave.telemetry import read_events
from tests.launcher import small_training

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CLUSTER = """
name: trio
nodes:
  - {name: a, nic: 200Mbit/s, devices: 2}
  - {name: b, nics: [{name: ib0, rate: 100Mbit/s}, {name: ib1, rate: 100Mbit/s}], devices: 1}
"""
GOODPUT = 0.955
"""TCP's part of a rate (docs/how-to/build-a-lab.md)."""
TWO_NICS = """
name: two-nics
nodes:
  - {name: a, nics: [{name: eth0, rate: 100Mbit/s}, {name: eth1, rate: 50Mbit/s}], devices: 1, count: 2}
"""
WAIT = "print('up'); time.sleep(1000)"


@pytest.fixture(scope="module")
def trio(lab_problems: list[str]) -> Iterator[Lab]:
    """One lab for all: what runs in it ends with each test."""
    if lab_problems:
        pytest.skip(" ".join(lab_problems))
    name = f"test-{os.getpid()}-trio"
    yield lab.up(topology.loads(CLUSTER), name, "always")
    lab.down(name)


@pytest.fixture
def start_in(start: Callable, trio: Lab) -> Callable:
    """`start_in(script)`: `ringweave lab run` of it."""
    return lambda *arguments, **more: start(*arguments, verb=("lab", "run", "--lab", trio.name), **more)


def test_workers_are_in_their_nodes(start_in, script, trio: Lab) -> None:
    run = start_in(
        "--order",
        "round-robin",
        script("""
            import json, socket
            print(json.dumps(dict(os.environ, host=socket.gethostname(), net=os.stat("/proc/self/ns/net").st_ino)))
        """),
        "--json",
        GLOO_SOCKET_IFNAME="lo",
    )
    assert run.wait_ended() == 0, run.stderr
    got = [json.loads(run.log(rank)) for rank in range(3)]
    assert [(e["host"], e["RINGWEAVE_NODE"], e["LOCAL_RANK"]) for e in got] == [
        ("a", "a", "0"),
        ("b", "b", "0"),
        ("a", "a", "1"),
    ]
    assert [e["GLOO_SOCKET_IFNAME"] for e in got] == ["eth0", "ib0", "eth0"], "as many as the node with the fewest has"
    assert {(e["MASTER_ADDR"], e["OMP_NUM_THREADS"]) for e in got} == {("10.99.0.1", "1")}
    assert [e["net"] for e in got] == [Path(f"/run/netns/rw-{trio.name}:{node}").stat().st_ino for node in "aba"]
    assert {e["RINGWEAVE_CLUSTER"] for e in got} == {str(run.run_dir / "cluster.yaml")}
    assert topology.load(run.run_dir / "cluster.yaml") == trio.cluster
    assert (run.record["lab"], run.record["order"]) == (trio.name, "round-robin")


def test_any_command_after_dashes_is_run_in_every_node(start_in) -> None:
    run = start_in("--", "hostname")
    assert run.wait_ended() == 0, run.stderr
    assert [run.log(rank) for rank in range(3)] == ["a\n", "a\n", "b\n"]


def test_rank_0_may_be_on_any_node(start_in, script) -> None:
    listen = """
        import socket
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank == 0:
            with socket.create_server(where) as server:
                for _ in range(2):
                    server.accept()[0].sendall(b"met")
        else:
            deadline = time.monotonic() + 300
            while True:
                try:
                    peer = socket.create_connection(where)
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
            print(os.environ["RINGWEAVE_NODE"], where[0], peer.recv(3).decode())
    """
    seed = next(seed for seed in range(20) if node_of_rank_0(seed) == 1)
    run = start_in("--order", f"shuffled:{seed}", script(listen))
    assert run.wait_ended() == 0, run.stderr
    assert {line.split(maxsplit=1)[1] for line in run.stdout.splitlines()} == {"a 10.99.0.2 met"}


def node_of_rank_0(seed: int) -> int:
    """Index of rank 0's node."""
    return worker_options.assign_ranks([2, 1], worker_options.parse_rank_order(f"shuffled:{seed}"))[0][0]


def test_a_killed_worker_is_named_and_the_rest_is_ended(start_in, script, all_gone, trio: Lab) -> None:
    run = start_in(script(WAIT))
    run.wait_printed("up", times=3)
    pids = run.pids()
    assert {node: sorted(inside) for node, inside in trio.processes().items()} == {
        "a": sorted([pids[0], pids[1]]),
        "b": [pids[2]],
    }
    os.kill(pids[2], signal.SIGKILL)
    assert run.wait_ended() == 1
    report = run.stderr[run.stderr.index("ringweave: failed") :]
    assert "rank 2 on node b was killed by SIGKILL." in report.splitlines()[0]
    assert "Ended by ringweave: rank 0, 1.\n" in report
    all_gone(list(pids.values()))


def test_an_interrupt_ends_all(start_in, script, all_gone) -> None:
    run = start_in(script(WAIT))
    run.wait_printed("up", times=3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait_ended() == 1
    assert " s by SIGINT.\n" in run.stderr
    all_gone(list(run.pids().values()))


def test_killing_ringweave_itself_leaves_nothing(start_in, script, all_gone) -> None:
    run = start_in(script(WAIT))
    run.wait_printed("up", times=3)
    run.process.kill()
    run.wait_ended()
    all_gone(list(run.pids().values()))


def test_taking_the_lab_down_ends_the_run(start, script, lab_name: str) -> None:
    lab.up(topology.loads(CLUSTER), lab_name, "always")
    run = start(script(WAIT), verb=("lab", "run", "--lab", lab_name))
    run.wait_printed("up", times=3)
    assert lab.down(lab_name)
    assert run.wait_ended() == 1
    assert "was killed by SIGTERM" in run.stderr


ALLREDUCE = """
    import torch, torch.distributed as dist
    dist.init_process_group()
    message = torch.full((500_000,), rank + 1.0)
    dist.all_reduce(message)
    assert message.eq(6).all()
    over_gloo = dist.new_group(backend="gloo")
    dist.all_reduce(message[:9], group=over_gloo)
    assert message[:9].eq(18).all()
    dist.destroy_process_group()
"""


def test_collectives_go_over_the_links_and_a_ring_sends_what_theory_says(start_in, script, trio: Lab) -> None:
    before = trio.bytes_on_links()
    run = start_in("--schedule", "ring", script(ALLREDUCE))
    assert run.wait_ended() == 0, run.stderr
    assert run.record["collectives_by_schedule"]["ring"]["collectives"] == 1
    content = 2 * (3 - 1) / 3 * 2_000_000  # bytes that every rank of a ring sends; two ranks share node a
    sent = {link: count - before[link] for link, count in trio.bytes_on_links().items()}
    for link in ("a->core", "core->b", "b->core", "core->a"):
        assert content < sent[link] < 1.2 * content, sent


def test_without_a_port_the_run_does_not_start(trio: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nosuch")
    with pytest.raises(LaunchError, match=r"port on node b: .*not found, expected a free one\. Check that the lab is"):
        node_context.LabContext(trio).pick_address("b")


def test_outside_of_a_lab_nothing_is_entered() -> None:
    here = node_context.HostContext()
    assert (here.lab_name, here.node_environ("a"), here.pick_address("a").host) == (None, {}, "127.0.0.1")


def test_without_the_cluster_file_workers_are_told_nothing(start_in, script) -> None:
    told = script("""
        import json, socket
        print(json.dumps([dict(os.environ), socket.gethostname()]))
    """)
    run = start_in("--no-cluster-file", told, RINGWEAVE_CLUSTER="/tmp/other.yaml")
    assert run.wait_ended() == 0, run.stderr
    for rank, node in enumerate("aab"):
        environ, host = json.loads(run.log(rank))
        environment = WorkerEnvironment.from_environ(environ)
        assert (environment.cluster_path, environment.node, host) == (None, None, node)


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_network_that_nobody_described_is_measured_and_kept(start, lab_name: str, tmp_path: Path) -> None:
    racks = """
name: racks
nodes:
  - {name: a, switch: r0, nic: 100Mbit/s, devices: 1, count: 2}
  - {name: b, switch: r1, nic: 100Mbit/s, devices: 1, count: 2}
switches: [{name: r0, uplink: 50Mbit/s}, {name: r1, uplink: 50Mbit/s}]
"""
    place = lab.up(topology.loads(racks), lab_name)
    seen = []
    for number in range(2):  # windows are a quarter of a second: what stood still in one of them looks like a slow link
        written = tmp_path / f"found-{number}.yaml"
        run = start(
            "--no-cluster-file", "-m", "ringweave.comm.probing", "--json", "--write", str(written),
            verb=("lab", "run", "--lab", lab_name), XDG_CACHE_HOME=str(tmp_path / "cache"),
        )  # fmt: skip
        assert run.wait_ended() == 0, run.stderr
        document = json.loads(run.log(0))
        assert len(document["pairs"]) == 12
        assert [path.suffix for path in place.probe_results_folder.iterdir()] == [".json"]
        assert not (tmp_path / "cache" / "ringweave" / "probes").exists(), "that is for machines that are no lab"
        found = topology.load(written)
        homes = [(node.name, node.switch) for node in found.nodes]
        rates = [bytes_per_s / 125e3 for bytes_per_s in (
            *(node.rate_bytes_per_s for node in found.nodes), *(each.uplink_bytes_per_s for each in found.switches)
        )]  # fmt: skip
        seen.append((homes, rates))
        expected = [100 * GOODPUT] * 4 + [50 * GOODPUT] * 2
        is_found = homes == [("a-0", "s0"), ("a-1", "s0"), ("b-0", "s1"), ("b-1", "s1")]
        if is_found and rates == pytest.approx(expected, rel=0.1):
            assert document["slow"].startswith("slow: link ")
            return
    raise AssertionError(f"no probe found the racks and their rates: {seen}")


def test_machines_and_network_are_found_together_and_a_run_says_what_it_knew(
    start_in, script, trio: Lab, tmp_path: Path
) -> None:
    for number in range(4):  # a busy machine sees less of a link now and then
        written = tmp_path / f"found-{number}.yaml"
        run = start_in("--no-cluster-file", "-m", "ringweave", "discover", "--probe", "--write", str(written))
        assert run.wait_ended() == 0, run.stderr
        found = topology.load(written)
        assert [(node.name, node.num_devices) for node in found.nodes] == [("a", 2), ("b", 1)]
        rates = [{nic.name: nic.rate_bytes_per_s for nic in node.nics} for node in found.nodes]
        # Of b one NIC is measured, as a has but one; and as b is slower, that is all that a can be seen to carry.
        assert [list(each) for each in rates] == [["eth0"], ["ib0", "ib1"]]
        assert rates[1]["ib0"] == rates[1]["ib1"]
        of_nominal = [rates[0]["eth0"] / 12.5e6, rates[1]["ib0"] / 12.5e6]
        if min(of_nominal) > 0.7:
            break
    assert all(0.7 < each < 1 for each in of_nominal), "not half of it, nor an assumed 10 Gbit/s"
    assert "ib1 on b: not measured, " in run.log(0)
    reduce = script("import torch.distributed as dist; dist.init_process_group(); dist.destroy_process_group()")
    run = start_in("--no-cluster-file", reduce)
    assert run.wait_ended() == 0, run.stderr
    (network,) = run.record["networks"]
    assert network["nodes"] == ["a", "b"]
    assert network["age_s"] > 0
    assert set(network["rates"]) == {"a->core", "core->a", "b->core", "core->b"}


@pytest.mark.thorough
def test_without_a_file_every_nic_that_is_alike_is_measured_and_used(
    start, script, lab_name: str, tmp_path: Path
) -> None:
    lab.up(topology.loads(TWO_NICS), lab_name)
    written, cache = tmp_path / "found.yaml", str(tmp_path / "cache")
    # Nobody names interfaces here, as on most clusters; the kernel does not know the rates of these.
    alone = "import os; os.environ.pop('GLOO_SOCKET_IFNAME')\n"
    discover = tmp_path / "discover.py"
    discover.write_text(
        f"{alone}from ringweave.cli import main; main.run_command_line(['discover', '--probe', '--write', '{written}'])"
    )
    lab_run = ("lab", "run", "--lab", lab_name)
    run = start("--no-cluster-file", str(discover), verb=lab_run, XDG_CACHE_HOME=cache)
    assert run.wait_ended() == 0, run.stderr
    for node in topology.load(written).nodes:
        rates = {nic.name: nic.rate_bytes_per_s for nic in node.nics}
        assert 0.7 < sum(rates.values()) / 18.75e6 < 1, "less than what is shaped, on a busy machine much less"
        assert 1.6 < rates["eth0"] / rates["eth1"] < 2.5
    reduce = script(f"""
        {alone}
        import json, torch, torch.distributed as dist
        def sent():
            lines = open("/proc/self/net/dev").read().splitlines()[2:]
            return {{line.split(":")[0].strip(): int(line.split()[9]) for line in lines}}
        dist.init_process_group()
        before, message = sent(), torch.ones(1_000_000)
        dist.all_reduce(message)
        assert message.eq(2).all()
        dist.barrier()  # the other has all of it: nothing waits in the queue of a NIC, where it does not count as sent
        print(json.dumps({{name: count - before[name] for name, count in sent().items()}}))
        dist.destroy_process_group()
    """)
    run = start("--no-cluster-file", "--schedule", "ring", reduce, verb=lab_run, XDG_CACHE_HOME=cache)
    assert run.wait_ended() == 0, run.stderr
    for rank in range(2):
        sent = json.loads(run.log(rank))
        assert 4e6 < sent["eth0"] + sent["eth1"] < 4.5e6, sent
        assert 1.6 < sent["eth0"] / sent["eth1"] < 2.5, sent


THIN_UPLINKS = """
name: thin
nodes:
  - {name: a, switch: r0, nic: 1Gbit/s, devices: 2}
  - {name: b, switch: r1, nic: 1Gbit/s, devices: 2}
switches:
  - {name: r0, uplink: 10Mbit/s}
  - {name: r1, uplink: 10Mbit/s}
"""


def test_auto_takes_sites_over_thin_uplinks_within_a_bound_on_the_loss(lab_name: str, start, script) -> None:
    place = lab.up(topology.loads(THIN_UPLINKS), lab_name, "always")
    model = "torch.nn.Sequential(torch.nn.Linear(6, 20_000), torch.nn.Linear(20_000, 2))"
    text = small_training.prepared(model=model) + small_training.epoch()
    run = start("--max-loss-increase", "0.35%", script(text), verb=("lab", "run", "--lab", place.name))
    assert run.wait_ended() == 0, run.stderr
    training = run.record["training"]
    assert training["mode"] == "local", training["reason"]
    assert training["reason"].endswith("; chosen: local with outer steps every 16 steps"), "64 lose up to 0.43 %"
    (formed,) = [each for each in read_events(run.run_dir / "events.jsonl") if each["kind"] == "sites_formed"]
    assert formed["sites"] == [[0, 1], [2, 3]]
