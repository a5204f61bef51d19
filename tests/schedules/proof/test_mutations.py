"""The proof fails when one operation is dropped, doubled, retargeted, swapped or changed, and says where."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules.generators.ring import ring
from tests import effort
from tests.schedules import generated, mutants, samples
from tests.schedules.generated import RANDOM
from tests.schedules.mutants import Mutant, Place
from tests.schedules.oracle import Listing, judge

KIND = st.sampled_from(sorted(mutants.KINDS))
MAKE = st.sampled_from(sorted(generated.EVERYTHING))


def error_of(listing: Listing, **options) -> str:
    """What `verify` says; empty if nothing."""
    try:
        schedules.verify(listing.schedule, **options)
    except ScheduleError as error:
        return str(error)
    return ""


def is_harmless(num_ranks: int, was: Place, now: Place) -> bool:
    """The two ways to retarget an operation of a ring that leave it a correct allreduce.

    A chunk's partial sums may skip ranks that add themselves later on the way, as long as they are still to come; and
    a complete chunk may be fetched from any rank that has it.
    """

    def station(rank: int) -> int:
        return (rank - was.op.chunk) % num_ranks

    if now.index != was.index or now.op.sign != was.op.sign or now.op.chunk != was.op.chunk:
        return False
    if was.op.sign == "+":
        return now.op.src == was.op.src and station(now.op.dst) > station(was.op.dst)
    num_copied = was.index - (num_ranks - 1)
    return now.op.dst == was.op.dst and (station(now.op.src) < num_copied or station(now.op.src) == num_ranks - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mutants.KINDS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_every_mutant_of_a_ring_is_refused_by_a_text_that_points_at_it(num_ranks: int, kind: str) -> None:
    whole = Listing.of(ring(num_ranks))
    for place in mutants.places(whole):
        for mutant in mutants.KINDS[kind](whole, *place):
            harmless = kind == "retarget" and is_harmless(num_ranks, *mutant.culprits)
            assert judge(mutant.listing).clean == harmless, mutant.what
            check_refused(mutant) if not harmless else schedules.verify(mutant.listing.schedule)


def check_refused(mutant: Mutant) -> None:
    text = error_of(mutant.listing)
    assert text, f"{mutant.what}: accepted"
    assert any(mutants.points_at(text, culprit) for culprit in mutant.culprits), f"{mutant.what}: {text}"
    assert "<-- here" in text or ", op " in text, f"{mutant.what}: {text}"


def test_the_number_of_mutants_is_what_the_sizes_say() -> None:
    whole, n = Listing.of(ring(4)), 4
    num_ops = 2 * (n - 1) * n
    counts = {kind: sum(len(list(f(whole, *p))) for p in mutants.places(whole)) for kind, f in mutants.KINDS.items()}
    assert counts["drop"] == counts["flip"] == num_ops == 24
    assert counts["double"] == 2 * num_ops
    assert counts["retarget"] == 2 * (n - 1) * num_ops
    assert counts["change chunk"] == (n - 1) * num_ops
    assert counts["swap"] == num_ops * (num_ops - n) // 2


@pytest.mark.slow
@settings(max_examples=effort.share_of(400))
@given(MAKE, st.integers(2, 7), KIND, RANDOM)
def test_exact_and_random_proofs_agree_with_brute_force(name: str, num_ranks: int, kind: str, random: Random) -> None:
    listing = Listing.of(generated.EVERYTHING[name](num_ranks, random))
    assert judge(listing) == (True, True)
    for _ in range(random.randrange(3)):
        places = mutants.places(listing)
        candidates = list(mutants.KINDS[kind](listing, *random.choice(places))) if places else []
        if candidates:
            listing = random.choice(candidates).listing
    verdict = judge(listing)
    assert (error_of(listing) == "") == verdict.clean
    assert (error_of(listing, exact=False, rng=np.random.default_rng(1)) == "") == verdict.right


@pytest.mark.slow
@given(MAKE, st.integers(2, 7), KIND, RANDOM)
def test_blocks_of_chunks_change_no_verdict(name: str, num_ranks: int, kind: str, random: Random) -> None:
    listing = Listing.of(generated.EVERYTHING[name](num_ranks, random))
    if candidates := list(mutants.KINDS[kind](listing, *random.choice(mutants.places(listing)))):
        listing = random.choice(candidates).listing
    one_chunk, two_chunks = 8 * num_ranks, 16 * num_ranks
    verdicts = {error_of(listing, memory_bytes=size) == "" for size in (1, one_chunk, two_chunks, 2**20)}
    assert len(verdicts) == 1


@given(st.integers(2, 8), st.sampled_from(["drop", "flip", "swap"]), RANDOM)
def test_what_breaks_the_result_is_found_by_chance_and_explained_exactly(
    num_ranks: int, kind: str, random: Random
) -> None:
    listing = Listing.of(samples.random_ring(num_ranks, random))
    place = random.choice([p for p in mutants.places(listing) if kind != "swap" or p[0] == 0])
    mutant = random.choice(list(mutants.KINDS[kind](listing, *place)))
    text = error_of(mutant.listing, exact=False)
    assert any(mutants.points_at(text, culprit) for culprit in mutant.culprits), f"{mutant.what}: {text}"


def test_a_mistake_in_a_large_group_is_traced_as_well() -> None:
    whole = Listing.of(ring(80))
    (mutant,) = mutants.drop(whole, 100, 7)
    assert error_of(mutant.listing) == (
        "schedule: rank 8 ends without the contribution of ranks 9, 10, 11, 12, 13, 14, 15, 16 and 50 more to chunk "
        "67, expected ranks 0, 1, 2, 3, 4, 5, 6, 7 and 72 more. The contribution of rank 9 to chunk 67 gets no "
        "further than rank 7, which holds it since 6>7:=67 in round 99: send it on. [round 100, rank 7]"
    )
