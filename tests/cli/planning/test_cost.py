import json
from pathlib import Path

import pytest

from ringweave.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "cost"
SETTING = ["--bytes", "100MB", "--rate", "1Gbit/s", "--reduce-s-per-byte", "0"]


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main.run_command_line(["cost", *argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


@pytest.mark.parametrize(
    ("architecture", "seconds"),
    [("ps", 25.62), ("ring", 1.8), ("hierarchical", 3.33), ("ps-hra", 3.69), ("ps-hra-shared-link", 8.49)],
)
def test_seconds(architecture: str, seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--architecture", architecture, "--workers", "16", "--groups", "4", "--latency", "0.01", *SETTING]
    assert document(capsys, *argv)["seconds"] == pytest.approx(seconds, rel=1e-12)


def test_a_bare_number_is_bytes_or_seconds_and_a_rate_has_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--architecture", "ring", "--workers", "2", "--bytes", "1e6", "--latency", "0", "--rate", "1e9bit/s"]
    assert document(capsys, *argv, "--reduce-s-per-byte", "1e-9")["seconds"] == pytest.approx(0.0085)


@pytest.mark.parametrize("architecture", ["ps", "ring"])
def test_groups_are_ignored_where_there_are_none(architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--architecture", architecture, "--workers", "2", "--groups", "99")
    assert "groups" not in found


def test_uneven_rings_are_said(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--architecture", "ps-hra", "--workers", "10", "--groups", "4", *SETTING]
    found = document(capsys, *argv)
    assert (found["ring_size"], found["largest_ring"]) == (2.5, 4)
    assert found["seconds_of_largest_ring"] > found["seconds"]
    assert main.run_command_line(["cost", *argv]) == 0
    check_golden(GOLDEN / "uneven.txt", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["latency", "workers"])
def test_figures(figure: str, check_golden, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run_command_line(["cost", "--figure", figure, *SETTING]) == 0
    check_golden(GOLDEN / f"{figure}.txt", capsys.readouterr().out)
    assert Path(f"cost-{figure}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_document_of_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.svg"
    found = document(capsys, "--figure", "latency", "--picture", str(path), *SETTING)
    assert (found["workers"], found["groups"], found["bytes"], found["rate"]) == (16, 4, 100_000_000, "1Gbit/s")
    paper, corrected = found["parts"]
    assert paper["lowest"][1] == {"architecture": "ps-hra", "first": 0.1, "last": 22 / 7}
    assert [span["architecture"] for span in corrected["lowest"]] == [
        "ring",
        "hierarchical",
        "ps-hra-shared-link",
        "ps",
    ]
    assert corrected["lowest"][-1]["last"] is None
    assert path.read_bytes().startswith(b"<?xml")
    for stated in (b"S = 100MB", b"B = 1Gbit/s", b"N = 16", b"k = 4"):
        assert stated in path.read_bytes()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "what to predict: 'neither', expected either --architecture or --figure. Give one of the two."),
        (["--architecture", "ps", "--figure", "latency"], "what to predict: 'both', expected either"),
        (
            ["--architecture", "pshra"],
            "architecture: 'pshra', expected one of ps, ring, hierarchical, ps-hra, ps-hra-sh",
        ),
        (["--architecture", "ps", "--rate", "1e9"], "rate: '1e9', expected a number with one of bit/s"),
        (["--architecture", "ps-hra", "--workers", "2"], "groups: 4, expected from 1 to the number of workers, 2."),
        (["--architecture", "ps", "--picture", "x.png"], "--picture: 'x.png', expected a figure to draw. Add --figure"),
        (
            ["--figure", "latency", "--picture", "x.gif"],
            "picture: 'x.gif', expected a file name ending in .png or .svg.",
        ),
    ],
)
def test_wrong_input(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["cost", *argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert text in json.loads(captured.out)["error"]
