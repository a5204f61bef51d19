"""Clusters that benchmarks run on: a lab, or this machine as it is."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ringweave.lab import Lab
from ringweave.lab.lab_layout import address_networks
from ringweave.topology import Cluster


class BenchCluster(Protocol):
    """Place where ranks run, as the benchmark sees it."""

    @property
    def cluster(self) -> Cluster:
        """The cluster file's nodes, switches and links."""
        ...

    @property
    def is_limited(self) -> bool:
        """True if nodes are separate and links have limits."""
        ...

    @property
    def addresses(self) -> Mapping[str, Sequence[str]]:
        """Node -> address of each NIC."""
        ...

    @property
    def networks(self) -> Sequence[str]:
        """Networks that together hold all addresses, such as 10.99.0.0/16."""
        ...

    @property
    def first_networks(self) -> Sequence[str]:
        """Networks of the nodes' first NICs, which every node has."""
        ...

    def interfaces(self, node: str) -> list[str]:
        """Names of the node's interfaces, in the order of its NICs."""
        ...

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs a command in a node, and becomes it."""
        ...

    def bytes_on_links(self) -> dict[str, int]:
        """Return link -> bytes sent on it so far, headers included; empty where nothing counts them."""
        ...


class LabBenchCluster:
    """Nodes of a lab."""

    is_limited = True

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.cluster = lab.cluster
        self.addresses: Mapping[str, Sequence[str]] = lab.addresses
        self.networks = [network for network, _ in address_networks(lab.addresses)]
        self.first_networks = [network for network, nic_index in address_networks(lab.addresses) if nic_index == 0]

    def interfaces(self, node: str) -> list[str]:
        return self._lab.interfaces(node)

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """Enter the node, without a CPU quota, as the benchmark is about networks."""
        return self._lab.command(node, argv)

    def bytes_on_links(self) -> dict[str, int]:
        """Return the kernel's counts where each link is limited."""
        return self._lab.bytes_on_links()


class LocalBenchCluster:
    """One node: this machine as it is."""

    is_limited = False

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.addresses: Mapping[str, Sequence[str]] = {node.name: ("127.0.0.1",) for node in cluster.nodes}
        self.networks = self.first_networks = ["127.0.0.0/8"]

    def interfaces(self, node: str) -> list[str]:
        """Return the loopback interface."""
        return ["lo"]

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """Return the same command line."""
        return list(argv)

    def bytes_on_links(self) -> dict[str, int]:
        """Return nothing: there is no link."""
        return {}
