"""Sites, rounds and their division: pure functions."""

from collections.abc import Callable

import numpy as np
import pytest

from ringweave.errors import TrainingError
from ringweave.planning import sites
from ringweave.planning.sites import RoundSplit, SiteOrder


def rank(node: str, rate: float | None = None, **uplinks: float) -> dict:
    return {"node": node, "rate": rate, "uplinks": uplinks}


def test_without_a_cluster_file_each_node_is_a_site() -> None:
    assert sites.find_sites([rank("a"), rank("b"), rank("a")]) == ((0, 2), (1,))
    assert sites.find_sites([rank("a"), rank("a")]) == ((0, 1),)


def test_nodes_below_an_oversubscribed_switch_are_a_site() -> None:
    ranks = [rank(f"{rack}{node}", 100.0, **{rack: 100.0}) for rack in "rs" for node in range(2)]
    assert sites.find_sites(ranks) == ((0, 1), (2, 3))


def test_a_switch_that_carries_all_that_its_nodes_send_divides_nothing() -> None:
    pods = [rank(f"{rack}{n}", 100.0, **{rack: 200.0, pod: 50.0}) for rack, pod in ("rp", "sp", "tq") for n in (0, 1)]
    assert sites.find_sites(pods) == ((0, 1, 2, 3), (4, 5))


def test_each_node_is_a_site_if_the_cluster_file_tells_none_apart() -> None:
    assert sites.find_sites([rank("a", 100.0), rank("b", 100.0), rank("b", 100.0)]) == ((0,), (1, 2))
    assert sites.find_sites([rank("a", 100.0), rank("a", 100.0)]) == ((0, 1),)


def test_a_node_behind_a_thin_nic_is_a_site() -> None:
    assert sites.find_sites([rank("a", 100.0), rank("b", 10.0), rank("c", 100.0)]) == ((0, 2), (1,))


def rates_of(matrix: list[list[float]]) -> Callable[[str, str], float]:
    return lambda a, b: min(matrix[int(a)][int(b)], matrix[int(b)][int(a)])


def matrix_of(site_of: list[int], across: float, inside: float = 100.0) -> list[list[float]]:
    return [[inside if a == b else across for b in site_of] for a in site_of]


def names_of(matrix: list[list[float]]) -> list[str]:
    return [str(index) for index in range(len(matrix))]


@pytest.mark.parametrize(
    ("matrix", "nodes"),
    [
        (matrix_of([0, 0, 0, 0, 1, 1, 1, 1], 1.0), (("0", "1", "2", "3"), ("4", "5", "6", "7"))),
        (matrix_of([0, 1, 0, 1, 2, 2], 25.0), (("0", "2"), ("1", "3"), ("4", "5"))),
        (matrix_of([0, 0, 1, 0], 10.0), (("0", "1", "3"), ("2",))),
        (matrix_of([0, 0, 1, 1], 26.0), None),
        (matrix_of([0, 0, 0], 1.0), None),
        (matrix_of([0, 1, 2], 1.0), None),
    ],
    ids=["two sites", "three, interleaved", "one thin NIC", "a gap below 4", "all equal", "all thin"],
)
def test_nodes_are_grouped_by_measured_rates(
    matrix: list[list[float]], nodes: tuple[tuple[str, ...], ...] | None
) -> None:
    found = sites.group_nodes_by_rate(names_of(matrix), rates_of(matrix))
    assert (found and found.nodes) == nodes


