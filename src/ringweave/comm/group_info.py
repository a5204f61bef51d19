"""Group info: the global rank, node and addresses of every member, so that every error can name rank and node."""

import ipaddress
import json
import math
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Store

from ringweave import __version__, topology
from ringweave.comm import peer_data
from ringweave.environment import ENCRYPT, WorkerEnvironment, is_same_minor
from ringweave.errors import DisagreementError, PeerError, explain
from ringweave.relayed_address import is_relayed
from ringweave.topology import cgroups, placement

if TYPE_CHECKING:
    from ringweave.comm.transport.encryption import LinkEncryption
    from ringweave.topology import Node
    from ringweave.topology.discovery import NetworkInterface

GENERATION_GROUP_PREFIX, REDUCE_GROUP_PREFIX = "generation ", "reduce "
"""Name prefixes of the groups that an elastic job makes for each generation (`comm/generation_group.py`)."""
TOKEN_BYTES = 16
PROTOCOL = 1
"""Number of all that ranks of a group say to each other, which grows with each change: entries, greetings, headers,
frames, plans, decisions (docs/reference/protocols.md)."""
_MAX_RANK_INFO_BYTES = 1 << 16
"""Limit on the description of a rank: names and ports of all its addresses."""

_MIN_CORES = 1e-4
"""Kernels take no smaller quota: Linux a millisecond per second."""

_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)

_UNUSED_ADDRESS = "192.0.2.1"
"""Address that no host has (RFC 5737): only the route to it is looked up."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Location of a process."""

    node: str
    address: str
    """IP address at which other ranks reach it."""
    more_addresses: tuple[str, ...] = ()
    """Addresses of its node's further NICs, in the same NIC order on every node, each NIC in its own network."""
    rates: tuple[float, ...] = (1.0,)
    nics: tuple[str, ...] = ()
    """Names of the NICs of the addresses; empty if unknown, or if a cluster file describes them."""
    networks: tuple[str, ...] = ()
    """IP network of each offered address; the group uses the networks that all its nodes share."""
    host: str = ""
    """Identifies its host among hosts of the same name (`topology.hosts.host_id`); empty if unknown."""
    cores: float = 0.0
    """Processors that a quota leaves the process; 0 without a quota."""
    gpus: tuple[str, ...] = ()
    """GPUs that the process sees, by the name that CUDA_VISIBLE_DEVICES gives them, or by number."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self.address, *self.more_addresses)

    def at_addresses(self, indices: Sequence[int], rates: Sequence[float]) -> "RankLocation":
        """Return the same process with some of its addresses; the first stays the first."""
        first, *more = (self.addresses[index] for index in indices)
        nics, networks = (tuple(told[i] for i in indices) if told else () for told in (self.nics, self.networks))
        kept = {"host": self.host, "cores": self.cores, "gpus": self.gpus}
        return RankLocation(self.node, first, tuple(more), tuple(rates), nics, networks, **kept)


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """Address of one channel of a rank."""

    ports: tuple[int, ...]
    name: str
    """Unix socket without a file, for the ranks of its node."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of a group: global rank, location and endpoints."""

    global_rank: int
    location: RankLocation
    endpoints: tuple[RankEndpoint, ...]
    """One for each channel."""
    fingerprint: str = ""
    """SHA-256 of its certificate; empty if the run is not encrypted."""

    def at_addresses(self, indices: Sequence[int], rates: Sequence[float]) -> "RankInfo":
        """Return the same rank with some of its addresses."""
        entrances = tuple(RankEndpoint(tuple(e.ports[i] for i in indices), e.name) for e in self.endpoints)
        return replace(self, location=self.location.at_addresses(indices, rates), endpoints=entrances)


