from datetime import datetime
from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave.launcher import run_dir as launcher_run_dir
from ringweave.launcher.run_dir import RunDir

NOW = datetime(2026, 3, 1, 12, 30, 59)


def test_names_say_when_and_what(tmp_path: Path) -> None:
    names = [launcher_run_dir.create_run_dir(tmp_path / "runs", "examples/train.py", NOW).root.name for _ in range(3)]
    assert names == ["20260301-123059-train", "20260301-123059-train-2", "20260301-123059-train-3"]


def test_a_place_where_nothing_can_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    expected = r"run directory: '.*', expected one that can be created\. \(Not a directory\) Give a --run-dir\."
    with pytest.raises(UsageError, match=expected):
        launcher_run_dir.create_run_dir(tmp_path / "runs", "train.py", NOW)


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"expected a directory that can be written\. \(File exists\) Give another"):
        launcher_run_dir.hold_run_dir(RunDir(root=tmp_path / "file")).__enter__()


def test_a_directory_is_held_by_one_run(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "deep" / "run")
    refused = pytest.raises(UsageError, match=r"expected one that no other run uses\. Wait for that run")
    with launcher_run_dir.hold_run_dir(run_dir), refused:
        launcher_run_dir.hold_run_dir(run_dir).__enter__()
    with launcher_run_dir.hold_run_dir(run_dir):
        pass


def finish(run_dir: RunDir, text: str) -> None:
    run_dir.run_json.write_text(text)
    run_dir.worker_log(0).write_text(text)


def test_every_attempt_keeps_its_files(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    for number in (1, 2, 3):
        assert launcher_run_dir.begin_attempt(run_dir, f"name: c{number}\n") == number
        assert not run_dir.run_json.exists()
        finish(run_dir, f"of {number}")
    assert run_dir.cluster_file.read_text() == "name: c3\n"
    for number in (1, 2):
        kept = run_dir.root / "attempts" / str(number)
        assert (kept / "run.json").read_text() == (kept / "logs" / "rank-0.log").read_text() == f"of {number}"
        assert (kept / "cluster.yaml").read_text() == f"name: c{number}\n"


def test_an_attempt_without_a_record_is_begun_again(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    launcher_run_dir.begin_attempt(run_dir, "name: c\n")
    assert launcher_run_dir.begin_attempt(run_dir, "name: c\n") == 1


def test_a_cluster_file_of_the_user_is_never_overwritten(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.cluster_file.write_text("name: mine\n")
    with pytest.raises(UsageError, match=r"expected one without a cluster\.yaml of another origin\. Give another"):
        launcher_run_dir.begin_attempt(run_dir, "name: other\n")
    assert run_dir.cluster_file.read_text() == "name: mine\n"
    assert launcher_run_dir.begin_attempt(run_dir, "name: mine\n") == 1
