"""Hosts that have IPv6 addresses alone: checked, run on and joined."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringweave import lab
from tests import demands
from tests.platforms.hosts.conftest import FakeHosts, make_hosts_in_namespace
from tests.platforms.hosts.test_join import start_run

NAMES = ("fd00::a", "fd00::b")
REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("ringweave")
for size in (10, 1_000_000):
    value = torch.full((size,), float(dist.get_rank() + 1))
    dist.all_reduce(value)
    print("sum", size, value[-1].item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def ipv6_hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeHosts]:
    """Two hosts in a network namespace whose loopback interface has their addresses, and no IPv4 beside 127.0.0.1."""
    demands.need(request.config, demands.LAB, lab.lab_problems())
    networks = [f"{address}/128" for address in (*NAMES, "fd00::c")]
    yield from make_hosts_in_namespace(tmp_path, {address: address for address in NAMES}, networks)


@pytest.mark.thorough  # daily: addresses of the launcher, of rpc and of cluster files
def test_hosts_with_ipv6_addresses_are_checked_run_on_and_joined(ipv6_hosts: FakeHosts) -> None:
    ipv6_hosts.write_script(REDUCE)
    named = ",".join(f"[{name}]:1" for name in NAMES)
    doctor = ipv6_hosts.run("doctor", "--hosts", named)
    assert doctor.stdout.endswith("A run on these hosts works.\n"), doctor.stdout + doctor.stderr
    command, (line,) = start_run(ipv6_hosts, "--hosts", f"{named},join:1", "--name", "train", "train.py")
    assert line.startswith("[fd00::a]:")
    joined = ipv6_hosts.run("join", line, "--address", "fd00::c", host="j")
    out, errors = command.communicate(timeout=150)
    assert (command.returncode, joined.returncode) == (0, 0), errors + joined.stderr
    assert "as host join-1, at fd00::c" in joined.stderr
    sums = [line for line in out.splitlines() if "] sum " in line]
    assert sorted(sums) == sorted(f"[{rank}] sum {size} 6.0" for rank in range(3) for size in (10, 1_000_000))
