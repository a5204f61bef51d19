"""Labs that are really up."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ringweave import lab, topology
from ringweave.cli import main
from ringweave.errors import ClusterError, LabError, PlacementError, UsageError
from ringweave.lab import Lab, lab_state

PAIR = """
name: pair
nodes: [{name: a, nic: 100Mbit/s, devices: 1}, {name: b, switch: r, nic: 200Mbit/s, devices: 2}]
switches: [{name: r, uplink: 50Mbit/s}]
"""
RAILS = """
name: rails
nodes:
  - {name: a, nics: [{name: ib0, rate: 80Mbit/s}, {name: ib1, rate: 20Mbit/s}], devices: 1}
  - {name: b, nics: [{name: eth0, rate: 80Mbit/s}, {name: eth1, rate: 20Mbit/s}], devices: 1}
  - {name: c, nic: 100Mbit/s, devices: 1, address: 192.168.7.1}
"""
UNEQUAL = """
name: unequal
nodes: [{name: a, nic: 1Gbit/s, devices: [{kind: cpu}, {kind: cpu, speed: 0.1}]}]
"""

RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
peer, _ = server.accept()
received = 0
while piece := peer.recv(1 << 20):
    received += len(piece)
    if len(sys.argv) > 2 and received >= 100_000:
        print("flows", flush=True)
        sys.argv.pop()
print(received)
"""
SEND = """
import socket, sys
source = (sys.argv[3], 0) if len(sys.argv) > 3 else None
with socket.create_connection((sys.argv[1], 5000), source_address=source) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""


@contextlib.contextmanager
def receiver(where: Lab, node: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A process in the node that listens on its first address; ready."""
    command = where.command(node, [sys.executable, "-c", RECEIVE, where.addresses[node][0], *more])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def sender(where: Lab, src: str, dst: str, num_bytes: int, *source: str) -> list[str]:
    arguments = [where.addresses[dst][0], str(num_bytes), *source]
    return where.command(src, [sys.executable, "-c", SEND, *arguments])


def send(where: Lab, src: str, dst: str, num_bytes: int, *source: str) -> float:
    """Seconds until all has arrived."""
    with receiver(where, dst) as process:
        started_s = time.monotonic()
        subprocess.run(sender(where, src, dst, num_bytes, *source), check=True, timeout=300)
        assert process.communicate(timeout=300)[0] == f"{num_bytes}\n"
        return time.monotonic() - started_s


def test_a_node_has_its_own_host_name_network_and_shared_memory(up, run_in, lab_name: str) -> None:
    pair = up(PAIR)
    assert run_in(pair, "a", "hostname; cat /proc/sys/kernel/hostname") == "a\na\n"
    assert run_in(pair, "a", "ls /sys/class/net").split() == ["eth0", "lo"]
    assert run_in(pair, "a", "ls -A /run/netns /dev/shm; cat /run/ringweave/inside").split() == [
        "/dev/shm:",
        "/run/netns:",
        "a",
    ]
    run_in(pair, "a", f"echo mine > /dev/shm/{lab_name}")
    assert run_in(pair, "a", f"cat /dev/shm/{lab_name}") == "mine\n"
    assert run_in(pair, "b", "ls -A /dev/shm") == ""
    assert not Path("/dev/shm", lab_name).exists()
    assert pair.addresses == {"a": ("10.99.0.1",), "b": ("10.99.0.2",)}
    assert [node.address for node in pair.cluster.nodes] == ["10.99.0.1", "10.99.0.2"]
    look_up = "import socket; print(socket.gethostbyname('b'), socket.gethostbyaddr('10.99.0.2')[0])"
    assert run_in(pair, "a", f'{sys.executable} -c "{look_up}"') == "10.99.0.2 b\n"


