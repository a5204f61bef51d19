"""Algorithm 1 of Huang & Yang (2022), in any order of reports."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import TrainingError
from ringweave.planning.ring_grouping import CompletionQueue


def literally(reports: Sequence[int], num_workers: int, num_rings: int) -> list[tuple[int, ...]]:
    """The paper's loop: whenever the queue holds N/k workers the first N/k leave it; the rest are the last ring."""
    size = num_workers // num_rings
    queue: list[int] = []
    rings: list[tuple[int, ...]] = []
    for worker in reports:
        queue.append(worker)
        if len(queue) >= size and len(rings) < num_rings - 1:
            rings.append(tuple(queue[:size]))
            del queue[:size]
    return [*rings, tuple(queue)]


@st.composite
def orders(draw):
    num_workers = draw(st.integers(1, 12))
    return draw(st.permutations(range(num_workers))), draw(st.integers(1, num_workers))


@given(orders())
def test_rings_are_those_of_the_paper(order) -> None:
    reports, num_rings = order
    queue = CompletionQueue(len(reports), num_rings)
    formed = [ring for ring in map(queue.report, reports) if ring is not None]
    assert formed == list(queue.rings) == literally(reports, len(reports), num_rings)
    assert sorted(worker for ring in queue.rings for worker in ring) == sorted(reports)
    assert {len(ring) for ring in queue.rings[:-1]} <= {len(reports) // num_rings}


def test_a_ring_is_formed_as_soon_as_there_are_enough() -> None:
    queue = CompletionQueue(7, 3)
    assert [queue.report(worker) for worker in (4, 0)] == [None, (4, 0)]
    assert queue.report(4) is None, "a second report changes nothing"
    assert [queue.report(worker) for worker in (1, 6)] == [None, (1, 6)]
    assert [queue.report(worker) for worker in (2, 3, 5)] == [None, None, (2, 3, 5)]


@pytest.mark.parametrize("num_rings", [0, 4])
def test_more_rings_than_workers_are_refused(num_rings: int) -> None:
    text = rf"^rings: {num_rings}, expected 1 to 3, one worker in each at least\. Choose fewer rings, or use more work"
    with pytest.raises(TrainingError, match=text):
        CompletionQueue(3, num_rings)


def test_a_stranger_is_refused() -> None:
    with pytest.raises(
        TrainingError, match=r"^worker that reports: 3, expected 0 to 2\. Look into the log of that worker\.$"
    ):
        CompletionQueue(3, 1).report(3)
