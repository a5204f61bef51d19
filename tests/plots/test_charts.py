import copy
from pathlib import Path

import pytest

from ringweave_bench import result_charts


def entry(system: str, median_s: float, **changes) -> dict:
    rounds_s = [median_s * 0.9, median_s, median_s * 1.1]
    return {
        "system": system,
        "bytes": 1_000_000,
        "median_s": median_s,
        "iqr_s": 0.1 * median_s,
        "bound_s": 1.0,
        "fraction_of_bound": 1.0 / median_s,
        "order": "block",
        "rounds_s": rounds_s,
    } | changes


RACKS = {"cluster": "two-racks", "results": [entry("gloo", 2.0), entry("ringweave", 1.25)]}
LOCAL = {"cluster": "local:2", "results": [entry("mpich", 2.0, bound_s=None), entry("gloo", 1.0, bound_s=None)]}


def test_bars_are_fractions_of_the_bound_or_speeds_relative_to_gloo() -> None:
    bounded, relative = result_charts.bar_groups([RACKS, LOCAL])
    assert [group.label for group in bounded + relative] == ["two-racks\n1MB", "local:2\n1MB"]
    assert [(bar.system, bar.height) for bar in bounded[0].bars] == [("ringweave", 0.8), ("gloo", 0.5)]
    assert [(bar.system, bar.height) for bar in relative[0].bars] == [("gloo", 1.0), ("mpich", 0.5)]
    bar = bounded[0].bars[1]
    assert bar.low < bar.height < bar.high
    assert (bar.low, bar.high) == (pytest.approx(1 / 2.1), pytest.approx(1 / 1.9))


def test_orders_are_named_where_there_are_several() -> None:
    both = copy.deepcopy(RACKS)
    both["results"].append(entry("gloo", 4.0, order="shuffled"))
    assert [group.label for group in result_charts.bar_groups([both])[0]] == [
        "two-racks\n1MB, block",
        "two-racks\n1MB, shuffled",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_pictures(tmp_path: Path, suffix: str, begin: bytes) -> None:
    path = tmp_path / f"picture{suffix}"
    result_charts.draw_results([RACKS, LOCAL], path)
    content = path.read_bytes()
    assert content.startswith(begin)
    assert len(content) > 5000


@pytest.mark.parametrize(("count", "lengths"), [(0, []), (1, [1]), (6, [6]), (7, [3, 4]), (13, [4, 4, 5])])
def test_many_groups_are_drawn_in_rows(count: int, lengths: list[int]) -> None:
    found = [result_charts.BarGroup(label=str(index), bars=()) for index in range(count)]
    rows = result_charts._split_rows(found)
    assert [len(row) for row in rows] == lengths
    assert [group for row in rows for group in row] == found
