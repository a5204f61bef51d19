"""Seconds from aborting a group, one of whose ranks has stopped in the middle of a collective, to the next result.

    python bench/regroup.py --rounds 5
    python bench/regroup.py --generations --rounds 12 --quota 0.2

Four ranks on this machine, once on one node and once on four: a large allreduce is under way when rank 3 is stopped
(SIGSTOP). The others abort the group, make a new one of themselves, and reduce 12 MB in it, values checked. Then rank 3
wakes, and the tensor of the first collective, which is in use again by then, must stay as it is. Prints one JSON
document: the time of the slowest rank in each round, and what it is made of.

With `--generations`, eight ranks form the groups of a generation of `--elastic` again and again (`form_group`), each
rank in a control group with so many processors (root only): the default group alone, and with the group for sums, both
at once and one after the other, by turns. Prints the time of the slowest rank by way, and the ratios of the medians.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringweave.comm import generation_group
from ringweave.comm.peer_data import BackgroundCall
from ringweave.lab import cpu_quotas
from ringweave.testing.ranks import Ranks, announce, run_ranks

NUM_RANKS = 4
SURVIVORS = [0, 1, 2]
_UNDER_WAY_ELEMENTS = 16_000_000
_AFTER_ELEMENTS = 3_000_000
_TIMEOUT_S = 60.0
_MARK = 42.0
NUM_MEMBERS = 8
WAYS = ("default group alone", "one after the other", "at once")
NODES = {"one node": ["a0"] * NUM_RANKS, "four nodes": ["a0", "b0", "c0", "d0"]}


def regroup(num_elements: int) -> dict[str, float]:
    """Run one rank, from the collective that never ends to the check after the stopped rank woke up.

    Returns:
        Seconds from the abort to: the end of the first collective, the new group, its first result.
    """
    tensor = torch.ones(num_elements)
    dist.all_reduce(tensor)
    announce("warm")
    if dist.get_rank() == NUM_RANKS - 1:
        return _reduce_until_cut(tensor)
    store = _store()
    store.wait(["stopped"])
    work = dist.all_reduce(tensor, async_op=True)
    announce("waiting")
    store.wait(["abort"])
    taken, started = {}, time.perf_counter()
    dist.group.WORLD.abort()
    try:
        work.wait()
    except RuntimeError:
        taken["ended_s"] = time.perf_counter() - started
    tensor.fill_(_MARK)  # no other rank uses it any more
    group = dist.new_group(SURVIVORS, backend="ringweave", use_local_synchronization=True)
    taken["group_s"] = time.perf_counter() - started
    message = torch.full((_AFTER_ELEMENTS,), dist.get_rank() + 1.0)
    dist.all_reduce(message, group=group)
    taken["result_s"] = time.perf_counter() - started
    if not (message == 6).all():
        raise AssertionError(f"rank {dist.get_rank()} has {message.unique().tolist()}, expected 6")
    announce("done")
    store.wait(["woken"])
    dist.all_reduce(message, group=group)
    if not (tensor == _MARK).all():
        raise AssertionError("the buffer of the aborted collective was written to")
    dist.destroy_process_group(group)
    return taken


def _store() -> dist.Store:
    """The store that the caller of the ranks writes to."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _reduce_until_cut(tensor: torch.Tensor) -> dict[str, float]:
    """Rank 3: takes part until it finds out that the others have gone on without it."""
    try:
        while True:
            dist.all_reduce(tensor.fill_(1.0))
    except RuntimeError:
        announce("cut")
        return {}


def measure(nodes: list[str], num_elements: int = _UNDER_WAY_ELEMENTS) -> list[dict[str, float]]:
    """Run one round; return the times of the ranks that continue."""
    with Ranks(regroup, NUM_RANKS, num_elements, timeout_s=_TIMEOUT_S, nodes=nodes) as ranks:
        ranks.wait_for(*(f"warm/{rank}" for rank in range(NUM_RANKS)))
        ranks.signal(NUM_RANKS - 1, signal.SIGSTOP)
        ranks.store.set("stopped", "1")
        ranks.wait_for(*(f"waiting/{rank}" for rank in SURVIVORS))
        ranks.store.set("abort", "1")
        ranks.wait_for(*(f"done/{rank}" for rank in SURVIVORS))
        ranks.signal(NUM_RANKS - 1, signal.SIGCONT)
        ranks.wait_for(f"cut/{NUM_RANKS - 1}")
        ranks.store.set("woken", "1")
        outcomes = ranks.outcomes(SURVIVORS)
    for rank, outcome in zip(SURVIVORS, outcomes, strict=True):
        if outcome.error or outcome.exit_code:
            raise AssertionError(f"rank {rank} failed:\n{outcome.error}")
    return [outcome.value for outcome in outcomes]


