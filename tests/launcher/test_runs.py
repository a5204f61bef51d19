"""`ringweave run` with real workers that end well."""

import json
import os
import subprocess
import sys

import pytest

from ringweave import telemetry

pytestmark = pytest.mark.distributed

PRINT_ENVIRON = """
    import json
    print(json.dumps(dict(os.environ)))
"""


def environs(run) -> list[dict[str, str]]:
    return [json.loads(run.log(rank)) for rank in range(run.record["world_size"])]


def test_workers_get_what_torchrun_would_give_them(start, script) -> None:
    run = start("--workers", "4", script(PRINT_ENVIRON), RINGWEAVE_SCHEDULE="ring", TORCHELASTIC_RUN_ID="outer")
    assert run.wait_ended() == 0, run.stderr
    got = environs(run)
    assert [e["RANK"] for e in got] == [e["LOCAL_RANK"] for e in got] == ["0", "1", "2", "3"]
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["GROUP_RANK"], e["NODE_RANK"]) for e in got} == {
        ("4", "4", "0", "0")
    }
    assert {(e["MASTER_ADDR"], e["PYTHONUNBUFFERED"]) for e in got} == {("127.0.0.1", "1")}
    assert len({e["MASTER_PORT"] for e in got}) == 1
    assert got[0]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 4))
    assert got[0]["RINGWEAVE_CLUSTER"] == str(run.run_dir / "cluster.yaml")
    assert got[0]["RINGWEAVE_RUN_DIR"] == str(run.run_dir)
    assert "RINGWEAVE_SCHEDULE" not in got[0], "only the argument forces a schedule"
    assert "TORCHELASTIC_RUN_ID" not in got[0]


