import json

import pytest

from ringweave.cli import main


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict:
    assert main.run_command_line(["split", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("gpus", "nodes"), [(15, [10, 5]), (11, [8, 3]), (10, [10, 0]), (3, [3, 0])])
def test_the_document(gpus: int, nodes: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--gpus", str(gpus), "--capacity", "10,5")
    assert found == {"gpus": gpus, "capacity": [10, 5], "min_per_node": 3, "nodes": nodes}


def test_the_least_per_node_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "--gpus", "11", "--capacity", "10,5", "--min-per-node", "1")["nodes"] == [10, 1]


@pytest.mark.parametrize(
    ("gpus", "capacity", "below", "above"),
    [("16", "10,5", 15, None), ("2", "10,5", None, 3), ("5", "4,4", 4, 6), ("4", "2,1", None, None)],
)
def test_what_cannot_be_names_the_nearest(gpus, capacity, below, above, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--gpus", gpus, "--capacity", capacity, code=2)
    assert (found["nodes"], found["nearest_below"], found["nearest_above"]) == (None, below, above)
    assert found["error"].startswith(f"split: {gpus}, expected a total that nodes of")


def test_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["split", "--gpus", "11", "--capacity", "10,2,5"]) == 0
    assert capsys.readouterr().out == "11 on 2 of 3 nodes\nnode 0: 8 of 10\nnode 1: not used, of 2\nnode 2: 3 of 5\n"


def test_a_refusal_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["split", "--gpus", "5", "--capacity", "4,4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "ringweave: error: split: 5, expected a total that nodes of (4, 4) can share with at least 3 each. "
        "Ask for 4 or 6, the nearest possible totals.\n"
    )


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--gpus", "0", "--capacity", "4"], "total: 0, expected a whole number of at least 1. Ask for some GPUs."),
        (["--gpus", "4", "--capacity", "4,x"], "--capacity: '4,x', expected whole numbers separated by commas, one "),
        (["--gpus", "4", "--capacity", "4,-1"], "capacity of node 1: -1, expected a whole number of at least 0. Write"),
        (["--gpus", "4", "--capacity", "4", "--min-per-node", "0"], "minimum per node: 0, expected a whole number of"),
    ],
)
def test_wrong_input(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["split", *argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert text in json.loads(captured.out)["error"]