def test_the_widest_gap_makes_the_sites() -> None:
    """Racks of 1000 in sites of 100, 5 between sites: gaps of 10 and of 20."""
    matrix = [[1000.0 if a // 2 == b // 2 else 100.0 if a // 4 == b // 4 else 5.0 for b in range(8)] for a in range(8)]
    found = sites.group_nodes_by_rate(names_of(matrix), rates_of(matrix))
    assert found is not None
    assert found.nodes == (("0", "1", "2", "3"), ("4", "5", "6", "7"))
    assert (found.inside_bytes_per_s, found.across_bytes_per_s) == (100.0, 5.0)


def test_a_chain_of_links_is_judged_by_its_slowest_pair() -> None:
    """0 and 2 are joined by way of 1 alone, so they are not four times as near as 3."""
    matrix = [[100.0, 100.0, 20.0, 10.0], [100.0, 100.0, 100.0, 10.0], [20.0, 100.0, 100.0, 10.0], [10.0] * 4]
    assert sites.group_nodes_by_rate(names_of(matrix), rates_of(matrix)) is None


def test_noise_of_measured_rates_moves_no_node() -> None:
    noise = np.random.default_rng(0).uniform(0.8, 1.2, (8, 8))
    matrix = (np.array(matrix_of([0, 0, 1, 1, 0, 0, 1, 1], 10.0)) * noise).tolist()
    found = sites.group_nodes_by_rate(names_of(matrix), rates_of(matrix))
    assert found is not None
    assert found.nodes == (("0", "1", "4", "5"), ("2", "3", "6", "7"))


def test_the_reason_names_sites_and_rates() -> None:
    matrix = matrix_of([0, 0, 1, 1], 1.25e6, 125e6)
    assert str(sites.group_nodes_by_rate(names_of(matrix), rates_of(matrix))) == (
        "sites by measured links: 0 1 | 2 3; 1Gbit/s or more inside, 10Mbit/s or less across, 100 times"
    )


def test_measured_sites_count_whatever_rates_are_assumed() -> None:
    measured = {"measured_sites": [["a", "c"], ["b"]]}
    assert sites.find_sites([rank("a") | measured, rank("b"), rank("c"), rank("b")]) == ((0, 2), (1, 3))
    assumed = [rank("a", 100.0) | measured, rank("b", 100.0), rank("c", 100.0)]
    assert sites.find_sites(assumed) == ((0, 2), (1,)), "agents of a job without a cluster file write one"


def test_named_sites_have_each_rank_once() -> None:
    assert sites.check_sites([[3, 2], [0, 1]], 4) == ((0, 1), (2, 3))
    for wrong in ([[0, 1], [1, 2, 3]], [[0, 1], [2]], [[0, 1, 2, 3], []]):
        with pytest.raises(TrainingError) as caught:
            sites.check_sites(wrong, 4)
        assert str(caught.value) == (
            f"sites: {wrong!r}, expected each of the ranks 0 to 3 in exactly one site. "
            "Name the ranks of each site, or leave sites out for those of the cluster file."
        )


def test_sites_that_nothing_tells_apart_are_explained() -> None:
    ranks = [{"node": f"n{index // 2}", "rate": 1e8, "uplinks": {}} for index in range(4)]
    assert sites.find_sites(ranks) == ((0, 1), (2, 3))
    assert sites.explain_sites(None, ranks) == f"; {sites.UNKNOWN_SITES}"
    assert sites.explain_sites([[0, 1], [2, 3]], ranks) == "", "the script names them"
    assert sites.explain_sites(None, ranks[:2]) == "", "one node"
    thin = [*ranks[:2], *({**each, "rate": 1e7} for each in ranks[2:])]
    assert sites.explain_sites(None, thin) == "", "the cluster file tells them apart"
    measured = [{**ranks[0], "measured_sites": (("n0",), ("n1",)), "measured_sites_text": "sites by links"}, *ranks[1:]]
    assert sites.explain_sites(None, measured) == "; sites by links"


def orders(split: RoundSplit, num_samples: int) -> list[SiteOrder]:
    indices = np.random.default_rng(0).permutation(num_samples)
    return [SiteOrder(indices=indices, split=split, site=site) for site in range(len(split.speeds))]


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 0.1), (1.0,)], ids=str)
@pytest.mark.parametrize(("batch", "steps"), [(8, 1), (8, 4), (7, 3), (2, 2)])
@pytest.mark.parametrize("num_samples", [1, 5, 64, 97])
def test_each_sample_is_in_one_inner_step_of_one_site(
    speeds: tuple[float, ...], batch: int, steps: int, num_samples: int
) -> None:
    ranks = tuple(range(1, len(speeds) + 1))
    split = RoundSplit(batch_samples=batch, inner_steps=steps, speeds=speeds, num_ranks=ranks)
    found = orders(split, num_samples)
    steps_of_all = [piece for order in found for piece in order.batches]
    assert sorted(np.concatenate(steps_of_all)) == list(range(num_samples))
    for order, largest in zip(found, split.site_batches, strict=True):
        assert all(0 < len(piece) <= largest for piece in order.batches)
    assert len({tuple(samples for samples, _ in order.rounds) for order in found}) == 1, (
        "all sites have the same rounds"
    )
    assert [sum(count for _, count in order.rounds) for order in found] == [order.num_batches for order in found]


def test_equal_sites_do_the_inner_steps_that_were_asked_for() -> None:
    split = RoundSplit(batch_samples=8, inner_steps=4, speeds=(1.0, 1.0))
    assert [order.rounds for order in orders(split, 64)] == [[(32, 4), (32, 4)]] * 2
    assert all(len(piece) == 4 for order in orders(split, 64) for piece in order.batches)


def test_a_site_that_is_three_times_as_fast_does_three_times_as_many_inner_steps() -> None:
    split = RoundSplit(batch_samples=8, inner_steps=8, speeds=(3.0, 1.0))
    assert [order.rounds for order in orders(split, 64)] == [[(64, 12)], [(64, 4)]]


def test_sites_of_nearly_equal_speed_do_as_many_whole_inner_steps() -> None:
    def parts(*speeds: float) -> list[tuple[int, int]]:
        split = RoundSplit(batch_samples=16 * len(speeds), inner_steps=4, speeds=speeds)
        return [(len(order.indices), *order.rounds[0]) for order in orders(split, 64 * len(speeds))]

    assert parts(65.0, 63.0) == [(128, 128, 4)] * 2
    assert parts(1.06, 1.0) == [(128, 128, 4)] * 2, "4.12 steps"
    assert [steps for *_, steps in parts(1.2, 1.0)] == [5, 4], "4.36 steps: 64 samples are too many for the slow site"
    assert [steps for *_, steps in parts(*[1.1] * 5, 1.0, 0.1)] == [5, 5, 5, 5, 5, 4, 1], "0.4 steps stay small"
    split = RoundSplit(batch_samples=112, inner_steps=1, speeds=(*[1.2] * 5, 1.0, 0.1))
    assert split.samples_of_sites(112)[-1] == 1, "what five fast sites leave is too much for the slowest one"


