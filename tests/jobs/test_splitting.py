import itertools
import random
import time

import pytest

from ringweave.errors import JobError
from ringweave.jobs import splitting
from ringweave.jobs.splitting import Split

MIN = 3


def every_sharing(capacities: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """By trying everything: total -> the sharing that the rule wants, of all that are legal.

    Fewest nodes; among those the largest nodes, the earlier of equal ones; then as much as possible to earlier nodes.
    """
    best: dict[int, tuple[tuple, tuple[int, ...]]] = {}
    for counts in itertools.product(*([0, *range(MIN, capacity + 1)] for capacity in capacities)):
        used = [node for node, count in enumerate(counts) if count]
        sizes = sorted((capacities[node] for node in used), reverse=True)
        key = (len(used), [-size for size in sizes], used, [-count for count in counts])
        total = sum(counts)
        if total and (total not in best or key < best[total][0]):
            best[total] = (key, counts)
    return {total: counts for total, (_, counts) in best.items()}


def feasible_totals(capacities: tuple[int, ...]) -> dict[int, int]:
    """Total -> fewest nodes, over all subsets: a set shares every total from 3 a node to the sum of its room."""
    found: dict[int, int] = {}
    for size in range(len(capacities), 0, -1):
        for nodes in itertools.combinations(capacities, size):
            if min(nodes) >= MIN:
                found |= dict.fromkeys(range(MIN * size, sum(nodes) + 1), size)
    return found


def check(found: Split, legal: dict[int, object]) -> None:
    if found.total in legal:
        assert found.is_feasible, found
        assert (found.nearest_below, found.nearest_above) == (None, None)
    else:
        assert not found.is_feasible, found
        assert found.nearest_below == max((total for total in legal if total < found.total), default=None), found
        assert found.nearest_above == min((total for total in legal if total > found.total), default=None), found


def check_every_total(capacities: tuple[int, ...]) -> None:
    legal = feasible_totals(capacities)
    for total in range(1, sum(capacities) + 2):
        found = splitting.split(total, capacities)
        check(found, legal)
        if found.counts is not None:
            assert found.num_nodes == legal[total]
            assert sum(found.counts) == total
            pairs = zip(found.counts, capacities, strict=True)
            assert all(count == 0 or MIN <= count <= capacity for count, capacity in pairs)


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
    assert splitting.split(total, capacities).counts == counts


@pytest.mark.slow
def test_equal_to_every_sharing_tried() -> None:
    small = (capacities for num in (1, 2, 3) for capacities in itertools.product(range(13), repeat=num))
    four = itertools.product((0, 2, 3, 4, 5, 7), repeat=4)
    for capacities in itertools.chain(small, four):
        legal = every_sharing(capacities)
        for total in range(1, sum(capacities) + 2):
            found = splitting.split(total, capacities)
            check(found, legal)
            assert found.counts == legal.get(total), (total, capacities)


@pytest.mark.slow
def test_six_nodes_equal_to_every_sharing_tried() -> None:
    chosen = random.Random(6)
    for _ in range(12):
        capacities = tuple(chosen.choice((0, 1, 3, 4, 5, 6, 8, 12)) for _ in range(6))
        legal = every_sharing(capacities)
        for total in range(1, sum(capacities) + 2):
            assert splitting.split(total, capacities).counts == legal.get(total), (total, capacities)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, pytest.param(6, marks=pytest.mark.thorough)])
def test_equal_to_all_subsets_for_every_set_of_up_to_six_nodes(num: int) -> None:
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
        found = splitting.split(total, capacities)
        taken_s.append(time.thread_time() - begun_s)
        assert found.is_feasible
    return min(taken_s)


def test_ten_times_as_many_nodes_take_hardly_more_than_ten_times_as_long() -> None:
    assert split_s(10_000) < 40 * split_s(1_000), "a hundred times, if it were quadratic"


def test_it_prints() -> None:
    assert str(splitting.split(11, (10, 5))) == "11 on (10, 5) -> 8, 3"
    assert str(splitting.split(16, (10, 5))) == "16 on (10, 5) -> impossible"


def test_the_refusal_of_many_nodes_stays_short() -> None:
    text = splitting.split(7, [3] * 3000).refusal("job.yaml: gpus")
    assert text == (
        "split: 7, expected a total that nodes of (3, 3, 3, 3, 3, 3, 3, 3, ...) can share with at least 3 each. "
        "Ask for 6 or 9, the nearest that can be. [job.yaml: gpus]"
    )


def test_no_node_with_room() -> None:
    assert splitting.split(4, (2, 1)).refusal().endswith("Add a node with room for at least 3.")


@pytest.mark.parametrize(
    ("total", "capacities", "least", "text"),
    [
        (True, (4,), 3, r"total: True, expected a whole number of at least 1\. Ask for some GPUs\."),
        (4, (), 3, r"capacities: \(\), expected at least one node\. Say how much each node may run\."),
        (4, (4.0,), 3, r"capacity of node 0: 4\.0, expected a whole number of at least 0\. Write 0 for a node that"),
        (4, (4,), 0, r"minimum per node: 0, expected a whole number of at least 1\. Leave it out for 3\."),
    ],
)
def test_what_is_no_count_is_refused(total, capacities, least: int, text: str) -> None:
    with pytest.raises(JobError, match=text):
        splitting.split(total, capacities, min_per_node=least)
