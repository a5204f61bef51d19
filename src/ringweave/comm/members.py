"""Who is in a group: each member's global rank and node, so that every error can name both."""

import ipaddress
import json
import math
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import Store

from ringweave import topology
from ringweave.comm import hearing
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError
from ringweave.topology import Node, cgroups, discovery, hosts
from ringweave.topology.discovery import Interface

TOKEN_BYTES = 16
_MAX_ENTRY_BYTES = 1 << 16
"""Of what a rank says of itself: names and ports of all its addresses."""

_LEAST_CORES = 1e-4
"""No kernel takes a smaller quota: Linux a millisecond of a second."""

_IP = (socket.AF_INET, socket.AF_INET6)

_SOMEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): only the route to it is looked up."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is."""

    node: str
    """Name of its node."""
    address: str
    """IP address at which the other ranks reach it."""
    more_addresses: tuple[str, ...] = ()
    """Those of its node's further NICs; on every node in the order of the NICs, each NIC in a network of its own."""
    rates: tuple[float, ...] = (1.0,)
    """Relative rate of the NIC of each address."""
    nics: tuple[str, ...] = ()
    """Names of the NICs of the addresses; empty where they are not known, or a cluster file tells all."""
    networks: tuple[str, ...] = ()
    """Of an offer, the IP network of each address: which of them all nodes share is settled when the group meets."""
    host: str = ""
    """What tells its host from others of the same name (`topology.hosts.host_id`); empty where that is not known."""
    cores: float = 0.0
    """Processor time by the second that a quota leaves the process; 0 where there is none."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it is reached, NIC by NIC."""
        return (self.address, *self.more_addresses)

    def only(self, indices: Sequence[int], rates: Sequence[float]) -> "Place":
        """The same process, reached at some of its addresses; the first stays the first."""
        first, *more = (self.addresses[index] for index in indices)
        nics, networks = (tuple(told[i] for i in indices) if told else () for told in (self.nics, self.networks))
        return Place(self.node, first, tuple(more), tuple(rates), nics, networks, self.host, self.cores)


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where a lane of a rank is called."""

    ports: tuple[int, ...]
    """TCP port at each of its addresses."""
    name: str
    """Unix socket without a file, for the ranks of its node."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group."""

    global_rank: int
    place: Place
    entrances: tuple[Entrance, ...]
    """For each lane."""

    def only(self, indices: Sequence[int], rates: Sequence[float]) -> "Member":
        """The same rank, called at some of its addresses."""
        entrances = tuple(Entrance(tuple(e.ports[i] for i in indices), e.name) for e in self.entrances)
        return Member(self.global_rank, self.place.only(indices, rates), entrances)


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a group in the order of their group ranks."""

    ranks: tuple[Member, ...]
    group_rank: int
    """This process's own place."""
    token: bytes
    """What a caller has to know to be let in: made by the first rank for this group alone."""

    @property
    def group_size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def own(self) -> Member:
        """This process."""
        return self.ranks[self.group_rank]

    @property
    def num_nodes(self) -> int:
        """How many nodes the members are on."""
        return len({member.place.node for member in self.ranks})

    @property
    def neighbours(self) -> frozenset[int]:
        """Group ranks of the other members on this process's node."""
        node = self.own.place.node
        return frozenset(r for r, m in enumerate(self.ranks) if m.place.node == node and r != self.group_rank)

    def name(self, group_rank: int) -> str:
        """`rank 3 (node b0)`."""
        member = self.ranks[group_rank]
        return f"rank {member.global_rank} (node {member.place.node})"

    def names(self, group_ranks: Sequence[int]) -> str:
        """`rank 3 (node b0) and rank 5 (node b1)`, cut after a few."""
        shown = [self.name(rank) for rank in group_ranks[:4]]
        if len(group_ranks) > len(shown):
            shown.append(f"{len(group_ranks) - len(shown)} more")
        return " and ".join(shown)


