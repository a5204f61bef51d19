"""Disks that are full, read-only, limited or gone: training goes on, it is said, and what was there stays."""

import errno
import itertools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringweave.training.checkpoints import store
from tests.training.checkpoints import examples

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which needs root")

LIMITED = """
import logging, resource, sys
import torch, ringweave
logging.basicConfig(level=logging.WARNING, format="%(message)s")
model = torch.nn.Linear(10, 10)
checkpoints = ringweave.Checkpoints(sys.argv[1], model=model, rng=False)
checkpoints.save(1)
assert checkpoints.wait(60)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
checkpoints.save(2)
assert checkpoints.wait(60)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("goes on after", ringweave.Checkpoints(sys.argv[1], model=model, rng=False).load())
checkpoints.save(3)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "ringweave-test", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte on the disk."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        any(file.write(bytes(4096)) == 0 for _ in itertools.count())
    return ballast


@NEEDS_ROOT
def test_a_full_disk_costs_checkpoints_and_no_training(
    small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event log is on the same disk, and fails with it."""
    monkeypatch.setenv("RINGWEAVE_EVENTS", str(small_disk / "events.jsonl"))
    parts, folder = examples.make(), small_disk / "checkpoints"
    checkpoints = examples.keeper(folder, parts)
    checkpoints.save(1)
    assert checkpoints.wait(60)
    ballast = fill(small_disk)
    with caplog.at_level(logging.WARNING, "ringweave"):
        examples.step(parts)
        checkpoints.save(2)
        assert checkpoints.wait(60)
    assert "checkpoint of step 2: not written: [Errno 28] No space left on device. Training goes on." in caplog.text
    assert [path.name[:13] for path in folder.iterdir()] == ["step-00000001"], "nothing half-written is left"
    assert examples.keeper(folder, examples.make()).load() == 1

    ballast.unlink()
    checkpoints.save(3)
    assert checkpoints.wait(60)
    assert examples.keeper(folder, examples.make()).load() == 3
    events = [each["train_step"] for each in examples.events(small_disk / "events.jsonl", "checkpoint_saved")]
    assert events == [1, 3]


@NEEDS_ROOT
def test_a_disk_that_becomes_read_only(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = examples.keeper(small_disk / "checkpoints", examples.make())
    checkpoints.save(1)
    assert checkpoints.wait(60)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with caplog.at_level(logging.WARNING, "ringweave"):
        checkpoints.save(2)
        assert checkpoints.wait(60)
    assert "Read-only file system" in caplog.text
    assert examples.keeper(small_disk / "checkpoints", examples.make()).load() == 1
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    checkpoints.save(3)
    assert checkpoints.wait(60)
    assert examples.keeper(small_disk / "checkpoints", examples.make()).load() == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The kernel sends SIGXFSZ then; the process must live, and the last save is written though nobody waits."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=500
    )
    assert done.stdout == "goes on after 1\n"
    assert "checkpoint of step 2: not written: [Errno 27] File too large. Training goes on." in done.stderr
    assert [saved.train_step for saved in store.list_checkpoints(tmp_path)] == [3, 1]


def test_a_folder_that_is_removed_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = examples.keeper(folder, examples.make())
    checkpoints.save(1)
    assert checkpoints.wait(60)
    shutil.rmtree(folder)
    checkpoints.save(2)
    assert checkpoints.wait(60)
    assert [saved.train_step for saved in store.list_checkpoints(folder)] == [2]


def test_a_file_in_the_place_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    checkpoints = examples.keeper(tmp_path / "checkpoints", examples.make())
    with caplog.at_level(logging.WARNING, "ringweave"):
        checkpoints.save(1)
        assert checkpoints.wait(60)
    assert "checkpoint of step 1: not written: [Errno 17] File exists" in caplog.text
    assert checkpoints.load() == 0
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_an_old_one_that_cannot_be_removed_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_files: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store, "remove_files", refuse)
    with caplog.at_level(logging.WARNING, "ringweave"):
        examples.save_some(tmp_path, range(1, 4), keep=1)
    assert "earlier checkpoints stay: [Errno 13] Permission denied" in caplog.text
    assert [saved.train_step for saved in store.list_checkpoints(tmp_path)] == [3, 2, 1]


def test_no_memory_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = examples.keeper(tmp_path, examples.make())

    def refuse(_tensors: object) -> None:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "ringweave"):
        patched.setattr(checkpoints._staging, "stage", refuse)
        checkpoints.save(1)
    assert "step 1: not written: no memory for a copy (can't allocate memory). Training goes on." in caplog.text
    checkpoints.save(2)
    assert checkpoints.wait(60)
    assert checkpoints.load() == 2