class _FinishedCall:
    """Stands in for `BackgroundCall`: the call has ended before the next one begins."""

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self._result = BackgroundCall(call, name).wait_result(_TIMEOUT_S, lambda: False)

    def wait_result(self, *_: object) -> Any:
        return self._result


def form_generations(num_rounds: int, cgroup: str) -> dict[str, list[float]]:
    """Run one rank: form the groups of generations in all ways by turns; return the seconds of each."""
    if cgroup:
        Path(cgroup.format(os.environ["RANK"]), "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    store, rank, groups = _store(), dist.get_rank(), generation_group.GenerationGroups("127.0.0.1")
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    ways = list(WAYS) * num_rounds
    random.Random(num_rounds).shuffle(ways)  # a generation also ends the groups of the one before
    for number, way in enumerate(ways, 1):
        generation_group.BackgroundCall = _FinishedCall if way == "one after the other" else BackgroundCall
        if rank == 0:
            store.set(f"place/{number}", groups.store_address)
        place = store.get(f"place/{number}").decode()
        store.add(f"here/{number}", 1)
        while store.add(f"here/{number}", 0) < NUM_MEMBERS:
            time.sleep(0.01)
        started = time.perf_counter()
        has_sums = way != "default group alone"
        groups.form_group(place, f"1.{number}", rank, NUM_MEMBERS, groups.num_aborts, has_reduce_group=has_sums)
        taken[way].append(time.perf_counter() - started)
        if not groups.all_agree(agrees=True):
            raise AssertionError("a member disagrees")
    dist.barrier()  # the store is rank 0's
    return taken


@contextlib.contextmanager
def quotas_of(quota: float) -> Iterator[str]:
    """Make a control group with so many processors for each member; yield the pattern of their folders."""
    hierarchy = cpu_quotas.find_hierarchy()
    if not quota or hierarchy is None:
        yield ""
        return
    name = f"regroup{os.getpid()}"
    quota_us = int(quota * cpu_quotas.QUOTA_PERIOD_US)
    cpu_quotas.make_groups(hierarchy, name, {"n": (quota_us,) * NUM_MEMBERS})
    try:
        yield str(hierarchy.device_folder(name, "n", 0)).removesuffix("0") + "{}"
    finally:
        cpu_quotas.remove_groups(hierarchy, name)


def measure_generations(num_rounds: int, quota: float) -> dict[str, Any]:
    """Return the seconds of the slowest rank by way and round, and the ratios of the medians to the first way."""
    with quotas_of(quota) as cgroup:
        ranks = run_ranks(form_generations, NUM_MEMBERS, num_rounds, cgroup, nodes=["a0"] * NUM_MEMBERS)
    slowest = {way: [round(max(each), 4) for each in zip(*(rank[way] for rank in ranks), strict=True)] for way in WAYS}
    medians = {way: statistics.median(each[1:] or each) for way, each in slowest.items()}  # the first one imports
    ratios = {way: round(each / medians[WAYS[0]], 3) for way, each in medians.items()}
    return {"quota": quota, "seconds": slowest, "median_s": medians, "ratio": ratios}


def main() -> None:
    """Measure both placements, several rounds each, or the groups of a generation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each placement")
    parser.add_argument("--generations", action="store_true", help="form the groups of generations instead")
    parser.add_argument("--quota", type=float, default=0.0, help="processors of each rank with --generations; 0: all")
    options = parser.parse_args()
    if options.generations:
        print(json.dumps({"kind": "measured", **measure_generations(options.rounds, options.quota)}, indent=2))
        return
    measured = {}
    for name, nodes in NODES.items():
        rounds = [measure(nodes) for _ in range(options.rounds)]
        slowest = {part: [max(rank[part] for rank in ranks) for ranks in rounds] for part in rounds[0][0]}
        measured[name] = {part: [round(second, 4) for second in seconds] for part, seconds in slowest.items()}
        measured[name]["median_result_s"] = round(statistics.median(slowest["result_s"]), 4)
    print(json.dumps({"kind": "measured", "ranks": NUM_RANKS, "bytes": 4 * _AFTER_ELEMENTS, **measured}, indent=2))


if __name__ == "__main__":
    main()
