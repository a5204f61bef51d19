import json
from pathlib import Path

import pytest

from ringweave.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "partition"
EQUAL = ["--work", ",".join("1" * 10), "--capability", "2,3,2,3"]
UNEQUAL = ["--work", "4,1,2,2,3,5", "--capability", "2,1,2", "--activation", "4,1,9,2,8,0", "--bandwidth", "2,0.25"]


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main.run_command_line(["partition", *argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_the_example_of_the_patent(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, *EQUAL) == {
        "splits": [2, 5, 7],
        "stages": [[1, 2], [3, 4, 5], [6, 7], [8, 9, 10]],
        "compute_s": [1, 1, 1, 1],
        "transfer_s": [0, 0, 0, 0],
        "memory": [None] * 4,
        "microbatches": None,
        "bottleneck_s": 1,
        "predicted_step_s": 1,
    }


def test_few_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *UNEQUAL, "--microbatches", "4")
    step_s = 3 * found["bottleneck_s"] + sum(found["compute_s"])
    assert found["predicted_step_s"] == pytest.approx(step_s, rel=1e-12)
    assert found["bottleneck_s"] == max(*found["compute_s"], *found["transfer_s"])


def test_an_empty_stage(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--work", "8,1,8", "--capability", "1,0.01,1", "--allow-empty")
    assert (found["splits"], found["stages"]) == ([1, 1], [[1], [], [2, 3]])


def test_memory_follows_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--work", "1,1,1,1", "--capability", "1,1", "--memory", "8,12"]
    argv += ["--block-memory", "2,2,2,2", "--block-stash", "2,2,2,2"]
    found = document(capsys, *argv)
    assert (found["splits"], found["memory"]) == ([1], [6, 12])
    assert document(capsys, *argv, "--schedule", "gpipe", "--microbatches", "1")["splits"] == [2]
    assert main.run_command_line(["partition", *argv, "--schedule", "gpipe", "--microbatches", "8"]) == 2
    assert "memory of block 1: 18.0, expected at most 12, what device 2 has" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "argv"), [("equal", EQUAL), ("unequal", [*UNEQUAL, "--microbatches", "4"])])
def test_on_the_screen(name: str, argv: list[str], check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["partition", *argv]) == 0
    check_golden(GOLDEN / f"{name}.txt", capsys.readouterr().out)


@pytest.mark.slow
def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stages.png"
    document(capsys, *EQUAL, "--picture", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--work", "1,x", "--capability", "1"],
            "--work, number 2: 'x', expected a number. Write numbers",
        ),
        (
            ["--work", "1", "--capability", "1,1"],
            "number of blocks: 1, expected at least one for each of the 2",
        ),
        (
            [*EQUAL, "--memory", "1,1,1,1"],
            "memory: 'only --memory', expected --memory of devices together with",
        ),
        ([*EQUAL, "--block-stash", "1"], "memory: 'no --memory', expected --memory of devices together with"),
        (
            [*EQUAL, "--memory", "1,1,1,1", "--schedule", "x"],
            "pipeline schedule: 'x', expected one of gpipe, 1f1b",
        ),
        ([*EQUAL, "--picture", "x.gif"], "picture: 'x.gif', expected a file name ending in .png or .svg."),
    ],
)
def test_wrong_input(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["partition", *argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert text in json.loads(captured.out)["error"]
