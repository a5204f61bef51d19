"""Who is in a group: each member's global rank and node, so that every error can name both."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psutil
from torch.distributed import Store

from ringweave import topology
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a group in the order of their group ranks."""

    global_ranks: tuple[int, ...]
    """Global rank of each member."""
    nodes: tuple[str, ...]
    """Name of each member's node."""
    group_rank: int
    """This process's own place."""

    @property
    def group_size(self) -> int:
        """Number of members."""
        return len(self.global_ranks)

    def name(self, group_rank: int) -> str:
        """`rank 3 (node b0)`."""
        return f"rank {self.global_ranks[group_rank]} (node {self.nodes[group_rank]})"

    def names(self, group_ranks: Sequence[int]) -> str:
        """`rank 3 (node b0) and rank 5 (node b1)`, cut after a few."""
        shown = [self.name(rank) for rank in group_ranks[:4]]
        if len(group_ranks) > len(shown):
            shown.append(f"{len(group_ranks) - len(shown)} more")
        return " and ".join(shown)


def own_node(environment: WorkerEnvironment, environ: Mapping[str, str]) -> str:
    """Name of the node that this process is on.

    With a cluster file it is found there: by `RINGWEAVE_NODE`, else the host name, else an interface address. Without
    one, `RINGWEAVE_NODE` or the host name are taken as they are.

    Raises:
        PlacementError: This process fits no node of the cluster, or its node has no device for LOCAL_RANK.
        ClusterError: The cluster file is wrong.
    """
    host_name = socket.gethostname()
    if environment.cluster_path is None:
        return environment.node or host_name
    cluster = topology.load(environment.cluster_path)
    addresses = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family in _IP]
    node = topology.place_rank(cluster, node_name=environment.node, host_name=host_name, addresses=addresses)
    if environ.get("LOCAL_RANK", "").isdecimal():
        topology.device_of(node, int(environ["LOCAL_RANK"]))
    return node.name


def meet(store: Store, group_rank: int, global_ranks: tuple[int, ...], node: str, timeout: timedelta) -> Members:
    """Tell the group where this process is, and learn where the others are.

    Raises:
        PeerError: Some members did not come within `timeout`; the text names their ranks.
    """
    keys = [f"member/{rank}" for rank in range(len(global_ranks))]
    store.set(keys[group_rank], json.dumps(node))
    try:
        store.wait(keys, timeout)
    except RuntimeError as cause:
        absent = [str(r) for r, key in zip(global_ranks, keys, strict=True) if not store.check([key])]
        raise PeerError(
            f"process group: rank {', '.join(absent) or 'unknown'} did not come within {timeout.total_seconds():g} s, "
            f"expected all of {len(global_ranks)} ranks. Look into the log of that rank. "
            f"[rank {global_ranks[group_rank]}]"
        ) from cause
    nodes = tuple(json.loads(value) for value in store.multi_get(keys))
    return Members(global_ranks, nodes, group_rank)


_IP = (socket.AF_INET, socket.AF_INET6)
