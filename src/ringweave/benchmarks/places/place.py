"""Where ranks are started, in one form for a lab and for this machine as it is."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ringweave.lab import Lab
from ringweave.lab.addresses import networks
from ringweave.topology import Cluster


class Place(Protocol):
    """What the benchmark needs of the place where ranks run."""

    @property
    def cluster(self) -> Cluster:
        """The machines."""
        ...

    @property
    def is_limited(self) -> bool:
        """Nodes are apart, and links have limits."""
        ...

    @property
    def addresses(self) -> Mapping[str, Sequence[str]]:
        """Node -> address of each NIC."""
        ...

    @property
    def networks(self) -> Sequence[str]:
        """The networks that hold all addresses, as in 10.99.0.0/16."""
        ...

    @property
    def first_networks(self) -> Sequence[str]:
        """Those of the nodes' first NICs, which every node has."""
        ...

    def interfaces(self, node: str) -> list[str]:
        """Names of the node's interfaces, in the order of its NICs."""
        ...

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs another one in a node, and becomes it."""
        ...

    def bytes_on_links(self) -> dict[str, int]:
        """Link -> bytes sent on it so far, headers included; empty where nobody counts."""
        ...


class InLab:
    """The nodes of a lab."""

    is_limited = True

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.cluster = lab.cluster
        self.addresses: Mapping[str, Sequence[str]] = lab.addresses
        self.networks = [network for network, _ in networks(lab.addresses)]
        self.first_networks = [network for network, nic_index in networks(lab.addresses) if nic_index == 0]

    def interfaces(self, node: str) -> list[str]:
        """As the lab named them."""
        return self._lab.interfaces(node)

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """Enters the node; no CPU quota, as the benchmark is about networks."""
        return self._lab.command(node, argv)

    def bytes_on_links(self) -> dict[str, int]:
        """Counted by the kernel where each link is limited."""
        return self._lab.bytes_on_links()


class OnThisMachine:
    """One node, this machine as it is."""

    is_limited = False

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.addresses: Mapping[str, Sequence[str]] = {node.name: ("127.0.0.1",) for node in cluster.nodes}
        self.networks = self.first_networks = ["127.0.0.0/8"]

    def interfaces(self, node: str) -> list[str]:
        """The loopback interface."""
        return ["lo"]

    def command(self, node: str, argv: Sequence[str]) -> list[str]:
        """The same command line."""
        return list(argv)

    def bytes_on_links(self) -> dict[str, int]:
        """Nothing: there is no link."""
        return {}
