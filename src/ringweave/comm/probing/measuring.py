"""The ranks of a job measure the network between their nodes: one of each node, all at the same time."""

import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from ringweave import topology
from ringweave.comm import members
from ringweave.comm.members import Members, Place
from ringweave.comm.probing import findings, nics, orders
from ringweave.comm.probing.conducting import Conductor, conduct
from ringweave.comm.probing.findings import Findings, FoundLink, FoundPair, rate_rounded, rounded
from ringweave.comm.transport.connecting import Door, open_doors
from ringweave.errors import UsageError, explain
from ringweave.topology import recovery
from ringweave.topology.recovery import Effort, Evidence, Fit, Host
from ringweave.topology.recovery.naming import slow_line

NAME = "probed"
_SEED = 0
"""The survey is to be the same wherever it sees the same."""
_BATCH_S = 0.45
"""What a batch takes, with what is said before and after it."""
_TRIALS_A_NODE = 1.5
"""As many batches of trials as it takes, in most cases."""


def probing_ranks(group: Members) -> tuple[int, ...]:
    """The first group rank of each node."""
    first: dict[str, int] = {}
    for group_rank, member in enumerate(group.ranks):
        first.setdefault(member.place.node, group_rank)
    return tuple(first.values())


def can_probe(group: Members) -> bool:
    """Whether there is a network to measure: several nodes, each with an address of its own."""
    addresses = {group.ranks[rank].place.address for rank in probing_ranks(group)}
    return group.num_nodes > 1 and len(addresses) == group.num_nodes


def hosts(group: Members) -> list[Host]:
    """The nodes of a group, with as many devices as the group has ranks there."""
    counts = Counter(member.place.node for member in group.ranks)
    places = [group.ranks[rank].place for rank in probing_ranks(group)]
    return [_host(place, counts[place.node]) for place in places]


def _host(place: Place, num_devices: int) -> Host:
    """NICs by name: their order is that of the first rank's networks, and another rank may be the first."""
    return Host(name=place.node, address=place.address, num_devices=num_devices, nics=tuple(sorted(place.nics)))


def predicted_s(num_nodes: int, effort: Effort) -> float:
    """About how long it will take to measure so many nodes."""
    rounds = effort.rounds(num_nodes - 1 + num_nodes % 2)
    trials = _TRIALS_A_NODE * num_nodes if effort.num_trials is None else effort.num_trials
    batches = 2 * rounds + (rounds if num_nodes > 3 else 0) + (trials if num_nodes > 2 else 0)
    return batches * _BATCH_S


def probe(
    store: Store,
    group: Members,
    timeout: timedelta,
    *,
    effort: Effort | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Findings | None:
    """Measure the network between the nodes of a group; all its ranks call this.

    Args:
        store: The group's, or one that no other probing uses.
        group: Its members.
        timeout: How long a rank may take to come.
        effort: Bounds how much is measured.
        tell: Is told what is being measured, on the first rank.

    Returns:
        What was found, on the first rank of the group and, unless it is very much, on that of each node; None on all
        others.

    Raises:
        PeerError: A probing rank did not come, or is gone, or cannot be reached.
        UsageError: There is no network between the members.

    Each node is measured at all addresses that the members of the group share, as a job without a cluster file uses
    them: together, and each NIC with its part of the rate.

    Cost:
        8 nodes take some 50 batches of 0.4 to 0.6 s; N nodes about 5 N of them, where the effort has no bounds.
    """
    if not can_probe(group):
        raise UsageError(_no_network(group))
    if group.group_rank not in probing_ranks(group):
        return None
    (door,) = open_doors(group.own.place.addresses, 1)
    try:
        probers = _meet(store, group, door, timeout)
        if probers.group_rank == 0:
            return _conduct(probers, door, group, timeout, effort or Effort(), tell)
        told = orders.obey(probers, door.outer)
        return findings.from_json(told) if told else None
    finally:
        door.close()


def _no_network(group: Members) -> str:
    return explain(
        "probing the network",
        got=f"{group.num_nodes} node(s)",
        expected="two at least, each with an address of its own",
        do="Start the job on several hosts, or in a lab: ringweave lab run --no-cluster-file",
    )


def _meet(store: Store, group: Members, door: Door, timeout: timedelta) -> Members:
    """The probing ranks of a group, as members of a group of their own."""
    own = probing_ranks(group)
    index = own.index(group.group_rank)
    number = store.add(f"probing/{index}", 1)  # whoever probes again does so in a space of its own
    ranks = [group.ranks[rank].global_rank for rank in own]
    space = PrefixStore(f"probing/{number}/", store)
    return members.meet(space, index, ranks, group.own.place, [door.entrance], timeout)


def _conduct(
    probers: Members, door: Door, group: Members, timeout: timedelta, effort: Effort, tell: Callable[[str], None]
) -> Findings:
    started_s = time.monotonic()
    conductor = Conductor(probers, door.outer, timeout.total_seconds())
    told = ""
    try:
        conductor.find_rails()
        latencies, evidence, fit = conduct(conductor, probers.group_size, random.Random(_SEED), effort, tell)
        found = _findings(hosts(group), latencies, evidence, fit, time.monotonic() - started_s, conductor.rates_of_nics)
        told = found.to_json()
    finally:
        conductor.close(told)
    return found


def _findings(
    found_hosts: list[Host],
    latencies: dict[tuple[int, int], float],
    evidence: Evidence,
    fit: Fit,
    wall_s: float,
    rates_of_nics: nics.Rates,
) -> Findings:
    both = latencies | {(b, a): seconds for (a, b), seconds in latencies.items()}
    median_s = sorted(latencies.values())[len(latencies) // 2]
    cluster, links = recovery.cluster(NAME, found_hosts, fit, rounded(median_s), rate_rounded)
    best = evidence.best_rates()
    names = [host.name for host in found_hosts]
    return Findings(
        time=time.time(),
        wall_s=round(wall_s, 2),
        num_batches=evidence.num_batches,
        cluster_text=topology.dumps(nics.put(cluster, rates_of_nics)),
        offers={host.name: host.nics for host in found_hosts if host.nics},
        links=tuple(
            FoundLink(name=link.name, rate_bytes_per_s=link.rate_bytes_per_s, is_proved=link.is_proved)
            for link in links
        ),
        pairs=tuple(
            FoundPair(
                src=names[src],
                dst=names[dst],
                latency_s=rounded(seconds),
                rate_bytes_per_s=rate_rounded(float(best[src, dst])) or None,
            )
            for (src, dst), seconds in sorted(both.items())
        ),
        slow=slow_line(cluster, links),
        unsought=fit.unsought,
    )
