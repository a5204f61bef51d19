from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import Domain, ReceiveOp, Stripe, multi_level, multi_level_broadcast, multi_level_striped
from tests.schedules import generated
from tests.schedules.generated import RANDOM, moved, random_domain, some_shares


def leader(member: Domain | int, chunk: int) -> int:
    return member.leaders[chunk] if isinstance(member, Domain) else member


@pytest.mark.slow
@given(st.integers(1, 12), RANDOM)
def test_bytes_are_those_of_every_domain_walked_one_by_one(num_ranks: int, random: Random) -> None:
    shares = some_shares(random.randint(1, 12), random)
    top = random_domain(num_ranks, len(shares), random)
    expected = [Fraction(0)] * num_ranks
    for domain in top.walk():
        for chunk, share in enumerate(shares):
            part = Fraction(share, sum(shares))
            for member in domain.members:
                if leader(member, chunk) != domain.leaders[chunk]:
                    expected[leader(member, chunk)] += part
                    expected[domain.leaders[chunk]] += part
    assert moved(multi_level(top, shares)) == (expected, expected)


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(1, 4), RANDOM)
def test_stripes_carry_together_what_each_would_carry_alone(num_ranks: int, count: int, random: Random) -> None:
    stripes = []
    for _ in range(count):
        shares = some_shares(random.randint(1, 8), random)
        stripes.append(Stripe(random_domain(num_ranks, len(shares), random), tuple(shares)))
    whole = multi_level_striped(stripes)
    schedules.verify(whole)
    units = sum(sum(stripe.shares) for stripe in stripes)
    parts = [
        (Fraction(sum(stripe.shares), units), moved(multi_level(stripe.domain, stripe.shares))) for stripe in stripes
    ]
    for way in (0, 1):
        expected = [sum(weight * each[way][rank] for weight, each in parts) for rank in range(num_ranks)]
        assert moved(whole)[way] == expected


def test_trees_of_different_ranks_cannot_be_stripes_of_one_message() -> None:
    with pytest.raises(ScheduleError, match="expected the same collective of the same group and root"):
        multi_level_striped([Stripe(Domain((0, 1), (0,)), (1,)), Stripe(Domain((0, 1, 2), (0,)), (1,))])


