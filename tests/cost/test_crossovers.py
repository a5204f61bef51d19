import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.cost import architectures
from ringweave.cost.architectures import CORRECTED_ARCHITECTURES, PAPER_ARCHITECTURES, ArchitectureSetting

PAPERS = ArchitectureSetting(
    num_workers=16,
    num_groups=4,
    num_bytes=100_000_000,
    latency_s=0.01,
    bandwidth_bytes_per_s=125e6,
    reduce_s_per_byte=0.0,
)


@st.composite
def settings(draw) -> ArchitectureSetting:
    workers = draw(st.integers(2, 500))
    return ArchitectureSetting(
        num_workers=workers,
        num_groups=draw(st.integers(1, workers)),
        num_bytes=draw(st.integers(1, 10**10)),
        latency_s=0.0,
        bandwidth_bytes_per_s=draw(st.floats(1e5, 1e11)),
        reduce_s_per_byte=draw(st.floats(0, 1e-8)),
    )


def lowest(setting: ArchitectureSetting, names: tuple[str, ...], latency_s: float) -> str:
    return min(names, key=lambda name: architectures.latency_line(name, setting).seconds_at(latency_s))


def test_ps_hra_is_lowest_between_its_two_crossovers() -> None:
    """By hand, without reduction: ring 30 a + 1.5, hierarchical 13 a + 3.2, PS-HRA 9 a + 3.6, PS 2 a + 25.6."""
    spans = architectures.fastest_over_latency(PAPERS, PAPER_ARCHITECTURES)
    assert [span.architecture for span in spans] == ["ring", "ps-hra", "ps"]
    assert spans[1].first == 0.1
    assert spans[1].last == float(22 / 7)
    for latency_s, expected in ((0.0999, "ring"), (0.1001, "ps-hra"), (3.142, "ps-hra"), (3.144, "ps")):
        assert lowest(PAPERS, PAPER_ARCHITECTURES, latency_s) == expected


def test_with_the_server_s_link_shared_the_hierarchy_is_lowest_first() -> None:
    """PS-HRA is 9 a + 8.4 then: above 13 a + 3.2 up to 1.3 s, and PS below it from 17.2 / 7 s on."""
    spans = architectures.fastest_over_latency(PAPERS, CORRECTED_ARCHITECTURES)
    assert [span.architecture for span in spans] == ["ring", "hierarchical", "ps-hra-shared-link", "ps"]
    assert [span.first for span in spans] == [0.0, 0.1, 1.3, float(Fraction("17.2") / 7)]
    assert spans[-1].last == math.inf


def test_every_pair_that_crosses_is_found() -> None:
    found = {
        (each.faster_below, each.faster_above): each
        for each in architectures.crossovers_over_latency(PAPERS, PAPER_ARCHITECTURES)
    }
    assert set(found) == {
        ("ring", "hierarchical"),
        ("ring", "ps-hra"),
        ("hierarchical", "ps-hra"),
        ("ring", "ps"),
        ("hierarchical", "ps"),
        ("ps-hra", "ps"),
    }
    assert found["ring", "ps"].at == float(24.1 / 28)
    assert found["hierarchical", "ps"].at == float(22.4 / 11)
    assert not found["ring", "ps"].is_lowest
    assert found["ps-hra", "ps"].is_lowest
    assert found["ps-hra", "ps"].seconds == pytest.approx(9 * 22 / 7 + 3.6)


@given(settings(), st.sampled_from([PAPER_ARCHITECTURES, CORRECTED_ARCHITECTURES]))
def test_at_a_crossover_both_take_as_long_and_change_places(
    setting: ArchitectureSetting, names: tuple[str, ...]
) -> None:
    for each in architectures.crossovers_over_latency(setting, names):
        below, above = (architectures.latency_line(name, setting) for name in (each.faster_below, each.faster_above))
        assert math.isclose(below.seconds_at(each.at), above.seconds_at(each.at), rel_tol=1e-9)
        assert math.isclose(each.seconds, above.seconds_at(each.at), rel_tol=1e-9)
        assert below.latencies > above.latencies


@given(settings(), st.sampled_from([PAPER_ARCHITECTURES, CORRECTED_ARCHITECTURES]))
def test_spans_follow_each_other_and_name_the_lowest(setting: ArchitectureSetting, names: tuple[str, ...]) -> None:
    spans = architectures.fastest_over_latency(setting, names)
    assert spans[0].first == 0.0
    assert spans[-1].last == math.inf
    for before, after in itertools.pairwise(spans):
        assert before.last == after.first
        assert before.architecture != after.architecture
    for span in spans:
        middle_s = span.first * 2 + 1e-9 if math.isinf(span.last) else (span.first + span.last) / 2
        times = {name: architectures.latency_line(name, setting).seconds_at(middle_s) for name in names}
        assert times[span.architecture] <= min(times.values()) * (1 + 1e-12)


@pytest.mark.parametrize("names", [PAPER_ARCHITECTURES, CORRECTED_ARCHITECTURES], ids=["paper", "corrected"])
@pytest.mark.parametrize("groups_of", [lambda count: count // 4, lambda _: 4], ids=["rings of 4", "4 rings"])
def test_at_ten_milliseconds_the_ring_is_lowest_for_all_workers(groups_of, names: tuple[str, ...]) -> None:
    sweep = architectures.settings_over_workers(PAPERS, range(4, 65), groups_of)
    (span,) = architectures.fastest_over_workers(sweep, names)
    assert (span.architecture, span.first, span.last) == ("ring", 4, 64)


def test_crossovers_in_workers_lie_between_two_whole_numbers() -> None:
    """Rings of 4, no reduction, a = 0.1 s: PS-HRA is 4.5 s, the ring 0.2 (N-1) + 1.6 (N-1)/N passes it at N = 17."""
    setting = ArchitectureSetting(
        num_workers=4,
        num_groups=1,
        num_bytes=100_000_000,
        latency_s=0.1,
        bandwidth_bytes_per_s=125e6,
        reduce_s_per_byte=0.0,
    )
    sweep = architectures.settings_over_workers(setting, range(4, 65, 4), lambda count: count // 4)
    (found,) = architectures.crossovers_over_workers(sweep, ("ring", "ps-hra"))
    assert (found.faster_below, found.faster_above, found.at) == ("ring", "ps-hra", 20)
    assert found.seconds == pytest.approx(4.5)
    spans = architectures.fastest_over_workers(sweep, ("ring", "ps-hra"))
    assert [(span.architecture, span.first, span.last) for span in spans] == [("ring", 4, 16), ("ps-hra", 20, 64)]


def test_ps_hra_is_flat_where_the_rings_stay_the_same() -> None:
    sweep = architectures.settings_over_workers(PAPERS, range(4, 65, 4), lambda count: count // 4)
    times = [architectures.round_seconds("ps-hra", setting) for setting in sweep]
    assert max(times) == pytest.approx(min(times), rel=1e-12)
    shared = [architectures.round_seconds("ps-hra-shared-link", setting) for setting in sweep]
    assert shared[-1] - shared[0] == pytest.approx(2 * 15 * 0.8)
