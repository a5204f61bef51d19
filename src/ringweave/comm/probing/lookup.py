"""Network lookup: the cluster of a job without a cluster file, from the cache or measured with its first group."""

import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from ringweave.comm import group_info
from ringweave.comm.group_info import GroupInfo
from ringweave.comm.probing import measure, network_measurement
from ringweave.comm.probing.network_measurement import MeasurementCache, NetworkMeasurement
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RingweaveError
from ringweave.topology.inference.infer import SurveyLimits

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


def measurement_for_group(
    store: Store, group: GroupInfo, timeout: timedelta, environment: WorkerEnvironment
) -> NetworkMeasurement | None:
    """Return the measured network between the members of a new group; all its ranks call this.

    Returns:
        The measurement, on the first rank of the group; None on all others, where a file describes the network, where
            there is none, and where the measurement failed.
    """
    is_described = environment.cluster_path is not None and not environment.probes_described
    if is_described or not environment.probes or not measure.can_probe(group):
        return None  # the same on all ranks, because its inputs are
    return find_or_measure(store, group, min(timeout, _GROUP_TIMEOUT))


def _print_status(text: str) -> None:
    """Print a status line; logs show only warnings by default."""
    print(f"ringweave: {text}", file=sys.stderr, flush=True)


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
        measure.group_hosts(group),
    )
    try:
        if group.group_rank:
            store.wait([_DECISION_KEY], timeout)
            if (
                store.get(_DECISION_KEY) == _PROBE.encode()
                and (measurement := measure.probe_group(store, group, timeout)) is not None
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
    effort = _FULL_EFFORT if count <= _MAX_NODES_FULL else _BRIEF_EFFORT
    about_s = max(1, round(measure.predicted_survey_s(count, effort)))
    advice = "RINGWEAVE_CLUSTER=FILE (a cluster file) or RINGWEAVE_PROBE=never avoids it"
    report_status(f"measuring the network between {count} nodes, about {about_s} s; {advice}")
    measurement = measure.probe_group(store, group, timeout, effort=effort)
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
    on_progress: Callable[[str], None] = lambda what: None,
) -> NetworkMeasurement | None:
    """Measure the network of a whole job on request; every rank calls this, and every node caches the result.

    A cluster file is ignored: RINGWEAVE_NODE or the host name names the node.

    Args:
        store: Store of all ranks of the job.
        rank: Rank of this process.
        world_size: Number of ranks.
        effort: Limits; None measures every pair.
        max_age_s: Seconds; a cached measurement that is not older is taken instead. None always measures.
        on_progress: Called on the first rank with the current activity.

    Returns:
        The measurement, on rank 0; None on all others.

    Raises:
        UsageError: There is one node only, or nodes without addresses of their own.
        CommunicationError: A rank did not come, or failed.
    """
    environment = WorkerEnvironment.from_environ(os.environ)
    place = group_info.locate_process(WorkerEnvironment(node=environment.node), os.environ)
    prefixed_store = PrefixStore("probe", store)
    group = group_info.exchange_group_info(prefixed_store, rank, range(world_size), place, [], JOB_TIMEOUT)
    cache, hosts = (
        network_measurement.process_cache(network_measurement.default_cache_folder()),
        measure.group_hosts(group),
    )
    known = None
    if rank == 0:
        known = cache.get(hosts, time.time(), max_age_s) if max_age_s is not None else None
        prefixed_store.set(_DECISION_KEY, _CACHED if known else _PROBE)
    prefixed_store.wait([_DECISION_KEY], JOB_TIMEOUT)
    if prefixed_store.get(_DECISION_KEY) == _PROBE.encode():
        known = measure.probe_group(prefixed_store, group, JOB_TIMEOUT, effort=effort, on_progress=on_progress)
        if known is not None:
            cache.put(hosts, known)
    return known if rank == 0 else None
