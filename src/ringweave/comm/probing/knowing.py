"""The cluster of a job that nobody has described: from the cache, else measured when its first group is formed."""

import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from ringweave.comm import members
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
JOB_PATIENCE = timedelta(seconds=120)
"""The workers of a job start at different times."""
_FEW_NODES = 16
"""Up to here a job measures every pair when it starts: half a minute."""
_FULL = Effort()
_BRIEF = Effort(num_rounds=8, num_trials=32, thinking_s=20.0)
"""For more: about as many batches, however many they are, and so about as long, with what is thought between them; not
every pair meets, neither for its latency nor for its rate."""


def look(store: Store, group: Members, timeout: timedelta, environment: WorkerEnvironment) -> Findings | None:
    """What the network between the members of a new group is like; all its ranks call this.

    Returns:
        The findings, on the first rank of the group; None on all others, and where the network is described by a file,
        where there is none, and where it could not be measured.
    """
    if environment.cluster_path is not None or not environment.probes or not measuring.can_probe(group):
        return None  # the same on all ranks, as it depends on nothing that differs between them
    return find_out(store, group, min(timeout, _PATIENCE))


def _say(text: str) -> None:
    """To whoever waits for the job; logs show only warnings where nobody has asked for more."""
    print(f"ringweave: {text}", file=sys.stderr, flush=True)


def find_out(
    store: Store,
    group: Members,
    timeout: timedelta,
    *,
    cache: Cache | None = None,
    clock: Callable[[], float] = time.time,
    say: Callable[[str], None] = _say,
) -> Findings | None:
    """What is known of the nodes of a group, or can be measured; all its ranks call this.

    What is measured is kept on every node, since the next job's first rank may be on another one. A job must not fail
    because its network could not be measured: this returns None then, and says why in the log.

    Args:
        store: The group's.
        group: Its members.
        timeout: How long a rank may take to come.
        cache: Where findings are kept; None: in this process, and in the user's folder.
        clock: Seconds of the epoch.
        say: Tells the user, on the first rank, that it is being measured, which takes a while, and has been.

    Returns:
        The findings, on the first rank of the group; None on all others.
    """
    cache, hosts = cache or caching.of_process(caching.default_folder()), measuring.hosts(group)
    try:
        if group.group_rank:
            store.wait([_KEY], timeout)
            if store.get(_KEY) == _PROBE.encode() and (told := measuring.probe(store, group, timeout)) is not None:
                cache.put(hosts, told)
            return None
        known = cache.get(hosts, clock())
        store.set(_KEY, _CACHED if known else _PROBE)
        if known is None:
            known = _measure(store, group, timeout, say)
            cache.put(hosts, known)
    except (RingweaveError, RuntimeError, ValueError) as cause:
        _LOG.warning("ringweave: the network was not measured, equal links are assumed: %s", cause)
        return None
    return known


def _measure(store: Store, group: Members, timeout: timedelta, say: Callable[[str], None]) -> Findings:
    """What the first rank of a group finds, with the others."""
    count = group.num_nodes
    effort = _FULL if count <= _FEW_NODES else _BRIEF
    about_s = max(1, round(measuring.predicted_s(count, effort)))
    how = "RINGWEAVE_CLUSTER=FILE (a cluster file) or RINGWEAVE_PROBE=never avoids it"
    say(f"measuring the network between {count} nodes, about {about_s} s; {how}")
    found = measuring.probe(store, group, timeout, effort=effort)
    assert found is not None, "this is the first rank"
    say(f"measured the network between {count} nodes in {found.wall_s:.0f} s; it is known for a day now")
    return found


def find_for_job(
    store: Store,
    rank: int,
    world_size: int,
    *,
    effort: Effort | None = None,
    max_age_s: float | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Findings | None:
    """What the network of a whole job is like, asked for by itself; every rank calls this. Every node keeps it.

    Whatever a cluster file says: nodes are who RINGWEAVE_NODE or the host's name says.

    Args:
        store: Where all ranks of the job meet.
        rank: This one.
        world_size: How many there are.
        effort: How long to go on; None until every pair has met.
        max_age_s: Seconds; findings that are not older are taken instead. None always measures.
        tell: Is told what is being measured, on the first rank.

    Returns:
        The findings, on rank 0; None on all others.

    Raises:
        UsageError: There is nothing to measure: one node only, or nodes without addresses of their own.
        CommunicationError: A rank did not come, or failed.
    """
    environment = WorkerEnvironment.from_environ(os.environ)
    place = members.own_place(WorkerEnvironment(node=environment.node), os.environ)
    space = PrefixStore("probe", store)
    group = members.meet(space, rank, range(world_size), place, [], JOB_PATIENCE)
    cache, hosts = caching.of_process(caching.default_folder()), measuring.hosts(group)
    known = None
    if rank == 0:
        known = cache.get(hosts, time.time(), max_age_s) if max_age_s is not None else None
        space.set(_KEY, _CACHED if known else _PROBE)
    space.wait([_KEY], JOB_PATIENCE)
    if space.get(_KEY) == _PROBE.encode():
        known = measuring.probe(space, group, JOB_PATIENCE, effort=effort, tell=tell)
        if known is not None:
            cache.put(hosts, known)
    return known if rank == 0 else None