def test_any_command_after_dashes_is_run_as_it_is(start) -> None:
    run = start("--workers", "2", "--", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE: $0 $1"', "a.py", "--json")
    assert run.wait_ended() == 0, run.stderr
    assert [run.log(rank) for rank in range(2)] == ["rank 0 of 2: a.py --json\n", "rank 1 of 2: a.py --json\n"]
    assert run.record["command"][:2] == ["sh", "-c"]


def test_two_unequal_nodes(start, script) -> None:
    run = start(
        "--workers",
        "3,2",
        "--replace-backend",
        "--schedule",
        "ring",
        script(PRINT_ENVIRON),
        OMP_NUM_THREADS="7",
        MALLOC_TRIM_THRESHOLD_="131072",
    )
    assert run.wait_ended() == 0, run.stderr
    got = environs(run)
    assert [e["LOCAL_RANK"] for e in got] == ["0", "1", "2", "0", "1"]
    assert [e["LOCAL_WORLD_SIZE"] for e in got] == ["3", "3", "3", "2", "2"]
    assert [e["GROUP_RANK"] for e in got] == ["0", "0", "0", "1", "1"]
    assert [e["RINGWEAVE_NODE"] for e in got] == ["node0"] * 3 + ["node1"] * 2
    assert {(e["RINGWEAVE_REPLACE_BACKEND"], e["RINGWEAVE_SCHEDULE"], e["OMP_NUM_THREADS"]) for e in got} == {
        ("1", "ring", "7")
    }
    assert {(e["MALLOC_TRIM_THRESHOLD_"], e["MALLOC_MMAP_THRESHOLD_"]) for e in got} == {("131072", str(2**28))}
    assert run.record["cluster"]["nodes"] == [
        {"name": "node0", "workers": [0, 1, 2]},
        {"name": "node1", "workers": [3, 4]},
    ]


def test_a_cluster_file_gives_one_worker_per_device(start, script, tmp_path) -> None:
    text = (
        "name: pair  # kept as it is\n"
        "nodes:\n"
        "  - {name: a0, nic: 1Gbit/s, devices: 2}\n"
        "  - {name: b0, nic: 1Gbit/s, devices: 1}\n"
    )
    (tmp_path / "pair.yaml").write_text(text)
    run = start("--cluster", "pair.yaml", script("print(os.environ['RINGWEAVE_NODE'], os.environ['LOCAL_RANK'])"))
    assert run.wait_ended() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[0] a0 0", "[1] a0 1", "[2] b0 0"]
    assert (run.run_dir / "cluster.yaml").read_text() == text
    assert run.record["cluster"]["path"] == "pair.yaml"
    assert next(telemetry.read_events(run.run_dir / "events.jsonl"))["cluster_text"] == text


def test_output_is_merged_by_line_and_kept_by_rank(start, script) -> None:
    run = start("--workers", "2", script("print('out', rank); print('err', file=sys.stderr); print('no end', end='')"))
    assert run.wait_ended() == 0
    assert sorted(run.stdout.splitlines()) == ["[0] no end", "[0] out 0", "[1] no end", "[1] out 1"]
    assert run.stderr.splitlines()[0] == "ringweave: 2 workers on node0 (2); files in run"
    assert sorted(run.stderr.splitlines()[1:]) == ["[0] err", "[1] err"]
    assert sorted(run.log(1).splitlines()) == ["err", "no end", "out 1"]


RECORD = """
    import importlib, json
    EventLog = importlib.import_module("ringweave.telemetry").EventLog  # by name: else torch is imported beforehand
    run_dir = os.environ["RINGWEAVE_RUN_DIR"]
    counts = {"ring": {"collectives": 3, "bytes": 300, "messages": 10 + rank}}
    EventLog(run_dir + "/events.jsonl").write("collectives", rank=rank, group="world", by_schedule=counts)
    if rank == 0:
        record = json.load(open(run_dir + "/run.json"))
        json.dump(record | {"loss": 2.5}, open(run_dir + "/run.json", "w"))
"""


def test_the_record_says_what_ran(start, script) -> None:
    run = start("--workers", "2", script(RECORD), "--json", "--workers=9")
    assert run.wait_ended() == 0, run.stderr
    record = run.record
    assert record["command"] == [str(run.folder / "script.py"), "--json", "--workers=9"]
    assert (record["world_size"], record["exit_code"], record["outcome"]) == (2, 0, "done")
    assert record["loss"] == 2.5, "what the script adds survives"
    assert record["collectives_by_schedule"] == {"ring": {"collectives": 3, "bytes": 300, "messages": 21}}
    assert {
        "ringweave",
        "python",
        "torch",
        "cluster",
        "started",
        "ended",
        "wall_s",
        "schedule",
        "plan",
    } <= record.keys()
    kinds = [event["kind"] for event in run.events()]
    assert sorted(set(kinds)) == ["collectives", "run_ended", "run_started", "worker_exited", "worker_started"]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_ended")


def test_arguments_after_the_script_are_its_own(start, script) -> None:
    run = start(script("print(sys.argv[1:])"), "--help", "-m", "--workers", "x", "--", "-", "a b", "")
    assert run.wait_ended() == 0, run.stderr
    assert run.stdout == f"[0] {['--help', '-m', '--workers', 'x', '--', '-', 'a b', '']}\n"


def test_a_module_runs_like_python_m(start, tmp_path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    run = start("--workers", "2", "-m", "package.train", "--lr", "1")
    assert run.wait_ended() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"[{rank}] __main__ ['--lr', '1']" for rank in (0, 1)]
    assert run.record["command"] == ["-m", "package.train", "--lr", "1"]


def test_ten_megabytes_do_not_block(start, script) -> None:
    line = "x" * 99
    run = start(
        "--workers", "2", script(f"for f in (sys.stdout, sys.stderr): f.write('{line}\\n' * 25_000); f.flush()")
    )
    assert run.wait_ended() == 0
    assert run.stdout.count("\n") == 50_000
    assert run.log(0) == f"{line}\n" * 50_000


def test_binary_garbage_comes_through(start, script) -> None:
    run = start(script(r"sys.stdout.buffer.write(bytes(range(11, 256)) + b'\n' + b'\0' * 200_000)"))
    assert run.wait_ended() == 0
    assert (run.folder / "stdout").read_bytes().count(b"\0") == 200_000


def test_a_progress_bar_gives_few_lines_and_its_last_state(start, script) -> None:
    run = start(script(r"for i in range(5000): sys.stderr.write(f'\r{i} of 5000')" "\nsys.stderr.write('\\n')"))
    assert run.wait_ended() == 0
    assert run.stderr.splitlines()[-1] == "[0] 4999 of 5000"
    assert len(run.stderr.splitlines()) < 10


def test_a_reader_that_leaves_does_not_end_the_run(script, tmp_path) -> None:
    cli = "from ringweave.cli.main import main; main()"
    command = [sys.executable, "-c", cli, "run", "--run-dir", "run", script("for i in range(2000): print(i)")]
    with (
        (tmp_path / "err").open("wb") as err,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=err) as process,
    ):
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 0, (tmp_path / "err").read_text()
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text().endswith("1999\n")


def test_a_second_attempt_keeps_the_files_of_the_first(start, script) -> None:
    path = script("print('attempt', sys.argv[1])")
    assert start("--workers", "2", path, "one").wait_ended() == 0
    run = start("--workers", "1", path, "two")
    assert run.wait_ended() == 0
    assert run.log(0) == "attempt two\n"
    first = run.run_dir / "attempts" / "1"
    assert (first / "logs" / "rank-1.log").read_text() == "attempt one\n"
    assert json.loads((first / "run.json").read_text())["world_size"] == 2
    assert run.record["attempt"] == 2
    assert "attempt 2; files of attempt 1 are in run/attempts/1" in run.stderr


def test_a_run_directory_serves_one_run_at_a_time(start, script) -> None:
    path = script("print('up'); time.sleep(1000)")
    first = start(path)
    first.wait_printed("up")
    second = start(path)
    assert second.wait_ended() == 2
    assert "expected one that no other run uses. Wait for that run, or give another --run-dir." in second.stderr
