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


def test_a_format_counts_less_over_a_thin_link(capsys: pytest.CaptureFixture[str]) -> None:
    """The cut leaves the place where little crosses for the one where devices are in balance."""
    thin = ["--work", "1,1,1,1", "--capability", "1,1", "--activation", "1,8,8,0", "--bandwidth", "1"]
    found = {wire: document(capsys, *thin, "--wire", wire) for wire in ("exact", "bf16", "int8")}
    assert {wire: each["splits"] for wire, each in found.items()} == {"exact": [1], "bf16": [1], "int8": [2]}
    assert found["exact"] == document(capsys, *thin)
    assert (found["int8"]["transfer_s"], found["int8"]["bottleneck_s"]) == ([0, 2], 2)
    assert found["bf16"]["transfer_s"] == [0, 0.5]


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


SLOW_BESIDE_FAST = ["--work", "6,5,1", "--samples", "8", "--microbatches", "16"]
SLOW_BESIDE_FAST += ["--memory", "10,10,10", "--block-memory", "6,5,1"]


def test_stages_of_several_devices_on_the_screen(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["partition", *SLOW_BESIDE_FAST, "--capability", "1,1,2"]) == 0
    check_golden(GOLDEN / "wide.txt", capsys.readouterr().out)


def test_speeds_and_nics_of_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "name: c\nnodes:\n"
        "  - {name: slow, nic: 8kbit/s, devices: [{kind: cpu, speed: 1}], count: 2}\n"
        "  - {name: fast, nic: 8kbit/s, devices: [{kind: cpu, speed: 2}]}\n"
    )
    given = document(capsys, *SLOW_BESIDE_FAST, "--capability", "1,1,2", "--nic", "1000,1000,1000")
    assert document(capsys, *SLOW_BESIDE_FAST, "--cluster", str(path)) == given
    assert given["devices"] == "0:4+1:4 2:8"
    assert given["splits"] == [1]
    assert given["one_device_a_stage"]["simulated_step_s"] / given["simulated_step_s"] > 1.5


def test_gradients_that_cross_a_slow_nic_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Three alike devices share all blocks, unless their gradients take longer than a bubble."""
    argv = ["--work", "1,1,1", "--capability", "1,1,1", "--nic", "1,1,1", "--samples", "6", "--microbatches", "8"]
    assert document(capsys, *argv)["splits"] == []
    dear = document(capsys, *argv, "--block-gradients", "9,9,9")
    assert dear["splits"] == [1, 2]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--work", "1,1"], "devices: 'no --capability', expected --capability, or --samples with --cluster"),
        (["--work", "1,1", "--capability", "1,1", "--nic", "1,1"], "devices: '--nic', expected"),
        (["--work", "1,1", "--capability", "1,1", "--samples", "0"], "--samples: 0, expected 1 or more"),
        (
            ["--work", "1,1", "--capability", "1,1", "--samples", "2", "--bandwidth", "1"],
            "options of --samples: '--bandwidth'",
        ),
        (["--work", "1,1", "--capability", "1,1", "--samples", "2", "--nic", "1"], "--nic: how many: 1, expected 2"),
        (
            ["--work", "1,1", "--capability", "1,0", "--samples", "2"],
            "speeds and rates: [1.0, 0.0], expected numbers above 0",
        ),
    ],
)
def test_options_that_do_not_fit_together(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["partition", *argv]) == 2
    assert text in capsys.readouterr().err
