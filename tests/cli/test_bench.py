"""`ringweave bench` by its real command line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ringweave import lab, topology
from ringweave.cli import main
from ringweave.errors import CommunicationError, LaunchError
from ringweave.launcher import processes
from ringweave_bench import benchmark_request, comparison
from ringweave_bench.comparison import ComparisonReport
from ringweave_bench.results import BenchmarkResult

GOLDEN = Path(__file__).parent / "golden"
_CLI = """
import ctypes, signal
from ringweave.launcher.bootstrap import PR_SET_PDEATHSIG
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # if pytest is killed nobody else would end it
from ringweave.cli.main import main
main()
"""
CLUSTER = """
name: {name}
nodes:
  - {{name: a, switch: r, nic: 100Mbit/s, devices: 1, count: 2}}
  - {{name: b, nic: 200Mbit/s, devices: 1}}
switches: [{{name: r, uplink: 50Mbit/s}}]
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator:
    """`bench("allreduce", ...)`: the real command line, started; its output goes to files."""
    processes = []

    def start(*arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _CLI, "bench", *map(str, arguments)]
        with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, cwd=tmp_path, start_new_session=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("verb", ["allreduce", "reduce-scatter", "picture"])
def test_help(verb: str, check_golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main.run_command_line(["bench", verb, "--help"]) == 0
    check_golden(GOLDEN / f"help-bench-{verb}.txt", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["local:1"], "CLUSTER: 'local:1', expected local:N with 2 to 64 ranks."),
        (["nosuch.yaml"], "nosuch.yaml"),
        (["local:2", "--sizes", "0"], "--sizes: 0, expected a positive multiple of 4 bytes"),
        (["local:2", "--systems", "ncl"], "--systems: 'ncl', expected ringweave, gloo, openmpi, mpich,"),
        (["local:2", "--orders", "rows"], "--orders: 'rows', expected block, round-robin, shuffled,"),
        (["local:2", "--rounds", "0"], "--rounds: 0, expected 1 or more."),
        (["local:2", "--search-rounds", "-1"], "--search-rounds: -1, expected 0 or more."),
        (["local:2", "--schedule", "rnig"], "schedule: 'rnig', expected one of ring,"),
        (
            ["local:2", "--out", "nosuch/x.json"],
            "--out: 'nosuch/x.json', expected a file that can be written. No such file",
        ),
        (["local:2", "--out", "."], "--out: '.', expected a file that can be written. Is a directory."),
        (
            ["local:2", "--picture", "no/x.png"],
            "picture: 'no/x.png', expected a file in a folder that exists. Make the",
        ),
        (
            ["local:2", "--picture", "x.gif"],
            "picture: 'x.gif', expected a file name ending in .png or .svg. Name it so.",
        ),
    ],
)
def test_wrong_input(argv: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run_command_line(["bench", "allreduce", *argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ringweave: error: ")
    assert text in captured.err
    assert text in json.loads(captured.out)["error"]


def test_work_that_fails(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(request, progress, keep) -> None:
        raise LaunchError("no ranks")

    monkeypatch.setattr(comparison, "run_benchmark", fail)
    assert main.run_command_line(["bench", "allreduce", "local:2"]) == 1
    assert capsys.readouterr().err == "ringweave: error: no ranks\n"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ComparisonReport:
    """What a benchmark finds whose second size fails after this."""
    request = benchmark_request.BenchmarkRequest(
        cluster=topology.one_machine([2]), is_local=True, sizes=(4, 8), systems=("gloo",)
    )
    made = ComparisonReport(request=request, rates=None, is_partial=True)
    made.results = [
        BenchmarkResult(
            system="gloo",
            knob="x",
            order="block",
            num_bytes=4,
            num_ranks=2,
            seconds=(1.0,),
            processor_s=0.5,
            bound_s=None,
            raw_bound_s=None,
            wire_bytes={},
            theory_bytes=None,
        )
    ]
    return made


def test_what_was_measured_before_a_failure_is_kept(
    report: ComparisonReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def fail_later(request, progress, keep) -> None:
        keep(report)
        raise CommunicationError("a wrong sum")

    monkeypatch.setattr(comparison, "run_benchmark", fail_later)
    assert main.run_command_line(["bench", "allreduce", "local:2", "--out", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err == "ringweave: error: a wrong sum\n"
    kept = json.loads((tmp_path / "x.json").read_text())
    assert [(each["system"], each["bytes"]) for each in kept["results"]] == [("gloo", 4)]
    assert kept["notes"] == ["not finished: it was written while sizes or orders had still to be measured"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_costs_no_measurement(report: ComparisonReport, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def run(request, progress, keep) -> ComparisonReport:
        keep(report)
        report.is_partial = False
        return report

    monkeypatch.setattr(comparison, "run_benchmark", run)
    assert main.run_command_line(["bench", "allreduce", "local:2", "--out", "/dev/full", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == report.document()
    text = "--out: '/dev/full', expected a file that can be written. No space left on device."
    while_it_ran, at_the_end = captured.err.splitlines()
    assert while_it_ran.endswith(f"] {text}")
    assert at_the_end == f"ringweave: error: {text}"


def test_processes_that_do_not_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        pid = 4711

    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(processes, "end_descendants", lambda spared, **patience: [Stuck()])
    with pytest.raises(LaunchError, match=r"processes 4711 do not end, even after SIGKILL\. Look at them with ps\."):  # noqa: SIM117
        with comparison._end_leftovers():
            pass


@pytest.mark.slow
def test_pictures_of_several_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    result = {"system": "gloo", "bytes": 4, "median_s": 2.0, "iqr_s": 0.1, "bound_s": 1.0, "order": "block"}
    for name in ("a", "b"):
        document = {"cluster": name, "results": [{**result, "fraction_of_bound": 0.5}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert main.run_command_line(["bench", "picture", "a.json", "b.json", "--out", "ab.png"]) == 0
    assert (tmp_path / "ab.png").read_bytes().startswith(b"\x89PNG")
    assert main.run_command_line(["bench", "picture", "c.json", "--out", "ab.png"]) == 2
    assert "result of a benchmark: 'No such file or directory'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_two_systems_on_this_machine(bench, tmp_path: Path) -> None:
    options = ("--systems", "ringweave,gloo", "--sizes", "4MB,100kB", "--rounds", 3, "--search-rounds", 0, "--json")
    assert bench("allreduce", "local:2", *options, "--out", "x.json").wait(300) == 0, (tmp_path / "stderr").read_text()
    document = json.loads((tmp_path / "stdout").read_text())
    assert document == json.loads((tmp_path / "x.json").read_text())
    found = [(each["system"], each["bytes"], each["rounds"], len(each["rounds_s"])) for each in document["results"]]
    assert found == [(name, size, 3, 3) for size in (4_000_000, 100_000) for name in ("ringweave", "gloo")]
    assert all(0 < each["median_s"] < 60 and each["bound_s"] is None for each in document["results"])
    assert document["results"][0]["schedule"] not in (None, "native")
    assert (document["cluster"], document["num_ranks"]) == ("local:2", 2)
    assert "3 rounds of ringweave, gloo" in (tmp_path / "stderr").read_text()


@pytest.mark.slow
@pytest.mark.distributed
def test_interrupted_it_leaves_nothing(bench, tmp_path: Path) -> None:
    process = bench(
        "allreduce", "local:2", "--systems", "gloo", "--sizes", "100kB", "--rounds", 10**6, "--search-rounds", 0
    )
    own = psutil.Process(process.pid)
    while "1000000 rounds of gloo" not in (tmp_path / "stderr").read_text():
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        psutil.wait_procs([own], timeout=0.05)
    ranks = own.children(recursive=True)
    assert len(ranks) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 1
    assert "ringweave: error: interrupted" in (tmp_path / "stderr").read_text()
    assert not [rank for rank in ranks if rank.is_running()]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.distributed
def test_in_a_lab(bench, lab_problems: list[str], tmp_path: Path) -> None:
    if lab_problems:
        pytest.skip(" ".join(lab_problems))
    name = f"test-{os.getpid()}"
    (tmp_path / "c.yaml").write_text(CLUSTER.format(name=name))
    options = ("--systems", "ringweave,gloo", "--sizes", "4MB", "--rounds", 2, "--search-rounds", 0, "--json")
    try:
        assert bench("allreduce", "c.yaml", *options).wait(300) == 0, (tmp_path / "stderr").read_text()
    finally:
        was_up = lab.down(comparison.LAB_PREFIX + name)
    assert not was_up
    document = json.loads((tmp_path / "stdout").read_text())
    for result in document["results"]:
        assert 0.1 < result["fraction_of_bound"] <= 1.2, "rates of links are measured, too, and may come out low"
        uplink = result["links"]["r->core"]
        assert uplink["payload_per_byte"] >= 0.99  # the sum of both a has to get out
        assert uplink["wire_per_byte"] == pytest.approx(uplink["payload_per_byte"] * 1.0456, rel=1e-3)
    ours = document["results"][0]["links"]["r->core"]
    assert 0.97 < ours["payload_per_byte"] / ours["theory_per_byte"] < 1.3, "TCP may have sent some of it again"
    assert "2 rounds were asked for, fewer than the 9 of a result to rely on" in document["notes"]
    measured = {each["link"]: each["measured_bytes_per_s"] for each in document["links"]}
    assert measured["r->core"] is None or 0.85 < measured["r->core"] / (6.25e6 * 0.956) < 1.06
