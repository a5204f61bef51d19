"""`ringweave join` in a lab with real sshd: a node that ssh does not reach, and one behind address translation."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ringweave_bench import ssh_lab
from ringweave_bench.ssh_lab import SshLab
from ringweave_bench.ssh_node import SshNode
from tests import demands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RINGWEAVE = [sys.executable, "-P", "-m", "ringweave"]
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


def start_run(node: SshNode, hosts: str) -> tuple["subprocess.Popen[str]", str]:
    """Start a run on a node; return its command and the line for the joining host."""
    node.write("project/train.py", REDUCE)
    words = ["run", "--name", "train", "--hosts", hosts, "train.py"]
    command = node.popen(["sh", "-c", 'cd project && exec "$@"', "sh", *RINGWEAVE, *words], **PIPES)
    assert command.stderr is not None
    seen = ""
    while not (found := re.search(r"type on host join-1, .*: ringweave join (\S+)\.", seen)):
        text = command.stderr.readline()
        assert text, f"the command has ended: {seen}"
        seen += text
    return command, found[1]


def run_processes(node: SshNode) -> list[str]:
    return [each.command for each in node.processes() if "ringweave" in each.command]


def wait_until_idle(node: SshNode) -> None:
    deadline_s = time.monotonic() + 60.0
    while found := run_processes(node):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)


def test_a_node_that_ssh_does_not_reach_trains(trio: SshLab) -> None:
    first, _, third = trio.nodes
    trio.block_port("n0", "n2", 22)
    trio.block_port("n1", "n2", 22)
    command, line = start_run(first, "n0:1,n1:1,join:1")
    joined = third.run([*RINGWEAVE, "join", line], check=False)
    out, errors = command.communicate(timeout=300)
    assert (command.returncode, joined.returncode) == (0, 0), errors + joined.stderr
    assert sorted(out.splitlines()) == sorted(f"[{rank}] sum {n} 6.0" for rank in range(3) for n in (10, 1_000_000))
    assert joined.stdout.splitlines() == ["[2] sum 10 6.0", "[2] sum 1000000 6.0"]
    for node in trio.nodes:
        wait_until_idle(node)
    assert not [path for path in third.files() if "/state/ringweave/hosts-n2/" in path]


def test_a_node_behind_address_translation_is_told_so(trio: SshLab) -> None:
    first, _, third = trio.nodes
    trio.put_behind("n2", "n1")
    command, line = start_run(first, "n0:1,join:1")
    joined = third.run([*RINGWEAVE, "join", line], check=False)
    assert joined.returncode == 2
    assert f"connection to the joining host: 'timed out', expected a listener at {third.address} port" in joined.stderr
    first.run([*RINGWEAVE, "stop", "train"])
    command.communicate(timeout=120)
    assert command.returncode == 1
