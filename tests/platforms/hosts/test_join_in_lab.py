"""`ringweave join` in a lab with real sshd: a node that ssh does not reach, and one behind address translation."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ringweave_bench import ssh_lab
from ringweave_bench.ssh_lab import SshLab
from ringweave_bench.ssh_node import SshNode
from tests import demands
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RINGWEAVE = [sys.executable, "-P", "-m", "ringweave"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Nodes share few processors, on which further threads would only spin."""
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group()
for size in (10, 1_000_000):
    value = torch.full((size,), float(dist.get_rank() + 1))
    dist.all_reduce(value)
    print("sum", size, value[-1].item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def trio(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(num_nodes=3) as found:
        yield found


def start_run(
    node: SshNode, hosts: str, *options: str, script: str = REDUCE, joining: int = 1
) -> tuple["subprocess.Popen[str]", list[str]]:
    """Start a run on a node; return its command and the lines for the joining hosts."""
    node.write("project/train.py", script)
    words = ["run", "--name", "train", "--hosts", hosts, *options, "train.py"]
    command = node.popen(["sh", "-c", 'cd project && exec "$@"', "sh", *RINGWEAVE, *words], **PIPES, environ=ONE_THREAD)
    assert command.stderr is not None
    seen = ""
    while len(found := re.findall(r"type on host join-\d, .*: ringweave join (\S+)\.", seen)) < joining:
        text = command.stderr.readline()
        assert text, f"the command has ended: {seen}"
        seen += text
    return command, found


def sums(out: str) -> list[str]:
    """Lines of the script. torch warns that nobody resolves 127.0.0.1 there; the first rank measures the network."""
    return [line for line in out.splitlines() if "] sum " in line]


def run_processes(node: SshNode) -> list[str]:
    return [each.command for each in node.processes() if "ringweave" in each.command]


def wait_until_idle(node: SshNode) -> None:
    wait_until(lambda: not run_processes(node), lambda: run_processes(node))


@pytest.mark.thorough
def test_a_node_that_ssh_does_not_reach_trains(trio: SshLab) -> None:
    first, _, third = trio.nodes
    trio.block_port("n0", "n2", 22)
    trio.block_port("n1", "n2", 22)
    command, (line,) = start_run(first, "n0:1,n1:1,join:1")
    joined = third.run([*RINGWEAVE, "join", line], check=False)
    out, errors = command.communicate(timeout=300)
    assert (command.returncode, joined.returncode) == (0, 0), errors + joined.stderr
    assert sorted(sums(out)) == sorted(f"[{rank}] sum {n} 6.0" for rank in range(3) for n in (10, 1_000_000))
    assert sums(joined.stdout) == ["[2] sum 10 6.0", "[2] sum 1000000 6.0"]
    for node in trio.nodes:
        wait_until_idle(node)
    assert not [path for path in third.files() if "/state/ringweave/hosts-n2/" in path]


def test_a_node_behind_address_translation_trains(trio: SshLab) -> None:
    first, _, third = trio.nodes
    trio.put_behind("n2", "n1")
    command, (line,) = start_run(first, "n0:1,join:1", "--run-dir", "out")
    joined = third.run([*RINGWEAVE, "join", line], check=False)
    out, errors = command.communicate(timeout=300)
    assert (command.returncode, joined.returncode) == (0, 0), errors + joined.stderr
    assert sorted(sums(out)) == sorted(f"[{rank}] sum {n} 3.0" for rank in range(2) for n in (10, 1_000_000))
    assert sums(joined.stdout) == ["[1] sum 10 3.0", "[1] sum 1000000 3.0"]
    planned = first.run([*RINGWEAVE, "plan", "--run", "project/out"]).stdout
    found = re.search(r"links .* measured by probing: .*join-1->core by relay ([0-9.]+)([MG])bit/s", planned)
    assert found is not None, planned
    assert 0.1 < float(found[1]) * {"M": 1e-3, "G": 1.0}[found[2]] <= 1.1  # the links of the lab have 1 Gbit/s
    told = "ringweave: joined train as host join-1, by relays: it calls the others, which cannot call it.\n"
    assert told in joined.stderr
    for node in trio.nodes:
        wait_until_idle(node)


@pytest.mark.thorough
def test_a_node_that_cannot_even_call_out_is_told_so(trio: SshLab) -> None:
    first, second, third = trio.nodes
    trio.put_behind("n2", "n1")
    command, (line,) = start_run(first, "n0:1,n1:1,join:1")
    second.nft(
        "add table ip lab_block",
        "add chain ip lab_block input { type filter hook input priority 0; }",
        f"add rule ip lab_block input ip saddr {third.address} tcp flags syn drop",
    )
    joined = third.run([*RINGWEAVE, "join", line], check=False)
    assert joined.returncode == 2
    assert f"connection to the joining host: 'timed out', expected a listener at {third.address} port" in joined.stderr
    assert f"connection from here to host n1: 'timed out', expected a listener at {second.address}" in joined.stderr
    status = first.run([*RINGWEAVE, "status", "train"]).stdout
    assert "waits for host join-1 to join" in status  # its line is still good
    first.run([*RINGWEAVE, "stop", "train"])
    command.communicate(timeout=120)
    assert command.returncode == 1


ELASTIC = """
import time
import torch
import ringweave
from torch import nn

torch.manual_seed(1)
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4000, 64), torch.randn(4000, 64))
loader = torch.utils.data.DataLoader(data, batch_size=20)
model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
for epoch in range(1000):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
"""
"""Trains until it is stopped."""
HIGH_ADDRESSES = """
name: ssh
nodes:
  - {name: n0, nic: 1Gbit/s, devices: 1, address: 192.168.77.1}
  - {name: n1, nic: 1Gbit/s, devices: 1, address: 192.168.77.2}
  - {name: n2, nic: 1Gbit/s, devices: 1, address: 192.168.77.3}
  - {name: n3, nic: 1Gbit/s, devices: 1, address: 192.168.77.4}
"""
"""Greater than relayed ones, so that Gloo calls the joined hosts; smaller ones are called by them."""


@pytest.fixture
def four(request: pytest.FixtureRequest) -> Iterator[SshLab]:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(cluster_text=HIGH_ADDRESSES) as found:
        yield found


@pytest.mark.thorough
def test_two_nodes_behind_address_translation_train_with_each_other(four: SshLab) -> None:
    first, _, third, fourth = four.nodes
    four.put_behind("n2", "n1")
    four.put_behind("n3", "n1")
    command, lines = start_run(first, "n0:1,join:1,join:1", joining=2)
    others = [
        node.popen([*RINGWEAVE, "join", line], **PIPES) for node, line in zip((third, fourth), lines, strict=True)
    ]
    out, errors = command.communicate(timeout=300)
    ends = [other.communicate(timeout=120) for other in others]
    assert [command.returncode, *(other.returncode for other in others)] == [0, 0, 0], (errors, ends)
    assert sorted(sums(out)) == sorted(f"[{rank}] sum {n} 6.0" for rank in range(3) for n in (10, 1_000_000))
    for node in four.nodes:
        wait_until_idle(node)


@pytest.mark.thorough
def test_a_node_behind_address_translation_joins_an_elastic_run_that_trains(four: SshLab) -> None:
    first, second, third, _ = four.nodes
    four.put_behind("n2", "n3")
    words = ("--elastic", "1:3", "--run-dir", "out")
    command, (line,) = start_run(first, "n0:1,n1:1,join:1", *words, script=ELASTIC)
    joined = third.popen([*RINGWEAVE, "join", line], **PIPES)
    wait_for_members(first, 3)
    for node in (second, third):  # another one of the first two holds the store of the next generation
        before = num_generations(first)
        kill_workers(node)
        wait_until(lambda before=before: num_generations(first) > before + 1)
        wait_for_members(first, 3)
    first.run([*RINGWEAVE, "stop", "train"])
    _, errors = command.communicate(timeout=120)
    _, told = joined.communicate(timeout=120)
    assert "by relays" in told, told + errors
    for node in four.nodes:
        wait_until_idle(node)


def generations(node: SshNode) -> list[dict[str, Any]]:
    """Events of generations that began, as the coordinators of a node have written them."""
    found = []
    for path in node.files():
        if path.endswith("/events.jsonl") and "/state/ringweave/hosts-" in path:
            text = node.run(["cat", path], check=False).stdout
            found += [json.loads(line) for line in text.splitlines() if '"generation_begun"' in line]
    return found


def num_generations(node: SshNode) -> int:
    return len(generations(node))


def wait_for_members(node: SshNode, count: int) -> None:
    wait_until(
        lambda: [len(each["members"]) for each in generations(node)[-1:]] == [count], lambda: generations(node)[-1:]
    )


def kill_workers(node: SshNode) -> None:
    """Kill the training processes of a node."""
    killed = [each for each in node.processes() if "train.py" in each.command and "launcher" in each.command]
    assert killed, [each.command for each in node.processes()]
    for each in killed:
        os.kill(each.pid, signal.SIGKILL)
