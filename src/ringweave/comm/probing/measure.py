"""Network of a job without a cluster file: from the cache, or measured with its first group, by a rank of each node."""

import json
import logging
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from ringweave import topology
from ringweave.comm import group_info, peer_data
from ringweave.comm.group_info import GroupInfo, RankLocation
from ringweave.comm.probing import network_measurement, probe_coordinator
from ringweave.comm.probing.network_measurement import (
    MeasurementCache,
    NetworkMeasurement,
    ProbedLink,
    ProbedPair,
    round_measured,
    round_rate,
)
from ringweave.comm.probing.probe_coordinator import ProbeCoordinator, measure_network
from ringweave.comm.transport.connect import ChannelListener, open_listeners
from ringweave.environment import WorkerEnvironment, ports_of_environ
from ringweave.errors import PeerError, RingweaveError, UsageError, explain
from ringweave.topology import Cluster, Nic, Node
from ringweave.topology.inference.fit import TreeFit
from ringweave.topology.inference.infer import SurveyLimits
from ringweave.topology.inference.observations import Observations
from ringweave.topology.inference.tree import NodeSpec, cluster_from_fit, slowest_part_text

_NICS_KEY = "probing/nics"
_EQUAL_SHARE_TOLERANCE = 0.1
"""Shares that differ by less count as equal: equal hardware shall look equal."""

NicRates = Mapping[str, Mapping[str, float]]
"""Bytes per second by NIC name, by node name."""


def nic_rates(cluster: Cluster) -> NicRates:
    """Return the NIC rates of a measured cluster."""
    return {node.name: {nic.name: nic.rate_bytes_per_s for nic in node.nics} for node in cluster.nodes}


def agree_on_nics(
    store: Store, group: GroupInfo, measurement: NetworkMeasurement | None, timeout: timedelta
) -> GroupInfo:
    """Return the group reachable by the NICs that probing found good, with their rates; all ranks call this.

    Where the further NICs of nodes were not measured, every node is reached at its first address alone: nothing shows
    that the others lead anywhere.

    `measurement`: the measured network, on the first rank; None on all others.

    Raises:
        PeerError: The first rank did not come.
        DisagreementError: It sent something else.
    """
    if not all(member.location.networks and member.location.more_addresses for member in group.ranks):
        return group
    if group.group_rank == 0:
        store.set(_NICS_KEY, json.dumps(nic_rates(measurement.cluster()) if measurement else {}))
    try:
        store.wait([_NICS_KEY], timeout)
    except RuntimeError as cause:
        do, where = "Look into its log", f"rank {group.own_info.global_rank}"
        got, expected = "nothing in time", f"{group.rank_text(0)} to say what probing found"
        raise PeerError("NICs of the nodes", got=got, expected=expected, do=do, where=where) from cause
    expected = f"rates of NICs, as {group.rank_text(0)} found them"
    return _restrict_to_nics(
        group,
        peer_data.decode_peer_data(store.get(_NICS_KEY), "NICs of the nodes", _parse_nic_rates, expected=expected),
    )


def _parse_nic_rates(document: Any) -> NicRates:
    return {
        str(node): {str(nic): _check_nic_rate(rate) for nic, rate in rates.items()} for node, rates in document.items()
    }