def test_a_command_keeps_directory_environment_streams_and_exit_status(up, tmp_path: Path) -> None:
    pair = up(PAIR)
    script = 'pwd; echo "$MINE"; cat; echo told >&2; exit 7'
    done = subprocess.run(
        pair.command("a", ["sh", "-c", script]),
        cwd=tmp_path,
        env={**os.environ, "MINE": "a b"},
        input="asked\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"{tmp_path}\na b\nasked\n", "told\n", 7)
    arguments = ["a b", "", "$HOME", "'", "-n", "--"]
    printed = subprocess.check_output(
        pair.command("a", [sys.executable, "-c", "import sys; print(sys.argv)", *arguments])
    )
    assert printed.decode() == f"{['-c', *arguments]}\n"
    assert subprocess.run(pair.command("a", ["nosuch"]), stderr=subprocess.DEVNULL, check=False).returncode == 127


def test_the_process_that_is_started_is_the_command(up) -> None:
    pair = up(PAIR)
    with subprocess.Popen(pair.command("a", ["sh", "-c", "echo $$; exec sleep 60"]), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        assert pair.processes() == {"a": [process.pid], "b": []}
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


def test_a_link_carries_its_rate_and_counts_what_it_carried(up) -> None:
    pair = up(PAIR)
    assert {link: rate for link, rate in pair.rates().items() if link.startswith(("a", "r"))} == {
        "a->core": 12.5e6,
        "r->b": 25e6,
        "r->core": 6.25e6,
    }
    num_bytes = 3_000_000
    elapsed_s = send(pair, "a", "b", num_bytes)
    assert elapsed_s > (num_bytes - 100_000) / 6.25e6, "the thinnest link on the way decides"
    sent = pair.bytes_on_links()
    for link in ("a->core", "core->r", "r->b"):
        assert 1.04 * num_bytes < sent[link] < 1.3 * num_bytes, link  # a busy machine sends some of it again
    for link in ("b->r", "r->core", "core->a"):
        assert sent[link] < 0.1 * num_bytes, link


def test_a_rate_changes_while_traffic_flows_and_nothing_is_lost(up) -> None:
    pair = up(PAIR)
    slow = 2.5e5
    pair.set_rate("a->core", slow)
    num_bytes = 10_000_000
    with receiver(pair, "b", "say when") as process, subprocess.Popen(sender(pair, "a", "b", num_bytes)):
        assert process.stdout is not None
        assert process.stdout.readline() == "flows\n"
        started_s = time.monotonic()
        before = queue(pair, "a")
        pair.set_rate("a->core", 125e6)
        after = queue(pair, "a")
        assert process.communicate(timeout=300)[0] == f"{num_bytes}\n"
    assert time.monotonic() - started_s < num_bytes / slow, "it went on at the old rate"
    assert (before["handle"], before["options"]["rate"]) == (after["handle"], slow)
    assert after["options"]["rate"] == 125_000_000
    assert queue(pair, "a")["drops"] == 0
    assert pair.rate("core->a") == 12.5e6, "the other direction stays"


def queue(where: Lab, node: str) -> dict:
    """What tc says of the node's only NIC."""
    seen = subprocess.check_output(
        ["tc", "-s", "-j", "-n", where.layout.namespaces[node], "qdisc", "show", "dev", "eth0"]
    )
    return json.loads(seen)[0]


def test_traffic_from_an_address_leaves_by_its_interface(up, run_in) -> None:
    rails = up(RAILS)
    assert rails.addresses == {
        "a": ("10.99.0.1", "10.100.0.1"),
        "b": ("10.99.0.2", "10.100.0.2"),
        "c": ("192.168.7.1",),
    }
    assert rails.interfaces("a") == ["ib0", "ib1"]
    for index, interface in enumerate(rails.interfaces("a")):
        before = int(run_in(rails, "a", f"cat /sys/class/net/{interface}/statistics/tx_bytes"))
        send(rails, "a", "c", 200_000, rails.addresses["a"][index])
        assert int(run_in(rails, "a", f"cat /sys/class/net/{interface}/statistics/tx_bytes")) - before > 200_000
    assert rails.bytes_on_links()["a->core"] > 400_000
    for address, interface in {"10.99.0.2": "ib0", "10.100.0.2": "ib1", "192.168.7.1": "ib0"}.items():
        assert f" dev {interface} " in run_in(rails, "a", f"ip route get {address}"), "of no address in particular"
    assert " dev eth0 " in run_in(rails, "c", "ip route get 10.100.0.2")
    send(rails, "c", "b", 1000)
    assert rails.rate("a->core") == 12.5e6
    rails.set_rate("a->core", 6.25e6)
    shown = subprocess.check_output(["tc", "-j", "-n", rails.layout.namespaces["a"], "qdisc"])
    assert {e["dev"]: e["options"]["rate"] for e in json.loads(shown) if e["kind"] == "tbf"} == {
        "ib0": 5_000_000,
        "ib1": 1_250_000,
    }


def test_devices_of_unequal_speed_get_cpu_quotas(up) -> None:
    unequal = up(UNEQUAL)
    assert unequal.quotas == {"a": (40_000, 4_000)}
    spin = """
import time
end, used_s = time.monotonic() + 0.6, time.process_time()
while time.monotonic() < end: pass
print(time.process_time() - used_s)
"""
    slow = subprocess.check_output(unequal.command("a", [sys.executable, "-S", "-c", spin], device=1))
    assert float(slow) < 0.2, "a tenth of a CPU for 0.6 s"
    with pytest.raises(PlacementError, match="local rank on node a: 2, expected 0 to 1"):
        unequal.command("a", ["true"], device=2)


def test_a_quota_can_be_changed_while_programs_run(up) -> None:
    unequal = up(UNEQUAL)
    group = Path(unequal.control_group("a", 1) or "")
    unequal.set_quota("a", 1, 20_000)
    limits = [
        path.read_text().split()[0] for name in ("cpu.max", "cpu.cfs_quota_us") if (path := group / name).exists()
    ]
    assert limits == ["20000"]
    with pytest.raises(
        LabError, match=r"^CPU quota of rw-a:1: 10, expected microseconds that the kernel takes\. Give at"
    ):
        unequal.set_quota("a", 1, 10)
    with pytest.raises(PlacementError, match="local rank on node a: 2, expected 0 to 1"):
        unequal.set_quota("a", 2, 20_000)


def test_equal_speeds_get_no_quotas_by_default(up) -> None:
    pair = up(PAIR)
    assert pair.quotas is None
    with pytest.raises(
        LabError, match=r"^CPU quotas of lab .*: none, expected some\. Bring it up with --quotas always"
    ):
        pair.set_quota("a", 0, 20_000)
    assert pair.control_group("a", 0) is None
    assert pair.command("a", ["true"], device=0) == pair.command("a", ["true"])


def test_labs_do_not_know_of_each_other(up, lab_name: str) -> None:
    one = up(PAIR)
    other_name = f"{lab_name}-b"
    other = lab.up(topology.loads(PAIR), other_name)
    try:
        assert other.addresses == one.addresses
        send(other, "a", "b", 100_000)
        assert one.bytes_on_links()["a->core"] < 1_000
        assert {lab_name, other_name} <= set(lab.names())
        assert lab.down(lab_name)
        send(other, "b", "a", 100_000)
    finally:
        lab.down(other_name)


def test_a_lab_that_goes_down_meanwhile_is_not_in_the_way(up, lab_name: str, tmp_path: Path, monkeypatch) -> None:
    """Its mounts vanish from the new node as well, between a look at them and their `umount`."""
    other = f"{lab_name}-o"
    umount = shutil.which("umount", path=os.pathsep.join([os.environ["PATH"], "/bin"]))
    seen = tmp_path / "seen"
    stand_in = tmp_path / "umount"
    stand_in.write_text(
        f'#!/bin/sh\ncase "$*" in *{other}/ns) {umount} "$@"; echo gone >> {seen};; esac\nexec {umount} "$@"\n'
    )
    stand_in.chmod(0o755)
    lab.up(topology.loads(PAIR), other)
    try:
        monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
        assert up(PAIR).cluster.node("b").name == "b"
    finally:
        monkeypatch.undo()
        lab.down(other)
    assert seen.read_text().splitlines() == ["gone"] * 2, "in each node that was made"


def test_down_ends_what_runs_inside_and_only_that(up, left_of, lab_name: str) -> None:
    unequal = up(UNEQUAL)
    stubborn = "trap '' TERM; echo up; while :; do sleep 1; done"
    inside = subprocess.Popen(unequal.command("a", ["sh", "-c", stubborn], device=1), stdout=subprocess.PIPE)
    outside = subprocess.Popen(["sleep", "300"])
    assert inside.stdout is not None
    assert inside.stdout.readline() == b"up\n"
    with inside, outside:
        assert lab.down(lab_name)
        assert inside.wait(timeout=300) == -signal.SIGKILL
        assert outside.poll() is None
        outside.kill()
    assert left_of(lab_name) == []
    assert not lab.down(lab_name), "once more does nothing"


def test_a_lab_that_is_up_is_not_brought_up_again(up, lab_name: str) -> None:
    up(PAIR)
    expected = rf"name of the lab: '{lab_name}', expected one that no lab has\. Take that one down first: ringweave lab"
    with pytest.raises(LabError, match=expected):
        up(PAIR)
    assert lab.is_up(lab_name)


def test_what_is_not_there_is_named(up, lab_name: str) -> None:
    pair = up(PAIR)
    with pytest.raises(
        ClusterError, match=rf"link of lab {lab_name}: 'a->r', expected one of a->core, core->a, .*\. Did"
    ):
        pair.set_rate("a->r", 1e6)
    with pytest.raises(ClusterError, match="rate of link a->core: '8bit/s', expected 8kbit/s to 1Tbit/s in a lab"):
        pair.set_rate("a->core", 1.0)
    with pytest.raises(ClusterError, match="node of cluster pair: 'c', expected one of a, b"):
        pair.command("c", ["true"])
    lab.down(lab_name)
    with pytest.raises(
        UsageError, match=rf"lab: '{lab_name}', expected one that is up .*\. (Bring it up first|Did you)"
    ):
        lab.find(lab_name)
    with pytest.raises(
        LabError, match=r"links of the lab: .*, expected a lab that is still up\. Look for it: ringweave"
    ):
        pair.rates()


def test_a_lab_that_goes_down_meanwhile_has_a_status(up, lab_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = up(PAIR)
    port = pair.layout.ports("a->core")[0]
    subprocess.run(["ip", "-n", port.namespace, "link", "delete", port.interface], check=True)
    assert main.run_command_line(["lab", "status", "--lab", lab_name]) == 1
    assert re.search(r"links of the lab: .*, expected a lab that is still up\. Look for it", capsys.readouterr().err)
    record = lab_state.read_record(lab_name)
    assert record is not None
    lab_state.write_record(replace(record, is_complete=False))
    assert main.run_command_line(["lab", "status", "--lab", lab_name]) == 0
    assert f"lab {lab_name}: incomplete. Clear it away" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 64])
def test_a_name_that_no_cluster_could_have_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"name of the lab: .*, expected at most 63 letters, .*\. Give another --name"):
        lab.up(topology.loads(PAIR), name)


def test_processes_that_do_not_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_state, "_signal_all", lambda *_: [5])
    monkeypatch.setattr(lab_state, "KILL_WAIT_S", 0)
    with pytest.raises(LabError, match=r"processes of the lab: \[5\], expected them to end when killed\. Look at them"):
        lab_state.end_processes([])


def test_eight_nodes_take_little_processor_time(lab_name: str) -> None:
    eight = topology.load(Path(__file__).parents[2] / "examples" / "clusters" / "eight-nodes.yaml")
    started_s = psutil.Process().cpu_times()
    lab.up(eight, lab_name)
    used = psutil.Process().cpu_times()
    children_s = used.children_user + used.children_system - started_s.children_user - started_s.children_system
    assert used.user + used.system - started_s.user - started_s.system + children_s < 15, "CPU seconds, ours and theirs"
