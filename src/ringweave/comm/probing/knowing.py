"""The cluster of a job that nobody has described: from the cache, else measured when its first group is formed."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store

from ringweave.comm.members import Members
from ringweave.comm.probing import caching, measuring
from ringweave.comm.probing.caching import Cache
from ringweave.comm.probing.findings import Findings
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RingweaveError
from ringweave.topology.recovery import Effort

_KEY = "probing/decision"
_CACHED, _PROBE = "cached", "probe"
_LOG = logging.getLogger("ringweave")

_PATIENCE = timedelta(seconds=60)
"""All ranks have just met, so none is far."""
_FEW_NODES = 16
"""Up to here a job measures every pair when it starts: half a minute."""
_BRIEF = Effort(num_rounds=8, num_trials=32)
"""For more: about as long, however many they are; not every pair meets."""


def look(store: Store, group: Members, timeout: timedelta, environment: WorkerEnvironment) -> Findings | None:
    """What the network between the members of a new group is like; all its ranks call this.

    Returns:
        The findings, on the first rank of the group; None on all others, and where the network is described by a file,
        where there is none, and where it could not be measured.
    """
    if environment.cluster_path is not None or not environment.probes or not measuring.can_probe(group):
        return None  # the same on all ranks, as it depends on nothing that differs between them
    return find_out(store, group, min(timeout, _PATIENCE))


def find_out(
    store: Store,
    group: Members,
    timeout: timedelta,
    *,
    cache: Cache | None = None,
    clock: Callable[[], float] = time.time,
) -> Findings | None:
    """What is known of the nodes of a group, or can be measured; all its ranks call this.

    A job must not fail because its network could not be measured: this returns None then, and says why in the log.

    Returns:
        The findings, on the first rank of the group; None on all others.
    """
    try:
        if group.group_rank:
            store.wait([_KEY], timeout)
            if store.get(_KEY).decode() == _PROBE:
                measuring.probe(store, group, timeout)
            return None
        cache = cache or Cache(caching.default_folder())
        hosts = measuring.hosts(group)
        known = cache.get(hosts, clock())
        store.set(_KEY, _CACHED if known else _PROBE)
        if known is None:
            _LOG.info("ringweave: measuring the network between %d nodes", group.num_nodes)
            known = measuring.probe(store, group, timeout, effort=None if group.num_nodes <= _FEW_NODES else _BRIEF)
            assert known is not None, "this is the first rank"
            cache.put(hosts, known)
    except (RingweaveError, RuntimeError) as cause:
        _LOG.warning("ringweave: the network was not measured, equal links are assumed: %s", cause)
        return None
    return known
