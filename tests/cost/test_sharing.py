"""Fair rates: no link carries more than it can, and nobody could have more without taking it from somebody poorer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.cost.network import max_min_fair_rates

LINKS = st.integers(0, 5)
ROUTES = st.lists(st.lists(LINKS, min_size=1, max_size=4, unique=True).map(tuple), min_size=1, max_size=8)
CAPACITIES = st.lists(st.floats(0.5, 100) | st.sampled_from([1.0, 2.0]), min_size=6, max_size=6)


@given(ROUTES, CAPACITIES)
def test_rates_are_max_min_fair(routes: list[tuple[int, ...]], capacities: list[float]) -> None:
    rates = max_min_fair_rates(routes, capacities)
    loads = [sum(rate for rate, route in zip(rates, routes, strict=True) if link in route) for link in range(6)]
    assert all(load <= capacity * (1 + 1e-9) for load, capacity in zip(loads, capacities, strict=True))
    for rate, route in zip(rates, routes, strict=True):
        full = [link for link in route if loads[link] >= capacities[link] * (1 - 1e-9)]
        others = {link: [r for r, o in zip(rates, routes, strict=True) if link in o] for link in full}
        assert any(rate >= max(others[link]) * (1 - 1e-9) for link in full), "a bottleneck, where nobody has more"


def test_a_known_case() -> None:
    """Bertsekas and Gallager's: a flow over all links, others over one; the second link is shared by three."""
    routes = [(0, 1, 2), (1,), (1,), (2,)]
    assert max_min_fair_rates(routes, [1.0, 1.0, 1.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_a_cut_link_gives_nothing() -> None:
    assert max_min_fair_rates([(0,), (0, 1), (1,)], [0.0, 5.0]) == [0.0, 0.0, 5.0]


def test_nobody_wants_anything() -> None:
    assert max_min_fair_rates([], [1.0]) == []


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), max_size=8))
def test_no_link_is_filled_beyond_its_rate_and_every_flow_passes_a_full_one(paths: list[list[int]]) -> None:
    rates = [1.0, 2.0, 3.0, 5.0, 8.0]
    got = max_min_fair_rates(paths, rates)
    for link, rate in enumerate(rates):
        assert sum(each for each, path in zip(got, paths, strict=True) if link in path) <= rate * 1.000001
    for each, path in zip(got, paths, strict=True):
        used = [sum(g for g, other in zip(got, paths, strict=True) if link in other) for link in path]
        assert each > 0
        assert any(total >= rates[link] * 0.999999 for total, link in zip(used, path, strict=True))


def test_a_flow_without_links_is_held_back_by_nothing() -> None:
    assert max_min_fair_rates([(), (0,)], [2.0]) == [math.inf, 2.0]
