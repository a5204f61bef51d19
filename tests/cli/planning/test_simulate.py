import json
from pathlib import Path

import pytest

from ringweave.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "simulate"
RACKS = "examples/clusters/two-racks.yaml"


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main.run_command_line(["simulate", RACKS, "--bytes", "1MB", "--json", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_the_screen(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["simulate", RACKS, "--bytes", "1MB", "--schedule", "ring"]) == 0
    check_golden(GOLDEN / "ring.txt", capsys.readouterr().out)


def test_the_screen_of_a_failure(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main.run_command_line(["simulate", RACKS, "--bytes", "1MB", "--schedule", "ring", "--fail", "rank:3@20ms"]) == 0
    )
    check_golden(GOLDEN / "killed.txt", capsys.readouterr().out)


def test_a_wire_format_has_fewer_bytes_and_less_time(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["simulate", RACKS, "--schedule", "ring", "--wire", "bf16"]) == 0
    check_golden(GOLDEN / "bf16.txt", capsys.readouterr().out)
    exact, int8 = (document(capsys, "--bytes", "25MB", "--wire", wire) for wire in ("exact", "auto"))
    assert (exact["wire"], int8["wire"]) == ("exact", "int8")
    assert int8["bytes_on_link"]["r0->core"] / exact["bytes_on_link"]["r0->core"] == pytest.approx(0.252, rel=1e-2)
    assert int8["simulated_s"] < 0.35 * exact["simulated_s"]


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--schedule", "ring")
    assert (found["schedule"], found["bytes"], found["bound_s"]) == ("ring", 1_000_000, 0.04)
    assert found["simulated_s"] == pytest.approx(0.07, rel=0.02)
    assert found["bytes_on_link"]["r0->core"] == pytest.approx(1.75e6)
    assert found["finish_s"] == pytest.approx([found["simulated_s"]] * 8, rel=0.12)
    assert (found["died"], found["noticed_s"]) == ([], {})


@pytest.mark.parametrize("kind", ["reduce-scatter", "allgather"])
def test_another_collective(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--collective", kind)
    assert (found["collective"], found["schedule"], found["bound_s"]) == (kind, "multi-level", 0.02)
    assert found["bytes_on_link"]["r0->core"] == pytest.approx(0.5e6, rel=1e-4)
    assert 0.75 < found["bound_s"] / found["simulated_s"] < 1


def test_a_broadcast_from_a_rank_of_the_second_rack(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--collective", "broadcast", "--schedule", "ring", "--root", "5")
    assert (found["bytes_on_link"]["r1->b-0"], found["bytes_on_link"].get("r1->b-1", 0)) == (1e6, 0)
    assert found["binding"] == "cut: the message has to enter a-0, a-1, a-2, a-3 by core->r0 (200Mbit/s)"


def test_the_screen_of_a_broadcast(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--collective", "broadcast", "--schedule", "ring", "--root", "3"]
    assert main.run_command_line(["simulate", RACKS, "--bytes", "1MB", *arguments]) == 0
    check_golden(GOLDEN / "broadcast.txt", capsys.readouterr().out)


def test_without_a_name_it_is_the_schedule_of_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", RACKS, "--bytes", "1MB", "--simulate", "0", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["chosen"]
    assert document(capsys)["schedule"] == planned


def test_segments_and_processors(capsys: pytest.CaptureFixture[str]) -> None:
    alone = document(capsys, "--schedule", "multi-level", "--segments", "4")
    with_costs = document(capsys, "--schedule", "multi-level", "--segments", "4", "--processors", "assumed")
    assert alone["num_segments"] == 4
    assert (alone["processors"], with_costs["processors"]) == ("none", "assumed")
    assert with_costs["simulated_s"] > alone["simulated_s"]


def test_a_node_can_be_slow_only_at_work_that_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--schedule", "ring", "--segments", "16"]
    costs = document(capsys, *arguments, "--processors", "assumed")
    slow = document(capsys, *arguments, "--straggle", "a-1=30")
    assert slow["processors"] == "assumed"
    assert slow["simulated_s"] > 1.2 * costs["simulated_s"]
    assert main.run_command_line(["simulate", RACKS, "--straggle", "a-1=30", "--processors", "none"]) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith(
            "--processors with a slow node: 'none', expected assumed, or a FILE. Leave --processors out: work that "
            "takes no time is not slower on a-1."
        )
    )


def test_measured_costs_of_processors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"costs": {"message_s": 0.01}}')
    dear = document(capsys, "--schedule", "ring", "--processors", str(path))
    assert dear["processors"] == str(path)
    assert dear["simulated_s"] > 14 * 0.02, "fourteen rounds, a send and a receive in each"
    assert main.run_command_line(["simulate", RACKS, "--processors", "asumed"]) == 2
    assert "costs of processors: 'asumed', expected a file." in capsys.readouterr().err


def test_a_failure_in_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--schedule", "ring", "--fail", "rank:3@20ms", "--straggle", "rank:0=1ms")
    assert (found["simulated_s"], found["died"]) == (None, [3])
    assert found["noticed_s"]["4"] == pytest.approx(0.02005), "a latency later"
    assert set(found["noticed_s"]) == {"0", "1", "2", "4", "5", "6", "7"}


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    document(capsys, "--schedule", "ring", "--trace", str(path))
    found = json.loads(path.read_text())
    assert found["otherData"] == {"title": "allreduce of 1MB on two-racks by ring", "times": "simulated"}
    assert {event["ph"] for event in found["traceEvents"]} == {"M", "X", "C"}


def test_a_large_ring_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("name: large\nnodes:\n  - {name: n, nic: 100Gbit/s, devices: 1, count: 400}\nlatency: 10us\n")
    assert main.run_command_line(["simulate", str(path), "--schedule", "ring", "--bytes", "4MB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated_s"] == pytest.approx(2 * 399 * (10e-6 + 4e6 / 400 / 12.5e9), rel=1e-6)


def test_measured_rates_take_the_place_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rates.json"
    path.write_text('{"links": [{"link": "r1->core", "measured_bytes_per_s": 12.5e6}]}')
    before, found = (document(capsys, "--schedule", "ring", *more) for more in ([], ["--rates", str(path)]))
    assert (before["measured_rates"], found["measured_rates"]) == ({}, {"r1->core": 12.5e6})
    assert found["simulated_s"] == pytest.approx(2 * before["simulated_s"], rel=0.05)
    assert main.run_command_line(["simulate", RACKS, "--bytes", "1MB", "--schedule", "ring", "--rates", str(path)]) == 0
    out = capsys.readouterr().out
    assert "  r1->core carries 1.75002 MB, 140 ms at its rate\n" in out
    assert out.endswith(f"rates    of 1 of 20 links as measured: {path}\n")


def test_what_is_too_large_in_segments_is_refused_with_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("name: large\nnodes:\n  - {name: n, nic: 100Gbit/s, devices: 1, count: 400}\n")
    assert main.run_command_line(["simulate", str(path), "--schedule", "ring", "--segments", "8"]) == 2
    expected = (
        "messages of ring: 'more than 2000000', expected at most 2000000, or a schedule that is regular; here there "
        "are 8 segments. Take one segment (simulate --segments 1), or another schedule, such as ring or"
    )
    assert expected in capsys.readouterr().err
    assert main.run_command_line(["simulate", str(path), "--schedule", "ring", "--segments", "1"]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_trace_on_a_full_disk_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--bytes", "1MB", "--schedule", "ring", "--trace", "/dev/full", "--json")
    assert main.run_command_line(["simulate", RACKS, *arguments]) == 2
    text = "--trace: '/dev/full', expected a file that can be written. No space left on device."
    assert json.loads(capsys.readouterr().out) == {"error": text}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--schedule", "rign"], "schedule: 'rign', expected one of"),
        (
            ["--collective", "allgather", "--schedule", "ps"],
            "--schedule of allgather: 'ps', expected one of ring, direct, multi-level. Name one of these.",
        ),
        (["--root", "1"], "--root: 1, expected none for allreduce. Leave --root out, or add --collective broadcast."),
        (["--collective", "broadcast", "--root", "8"], "--root: 8, expected ranks 0..7. Name a rank."),
        (["--schedule", "native"], "'native' names the native backend"),
        (["--straggle", "z-9=2"], "node of a fault: 'z-9', expected a node with ranks of this group."),
        (["--fail", "rank:8"], "rank of a fault: 8, expected 0 to 7."),
        (
            ["--trace", "/no/such/folder/x.json"],
            "--trace: '/no/such/folder/x.json', expected a file that can be written.",
        ),
    ],
)
def test_wrong_usage(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["simulate", RACKS, *arguments]) == 2
    assert text in capsys.readouterr().err
