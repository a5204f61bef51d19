"""Where further workers of an elastic run go. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ringweave.launch.workers import NodeLike, WorkerGroup, WorkerSpec


def spread(counts: Sequence[int], total: int, *, most: int) -> list[int]:
    """Places for workers on each node: its workers', and then one after the other where there are fewest.

    Args:
        counts: Workers of each node at the begin.
        total: Places in all, if they fit.
        most: On one node.
    """
    places = list(counts)
    while sum(places) < total and min(places) < most:
        places[places.index(min(places))] += 1
    return places


def with_further(group: WorkerGroup, nodes: Sequence[NodeLike], *, num_cpus: int) -> WorkerGroup:
    """The workers of a group, and behind them one for each device that none of them has, in the order of their coming.

    Args:
        group: Those that are there from the begin, some on each node.
        nodes: With a device for each place.
        num_cpus: CPUs that all workers share.
    """
    workers = list(group.workers)
    like = {worker.node: worker for worker in workers}
    count = Counter(worker.node for worker in workers)
    free = {node.name: len(node.devices) - count[node.name] for node in nodes}
    while any(free.values()):
        node = min((name for name, left in free.items() if left), key=lambda name: count[name])
        workers.append(_another(like[node], len(workers), count[node], num_cpus))
        count[node] += 1
        free[node] -= 1
    return replace(group, workers=tuple(workers))


def _another(like: WorkerSpec, rank: int, local_rank: int, num_cpus: int) -> WorkerSpec:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(rank + 1),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_rank + 1),
        "OMP_NUM_THREADS": str(max(1, num_cpus // (rank + 1))),
    }
    return replace(like, global_rank=rank, local_rank=local_rank, environ={**like.environ, **own})
