"""The formulas against the spec's table and its sums, written down again here in fractions."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.cost import architectures
from ringweave.cost.architectures import ArchitectureSetting
from ringweave.errors import UsageError


@st.composite
def settings(draw) -> ArchitectureSetting:
    workers = draw(st.integers(1, 5000))
    return ArchitectureSetting(
        num_workers=workers,
        num_groups=draw(st.integers(1, workers)),
        num_bytes=draw(st.integers(0, 10**12)),
        latency_s=draw(st.floats(0, 100)),
        bandwidth_bytes_per_s=draw(st.floats(1, 1e12)),
        reduce_s_per_byte=draw(st.floats(0, 1e-3)),
    )


def by_the_table(setting: ArchitectureSetting) -> dict[str, Fraction]:
    n, k = Fraction(setting.num_workers), Fraction(setting.num_groups)
    s, b = Fraction(setting.num_bytes), Fraction(setting.bandwidth_bytes_per_s)
    a, c = Fraction(setting.latency_s), Fraction(setting.reduce_s_per_byte)
    scatter_reduce = (n / k - 1) * (a + k * s / (n * b) + k * s / n * c)
    allgather = (n / k - 1) * (a + k * s / (n * b))
    return {
        "ps": 2 * (a + n * s / b) + n * s * c,
        "ring": 2 * (n - 1) * (a + s / (n * b)) + (n - 1) * (s / n) * c,
        "hierarchical": 2 * (n / k - 1) * (a + k * s / (n * b))
        + 2 * (k - 1) * (a + s / (k * b))
        + (n / k - 1) * (k * s / n) * c
        + (k - 1) * (s / k) * c
        + a
        + s / b,
        "ps-hra": scatter_reduce + allgather + 2 * (a + s / b) + s * c + a + s / b,
        "ps-hra-shared-link": scatter_reduce + allgather + 2 * (a + k * s / b) + k * s * c + a + s / b,
    }


@given(settings())
def test_the_formulas(setting: ArchitectureSetting) -> None:
    for name, expected in by_the_table(setting).items():
        assert math.isclose(architectures.round_seconds(name, setting), expected, rel_tol=1e-12)


@given(settings())
def test_ps_hra_is_the_sum_that_the_table_gives_it(setting: ArchitectureSetting) -> None:
    n, k, a = Fraction(setting.num_workers), Fraction(setting.num_groups), Fraction(setting.latency_s)
    s, b, c = Fraction(setting.num_bytes), Fraction(setting.bandwidth_bytes_per_s), Fraction(setting.reduce_s_per_byte)
    table = 2 * (n / k - 1) * (a + k * s / (n * b)) + (n / k - 1) * (k * s / n) * c + 3 * (a + s / b) + s * c
    assert math.isclose(architectures.round_seconds("ps-hra", setting), table, rel_tol=1e-12)


def setting(**changes) -> ArchitectureSetting:
    values = {
        "num_workers": 10,
        "num_groups": 4,
        "num_bytes": 1000,
        "latency_s": 1.0,
        "bandwidth_bytes_per_s": 1e3,
        "reduce_s_per_byte": 0.0,
    }
    return ArchitectureSetting(**values | changes)


def test_one_group_shares_the_link_with_nobody() -> None:
    alone = setting(num_groups=1)
    assert architectures.round_seconds("ps-hra-shared-link", alone) == architectures.round_seconds("ps-hra", alone)


def test_the_last_ring_takes_the_remainder() -> None:
    """Rings of 2, 2, 2 and 4, and four groups among each other."""
    uneven = setting()
    assert (uneven.ring_size, uneven.largest_ring) == (2.5, 4)
    assert architectures.round_seconds_of_largest_ring("ps-hra", uneven) == 6 * (1 + 1 / 4) + 3 * 2
    assert architectures.round_seconds_of_largest_ring("hierarchical", uneven) == 6 * (1 + 1 / 4) + 6 * (1 + 1 / 4) + 2


def test_even_rings_have_no_largest_one() -> None:
    even = setting(num_groups=5)
    for name in architectures.ARCHITECTURES:
        assert architectures.round_seconds_of_largest_ring(name, even) == architectures.round_seconds(name, even)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_workers": 0}, "workers: 0, expected at least one. Change it."),
        ({"num_groups": 11}, "groups: 11, expected from 1 to the number of workers, 10. Change it."),
        ({"num_groups": 0}, "groups: 0, expected from 1 to the number of workers, 10. Change it."),
        ({"bandwidth_bytes_per_s": 0.0}, "rate: 0.0, expected a positive rate. Change it."),
        ({"num_bytes": -1}, "bytes: -1, expected zero or more. Change it."),
        ({"latency_s": -0.5}, "latency: -0.5, expected zero or more. Change it."),
        ({"latency_s": math.nan}, "latency: nan, expected zero or more. Change it."),
        ({"reduce_s_per_byte": -1.0}, "time to reduce a byte: -1.0, expected zero or more. Change it."),
    ],
)
def test_what_the_formulas_do_not_mean(changes, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        setting(**changes)
    assert str(caught.value) == text


@pytest.mark.parametrize(("name", "do"), [("rings", 'Did you mean "ring"?'), ("xyz", "Use one of these names.")])
def test_unknown_names(name: str, do: str) -> None:
    with pytest.raises(UsageError) as caught:
        architectures.round_seconds(name, setting())
    expected = "ps, ring, hierarchical, ps-hra, ps-hra-shared-link"
    assert str(caught.value) == f"architecture: '{name}', expected one of {expected}. {do}"