MAX_STREAMS = 4
"""Connections between two ranks by one NIC, at most."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The ranks of a group, in the order of their group ranks."""

    ranks: tuple[RankInfo, ...]
    group_rank: int
    """Group rank of this process."""
    token: bytes
    """Secret that a peer must present to connect; the first rank draws it for this group alone."""
    encryption: "LinkEncryption | None" = None
    """TLS of connections between nodes; None: they are plain."""
    streams: tuple[int, ...] = ()
    """Connections that this rank opens by each NIC to each rank, where it opens them; empty: one."""

    def num_streams_to(self, peer: int) -> int:
        return self.streams[peer] if self.streams else 1

    @property
    def group_size(self) -> int:
        return len(self.ranks)

    @property
    def own_info(self) -> RankInfo:
        return self.ranks[self.group_rank]

    @property
    def num_nodes(self) -> int:
        return len({member.location.node for member in self.ranks})

    @property
    def same_node_ranks(self) -> frozenset[int]:
        node = self.own_info.location.node
        return frozenset(r for r, m in enumerate(self.ranks) if m.location.node == node and r != self.group_rank)

    def calls(self, caller: int, callee: int) -> bool:
        """Return True if `caller` opens the connections between two ranks, and `callee` accepts them.

        A rank whose host others cannot connect to calls; else the lower rank does.
        """
        caller_is_relayed, callee_is_relayed = (is_relayed(self.ranks[e].location.address) for e in (caller, callee))
        return caller < callee if caller_is_relayed == callee_is_relayed else caller_is_relayed

    def rank_text(self, group_rank: int) -> str:
        member = self.ranks[group_rank]
        return f"rank {member.global_rank} (node {member.location.node})"

    def ranks_text(self, group_ranks: Sequence[int]) -> str:
        """Return `rank 3 (node b0) and rank 5 (node b1)`, cut after a few."""
        shown = [self.rank_text(rank) for rank in group_ranks[:4]]
        if len(group_ranks) > len(shown):
            shown.append(f"{len(group_ranks) - len(shown)} more")
        return " and ".join(shown)


def locate_process(environment: WorkerEnvironment, environ: Mapping[str, str]) -> RankLocation:
    """Return this process's node, addresses and CPU quota.

    With a cluster file the node is found there: by `RINGWEAVE_NODE`, else the host name, else an interface address.
    Without one, `RINGWEAVE_NODE` or the host name names it (`topology.hosts`), and the addresses of all NICs that
    discovery calls equal are offered: the group selects among them by the other nodes and the probing results.

    Raises:
        PlacementError: This process fits no node of the cluster, or its node has no device for LOCAL_RANK.
        ClusterError: The cluster file is wrong.
    """
    siblings = environ.get("LOCAL_WORLD_SIZE", "")
    cores = cgroups.cores_per_process(int(siblings) if siblings.isdecimal() else 1)
    return replace(_locate_process(environment, environ), cores=cores or 0.0, gpus=_visible_gpus(environ))


def _visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    count = torch.cuda.device_count()
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(names[:count]) if len(names) >= count else tuple(map(str, range(count)))


def _locate_process(environment: WorkerEnvironment, environ: Mapping[str, str]) -> RankLocation:
    host_name = socket.gethostname()
    if environment.cluster_path is None:
        name = placement.node_name_of_host(environment.node or host_name)
        return replace(_offer_nics(name, _own_address(environ), environ, environment.probes), host=placement.host_id())
    import psutil  # late, as discovery is: a group on this machine alone needs neither

    cluster = topology.load(environment.cluster_path)
    addresses = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family in _IP_FAMILIES]
    node = topology.place_rank(cluster, node_name=environment.node, host_name=host_name, addresses=addresses)
    if environ.get("LOCAL_RANK", "").isdecimal():
        topology.device_of_local_rank(node, int(environ["LOCAL_RANK"]))
    given = node.address or ""
    address = given if given in addresses or is_relayed(given) else _own_address(environ)
    reached = _addresses_of_nics(node)
    if address not in reached or len(reached) == 1:
        return RankLocation(node.name, address, host=placement.host_id())
    first, *more = reached
    return RankLocation(node.name, first, tuple(more), tuple(reached.values()), host=placement.host_id())


