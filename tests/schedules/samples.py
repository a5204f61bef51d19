"""Small correct allreduces of many shapes, for the tests of everything that takes a schedule."""

from collections.abc import Callable, Iterable
from random import Random

from ringweave.schedules import Collective, ReceiveOp, Round, Schedule
from ringweave.schedules.generators.ring import ring

Row = tuple[int, int, int, int]
"""src, dst, first chunk, number of chunks."""


def make_round(how: ReceiveOp, rows: Iterable[Row]) -> Round:
    src, dst, first, count = zip(*rows, strict=True)
    return Round.of(src, dst, first, how, count)


def random_ring(num_ranks: int, random: Random) -> Schedule:
    return ring(num_ranks, random.sample(range(num_ranks), num_ranks))


def star(num_ranks: int, random: Random) -> Schedule:
    """Everybody sends all to one rank, one after the other, and gets all back at once."""
    centre, chunks = random.randrange(num_ranks), random.randint(1, 4)
    others = [r for r in range(num_ranks) if r != centre]
    random.shuffle(others)
    rounds = [make_round(ReceiveOp.REDUCE, [(r, centre, 0, chunks)]) for r in others]
    if others:
        rounds.append(make_round(ReceiveOp.COPY, [(centre, r, 0, chunks) for r in others]))
    return Schedule("star", Collective("allreduce"), num_ranks, random_shares(chunks, random), rounds)


def direct(num_ranks: int, random: Random) -> Schedule:
    """Each rank reduces some chunks of its own, possibly none of any size, and sends them to all."""
    firsts = sorted(random.choices(range(2 * num_ranks + 1), k=num_ranks))
    bounds = [*firsts, 2 * num_ranks]
    bounds[0] = 0
    owned = [(bounds[r], bounds[r + 1] - bounds[r]) for r in range(num_ranks)]
    rounds = []
    for how in ReceiveOp:
        for distance in range(1, num_ranks):
            pairs = [(r, (r + distance) % num_ranks) for r in range(num_ranks)]
            rows = [(s, d, *owned[d if how == ReceiveOp.REDUCE else s]) for s, d in pairs]
            rounds.append(make_round(how, kept) if (kept := [row for row in rows if row[3]]) else Round.of((), 0, 0, 0))
    return Schedule("direct", Collective("allreduce"), num_ranks, random_shares(2 * num_ranks, random), rounds)


def two_level(num_ranks: int, random: Random) -> Schedule:
    """Groups reduce to their first rank, these form a ring, and copy the result to their groups."""
    groups = random_groups(num_ranks, random)
    leaders, width = [group[0] for group in groups], random.randint(1, 2)
    chunks = len(groups) * width
    rounds = []
    for turn in range(1, max(map(len, groups))):
        rounds.append(make_round(ReceiveOp.REDUCE, [(g[turn], g[0], 0, chunks) for g in groups if turn < len(g)]))
    for round_ in ring(len(groups)).rounds:
        rows = [(leaders[s], leaders[d], c * width, width) for s, d, c, _, _ in round_.rows()]
        rounds.append(make_round(ReceiveOp(int(round_.how[0])), rows))
    followers = [(group[0], r, 0, chunks) for group in groups for r in group[1:]]
    if followers:
        rounds.append(make_round(ReceiveOp.COPY, followers))
    return Schedule("two-level", Collective("allreduce"), num_ranks, random_shares(chunks, random), rounds)


def random_trees(num_ranks: int, random: Random) -> Schedule:
    """Each chunk is merged and spread along a random tree of its own; chunks overlap in time as they may."""
    chunks = random.randint(1, 4)
    rounds: list[list[tuple[int, int, int, ReceiveOp]]] = []
    for chunk in range(chunks):
        turn = -1
        for src, dst, how in _tree(num_ranks, random):
            turn += random.choice((1, 1, 2))
            rounds += [[] for _ in range(turn + 1 - len(rounds))]
            rounds[turn].append((src, dst, chunk, how))
    built = [Round.of(*zip(*ops, strict=True)) if ops else Round.of((), 0, 0, 0) for ops in rounds]
    return Schedule("trees", Collective("allreduce"), num_ranks, random_shares(chunks, random), built)


ALL: dict[str, Callable[[int, Random], Schedule]] = {
    "ring": random_ring,
    "star": star,
    "direct": direct,
    "two-level": two_level,
    "trees": random_trees,
}


def random_shares(num_chunks: int, random: Random) -> tuple[int, ...]:
    shares = [random.choice((0, 1, 1, 2, 7)) for _ in range(num_chunks)]
    shares[random.randrange(num_chunks)] = 3
    return tuple(shares)


def random_groups(num_ranks: int, random: Random) -> list[list[int]]:
    ranks = random.sample(range(num_ranks), num_ranks)
    cuts = sorted(random.sample(range(1, num_ranks), random.randrange(num_ranks)))
    return [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, num_ranks], strict=True)]


def _tree(num_ranks: int, random: Random) -> Iterable[tuple[int, int, ReceiveOp]]:
    parts = list(range(num_ranks))
    while len(parts) > 1:
        src = parts.pop(random.randrange(len(parts)))
        yield src, random.choice(parts), ReceiveOp.REDUCE
    complete, waiting = parts, random.sample(range(num_ranks), num_ranks)
    for dst in waiting:
        if dst not in complete:
            yield random.choice(complete), dst, ReceiveOp.COPY
            complete.append(dst)
