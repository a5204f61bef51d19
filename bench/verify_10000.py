"""Time and memory of verifying and hashing a schedule of 10,000 ranks; 60 s and 2 GiB are allowed.

Run: `python bench/verify_10000.py [case] [num_ranks]`; without a case, all of them, each in a process of its own.
Needs no torch.
"""

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from ringweave import schedules
from ringweave.schedules import Domain, Schedule


def nodes_of(num_ranks: int, per_node: int) -> list[list[int]]:
    """Neighbouring ranks in groups, the last of which may be smaller."""
    return [list(range(at, min(at + per_node, num_ranks))) for at in range(0, num_ranks, per_node)]


def unequal_nodes(num_ranks: int) -> list[list[int]]:
    """Groups of 80 to 120 ranks in turn."""
    groups, at = [], 0
    while at < num_ranks:
        size = 80 + 7 * len(groups) % 41
        groups.append(list(range(at, min(at + size, num_ranks))))
        at += size
    return groups


def racks(num_ranks: int, *, striped: bool) -> Domain:
    """About sqrt(N) racks; each rank owns a chunk that is led in every rack by the rank of the same index there.

    Striped, chunk c belongs to rank c, so that in a rack the leader changes from chunk to chunk; else the chunks of one
    index are neighbours and go together.
    """
    per_rack = math.isqrt(num_ranks)
    groups = nodes_of(num_ranks, per_rack)
    owners = list(range(num_ranks)) if striped else sorted(range(num_ranks), key=lambda rank: rank % per_rack)
    leaders = [tuple(group[owner % per_rack % len(group)] for owner in owners) for group in groups]
    tops = tuple(leaders[owner // per_rack][chunk] for chunk, owner in enumerate(owners))
    domains = tuple(Domain(tuple(group), of) for group, of in zip(groups, leaders, strict=True))
    return Domain(domains, tops)


def over_racks(num_ranks: int, *, striped: bool) -> Schedule:
    """Allreduce over these racks, in equal chunks."""
    return schedules.multi_level(racks(num_ranks, striped=striped), (1,) * num_ranks)


def broadcast_over_racks(num_ranks: int) -> Schedule:
    """Broadcast of the last rank over these racks, in equal chunks."""
    return schedules.multi_level_broadcast(racks(num_ranks, striped=True), (1,) * num_ranks, num_ranks - 1)


CASES: dict[str, Callable[[int], Schedule]] = {
    **{
        name: lambda num_ranks, name=name: schedules.generate(name, num_ranks) for name in schedules.SCHEDULE_NAMES[:-1]
    },
    "leader-matrix, 8 a node": lambda num_ranks: schedules.leader_matrix(nodes_of(num_ranks, 8)),
    "leader-matrix, ragged": lambda num_ranks: schedules.leader_matrix(nodes_of(num_ranks, 1), 97),
    "hierarchical, 100 a node": lambda num_ranks: schedules.hierarchical(nodes_of(num_ranks, 100)),
    "hierarchical, 80 to 120 a node": lambda num_ranks: schedules.hierarchical(unequal_nodes(num_ranks)),
    "direct, some without a share": lambda num_ranks: schedules.direct(num_ranks, [r % 4 for r in range(num_ranks)]),
    "multi-level, racks": lambda num_ranks: over_racks(num_ranks, striped=False),
    "multi-level, racks, striped": lambda num_ranks: over_racks(num_ranks, striped=True),
    "multi-level broadcast, racks": broadcast_over_racks,
    "chain broadcast": schedules.chain_broadcast,
    "binomial broadcast": schedules.binomial_broadcast,
}


def measure(case: str, num_ranks: int) -> None:
    """Print one line: seconds by the clock for making, verifying and hashing, and the process's peak memory."""
    start = time.perf_counter()
    schedule = CASES[case](num_ranks)
    made, cpu_s = time.perf_counter(), time.process_time()
    schedules.verify(schedule, exact=False)
    verified, cpu_s = time.perf_counter(), time.process_time() - cpu_s
    digest = schedule.digest
    hashed = time.perf_counter()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"| {case} | {len(schedule.rounds)} | {schedule.num_chunks} | {made - start:.1f} | {verified - made:.1f} | "
        f"{cpu_s:.1f} | "
        f"{hashed - verified:.1f} | {peak_bytes / 2**30:.2f} | {digest[:8]} |",
        flush=True,
    )


def main(arguments: list[str]) -> None:
    """Measure one case, or all."""
    num_ranks = int(arguments[-1]) if arguments and arguments[-1].isdigit() else 10_000
    named = [argument for argument in arguments if not argument.isdigit()]
    if named:
        measure(named[0], num_ranks)
        return
    print(
        f"{num_ranks} ranks\n| case | rounds | chunks | make s | verify s | of CPU | digest s | peak GiB | digest |",
        flush=True,
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        subprocess.run([sys.executable, __file__, case, str(num_ranks)], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