def exchange_group_info(
    store: Store,
    group_rank: int,
    global_ranks: Sequence[int],
    location: RankLocation,
    endpoints: Sequence[RankEndpoint],
    timeout: timedelta,
    encryption: "LinkEncryption | None" = None,
) -> GroupInfo:
    """Publish this process's location and endpoints to the group, and return those of all ranks.

    Only addresses in networks that every node shares are kept.

    Raises:
        PeerError: Some members did not come within `timeout`; the text names their ranks.
        PlacementError: Members on different hosts claim the same node; the text names two of them.
        DisagreementError: Some members encrypt, and others do not; or a member has another protocol or torch.
    """
    keys = [f"member/{rank}" for rank in range(len(global_ranks))]
    entry: dict[str, Any] = {"location": astuple(location), "endpoints": [astuple(e) for e in endpoints]}
    entry["fingerprint"] = encryption.fingerprint if encryption is not None else ""
    entry["versions"] = own_versions()
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
    found = [parse_rank_info(value, rank) for rank, value in zip(global_ranks, store.multi_get(keys), strict=True)]
    members = [member for member, _ in found]
    placement.check_one_host_per_node(
        placement.RankPlacement(
            global_rank=each.global_rank,
            node=each.location.node,
            host=each.location.host,
            address=each.location.address,
        )
        for each in members
    )
    if len({bool(each.fingerprint) for each in members}) > 1:
        raise DisagreementError(_mixed_encryption_text(members))
    return GroupInfo(tuple(_restrict_to_shared_networks(members)), group_rank, found[0][1], encryption)


def _mixed_encryption_text(members: Sequence[RankInfo]) -> str:
    plain = ", ".join(str(each.global_rank) for each in members if not each.fingerprint)
    do = f"Set {ENCRYPT} alike on all ranks; ringweave run --encrypt does"
    return explain("encryption", got=f"none on rank {plain}", expected="the same on all ranks", do=do)


def parse_rank_info(value: bytes, global_rank: int) -> tuple[RankInfo, bytes]:
    """Parse a rank's entry in the store: its info, and the token that it drew.

    Raises:
        DisagreementError: It is not an entry of this protocol, or its rank has a torch of another minor version.
    """

    def convert(entry: Any) -> tuple[RankInfo, bytes]:
        check_versions(peer_data.require_object(entry.get("versions")), global_rank)
        node, address, more_addresses, rates, nics, networks, host, cores, gpus = entry["location"]
        entrances = tuple(RankEndpoint(tuple(map(int, ports)), str(name)) for ports, name in entry["endpoints"])
        more, own_nics, own_networks, own_gpus = (tuple(map(str, e)) for e in (more_addresses, nics, networks, gpus))
        relative = tuple(map(float, rates))
        place = RankLocation(
            str(node), str(address), more, relative, own_nics, own_networks, str(host), _check_quota(cores), own_gpus
        )
        fingerprint = str(entry.get("fingerprint", ""))
        return RankInfo(global_rank, place, entrances, fingerprint), bytes.fromhex(entry["token"])

    description, expected = "entry of a rank in the store", "where a rank of the same ringweave can be called"
    return peer_data.decode_peer_data(
        value, description, convert, expected=expected, max_bytes=_MAX_RANK_INFO_BYTES, where=f"rank {global_rank}"
    )


def own_versions() -> dict[str, Any]:
    """Return the protocol of groups, and the versions of ringweave and torch, of this process."""
    return {"protocol": PROTOCOL, "ringweave": __version__, "torch": str(torch.__version__)}


def check_versions(theirs: Mapping[str, Any], global_rank: int) -> None:
    """Refuse a rank that speaks another protocol, or has a torch of another minor version.

    Messages of Gloo and buckets of DDP change with minor versions of torch; patch releases and builds may be mixed.

    Raises:
        DisagreementError: It does; the text names both versions.
    """
    own, where = own_versions(), f"rank {global_rank}"
    if theirs.get("protocol") != own["protocol"]:
        raise DisagreementError(
            f"protocol of rank {global_rank}",
            got=f"{theirs.get('protocol')} (ringweave {theirs.get('ringweave')})",
            expected=f"{own['protocol']} (ringweave {own['ringweave']}), as this rank has",
            do="Install the same ringweave on all nodes",
            where=where,
        )
    if not is_same_minor(str(theirs.get("torch")), own["torch"]):
        raise DisagreementError(
            f"torch of rank {global_rank}",
            got=theirs.get("torch"),
            expected=f"{own['torch']}, as this rank has, or another patch release of it",
            do="Install the same minor version of torch on all nodes",
            where=where,
        )


def _check_quota(cores: float) -> float:
    if cores != 0 and not _MIN_CORES <= cores < math.inf:
        raise ValueError(f"{cores} processors")
    return float(cores)


