import os
from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave.files import file_io


def test_a_check_leaves_no_file_and_changes_none(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    for path in (new, old, None):
        file_io.check_writable("--out", path)
    assert not new.exists()
    assert old.read_text() == "kept"


def test_what_is_written_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text in ("longer than", "ä"):
        file_io.write_output("--out", path, text)
    assert path.read_bytes() == "ä".encode()


@pytest.mark.parametrize(("name", "reason"), [(".", "Is a directory"), ("no/x", "No such file or directory")])
def test_what_cannot_be_written_is_refused_before_and_after_the_work(name: str, reason: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    for call in (lambda: file_io.check_writable("--out", path), lambda: file_io.write_output("--out", path, "text")):
        with pytest.raises(UsageError) as caught:
            call()
        assert str(caught.value).startswith("--out: ")
        assert str(caught.value).endswith(f", expected a file that can be written. {reason}.")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        file_io.check_writable("--out", tmp_path / "x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_an_error_with_the_option() -> None:
    with pytest.raises(UsageError, match=r"--out: '/dev/full', expected a file that can be written\. No space left"):
        file_io.write_output("--out", "/dev/full", "text")