def _check_nic_rate(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{value} is no rate")
    return float(value)


def _restrict_to_nics(group: GroupInfo, known: NicRates) -> GroupInfo:
    """Restrict the group to addresses of NICs that are known on every node."""
    node_rates = [known.get(member.location.node, {}) for member in group.ranks]
    count = len(group.own_info.location.addresses)
    pairs = list(zip(group.ranks, node_rates, strict=True))
    kept = [index for index in range(count) if all(member.location.nics[index] in rates for member, rates in pairs)]
    ranks = [
        member.at_addresses(kept, [rates[member.location.nics[i]] for i in kept])
        if 0 in kept
        else member.at_addresses([0], [1.0])
        for member, rates in pairs
    ]
    return replace(group, ranks=tuple(ranks))


def with_measured_nics(cluster: Cluster, best_rates: Mapping[str, Mapping[str, float]]) -> Cluster:
    """Return the cluster with the NICs that were used, each with its share of its node's rate.

    Args:
        cluster: The inferred cluster, with one NIC per node.
        best_rates: Node -> NIC -> highest bytes per second seen on it; other nodes stay unchanged.
    """
    shares = {name: _nic_shares(list(rates.values())) for name, rates in best_rates.items()}
    counts = {len(each) for each in shares.values()}
    if len(counts) == 1 and shares:
        (count,) = counts
        usual = [statistics.median(each[i] for each in shares.values()) for i in range(count)]
        near = {name for name, each in shares.items() if _are_equal_shares(each, usual)}
        shares |= {name: _nic_shares(usual) for name in near}
    return replace(
        cluster, nodes=tuple(_node_with_nics(node, best_rates, shares.get(node.name, [])) for node in cluster.nodes)
    )


def _node_with_nics(node: Node, seen: NicRates, shares: Sequence[float]) -> Node:
    if not shares:
        return node
    rates = [round_rate(node.rate_bytes_per_s * share) for share in shares[1:]]
    first = node.rate_bytes_per_s - sum(rates)  # so that the sum is the node's measured rate
    nics = [Nic(name=name, rate_bytes_per_s=rate) for name, rate in zip(seen[node.name], [first, *rates], strict=True)]
    return replace(node, nics=tuple(nics))


def _nic_shares(rates: Sequence[float]) -> list[float]:
    total = sum(rates)
    return [rate / total for rate in rates]


def _are_equal_shares(shares: Sequence[float], usual: Sequence[float]) -> bool:
    return all(abs(own - each) <= _EQUAL_SHARE_TOLERANCE * each for own, each in zip(shares, usual, strict=True))


MEASURED_CLUSTER_NAME = "probed"
_SURVEY_SEED = 0
"""The survey is deterministic for equal measurements."""
_BATCH_S = 0.45
"""Duration of a batch, with the messages before and after it."""
_TRIALS_PER_NODE = 1.5
"""Batches of trials per node in most cases."""


def probing_ranks(group: GroupInfo) -> tuple[int, ...]:
    """Return the first group rank of each node."""
    first: dict[str, int] = {}
    for group_rank, member in enumerate(group.ranks):
        first.setdefault(member.location.node, group_rank)
    return tuple(first.values())


def can_probe(group: GroupInfo) -> bool:
    """Return True if there is a network to measure: several nodes, each with an address of its own."""
    addresses = {group.ranks[rank].location.address for rank in probing_ranks(group)}
    return group.num_nodes > 1 and len(addresses) == group.num_nodes


def group_hosts(group: GroupInfo) -> list[NodeSpec]:
    """Return the nodes of a group, with as many devices as the group has ranks there."""
    counts = Counter(member.location.node for member in group.ranks)
    places = [group.ranks[rank].location for rank in probing_ranks(group)]
    return [_node_spec(place, counts[place.node]) for place in places]


def _node_spec(place: RankLocation, num_devices: int) -> NodeSpec:
    """Describe a node, with its NICs sorted: their order depends on the first rank, which may be another one."""
    return NodeSpec(name=place.node, address=place.address, num_devices=num_devices, nics=tuple(sorted(place.nics)))


def predicted_survey_s(num_nodes: int, effort: SurveyLimits) -> float:
    """Predict the seconds that a measurement of so many nodes takes."""
    rounds = effort.limit_rounds(num_nodes - 1 + num_nodes % 2)
    trials = _TRIALS_PER_NODE * num_nodes if effort.num_trials is None else effort.num_trials
    batches = 2 * rounds + (rounds if num_nodes > 3 else 0) + (trials if num_nodes > 2 else 0)
    return batches * _BATCH_S


def probe_group(
    store: Store,
    group: GroupInfo,
    timeout: timedelta,
    *,
    effort: SurveyLimits | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> NetworkMeasurement | None:
    """Measure the network between the nodes of a group; all its ranks call this.

    Args:
        store: The group's store, or one that no other probing uses.
        group: Its members.
        timeout: Limit on waiting for a rank.
        effort: Limits of the survey.
        on_progress: Called on the first rank with the current activity.

    Returns:
        The measurement, on the first rank of the group and, unless it is very large, on that of each node; None on all
            others.

    Raises:
        PeerError: A probing rank did not come, is dead, or cannot be reached.
        UsageError: There is no network between the members.

    Each node is measured at all addresses that the members of the group share, as a job without a cluster file uses
    them: together, and each NIC with its part of the rate.

    Cost:
        8 nodes take some 50 batches of 0.4 to 0.6 s; N nodes about 5 N of them, where the effort has no bounds.
    """
    if not can_probe(group):
        raise UsageError(_no_network_text(group))
    if group.group_rank not in probing_ranks(group):
        return None
    (listener,) = open_listeners(group.own_info.location.addresses, 1, ports_of_environ(os.environ))
    try:
        probers = _meet_probers(store, group, listener, timeout)
        if probers.group_rank == 0:
            return _coordinate(probers, listener, group, timeout, effort or SurveyLimits(), on_progress)
        text = probe_coordinator.follow_coordinator(probers, listener.tcp_sockets)
        return network_measurement.measurement_from_json(text) if text else None
    finally:
        listener.close()


def _no_network_text(group: GroupInfo) -> str:
    return explain(
        "probing the network",
        got=f"{group.num_nodes} node(s)",
        expected="two at least, each with an address of its own",
        do="Start the job on several hosts, or in a lab: ringweave lab run --no-cluster-file",
    )


def _meet_probers(store: Store, group: GroupInfo, listener: ChannelListener, timeout: timedelta) -> GroupInfo:
    prober_ranks = probing_ranks(group)
    index = prober_ranks.index(group.group_rank)
    number = store.add(f"probing/{index}", 1)  # each repeated probe has its own key space
    ranks = [group.ranks[rank].global_rank for rank in prober_ranks]
    space = PrefixStore(f"probing/{number}/", store)
    return group_info.exchange_group_info(space, index, ranks, group.own_info.location, [listener.endpoint], timeout)


def _coordinate(
    probers: GroupInfo,
    listener: ChannelListener,
    group: GroupInfo,
    timeout: timedelta,
    effort: SurveyLimits,
    on_progress: Callable[[str], None],
) -> NetworkMeasurement:
    started_s = time.monotonic()
    coordinator = ProbeCoordinator(probers, listener.tcp_sockets, timeout.total_seconds())
    text = ""
    try:
        coordinator.find_rails()
        latencies, evidence, fit = measure_network(
            coordinator, probers.group_size, random.Random(_SURVEY_SEED), effort, on_progress
        )
        measurement = _make_measurement(
            group_hosts(group), latencies, evidence, fit, time.monotonic() - started_s, coordinator.nic_rates
        )
        text = measurement.to_json()
    finally:
        coordinator.close(text)
    return measurement


def _make_measurement(
    found_hosts: list[NodeSpec],
    latencies: dict[tuple[int, int], float],
    evidence: Observations,
    fit: TreeFit,
    wall_s: float,
    rates_of_nics: NicRates,
) -> NetworkMeasurement:
    both = latencies | {(b, a): seconds for (a, b), seconds in latencies.items()}
    median_s = sorted(latencies.values())[len(latencies) // 2]
    cluster, links = cluster_from_fit(MEASURED_CLUSTER_NAME, found_hosts, fit, round_measured(median_s), round_rate)
    best = evidence.best_rates()
    names = [host.name for host in found_hosts]
    return NetworkMeasurement(
        time=time.time(),
        wall_s=round(wall_s, 2),
        num_batches=evidence.num_batches,
        cluster_text=topology.dumps(with_measured_nics(cluster, rates_of_nics)),
        offers={host.name: host.nics for host in found_hosts if host.nics},
        links=tuple(
            ProbedLink(name=link.name, rate_bytes_per_s=link.rate_bytes_per_s, is_proved=link.is_proved)
            for link in links
        ),
        pairs=tuple(
            ProbedPair(
                src=names[src],
                dst=names[dst],
                latency_s=round_measured(seconds),
                rate_bytes_per_s=round_rate(float(best[src, dst])) or None,
            )
            for (src, dst), seconds in sorted(both.items())
        ),
        slow=slowest_part_text(cluster, links),
        not_searched=fit.not_searched,
    )


_DECISION_KEY = "probing/decision"
_CACHED, _PROBE = "cached", "probe"
_LOG = logging.getLogger("ringweave")

_GROUP_TIMEOUT = timedelta(seconds=60)
"""All ranks have just called, so none is late."""
JOB_TIMEOUT = timedelta(seconds=120)
"""The workers of a job start at different times."""
_MAX_NODES_FULL = 16
"""Up to this number of nodes a job measures every pair when it starts: half a minute."""
_FULL_EFFORT = SurveyLimits()
_BRIEF_EFFORT = SurveyLimits(num_rounds=8, num_trials=32, total_cpu_s=20.0)
"""Effort for more nodes: a constant number of batches, and thus about the same duration including computing between
them. Not every pair is measured, neither for latency nor for rate."""


def effort_of_job(num_nodes: int) -> SurveyLimits:
    """Return the limits of the measurement with which a job on so many nodes starts."""
    return _FULL_EFFORT if num_nodes <= _MAX_NODES_FULL else _BRIEF_EFFORT


def measurement_for_group(
    store: Store, group: GroupInfo, timeout: timedelta, environment: WorkerEnvironment
) -> NetworkMeasurement | None:
    """Return the measured network between the members of a new group; all its ranks call this.

    Returns:
        The measurement, on the first rank of the group; None on all others, where a file describes the network, where
            there is none, in an elastic job on hosts, and where the measurement failed.
    """
    if environment.describes_links or not environment.probes or not can_probe(group):
        return None  # the same on all ranks, because its inputs are
    if environment.probes_described and environment.coordinators:
        return kept_measurement(group_hosts(group)) if group.group_rank == 0 else None
    return find_or_measure(store, group, min(timeout, _GROUP_TIMEOUT))


def _print_status(text: str) -> None:
    """Print a status line; logs show only warnings by default."""
    print(f"ringweave: {text}", file=sys.stderr, flush=True)


def kept_measurement(hosts: Sequence[NodeSpec]) -> NetworkMeasurement | None:
    """Return the measurement of these nodes that this node has kept in the last day, if there is one."""
    folder = network_measurement.default_cache_folder()
    return network_measurement.process_cache(folder).get(hosts, time.time())


def find_or_measure(
    store: Store,
    group: GroupInfo,
    timeout: timedelta,
    *,
    cache: MeasurementCache | None = None,
    clock: Callable[[], float] = time.time,
    report_status: Callable[[str], None] = _print_status,
) -> NetworkMeasurement | None:
    """Return the cached measurement of a group's nodes, or measure them; all its ranks call this.

    The measurement is cached on every node, since the next job's first rank may be on another one. A failed measurement
    must not fail the job: this logs the reason and returns None.

    Args:
        store: The group's store.
        group: Its members.
        timeout: Limit on waiting for a rank.
        cache: Cache of measurements; None: this process and the user's folder.
        clock: Seconds since 1970.
        report_status: Called on the first rank before and after a measurement, with a text for the user.

    Returns:
        The measurement, on the first rank of the group; None on all others.
    """
    cache, hosts = (
        cache or network_measurement.process_cache(network_measurement.default_cache_folder()),
        group_hosts(group),
    )
    try:
        if group.group_rank:
            store.wait([_DECISION_KEY], timeout)
            if (
                store.get(_DECISION_KEY) == _PROBE.encode()
                and (measurement := probe_group(store, group, timeout)) is not None
            ):
                cache.put(hosts, measurement)
            return None
        cached = cache.get(hosts, clock())
        store.set(_DECISION_KEY, _CACHED if cached else _PROBE)
        if cached is None:
            cached = _measure_as_first(store, group, timeout, report_status)
            cache.put(hosts, cached)
    except (RingweaveError, RuntimeError, ValueError) as cause:
        _LOG.warning("ringweave: the network was not measured, equal links are assumed: %s", cause)
        return None
    return cached


def _measure_as_first(
    store: Store, group: GroupInfo, timeout: timedelta, report_status: Callable[[str], None]
) -> NetworkMeasurement:
    """Measure on the first rank of a group, with the others."""
    count = group.num_nodes
    effort = effort_of_job(count)
    about_s = max(1, round(predicted_survey_s(count, effort)))
    advice = "RINGWEAVE_CLUSTER=FILE (a cluster file) or RINGWEAVE_PROBE=never avoids it"
    report_status(f"measuring the network between {count} nodes, about {about_s} s; {advice}")
    measurement = probe_group(store, group, timeout, effort=effort)
    assert measurement is not None, "this is the first rank"
    report_status(
        f"measured the network between {count} nodes in {measurement.wall_s:.0f} s; it is known for a day now"
    )
    return measurement


def measure_job_network(
    store: Store,
    rank: int,
    world_size: int,
    *,
    effort: SurveyLimits | None = None,
    max_age_s: float | None = None,
    cluster_path: Path | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> NetworkMeasurement | None:
    """Measure the network of a whole job on request; every rank calls this, and every node caches the result.

    RINGWEAVE_NODE or the host name names the node. RINGWEAVE_CLUSTER is ignored.

    Args:
        store: Store of all ranks of the job.
        rank: Rank of this process.
        world_size: Number of ranks.
        effort: Limits; None measures every pair.
        max_age_s: Seconds; a cached measurement that is not older is taken instead. None always measures.
        cluster_path: Cluster file with the addresses of the nodes, which a job with this file finds measured then; its
            rates are ignored. None: each node offers its own addresses.
        on_progress: Called on the first rank with the current activity.

    Returns:
        The measurement, on rank 0; None on all others.

    Raises:
        UsageError: There is one node only, or nodes without addresses of their own.
        CommunicationError: A rank did not come, or failed.
    """
    environment = WorkerEnvironment.from_environ(os.environ)
    place = group_info.locate_process(WorkerEnvironment(node=environment.node, cluster_path=cluster_path), os.environ)
    prefixed_store = PrefixStore("probe", store)
    group = group_info.exchange_group_info(prefixed_store, rank, range(world_size), place, [], JOB_TIMEOUT)
    cache, hosts = (
        network_measurement.process_cache(network_measurement.default_cache_folder()),
        group_hosts(group),
    )
    known = None
    if rank == 0:
        known = cache.get(hosts, time.time(), max_age_s) if max_age_s is not None else None
        prefixed_store.set(_DECISION_KEY, _CACHED if known else _PROBE)
    prefixed_store.wait([_DECISION_KEY], JOB_TIMEOUT)
    if prefixed_store.get(_DECISION_KEY) == _PROBE.encode():
        known = probe_group(prefixed_store, group, JOB_TIMEOUT, effort=effort, on_progress=on_progress)
        if known is not None:
            cache.put(hosts, known)
    return known if rank == 0 else None