def _addresses_of_nics(node: "Node") -> dict[str, float]:
    """Return address -> rate of the cluster file's NICs that this machine has, in the file's order."""
    import psutil

    interfaces = psutil.net_if_addrs()
    reached: dict[str, float] = {}
    for nic in node.nics:
        own = [found.address for found in interfaces.get(nic.name, []) if found.family == socket.AF_INET]
        reached.update(dict.fromkeys(own[:1], nic.rate_bytes_per_s))
    return reached


def _offer_nics(node: str, address: str, environ: Mapping[str, str], probes: bool) -> RankLocation:
    """Return the location of a process without a cluster file, with the further NICs that probing may use.

    Interfaces that the user names for Gloo are the only ones offered.
    """
    if not probes or _is_loopback(address):
        return RankLocation(node, address)
    from ringweave.topology import discovery

    machine = discovery.observe_links()
    first_nic = next((nic for nic in machine.interfaces if address in nic.addresses), None)
    if first_nic is None:
        return RankLocation(node, address)
    named = environ.get("GLOO_SOCKET_IFNAME")
    others = [nic for nic in machine.interfaces if nic.name in named.split(",")] if named else []
    offers = {first_nic.name: _network_at(first_nic, address)}
    for nic in others if named else discovery.equivalent_interfaces(machine, first_nic):
        first = next((each for each in nic.addresses if (":" in each) == (":" in address)), None)
        network = _network_at(nic, first) if first else ""
        if first and network and network not in offers.values():  # in one network, one NIC would carry both
            offers[nic.name] = network
    reached = {nic.name: nic for nic in machine.interfaces}
    more = [_address_in(reached[name], network) for name, network in offers.items() if name != first_nic.name]
    return RankLocation(node, address, tuple(more), (1.0,) * len(offers), tuple(offers), tuple(offers.values()))


def _network_at(nic: "NetworkInterface", address: str) -> str:
    """Return the IP network that an address of a NIC is in; empty if unknown."""
    found = (ipaddress.ip_interface(each) for each in nic.networks)
    return next((str(each.network) for each in found if str(each.ip) == address), "")


def _address_in(nic: "NetworkInterface", network: str) -> str:
    return next(address for address in nic.addresses if _network_at(nic, address) == network)


def _restrict_to_shared_networks(found: Sequence[RankInfo]) -> list[RankInfo]:
    """Keep the first address of each rank, and those in networks in which every node has its own address.

    Ranks of one node keep the first alone: no network connects them.
    """
    is_alone = len({member.location.node for member in found}) == 1
    if is_alone or not all(member.location.networks for member in found):
        return [member.at_addresses([0], [1.0]) if member.location.networks else member for member in found]
    shared = []
    for network in found[0].location.networks[1:]:
        places = [member.location for member in found]
        if all(network in place.networks[1:] for place in places):
            nodes = {place.addresses[place.networks.index(network)]: place.node for place in places}
            if len(nodes) == len({place.node for place in places}) == len(set(nodes.values())):
                shared.append(network)
    indices = [[0, *(member.location.networks.index(network) for network in shared)] for member in found]
    return [member.at_addresses(each, [1.0] * len(each)) for member, each in zip(found, indices, strict=True)]


def _own_address(environ: Mapping[str, str]) -> str:
    """Return the address at which the other ranks reach this process.

    It is the address of the interface that GLOO_SOCKET_IFNAME names, if set; else the source address of packets to the
    master. Many hosts resolve their own name to a loopback address, which no other host can reach: unless the master is
    named as loopback, the source address of the default route is taken instead.
    """
    interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface and (named := _first_address(interface)):
        return named
    master = environ.get("MASTER_ADDR") or socket.gethostname()
    address = _source_address(master)
    if address is not None and not _is_loopback(address):
        return address
    if master == "localhost" or _is_loopback(master):
        return address or "127.0.0.1"
    outward = _source_address(_UNUSED_ADDRESS)
    return outward or address or "127.0.0.1"


def _first_address(interface: str) -> str | None:
    import psutil

    found = psutil.net_if_addrs().get(interface, [])
    return next((each.address for each in found if each.family in _IP_FAMILIES), None)


def _source_address(destination: str) -> str | None:
    """Return the source address of packets to `destination`; None if unknown or unreachable. Nothing is sent."""
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
