"""Groups of ranks that are threads, and findings, which the tests of probing share."""

import threading
from collections.abc import Callable
from typing import Any

from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.probing.network_measurement import NetworkMeasurement

TOKEN = bytes(16)
FOUND = NetworkMeasurement(
    time=1000.0,
    wall_s=1.5,
    num_batches=2,
    cluster_text="name: x\nnodes:\n- {name: n0, address: 127.0.0.1, nic: 1Gbit/s, devices: 1}\n"
    "- {name: n1, address: 127.0.0.2, nic: 1Gbit/s, devices: 1}\n",
    links=(),
    pairs=(),
    slow=None,
)


def at_once(*calls_: Callable[[], Any]) -> list[Any]:
    """What each returns, or the exception that it raised; all run at the same time."""
    got: list[Any] = [None] * len(calls_)

    def run(index: int) -> None:
        try:
            got[index] = calls_[index]()
        except Exception as error:
            got[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls_))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return got


def group(num_nodes: int, ranks_a_node: int = 1) -> list[GroupInfo]:
    """The members of a group as each rank sees them; the node of each has a loopback address of its own."""
    places = [RankLocation(f"n{node}", f"127.0.0.{node + 1}") for node in range(num_nodes) for _ in range(ranks_a_node)]
    ranks = tuple(RankInfo(rank, place, ()) for rank, place in enumerate(places))
    return [GroupInfo(ranks, rank, TOKEN) for rank in range(len(ranks))]