def test_one_site_has_the_batches_of_the_epoch() -> None:
    (order,) = orders(RoundSplit(batch_samples=8, inner_steps=1, speeds=(2.0,)), 20)
    assert [list(piece) for piece in order.batches] == [
        list(order.indices[first : first + 8]) for first in range(0, 20, 8)
    ]


def test_the_division_follows_measured_speeds_beyond_noise() -> None:
    split = RoundSplit(batch_samples=8, inner_steps=4, speeds=(1.0, 1.0))
    assert split.with_measured((16, 16), (1.0, 1.04)) is split
    assert split.with_measured((16, 16), (1.0, 3.0)).samples_of_sites(32) == (24, 8)
    assert split.with_measured((32, 0), (1.0, 1.0)) is split, "a site without samples measured nothing"


def test_inner_steps_follow_from_the_share_of_time_computing() -> None:
    assert sites.inner_steps_for_share(step_s=0.5, exchange_s=1.0, computing_share=0.9) == 18
    assert sites.inner_steps_for_share(step_s=1.0, exchange_s=1e-9, computing_share=0.94) == 1
    assert sites.inner_steps_for_share(step_s=1e-3, exchange_s=60.0, computing_share=0.94) == sites.MAX_INNER_STEPS


def test_rounds_are_as_long_as_the_exchange_of_a_fragment_needs() -> None:
    split = RoundSplit(batch_samples=8, inner_steps=16, speeds=(1.0, 1.0), fragments=4)
    fitted = split.fitted(step_s=1.0, exchange_s=7.0, blocked_s=0.0, computing_share=0.9, min_change=0.2)
    assert (fitted.inner_steps, fitted.round_steps) == (40, 10)
    fitted = split.fitted(step_s=1.0, exchange_s=0.01, blocked_s=1.0, computing_share=0.9, min_change=0.2)
    assert (fitted.inner_steps, fitted.round_steps) == (36, 9), "coding and applying take a tenth of the time"
    assert split.fitted(1.0, 1e-9, 0.0, 0.9, 0.2).inner_steps == sites.MIN_INNER_STEPS
    assert split.fitted(1e-3, 60.0, 0.0, 0.9, 0.2).inner_steps == sites.MAX_INNER_STEPS
    assert split.fitted(1.0, 2.9, 0.0, 0.9, min_change=0.3) is split, "20 is too near to 16"


def test_learning_rates_make_up_for_smaller_batches_and_for_more_steps_of_fast_sites() -> None:
    def factors(*speeds: float, ranks: tuple[int, ...] = (), site: int = 0) -> tuple[float, float]:
        split = RoundSplit(batch_samples=64, inner_steps=4, speeds=speeds, num_ranks=ranks)
        return split.inner_lr_factor(site, is_scale_invariant=True), split.inner_lr_factor(
            site, is_scale_invariant=False
        )

    assert factors(3.0, 3.0) == pytest.approx((2**0.5, 1.0))
    assert factors(*[1.0] * 8) == pytest.approx((8**0.5, 1.0))
    assert factors(7.0, 1.0) == pytest.approx((2**0.5 / 1.5625, 1 / 1.5625)), "7/8 of 14 steps, and 1/8 of 2: 12.5"
    assert factors(7.0, 1.0, ranks=(7, 1)) == pytest.approx(((7 / 8) ** 0.5 / 0.78125, 7 / 8 / 0.78125))
    assert factors(7.0, 1.0, ranks=(7, 1), site=1) == pytest.approx(((1 / 8) ** 0.5 / 0.78125, 1 / 8 / 0.78125))
    assert factors(2.0) == (1.0, 1.0)


def test_ranks_have_batches_of_one_size_in_sites_of_unequal_size() -> None:
    split = RoundSplit(batch_samples=32, inner_steps=4, speeds=(7.0, 1.0), num_ranks=(7, 1))
    assert split.site_batches == (28, 4)
    assert [order.rounds for order in orders(split, 128)] == [[(128, 4)]] * 2


def test_fragments_are_neighbours_of_about_equal_size() -> None:
    assert sites.divide_into_fragments([1, 1, 1, 1], 2) == ((0, 1), (2, 3))
    assert sites.divide_into_fragments([6, 1, 1, 1], 2) == ((0,), (1, 2, 3))
    assert sites.divide_into_fragments([5], 2) == ((), (0,)), "one is empty"
    found = sites.divide_into_fragments([3, 9, 4, 4, 7, 1], 3)
    assert sorted(index for fragment in found for index in fragment) == list(range(6))