@pytest.mark.slow
@given(st.integers(2, 16), RANDOM)
def test_the_way_down_is_the_way_up_turned_round_level_by_level(num_ranks: int, random: Random) -> None:
    shares = some_shares(random.randint(1, 12), random)
    schedule = multi_level(random_domain(num_ranks, len(shares), random), shares)
    half, phases = len(schedule.rounds) // 2, schedule.phases
    starts = [*(phase.first_round for phase in phases), len(schedule.rounds)]
    assert [phase.name.split()[0] for phase in phases] == ["reduce-scatter"] * (len(phases) // 2) + ["allgather"] * (
        len(phases) // 2
    )
    ups = {
        phases[i].name.split()[-1]: [sorted(r.rows()) for r in schedule.rounds[starts[i] : starts[i + 1]]]
        for i in range(len(phases) // 2)
    }
    for i in range(len(phases) // 2, len(phases)):
        assert starts[i] >= half
        down = [
            sorted((d, s, f, n, ReceiveOp.REDUCE) for s, d, f, n, _ in r.rows())
            for r in schedule.rounds[starts[i] : starts[i + 1]]
        ]
        assert down == ups[phases[i].name.split()[-1]]


def test_the_round_in_which_each_member_sends() -> None:
    """In round t the member t places after the leader's own."""
    schedule = multi_level(Domain((5, 4, 3, 2, 1, 0), (4,)), (1,))
    sources = [int(round_.src[0]) for round_ in schedule.rounds[:5]]
    assert sources == [3, 2, 1, 0, 5]
    assert [int(round_.dst[0]) for round_ in schedule.rounds[5:]] == sources


def test_neighbouring_chunks_of_one_way_are_one_operation() -> None:
    schedule = multi_level(Domain((0, 1, 2), (0, 0, 0, 1, 1, 2)), (1,) * 6)
    assert sorted(schedule.rounds[0].rows()) == [
        (0, 2, 5, 1, ReceiveOp.REDUCE),
        (1, 0, 0, 3, ReceiveOp.REDUCE),
        (2, 1, 3, 2, ReceiveOp.REDUCE),
    ]


def test_neighbours_are_joined_where_another_member_changes_its_leader() -> None:
    """Chunks 0 and 1 come from one rank of the first member in round 0, and from two of the second in round 1."""
    domain = Domain((0, Domain((1, 2), (1, 2)), 3), (0, 0))
    rounds = [sorted(round_.rows()) for round_ in multi_level(domain, (1, 1)).rounds]
    assert rounds[1] == [(1, 0, 0, 1, ReceiveOp.REDUCE), (2, 0, 1, 1, ReceiveOp.REDUCE)]
    assert rounds[2] == [(3, 0, 0, 2, ReceiveOp.REDUCE)]


def test_domains_of_one_member_pass_through() -> None:
    bare = Domain((0, 1), (0, 1))
    nested = Domain((Domain((Domain((0,), (0, 0)),), (0, 0)), Domain((1,), (1, 1))), (0, 1))
    assert multi_level(Domain((nested,), (0, 1)), (1, 1)) == multi_level(bare, (1, 1))


def test_chunks_without_a_share_are_left_out() -> None:
    three = multi_level(Domain((0, 1, 2), (0, 1, 2)), (1, 0, 3))
    assert three == multi_level(Domain((0, 1, 2), (0, 2)), (1, 3))
    scattered = schedules.multi_level_reduce_scatter(Domain((0, 1, 2), (0, 1, 2)), (1, 0, 3))
    assert scattered.collective.owners == (0, 2)


def two_tiers(num_racks: int, per_rack: int) -> Domain:
    """Chunk c belongs to rank c; in another rack it is led by the rank of the same index."""
    chunks = range(num_racks * per_rack)
    racks = []
    for rack in range(num_racks):
        ranks = range(rack * per_rack, (rack + 1) * per_rack)
        racks.append(Domain(tuple(ranks), tuple(ranks[chunk % per_rack] for chunk in chunks)))
    return Domain(tuple(racks), tuple(chunks))


@pytest.mark.parametrize(("num_racks", "per_rack"), [(2, 4), (4, 4), (3, 5)])
def test_hosts_and_uplinks_both_carry_what_the_bound_says(num_racks: int, per_rack: int) -> None:
    """2(N-1)/N of the message on each host's link, 2(R-1)/R on each uplink."""
    num_ranks = num_racks * per_rack
    schedule = multi_level(two_tiers(num_racks, per_rack), (1,) * num_ranks)
    volume = 2 * Fraction(num_ranks - 1, num_ranks)
    assert moved(schedule) == ([volume] * num_ranks,) * 2
    up = [Fraction(0)] * num_racks
    for round_ in schedule.rounds:
        for src, dst, _, count, _ in round_.rows():
            if src // per_rack != dst // per_rack:
                up[src // per_rack] += Fraction(count, num_ranks)
    assert up == [2 * Fraction(num_racks - 1, num_racks)] * num_racks


@pytest.mark.slow
@given(st.integers(1, 10), RANDOM)
def test_a_broadcast_enters_and_leaves_each_domain_once(num_ranks: int, random: Random) -> None:
    shares = some_shares(random.randint(1, 6), random)
    top, root = random_domain(num_ranks, len(shares), random), random.randrange(num_ranks)
    schedule = multi_level_broadcast(top, shares, root)
    for domain in top.walk():
        inside = set(ranks_of(domain))
        entered = left = 0
        for round_ in schedule.rounds:
            for src, dst, first, count, _ in round_.rows():
                part = sum(schedule.shares[first : first + count])
                entered += part * (src not in inside and dst in inside)
                left += part * (src in inside and dst not in inside)
        assert entered == sum(shares) * (root not in inside)
        assert left <= sum(shares) * depth_of(top, domain)


@pytest.mark.parametrize(("num_racks", "per_rack"), [(2, 4), (4, 4), (3, 5)])
def test_no_rank_of_a_broadcast_sends_much_more_than_the_message(num_racks: int, per_rack: int) -> None:
    num_ranks = num_racks * per_rack
    for root in (0, per_rack, num_ranks - 1):
        schedule = multi_level_broadcast(two_tiers(num_racks, per_rack), (1,) * num_ranks, root)
        schedules.verify(schedule)
        sent, _ = moved(schedule)
        assert sent[root] == 1
        assert max(sent) <= Fraction(5, 4)


def ranks_of(domain: Domain) -> list[int]:
    return [r for m in domain.members for r in (ranks_of(m) if isinstance(m, Domain) else [m])]


def depth_of(top: Domain, domain: Domain) -> int:
    """How many domains are above."""
    if top is domain:
        return 0
    return 1 + next(
        depth_of(m, domain) for m in top.members if isinstance(m, Domain) and any(d is domain for d in m.walk())
    )


RACK = Domain((2, 3), (2, 3))
PLACE = "Choose one of these. [depth 0, domain 0]"


@pytest.mark.parametrize("make", [multi_level, lambda domain, shares: multi_level_broadcast(domain, shares, 0)])
@pytest.mark.parametrize(
    ("domain", "shares", "expected"),
    [
        (Domain((), (0,)), (1,), "domain: no members, expected at least one. Leave empty domains out."),
        (
            Domain((0, 1), (0,)),
            (1, 1),
            "leaders of a domain: 1, expected 2, one per share. Name one each.",
        ),
        (
            Domain((0, 1, 1), (0,)),
            (1,),
            "ranks of the domains: [0, 1, 1], expected every rank from 0 to 2 once. List each once.",
        ),
        (
            Domain((1, RACK), (2, 3)),
            (1, 1),
            "ranks of the domains: [1, 2, 3], expected every rank from 0 to 2 once. List each once.",
        ),
        (Domain((0, 1), (), ), (), "shares: (), expected one whole number per chunk, none negative and not all 0. Give "
         "each chunk its relative size."),
        (Domain((0, 1), (0, 1)), (0, 0), "shares: (0, 0), expected one whole number per chunk, none negative and not "
         "all 0. Give each chunk its relative size."),
    ],
)  # fmt: skip
def test_trees_that_are_none(make, domain: Domain, shares: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make(domain, shares)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        (Domain((0, 1), (0, 2)), f"2, expected a rank from 0 to 1. {PLACE}"),
        (Domain((0, 1), (0, -1)), f"-1, expected a rank from 0 to 1. {PLACE}"),
        (Domain((0, 1), (0, 0.5)), f"0.0, expected a rank from 0 to 1. {PLACE}"),  # pyrefly: ignore
        (Domain((0, 1), (0, 2**70)), f"0, expected a rank from 0 to 1. {PLACE}"),
        (
            Domain((0, 1, RACK), (2, 2)),
            f"2, expected the leader of one of its members for chunk 1. {PLACE}",
        ),
        (
            Domain((RACK, Domain((0, 1), (0, 2))), (2, 3)),
            "2, expected the leader of one of its members for chunk 1. Choose one of these. [depth 1, domain 1]",
        ),
    ],
)
def test_leaders_that_lead_no_member(domain: Domain, expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        multi_level(domain, (1, 1))
    assert str(caught.value) == f"leader of a domain: {expected}"


@pytest.mark.parametrize("root", [-1, 4])
def test_a_root_that_is_not_there(root: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        multi_level_broadcast(Domain((0, 1, RACK), (0, 3)), (1, 1), root)
    assert str(caught.value) == f"root: {root}, expected ranks 0..3. Name a rank of the tree."


@pytest.mark.slow
def test_a_thousand_ranks_in_racks() -> None:
    schedule = multi_level(two_tiers(25, 40), (1,) * 1000)
    schedules.verify(schedule)
    assert generated.ALL.keys() >= {"multi-level"}


def test_owners_of_cut_blocks() -> None:
    assert schedules.block_owners((2, 1, 1, 2, 0), 3) == (0, 1, 1, 2, 2)
    for shares in ((1, 2, 1), (1, 1, 1)):
        with pytest.raises(
            ScheduleError, match=r"shares: \(.*\), expected 2 blocks of equal size, each cut into whole"
        ):
            schedules.block_owners(shares, 2)


def test_an_owner_that_there_is_not() -> None:
    with pytest.raises(ScheduleError, match=r"owner: 2, expected ranks 0\.\.1\. Name ranks of the tree"):
        schedules.multi_level_allgather(Domain((0, 1), (0, 1)), (1, 1), (0, 2))


def test_a_direct_broadcast_has_a_root_of_the_group() -> None:
    with pytest.raises(ScheduleError, match=r"root: 3, expected ranks 0\.\.2"):
        schedules.direct_broadcast(3, 3)
