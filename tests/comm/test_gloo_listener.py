"""Listeners of Gloo: no caller once the ranks of a group are connected, and none of another program in their place."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from ringweave import relayed_address
from ringweave.comm import gloo
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.transport.encryption import LinkEncryption
from ringweave.rpc import CertificateAuthority
from ringweave.testing.ranks import run_ranks

_LIMIT = timedelta(seconds=60)


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


def test_all_ranks_listen_anew_where_a_program_of_another_node_has_a_port_at_all_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority, store = CertificateAuthority("job"), HashStore()
    members = [LinkEncryption(authority.issue("worker", f"{rank}.0")) for rank in range(2)]
    ranks = tuple(RankInfo(r, RankLocation(f"n{r}", "127.0.0.1"), (), m.fingerprint) for r, m in enumerate(members))
    listen, find = gloo._listen_on_loopback, relayed_address.find_listeners
    foreign, address = socket.create_server(("", 0)), "127.32.0.9"
    port = foreign.getsockname()[1]
    on_node = threading.local()

    def listen_there() -> tuple[str, object]:
        if getattr(on_node, "address", None) != address:
            return listen()
        on_node.address = ""
        return address, None

    def find_there(wanted: str) -> set[int] | frozenset[int]:
        return on_node.ports if wanted == address else find(wanted)

    monkeypatch.setattr(gloo, "_listen_on_loopback", listen_there)
    monkeypatch.setattr(relayed_address, "find_listeners", find_there)

    def reduce(rank: int) -> list[float]:
        # On the node of rank 0 the port is free, and its listener there; on this machine another program has it.
        on_node.address, on_node.ports = (address, {port}) if rank == 0 else ("", set())
        made, total = gloo.make_gloo(store, GroupInfo(ranks, rank, b"", members[rank]), _LIMIT), torch.ones(3)
        made.allreduce([total]).wait()
        return total.tolist()

    with foreign, ThreadPoolExecutor(2) as threads:
        assert list(threads.map(reduce, range(2))) == [[2.0] * 3] * 2
        foreign.setblocking(False)
        with pytest.raises(BlockingIOError):
            foreign.accept()