def own_place(environment: WorkerEnvironment, environ: Mapping[str, str]) -> Place:
    """The node that this process is on, its address, and what a quota leaves it of processors.

    With a cluster file it is found there: by `RINGWEAVE_NODE`, else the host name, else an interface address. Without
    one, `RINGWEAVE_NODE` or the host name name it (`topology.hosts.node_name`), and the addresses of all NICs that
    discovery calls equal are offered: which of them the group uses depends on the other nodes and what probing finds.

    Raises:
        PlacementError: This process fits no node of the cluster, or its node has no device for LOCAL_RANK.
        ClusterError: The cluster file is wrong.
    """
    siblings = environ.get("LOCAL_WORLD_SIZE", "")
    cores = cgroups.cores_of_one(int(siblings) if siblings.isdecimal() else 1)
    return replace(_own_place(environment, environ), cores=cores or 0.0)


def _own_place(environment: WorkerEnvironment, environ: Mapping[str, str]) -> Place:
    host_name = socket.gethostname()
    if environment.cluster_path is None:
        name = hosts.node_name(environment.node or host_name)
        return replace(_offered(name, _address(environ), environ, environment.probes), host=hosts.host_id())
    cluster = topology.load(environment.cluster_path)
    addresses = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family in _IP]
    node = topology.place_rank(cluster, node_name=environment.node, host_name=host_name, addresses=addresses)
    if environ.get("LOCAL_RANK", "").isdecimal():
        topology.device_of(node, int(environ["LOCAL_RANK"]))
    address = node.address if node.address in addresses else _address(environ)
    reached = _reached_by(node)
    if address not in reached or len(reached) == 1:
        return Place(node.name, address, host=hosts.host_id())
    first, *more = reached
    return Place(node.name, first, tuple(more), tuple(reached.values()), host=hosts.host_id())


def meet(
    store: Store,
    group_rank: int,
    global_ranks: Sequence[int],
    place: Place,
    entrances: Sequence[Entrance],
    timeout: timedelta,
) -> Members:
    """Tell the group where this process is and can be called, and learn the same of the others.

    Of what the places offer, the addresses in networks of which every node has one stay.

    Raises:
        PeerError: Some members did not come within `timeout`; the text names their ranks.
        PlacementError: Members on different hosts say that they are on the same node; the text names two of them.
    """
    keys = [f"member/{rank}" for rank in range(len(global_ranks))]
    entry = {"place": astuple(place), "entrances": [astuple(e) for e in entrances]}
    store.set(keys[group_rank], json.dumps({**entry, "token": secrets.token_hex(TOKEN_BYTES)}))
    try:
        store.wait(keys, timeout)
    except RuntimeError as cause:
        absent = [str(r) for r, key in zip(global_ranks, keys, strict=True) if not store.check([key])]
        raise PeerError(
            f"process group: rank {', '.join(absent) or 'unknown'} did not come within {timeout.total_seconds():g} s, "
            f"expected all of {len(global_ranks)} ranks. Look into the log of that rank. "
            f"[rank {global_ranks[group_rank]}]"
        ) from cause
    found = [read_entry(value, rank) for rank, value in zip(global_ranks, store.multi_get(keys), strict=True)]
    members = [member for member, _ in found]
    hosts.refuse_namesakes(
        hosts.Seat(global_rank=each.global_rank, node=each.place.node, host=each.place.host, address=each.place.address)
        for each in members
    )
    return Members(tuple(_in_shared_networks(members)), group_rank, found[0][1])


def read_entry(value: bytes, global_rank: int) -> tuple[Member, bytes]:
    """(a member, the token it drew) from what it put into the store.

    Raises:
        DisagreementError: That is not what a member of this ringweave puts there.
    """

    def take(entry: Any) -> tuple[Member, bytes]:
        node, address, more_addresses, rates, nics, networks, host, cores = entry["place"]
        entrances = tuple(Entrance(tuple(map(int, ports)), str(name)) for ports, name in entry["entrances"])
        more, own_nics, own_networks = (tuple(map(str, each)) for each in (more_addresses, nics, networks))
        relative = tuple(map(float, rates))
        place = Place(str(node), str(address), more, relative, own_nics, own_networks, str(host), _quota(cores))
        return Member(global_rank, place, entrances), bytes.fromhex(entry["token"])

    what, expected = "entry of a rank in the store", "where a rank of the same ringweave can be called"
    return hearing.read(value, what, take, expected=expected, most=_MAX_ENTRY_BYTES, where=f"rank {global_rank}")


