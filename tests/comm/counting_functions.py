"""Ranks that count the messages which really go out, whatever the group's own counters say."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ringweave.comm.transport.sockets import SocketTransport


@contextlib.contextmanager
def sends() -> Iterator[list[int]]:
    """The peers of all messages that really go out peer to peer meanwhile."""
    peers: list[int] = []
    send = SocketTransport.send

    def noting(self: SocketTransport, piece: Any, peer: int, tag: int, stage: int) -> Any:
        peers.append(peer)
        return send(self, piece, peer, tag, stage)

    SocketTransport.send = noting
    try:
        yield peers
    finally:
        SocketTransport.send = send


def count_messages(num_elements: int, schedule: str) -> tuple[int, dict[str, dict[str, int]]]:
    """(messages that really went out peer to peer, what the group's own counters say) for one allreduce."""
    dist.all_reduce(torch.ones(num_elements))  # agreement and connections
    before = dist.group.WORLD.collectives_by_schedule().get(schedule, {"messages": 0})["messages"]
    with sends() as peers:
        dist.all_reduce(torch.ones(num_elements))
    counters = dist.group.WORLD.collectives_by_schedule()
    counters["sent_in_this_one"] = {"messages": counters.get(schedule, {"messages": 0})["messages"] - before}
    return len(peers), counters


def count_between_nodes(num_elements: int, node_of: list[str]) -> int:
    """How many messages this rank sends to other nodes in one allreduce, whose sums are checked."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(num_elements))
    with sends() as peers:
        dist.all_reduce(reduced := torch.full((num_elements,), float(rank)))
    assert (reduced == size * (size - 1) / 2).all()
    return sum(node_of[peer] != node_of[rank] for peer in peers)
