"""Gloo's listener takes no caller once the ranks of its group are connected."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringweave.testing.ranks import run_ranks


def call_listeners() -> None:
    """Call what listens in 127.32.0.0/11 for this rank, and sum something afterwards."""
    dist.barrier()
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    inodes = {entry.stat().st_ino for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    found = [row[1].split(":") for row in rows if row[3] == "0A" and int(row[9]) in inodes]
    hosts = [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found]
    own = [(host, port) for host, port in hosts if host.startswith("127.") and 32 <= int(host.split(".")[1]) < 64]
    assert own, hosts
    for address in own:
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3


@pytest.mark.distributed
def test_callers_are_dropped_and_collectives_go_on() -> None:
    run_ranks(call_listeners, 2, environ={"GLOO_SOCKET_IFNAME": "lo"})