def _quota(cores: float) -> float:
    if cores != 0 and not _LEAST_CORES <= cores < math.inf:
        raise ValueError(f"{cores} processors")
    return float(cores)


def _reached_by(node: Node) -> dict[str, float]:
    """Address -> rate of those NICs of the cluster file that this machine has, in the file's order."""
    interfaces = psutil.net_if_addrs()
    reached: dict[str, float] = {}
    for nic in node.nics:
        own = [found.address for found in interfaces.get(nic.name, []) if found.family == socket.AF_INET]
        reached.update(dict.fromkeys(own[:1], nic.rate_bytes_per_s))
    return reached


def _offered(node: str, address: str, environ: Mapping[str, str], probes: bool) -> Place:
    """The place of a process that no cluster file tells of, with its further NICs where probing is to look at them.

    Users who name interfaces for Gloo have named all that there are.
    """
    if not probes or _is_loopback(address):
        return Place(node, address)
    machine = discovery.observe_links()
    used = next((nic for nic in machine.interfaces if address in nic.addresses), None)
    if used is None:
        return Place(node, address)
    named = environ.get("GLOO_SOCKET_IFNAME")
    others = [nic for nic in machine.interfaces if nic.name in named.split(",")] if named else []
    offers = {used.name: _network_at(used, address)}
    for nic in others if named else discovery.equals(machine, used):
        first = next((each for each in nic.addresses if (":" in each) == (":" in address)), None)
        network = _network_at(nic, first) if first else ""
        if first and network and network not in offers.values():  # in one network, one NIC would carry both
            offers[nic.name] = network
    reached = {nic.name: nic for nic in machine.interfaces}
    more = [_address_in(reached[name], network) for name, network in offers.items() if name != used.name]
    return Place(node, address, tuple(more), (1.0,) * len(offers), tuple(offers), tuple(offers.values()))


def _network_at(nic: Interface, address: str) -> str:
    """The IP network that an address of a NIC is in; empty where that is not told."""
    found = (ipaddress.ip_interface(each) for each in nic.networks)
    return next((str(each.network) for each in found if str(each.ip) == address), "")


def _address_in(nic: Interface, network: str) -> str:
    return next(address for address in nic.addresses if _network_at(nic, address) == network)


def _in_shared_networks(found: Sequence[Member]) -> list[Member]:
    """The members with their first addresses, and those in networks in which every node has one of its own."""
    if not all(member.place.networks for member in found):
        return [member.only([0], [1.0]) if member.place.networks else member for member in found]
    shared = []
    for network in found[0].place.networks[1:]:
        places = [member.place for member in found]
        if all(network in place.networks[1:] for place in places):
            nodes = {place.addresses[place.networks.index(network)]: place.node for place in places}
            if len(nodes) == len({place.node for place in places}) == len(set(nodes.values())):
                shared.append(network)
    indices = [[0, *(member.place.networks.index(network) for network in shared)] for member in found]
    return [member.only(each, [1.0] * len(each)) for member, each in zip(found, indices, strict=True)]


def _address(environ: Mapping[str, str]) -> str:
    """The address at which the other ranks reach this process.

    That of the interface which GLOO_SOCKET_IFNAME names, where users have set it; else the one that packets to the
    master leave from. Many hosts resolve their own name to a loopback address, which is nobody else's: unless the
    master is named as loopback, the address towards the default route is taken instead.
    """
    interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    named = [found.address for found in psutil.net_if_addrs().get(interface, []) if found.family in _IP]
    if named:
        return named[0]
    master = environ.get("MASTER_ADDR") or socket.gethostname()
    address = _source_address(master)
    if address is not None and not _is_loopback(address):
        return address
    if master == "localhost" or _is_loopback(master):
        return address or "127.0.0.1"
    outward = _source_address(_SOMEWHERE)
    return outward or address or "127.0.0.1"


def _source_address(destination: str) -> str | None:
    """The address that packets to `destination` leave from; None if it is unknown or out of reach. Nothing is sent."""
    try:
        family, kind, _, _, peer = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(peer)
            return probe.getsockname()[0]
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
