"""The large tree of bench/big_tree.py, here with fewer nodes."""

import importlib.util
import json
from pathlib import Path

import pytest

from ringweave import topology
from ringweave.cli import main


def tree(num_racks: int, num_nodes: int) -> str:
    spec = importlib.util.spec_from_file_location("big_tree", "bench/big_tree.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.text(num_racks, num_nodes, seed=0)


def test_the_tree_has_as_many_nodes_as_asked_for_in_unequal_racks() -> None:
    cluster = topology.loads(tree(10, 300))
    assert (cluster.num_nodes, len(cluster.switches)) == (300, 10)
    assert len({switch.uplink_bytes_per_s for switch in cluster.switches}) > 5
    assert tree(10, 300) == tree(10, 300)


@pytest.mark.slow
def test_a_tree_of_unequal_racks_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "big.yaml"
    path.write_text(tree(20, 1000))
    assert main.call(["plan", str(path), "--bytes", "100MB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"leader-matrix", "multi-level", "ring"} <= {choice["schedule"] for choice in found["choices"]}
    assert all(choice["predicted_s"] >= found["bound_s"] for choice in found["choices"])
    assert sorted(rank for row in found["matrix"] for rank in row) == list(range(1000))
