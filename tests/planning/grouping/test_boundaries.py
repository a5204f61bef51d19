"""The search for borders, against every way to put workers into rings."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import TrainingError
from ringweave.planning.ring_grouping import RingCostModel, ring_throughput, split_into_rings

FREE = RingCostModel(exchange_s=lambda _size, _rings: 0.0, efficiency=lambda _rings: 1.0)


def partitions(workers: list[int]) -> Iterator[list[list[int]]]:
    """Every set partition."""
    if not workers:
        yield []
        return
    first, rest = workers[0], workers[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for index, ring in enumerate(smaller):
            yield [*smaller[:index], [first, *ring], *smaller[index + 1 :]]


@st.composite
def models(draw):
    per_worker, shared = draw(st.floats(0, 2)), draw(st.floats(0, 2))
    falls = draw(st.floats(0, 0.5))
    return RingCostModel(
        exchange_s=lambda size, rings: per_worker * (size - 1) + shared * rings,
        efficiency=lambda rings: 1 / (1 + falls * (rings - 1)),
    )


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), models())
def test_no_partition_is_better(round_s, model) -> None:
    found = split_into_rings(round_s, model)
    assert sorted(worker for ring in found.rings for worker in ring) == list(range(len(round_s)))
    assert found.rounds_per_s == pytest.approx(ring_throughput(found.rings, round_s, model))
    best = max(ring_throughput(rings, round_s, model) for rings in partitions(list(range(len(round_s)))))
    assert found.rounds_per_s == pytest.approx(best)


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=6), models())
def test_no_partition_into_as_many_rings_is_better(round_s, model) -> None:
    found = split_into_rings(round_s, model, num_rings=3)
    ways = [rings for rings in partitions(list(range(len(round_s)))) if len(rings) == 3]
    assert found.rounds_per_s == pytest.approx(max(ring_throughput(rings, round_s, model) for rings in ways))


def test_borders_are_where_speeds_differ() -> None:
    costs = RingCostModel(exchange_s=lambda _size, rings: 0.05 * rings, efficiency=lambda rings: 0.97 ** (rings - 1))
    round_s = [4.1, 1.0, 1.02, 4.0, 1.01, 1.03, 0.99, 1.0]
    assert [sorted(ring) for ring in split_into_rings(round_s, costs).rings] == [[1, 2, 4, 5, 6, 7], [0, 3]]
    assert len(split_into_rings([1.0] * 8, costs).rings) == 1, "among equals one ring: nothing gets old"


def test_who_never_reported_is_in_no_ring() -> None:
    assert split_into_rings([1.0, math.inf, 1.0], FREE, num_rings=1).rings == ((0, 2),)


@pytest.mark.parametrize(("round_s", "num_rings"), [([1.0, 2.0], 3), ([1.0], 0), ([math.inf], None)])
def test_impossible_numbers_are_refused(round_s, num_rings) -> None:
    with pytest.raises(
        TrainingError, match=r"^rings: .*, expected 1 to \d, the workers that have reported\. Choose fewer"
    ):
        split_into_rings(round_s, FREE, num_rings)
