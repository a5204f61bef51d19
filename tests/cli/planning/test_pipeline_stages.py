"""`plan --pipeline` and `simulate --pipeline`: stages of several devices on a cluster."""

import json
from pathlib import Path

import pytest

from ringweave.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"
CLUSTER, COARSE = "examples/clusters/slow-beside-fast.yaml", "examples/pipelines/coarse.yaml"
NUM_SAMPLES = 8 * 16


def document(capsys: pytest.CaptureFixture[str], verb: str, *arguments: str, cluster: str = CLUSTER) -> dict:
    assert main.run_command_line([verb, cluster, "--pipeline", COARSE, "--json", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_the_screen_of_a_plan(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", CLUSTER, "--pipeline", COARSE]) == 0
    check_golden(GOLDEN / "plan" / "pipeline.txt", capsys.readouterr().out)


def test_the_screen_of_a_simulation(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--devices", "0:3+1:5 2:8", "--straggle", "slow-0=2"]
    assert main.run_command_line(["simulate", CLUSTER, "--pipeline", COARSE, *arguments]) == 0
    check_golden(GOLDEN / "simulate" / "pipeline.txt", capsys.readouterr().out)


def test_two_slow_devices_share_a_stage_and_make_it_faster(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "plan")
    assert sorted(len(stage["devices"]) for stage in found["stages"]) == [1, 2]
    (wide,) = (stage for stage in found["stages"] if len(stage["devices"]) == 2)
    assert [(each["name"], each["samples"], each["share"]) for each in wide["devices"]] == [
        ("slow-0", 4, 0.5),
        ("slow-1", 4, 0.5),
    ]
    assert (wide["reduced_bytes"], wide["predicted_reduce_s"]) == (6_000_000, pytest.approx(6e6 / 125e6))
    assert found["simulated_samples_per_s"] == pytest.approx(NUM_SAMPLES / found["simulated_step_s"])
    assert found["one_device_a_stage"]["simulated_step_s"] / found["simulated_step_s"] > 1.5
    (link,) = found["links"]
    assert len(link["pieces"]) == 2
    assert link["predicted_transfer_s"] == pytest.approx(64e3 / 125e6 + 2 * 50e-6)


def test_a_format_between_stages_counts_fewer_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thin = tmp_path / "thin.yaml"
    thin.write_text("name: thin\nnodes:\n  - {name: n, nic: 1Mbit/s, devices: 1, count: 2}\n")
    arguments = ("simulate", "--devices", "0:8 1:8", "--splits", "1")
    found = {
        wire: document(capsys, *arguments, "--wire", wire, cluster=str(thin)) for wire in ("exact", "bf16", "int8")
    }
    assert [each["wire"] for each in found.values()] == ["exact", "bf16", "int8"]
    assert [each["links"][0]["bytes"] for each in found.values()] == [64e3, 32e3, 16e3]
    assert found["int8"]["simulated_step_s"] < 0.5 * found["exact"]["simulated_step_s"]
    assert main.run_command_line(["plan", CLUSTER, "--pipeline", COARSE, "--wire", "int8"]) == 0
    assert "1f1b-overlap, int8 between stages\n" in capsys.readouterr().out
    assert main.run_command_line(["plan", CLUSTER, "--pipeline", COARSE, "--wire", "int4"]) == 2
    assert "--wire of a pipeline: 'int4', expected one of exact, bf16, int8." in capsys.readouterr().err


def test_a_faster_device_of_a_stage_gets_more_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "name: c\nnodes:\n"
        "  - {name: pair, nic: 10Gbit/s, devices: [{kind: cpu, speed: 1}, {kind: cpu, speed: 3}]}\n"
        "  - {name: fast, nic: 10Gbit/s, devices: [{kind: cpu, speed: 4}]}\n"
    )
    found = document(capsys, "plan", "--memory", "40MB", cluster=str(path))
    shares = {each["name"]: each["samples"] for stage in found["stages"] for each in stage["devices"]}
    assert shares == {"pair/0": 2, "pair/1": 6, "fast": 8}


def test_memory_of_devices_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """The fast device cannot hold the largest block beside another one, and the slow ones hold only that one."""
    found = document(capsys, "plan", "--memory", "40MB")
    assert (found["devices"], found["splits"]) == ("0:4+1:4 2:8", [1])
    assert found["one_device_a_stage"] is None
    assert main.run_command_line(["plan", CLUSTER, "--pipeline", COARSE, "--memory", "9MB"]) == 2
    assert "stages: '3 blocks, 8 samples a microbatch', expected" in capsys.readouterr().err


def test_simulated_as_planned_and_slower_with_a_straggler(capsys: pytest.CaptureFixture[str]) -> None:
    planned = document(capsys, "plan")
    simulated = document(capsys, "simulate")
    assert simulated["simulated_step_s"] == planned["simulated_step_s"]
    given = ["--devices", planned["devices"], "--splits", ",".join(map(str, planned["splits"]))]
    assert document(capsys, "simulate", *given)["simulated_step_s"] == planned["simulated_step_s"]
    assert simulated["bound_s"] <= simulated["simulated_step_s"]
    slow = document(capsys, "simulate", *given, "--straggle", "slow-1=2")
    assert 1.8 < slow["simulated_step_s"] / planned["simulated_step_s"] < 2


def test_a_trace_has_the_spans_of_every_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    found = document(capsys, "simulate", "--trace", str(path))
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 3 * 2 * 16
    busy_us = {thread: sum(span["dur"] for span in spans if span["tid"] == thread) for thread in (1, 2, 3)}
    compute_s = [each["predicted_compute_s"] for stage in found["stages"] for each in stage["devices"]]
    assert list(busy_us.values()) == pytest.approx([16e6 * each for each in compute_s])


def test_uplinks_are_said_not_to_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["simulate", "examples/clusters/thin-uplink.yaml", "--pipeline", COARSE]) == 0
    assert "links     rates of NICs; uplinks of switches are not counted\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "arguments", "text"),
    [
        ("plan", ["--bytes", "1MB"], "options: ['--bytes'], expected none beside --pipeline"),
        ("simulate", ["--root", "1"], "options: ['--root'], expected none beside --pipeline"),
        ("simulate", ["--splits", "1"], "--splits: '1', expected --devices beside it"),
        ("simulate", ["--devices", "0:4+1:4"], "--devices: how many: 2, expected 3, as in the cluster file"),
        ("simulate", ["--devices", "0:4+1:4 2:8", "--splits", "1,2"], "--splits: '1,2', expected 1 block numbers"),
        ("simulate", ["--devices", "0:4+1:4 2:8", "--splits", "3"], "splits: '3', expected a block in each stage"),
        ("simulate", ["--straggle", "nobody=2"], "expected NODE=2 with a node of the cluster"),
        ("simulate", ["--fail", "rank:1"], "options: ['--fail'], expected none beside --pipeline"),
        ("simulate", ["--straggle", "rank:1=2s"], "expected NODE=2 with a node of the cluster"),
        ("plan", ["--memory", "1MB,2MB"], "--memory: how many: 2, expected 1 or 3, as devices"),
    ],
)
def test_options_that_do_not_fit(
    verb: str, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run_command_line([verb, CLUSTER, "--pipeline", COARSE, *arguments]) == 2
    assert text in capsys.readouterr().err


def test_options_that_need_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["simulate", CLUSTER, "--memory", "1MB"]) == 2
    assert "options of a pipeline: ['--memory'], expected none without --pipeline" in capsys.readouterr().err
    assert main.run_command_line(["plan", "--pipeline", COARSE]) == 2
    assert "CLUSTER: None, expected a cluster file beside --pipeline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "pipeline file: 'nothing', expected a map with the keys samples, microbatches and blocks"),
        ("samples: 1\nmicrobatches: 1\nblocks: []\n", "blocks: [], expected at least one block"),
        ("samples: 0\nmicrobatches: 1\nblocks: [{forward: 1s}]\n", "samples: 0, expected 1 or more"),
        (
            "samples: 1\nmicrobatches: 1\nschedule: x\nblocks: [{forward: 1s}]\n",
            "schedule: 'x', expected one of gpipe, 1f1b",
        ),
        (
            "samples: 1\nmicrobatches: 1\nblocks: [{forward: 1s, output: lots}]\n",
            "output: 'lots', expected a size such as 1MB. Correct it. [{path}:3: blocks.0.output]",
        ),
        ("samples: 1\nmicrobatches: 1\nblocks: [{forward: 1s, count: 1001}]\n", "count: 1001, expected 1 to 1000"),
        ("samples: 1\nmicrobatches: 1\nblocks: [{forwards: 1s}]\n", 'Did you mean "forward"?'),
    ],
)
def test_wrong_files(content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(content)
    assert main.run_command_line(["plan", CLUSTER, "--pipeline", str(path)]) == 2
    assert text.replace("{path}", str(path)) in capsys.readouterr().err
