"""What all pictures have in common: colours by one table, labels that do not overlap, units, alternative texts."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringweave import planning, topology
from ringweave.planning.partition.solve import solve_partition
from ringweave.plots import figures, plan_plot
from ringweave_bench import pipeline_history, result_charts
from tests.plots.overlapping import overlaps
from tests.plots.test_architectures import SETTING
from tests.plots.test_charts import LOCAL, RACKS
from tests.plots.test_stages import PROBLEM

ROOT = Path(__file__).parents[2]
DRAWERS = ("src/ringweave/plots", "bench/ringweave_bench", "bench/unequal", "bench/gpu", "examples/support")
CLUSTERS = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+\.(?:png|svg))\)")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that were saved."""
    found: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: found.append(figure))
    return found


def test_systems_and_parts_of_a_step_have_colours_of_their_own() -> None:
    systems = {name: colour for name, colour in figures.SYSTEM_COLOURS.items() if name != "balanced"}
    assert figures.SYSTEM_COLOURS["balanced"] == systems["ringweave"], "a mode of it"
    named = [*systems.values(), *figures.PART_COLOURS.values(), figures.ALARM, figures.DARK, figures.GREY]
    assert len(set(named)) == len(named)
    assert not set(named) & set(figures.DEVICE_COLOURS)


def test_the_page_of_a_run_has_the_same_colours() -> None:
    style = (ROOT / "src/ringweave/page/static/page.css").read_text()
    light = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", style.partition("@media")[0]))
    assert {name: light[name] for name in figures.PART_COLOURS} == figures.PART_COLOURS
    assert (light["alarm"], light["text"]) == (figures.ALARM, figures.DARK)


def test_no_drawer_has_a_colour_of_its_own() -> None:
    paths = [path for folder in DRAWERS for path in (ROOT / folder).glob("*.py") if path.name != "figures.py"]
    own = {path.name: re.findall(r"[\"'](?:#[0-9a-fA-F]{3,6}|C\d|tab:\w+)[\"']", path.read_text()) for path in paths}
    assert {name: found for name, found in own.items() if found} == {}


def images() -> Iterator[Any]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for text, target in IMAGE.findall(path.read_text()):
            yield pytest.param(path, text, target, id=f"{path.name}-{Path(target).name}")


@pytest.mark.parametrize(("path", "text", "target"), list(images()))
def test_alternative_texts_say_what_is_seen_and_of_which_kind_it_is(path: Path, text: str, target: str) -> None:
    assert (path.parent / target).is_file()
    assert len(text) >= 50, "a sentence, not a name"
    assert re.search("predicted|simulated|measured", text, re.IGNORECASE)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_labels_of_plans_do_not_overlap(path: Path, drawn: list[Any]) -> None:
    cluster = topology.load(str(path))
    plan = planning.plan_group(cluster, [node.name for node in cluster.nodes for _ in node.devices])
    first = cluster.links()[0]
    rates = {first.name: first.bandwidth_bytes_per_s / 3}  # measured one way: the longest text of a link
    plan_plot.draw_plan(cluster, plan, 25_000_000, Path("plan.png"), rates)
    assert overlaps(drawn[0]) == []


@pytest.mark.parametrize("num_workers", [16, 32])
def test_labels_of_curves_do_not_overlap(num_workers: int, drawn: list[Any]) -> None:
    figures.draw_over_latency(replace(SETTING, num_workers=num_workers), Path("curves.png"))
    assert overlaps(drawn[0]) == []
    assert all("(s)" in axis.get_xlabel() for axis in drawn[0].axes)


def test_labels_of_charts_do_not_overlap(drawn: list[Any]) -> None:
    result_charts.draw_results([RACKS, LOCAL], Path("bars.png"))
    figures.draw_partition(solve_partition(PROBLEM), Path("partition.png"))
    windows = [
        {"kind": "pipeline_measured", "first_step": at, "end_step": at + 10, "blocks": 12, "splits": [3, 6, 9]}
        for at in range(0, 80, 10)
    ]
    times = [{**event, "measured_s": 0.6, "predicted_s": 0.58} for event in windows]
    pipeline_history.draw_history(pipeline_history.read_history(times), Path("history.png"))
    for figure in drawn:
        assert overlaps(figure) == []
        assert all(axis.get_ylabel() or axis.get_xlabel() for axis in figure.axes)
