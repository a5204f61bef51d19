import itertools
import random
import time

import numpy as np
import pytest

from ringweave.errors import JobError
from ringweave.jobs import split

MIN, BASE = 3, 13


def every_sharing(capacities: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """By trying everything: total -> the sharing that the rule wants, of all that are legal.

    Fewest nodes; among those the largest nodes, the earlier of equal ones; then as much as possible to earlier nodes.
    """
    legal: dict[int, tuple[int, ...]] = {}
    usable = [node for node, capacity in enumerate(capacities) if capacity >= MIN]
    sets = [used for size in range(1, len(usable) + 1) for used in itertools.combinations(usable, size)]
    for used in sorted(sets, key=lambda used: (len(used), sorted(-capacities[node] for node in used), used)):
        found = np.full(sum(capacities) + 1, -1)
        totals, codes = every_count(capacities, used)
        np.maximum.at(found, totals, codes)  # the largest number is what gives most to earlier nodes
        for total in np.flatnonzero(found >= 0).tolist():
            if total not in legal:
                digits = [int(found[total]) // BASE**place % BASE for place in reversed(range(len(capacities)))]
                legal[total] = tuple(digits)
    return legal


def every_count(capacities: tuple[int, ...], used: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Every legal sharing among these nodes: its total, and its counts as the digits of a number."""
    totals = codes = np.zeros(1, dtype=np.int64)
    for node, capacity in enumerate(capacities):
        options = np.arange(MIN, capacity + 1) if node in used else np.zeros(1, dtype=np.int64)
        totals = (totals[:, None] + options).ravel()
        codes = (codes[:, None] * BASE + options).ravel()
    return totals, codes


def check_every_total(capacities: tuple[int, ...]) -> None:
    legal = every_sharing(capacities)
    for total in range(1, sum(capacities) + 2):
        found = split.split_workers(total, capacities)
        assert found.counts == legal.get(total), (total, capacities)
        below = max((other for other in legal if other < total), default=None)
        above = min((other for other in legal if other > total), default=None)
        nearest = (None, None) if total in legal else (below, above)
        assert (found.nearest_below, found.nearest_above) == nearest, found


@pytest.mark.parametrize(
    ("total", "capacities", "counts"),
    [
        (15, (10, 5), (10, 5)),
        (11, (10, 5), (8, 3)),
        (10, (10, 5), (10, 0)),
        (10, (3, 3, 4), (3, 3, 4)),
        (7, (8, 10), (0, 7)),
        (5, (5, 5), (5, 0)),
        (13, (5, 2, 5, 10), (5, 0, 0, 8)),
    ],
)
def test_the_rule(total: int, capacities: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert split.split_workers(total, capacities).counts == counts


@pytest.mark.slow
def test_equal_to_every_sharing_tried_in_every_order_of_up_to_three_nodes() -> None:
    for num in (1, 2, 3):
        for capacities in itertools.product(range(13), repeat=num):
            check_every_total(capacities)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num", [4, *(pytest.param(num, marks=pytest.mark.thorough) for num in (5, 6))])
def test_equal_to_every_sharing_tried_for_every_set_of_up_to_six_nodes(num: int) -> None:
    shuffled = random.Random(0)
    kinds = (0, *range(MIN, 13))  # what is too small for the minimum is left out, whatever it is
    for capacities in itertools.combinations_with_replacement(kinds, num):
        check_every_total(tuple(shuffled.sample(capacities, num)))


def split_s(num_nodes: int) -> float:
    """Seconds of this thread's processor for one split over so many nodes: the least of ten."""
    chosen = random.Random(1)
    capacities = [chosen.randint(0, 16) for _ in range(num_nodes)]
    total = sum(capacity for capacity in capacities if capacity >= MIN) - 5
    taken_s = []
    for _ in range(10):
        begun_s = time.thread_time()
        found = split.split_workers(total, capacities)
        taken_s.append(time.thread_time() - begun_s)
        assert found.is_feasible
    return min(taken_s)


def test_ten_times_as_many_nodes_take_hardly_more_than_ten_times_as_long() -> None:
    assert split_s(10_000) < 40 * split_s(1_000), "a hundred times, if it were quadratic"


def test_it_prints() -> None:
    assert str(split.split_workers(11, (10, 5))) == "11 on (10, 5) -> 8, 3"
    assert str(split.split_workers(16, (10, 5))) == "16 on (10, 5) -> impossible"


def test_the_refusal_of_many_nodes_stays_short() -> None:
    text = split.split_workers(7, [3] * 3000).refusal_text("job.yaml: gpus")
    assert text == (
        "split: 7, expected a total that nodes of (3, 3, 3, 3, 3, 3, 3, 3, ...) can share with at least 3 each. "
        "Ask for 6 or 9, the nearest possible totals. [job.yaml: gpus]"
    )


def test_no_node_with_room() -> None:
    assert split.split_workers(4, (2, 1)).refusal_text().endswith("Add a node with room for at least 3.")


@pytest.mark.parametrize(
    ("total", "capacities", "least", "text"),
    [
        (True, (4,), 3, r"total: True, expected a whole number of at least 1\. Ask for some GPUs\."),
        (4, (), 3, r"capacities: \(\), expected at least one node\. Give the capacity of each node\."),
        (4, (4.0,), 3, r"capacity of node 0: 4\.0, expected a whole number of at least 0\. Write 0 for a node without"),
        (4, (4,), 0, r"minimum per node: 0, expected a whole number of at least 1\. Leave it out for 3\."),
    ],
)
def test_what_is_no_count_is_refused(total, capacities, least: int, text: str) -> None:
    with pytest.raises(JobError, match=text):
        split.split_workers(total, capacities, min_per_node=least)
