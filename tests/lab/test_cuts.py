"""Nodes that are cut off, in real labs: who still hears whom."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from ringweave import lab
from ringweave.cli.main import run_command_line
from ringweave.errors import ClusterError, UsageError
from ringweave.lab import Lab

TRIO = """
name: trio
nodes:
  - {name: a, nics: [{name: eth0, rate: 80Mbit/s}, {name: eth1, rate: 20Mbit/s}], devices: 1}
  - {name: b, switch: r, nic: 100Mbit/s, devices: 1}
  - {name: c, switch: r, nic: 100Mbit/s, devices: 1}
switches: [{name: r, uplink: 50Mbit/s}]
"""
HEAR = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 9000))
print("ready", flush=True)
heard = set()
sock.settimeout(120)
while True:
    word = sock.recv(100).decode()
    heard.add(word)
    if word == "end":
        break
print(" ".join(sorted(heard)))
"""
SAY = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(5):
    sock.sendto(sys.argv[2].encode(), (sys.argv[1], 9000))
"""


def say(where: Lab, node: str, address: str, word: str) -> None:
    subprocess.run(where.command(node, [sys.executable, "-c", SAY, address, word]), check=True, timeout=300)


def heard(where: Lab, by: str, speaker: str) -> bool:
    """Whether `by` gets what `speaker` sends; `by` says to itself when that is over."""
    address = where.addresses[by][0]
    command = where.command(by, [sys.executable, "-c", HEAR, address])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        say(where, speaker, address, "word")
        say(where, by, address, "end")
        return process.stdout.read().split() == ["end", "word"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("node", ["a", "b"])
def test_one_way_or_both_and_only_the_one_that_is_meant(up: Callable[..., Lab], node: str) -> None:
    trio = up(TRIO)
    rates = trio.rates()
    assert heard(trio, "c", node)
    trio.cut(node, "out")
    assert (heard(trio, "c", node), heard(trio, node, "c"), trio.current_cut(node)) == (False, True, "out")
    trio.reconnect(node)
    assert heard(trio, "c", node)  # each knows the other's hardware address anew: a deaf node could not ask for it
    trio.cut(node, "in")
    assert (heard(trio, "c", node), heard(trio, node, "c"), trio.current_cut(node)) == (True, False, "in")
    trio.cut(node)
    assert (heard(trio, "c", node), heard(trio, node, "c"), trio.current_cut(node)) == (False, False, "both")
    assert trio.rates() == rates
    trio.reconnect(node)
    assert (heard(trio, "c", node), heard(trio, node, "c"), trio.current_cut(node)) == (True, True, "")
    assert trio.current_cut("c") == ""
    assert trio.rates() == rates


@pytest.mark.slow
def test_a_rate_that_changes_meanwhile_stays_and_so_does_the_cut(up: Callable[..., Lab]) -> None:
    trio = up(TRIO)
    trio.cut("b")
    trio.set_rate("r->b", 1e6)
    trio.set_rate("r->core", 2e6)
    assert trio.current_cut("b") == "both"
    trio.reconnect("b")
    trio.reconnect("b")
    assert trio.current_cut("b") == ""
    assert (trio.rate("r->b"), trio.rate("r->core")) == (1e6, 2e6)


@pytest.mark.slow
def test_what_is_not_there_cannot_be_cut(up: Callable[..., Lab]) -> None:
    trio = up(TRIO)
    with pytest.raises(
        UsageError, match=r"way of a cut: 'down', expected in, out, both\. Say it from the node's side\."
    ):
        trio.cut("a", "down")
    with pytest.raises(ClusterError, match=r"node.*'d'"):
        trio.cut("d")
    assert trio.current_cut("a") == ""


@pytest.mark.slow
def test_the_commands(up: Callable[..., Lab], lab_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    up(TRIO)
    assert run_command_line(["lab", "cut", "--lab", lab_name, "a", "--in", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"lab": lab_name, "node": "a", "cut": "in"}
    assert run_command_line(["lab", "cut", "--lab", lab_name, "a"]) == 0
    assert capsys.readouterr().out == "a: cut off\n"
    assert lab.find(lab_name).current_cut("a") == "both"
    assert run_command_line(["lab", "mend", "--lab", lab_name, "a"]) == 0
    assert capsys.readouterr().out == "a: connected\n"
    assert run_command_line(["lab", "mend", "--lab", lab_name, "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cut"] is None
