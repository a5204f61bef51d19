"""Schedules as the real generators make them, from random arguments, and how much of a message each rank moves."""

from collections.abc import Callable
from fractions import Fraction
from random import Random

from hypothesis import strategies as st

from ringweave import schedules
from ringweave.schedules import Domain, Schedule
from tests.schedules import samples

RANDOM = st.integers(0, 2**32 - 1).map(Random)
"""Not `st.randoms`, which draws every number by itself: large groups need too many."""

Make = Callable[[int, Random], Schedule]


def leader_matrix(num_ranks: int, random: Random) -> Schedule:
    groups = samples.random_groups(num_ranks, random)
    columns, nests_rings = random.choice([None, random.randint(1, len(groups))]), random.random() < 0.5
    return schedules.leader_matrix(groups, columns, nests_rings=nests_rings)


def multi_level(num_ranks: int, random: Random) -> Schedule:
    shares = some_shares(random.randint(1, 2 * num_ranks), random)
    return schedules.multi_level(random_domain(num_ranks, len(shares), random), shares)


ALLREDUCES: dict[str, Make] = {
    "ring": lambda num_ranks, random: schedules.ring(num_ranks, shuffled(num_ranks, random)),
    "leader-matrix": leader_matrix,
    "hierarchical": lambda num_ranks, random: schedules.hierarchical(samples.random_groups(num_ranks, random)),
    "ps": lambda num_ranks, random: schedules.parameter_server(num_ranks, random.randrange(num_ranks)),
    "direct": lambda num_ranks, random: schedules.direct(num_ranks, some_shares(num_ranks, random)),
    "multi-level": multi_level,
    "halving-doubling": lambda num_ranks, random: schedules.halving_doubling(num_ranks),
}


def half_of_a_ring(half: Callable[..., Schedule]) -> Make:
    return lambda num_ranks, random: half(num_ranks, shuffled(num_ranks, random), random.randint(-2, num_ranks + 2))


def half_of_direct(half: Callable[..., Schedule]) -> Make:
    return lambda num_ranks, random: half(num_ranks, some_shares(num_ranks, random))


def over_domains(half: Callable[..., Schedule], *, rooted: bool = False) -> Make:
    def make(num_ranks: int, random: Random) -> Schedule:
        shares = some_shares(random.randint(1, 2 * num_ranks), random)
        domain = random_domain(num_ranks, len(shares), random)
        return half(domain, shares, *([random.randrange(num_ranks)] if rooted else []))

    return make


def owned_over_domains(num_ranks: int, random: Random) -> Schedule:
    """Any owners and any leaders; the owners in the order of the ranks, as plans have them."""
    shares = some_shares(random.randint(1, 2 * num_ranks), random)
    domain = random_domain(num_ranks, len(shares), random)
    owners = sorted(random.choices(range(num_ranks), k=len(shares)))
    return schedules.multi_level_allgather(domain, shares, owners)


def ring_of_blocks(num_ranks: int, random: Random) -> Schedule:
    shares = random.choice([None, [random.randint(1, 5) for _ in range(num_ranks)]])
    return schedules.ring_block_allgather(num_ranks, shuffled(num_ranks, random), shares)


def mirrored(make: Make) -> Make:
    return lambda num_ranks, random: schedules.mirror(make(num_ranks, random))


def along_a_chain(collective: Callable[..., Schedule]) -> Make:
    return lambda num_ranks, random: collective(num_ranks, random.randrange(num_ranks), shuffled(num_ranks, random))


def along_a_tree(collective: Callable[..., Schedule]) -> Make:
    return lambda num_ranks, random: collective(num_ranks, random.randrange(num_ranks))


ALL: dict[str, Make] = {
    **ALLREDUCES,
    "ring reduce-scatter": half_of_a_ring(schedules.ring_reduce_scatter),
    "ring allgather": half_of_a_ring(schedules.ring_allgather),
    "direct reduce-scatter": half_of_direct(schedules.direct_reduce_scatter),
    "direct allgather": half_of_direct(schedules.direct_allgather),
    "multi-level reduce-scatter": over_domains(schedules.multi_level_reduce_scatter),
    "multi-level allgather": over_domains(schedules.multi_level_allgather),
    "multi-level allgather of owners": owned_over_domains,
    "multi-level reduce-scatter to owners": mirrored(owned_over_domains),
    "ring allgather of blocks": ring_of_blocks,
    "ring reduce-scatter of blocks": mirrored(ring_of_blocks),
    "direct broadcast": along_a_tree(schedules.direct_broadcast),
    "multi-level broadcast": over_domains(schedules.multi_level_broadcast, rooted=True),
    "chain broadcast": along_a_chain(schedules.chain_broadcast),
    "chain reduce": along_a_chain(schedules.chain_reduce),
    "binomial broadcast": along_a_tree(schedules.binomial_broadcast),
    "binomial reduce": along_a_tree(schedules.binomial_reduce),
}

EVERYTHING: dict[str, Make] = {**samples.ALL, **{f"generated {name}": make for name, make in ALL.items()}}
"""These and the hand-made samples."""


def shuffled(num_ranks: int, random: Random) -> list[int]:
    return random.sample(range(num_ranks), num_ranks)


def some_shares(count: int, random: Random) -> tuple[int, ...]:
    return samples.random_shares(count, random)


def random_domain(num_ranks: int, num_chunks: int, random: Random) -> Domain:
    """A tree of any depth and any leaders; some domains have a single member, some ranks hang higher than others."""
    return _domain(shuffled(num_ranks, random), num_chunks, random)


def _domain(ranks: list[int], num_chunks: int, random: Random) -> Domain:
    num_members = random.randint(1, min(4, len(ranks))) if random.random() < 0.7 else len(ranks)
    cuts = sorted(random.sample(range(1, len(ranks)), num_members - 1))
    members: list[Domain | int] = []
    for begin, end in zip([0, *cuts], [*cuts, len(ranks)], strict=True):
        is_bare = end - begin == 1 and random.random() < 0.8
        members.append(ranks[begin] if is_bare else _domain(ranks[begin:end], num_chunks, random))
    heads = [m.leaders if isinstance(m, Domain) else (m,) * num_chunks for m in members]
    if random.random() < 0.5:  # leaders in stretches, as planners like them
        picks = sorted(random.choices(range(len(heads)), k=num_chunks))
    else:
        picks = random.choices(range(len(heads)), k=num_chunks)
    return Domain(tuple(members), tuple(heads[pick][chunk] for chunk, pick in enumerate(picks)))


def moved(schedule: Schedule) -> tuple[list[Fraction], list[Fraction]]:
    """The parts of a message that each rank sends and receives in all."""
    total = sum(schedule.shares)
    sent, received = [Fraction(0)] * schedule.num_ranks, [Fraction(0)] * schedule.num_ranks
    for round_ in schedule.rounds:
        for src, dst, first, count, _ in round_.rows():
            part = Fraction(sum(schedule.shares[first : first + count]), total)
            sent[src] += part
            received[dst] += part
    return sent, received
