from pathlib import Path

import pytest

from ringweave import planning, topology
from ringweave.plots import figures, plan_plot
from ringweave.schedules import CollectiveKind


def drawn(text: str, path: Path, kind: CollectiveKind = "allreduce") -> str:
    """The words of the picture."""
    import matplotlib as mpl

    cluster = topology.loads(text)
    plan = planning.plan_group(cluster, [node.name for node in cluster.nodes for _ in node.devices])
    with mpl.rc_context({"svg.fonttype": "none"}):
        plan_plot.draw_plan(cluster, plan, 25_000_000, path, kind=kind)
    return path.read_text()


@pytest.mark.slow
def test_machines_links_leaders_and_the_bound(tmp_path: Path) -> None:
    words = drawn(Path("examples/clusters/three-racks.yaml").read_text(), tmp_path / "p.svg")
    for expected in (
        ">three-racks: 25MB among 6 ranks, at least 2000 ms; multi-level predicted 2047 ms<",
        ">The bound (red): cut: all that leaves a2 passes a2-&gt;r0 (100Mbit/s)<",
        ">core<",
        ">r1<",
        ">a2, 1 device, leads in row 0, column 2<",
        ">400Mbit/s<",
        ">100Mbit/s (slowest)<",
        ">leader matrix: 2 rows x 3 columns<",
        ">row 1<",
        ">col 2<",
    ):
        assert expected in words
    assert figures.ALARM in words


@pytest.mark.slow
def test_other_collectives_have_their_own_bound_and_no_matrix(tmp_path: Path) -> None:
    text = Path("examples/clusters/two-racks.yaml").read_text()
    words = drawn(text, tmp_path / "p.svg", "allgather")
    assert ">two-racks: allgather of 25MB among 8 ranks, at least 500 ms; multi-level predicted" in words
    assert ">The bound (red): cut: what they own, 0.5 of the message, has to leave" in words
    assert "leader matrix" not in words
    assert "leads in row" not in words


@pytest.mark.slow
def test_ranks_are_named_where_a_node_has_several(tmp_path: Path) -> None:
    words = drawn("name: c\nnodes:\n  - {name: a, nic: 1Gbit/s, devices: 2, count: 2}\n", tmp_path / "p.svg")
    assert ">a-1, 2 devices, rank 2 leads in row 0, column 1<" in words
    assert ">a-1/2<" in words


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 40, 400])
def test_clusters_of_any_size(count: int, tmp_path: Path) -> None:
    nodes = "  - {name: a-rather-long-name, nic: 1Gbit/s, devices: 1"
    words = drawn(f"name: c\nnodes:\n{nodes}, count: {count}}}\n", tmp_path / "p.svg")
    assert words.count(", leads in row") == (count if count <= 40 else 0)
    assert (f"({count} nodes), 1 device, leaders" in words) == (count > 40)
