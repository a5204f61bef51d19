from pathlib import Path

import pytest

from ringweave.planning.partition.problem import PartitionProblem
from ringweave.planning.partition.solve import solve_partition
from ringweave.plots import figures

PROBLEM = PartitionProblem(
    work=((8, 1, 8),), capability=(1, 0.01, 1), activation=(2, 2, 2), bandwidth=(1, 1), allow_empty=True
)


def test_rows() -> None:
    assert [line.split() for line in figures.partition_rows(solve_partition(PROBLEM))] == [
        ["device", "blocks", "compute", "s", "transfer", "s"],
        ["1", "1", "8", "0", "#" * 36],
        ["2", "none", "0", "2", "=" * 9],
        ["3", "2-3", "9", "2", "#" * 40],
    ]


def test_rows_without_any_time() -> None:
    assert figures.partition_rows(solve_partition(PartitionProblem(work=((0,),), capability=(1,))))[1].split() == [
        "1",
        "1",
        "0",
        "0",
    ]


@pytest.mark.slow
def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    figures.draw_partition(solve_partition(PROBLEM), tmp_path / "p.svg")
    words = (tmp_path / "p.svg").read_text()
    for expected in (
        "device 1: 1<",
        "device 2: none<",
        "device 3: 2-3<",
        "bottleneck 9 s (predicted)",
        "transfer into it",
    ):
        assert expected in words


@pytest.mark.slow
def test_many_devices_are_not_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    figures.draw_partition(
        solve_partition(PartitionProblem(work=((1,) * 100,), capability=(1,) * 100)), tmp_path / "p.svg"
    )
    assert (tmp_path / "p.svg").read_text().count(">device ") == 34
