"""Archives that arrive from hosts: what is not such an archive is refused before a byte of it is written."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from ringweave.errors import LaunchError
from ringweave.platforms.hosts import host_runtime
from ringweave.platforms.hosts.run_entry import HostFolder


def archive(members: Iterable[tuple[str, int]], kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return an archive of files of these names and sizes, of zeros."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as packed:
        for name, size in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname = kind, size, "/etc/passwd"
            packed.addfile(entry, io.BytesIO(bytes(size)))
    return buffer.getvalue()


def test_what_a_host_packs_is_unpacked(tmp_path: Path) -> None:
    folder = HostFolder(root=tmp_path / "host")
    logs = folder.job.runs("n0", 1) / "round-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("trains\n")
    (logs.parent / "run.json").write_text("{}")
    host_runtime.unpack_files(host_runtime.archive_files(folder), tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"n0/1/round-1/logs/rank-0.log", "n0/1/round-1/run.json"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (archive((f"f{number}", 0) for number in range(11)), "11 files of 0 bytes or more', expected at most 10 files"),
        (archive([("good", 1), ("large", 2001)]), "'large' of 2001 bytes.*, expected files of at most 2000 bytes"),
        (archive([(f"f{number}", 1500) for number in range(3)]), "3 files of 4500 bytes or more', expected at most"),
        (archive([("link", 0)], tarfile.SYMTYPE), "'link', no file"),
        (archive([("device", 0)], tarfile.CHRTYPE), "'device', no file"),
        (archive([("x" * 200_000, 1)]), "more than 24480 bytes', expected at most 4000 of files"),
        (archive([("good", 1), ("../bad", 1)]), "'../bad' would be extracted to .*which is outside the destination"),
        (archive([("good", 1)])[:-20], "expected a tar archive, packed by gzip"),
        (b"no archive", "expected a tar archive, packed by gzip"),
    ],
    ids=["many", "large", "large together", "link", "device", "header", "outside", "truncated", "rubbish"],
)
def test_more_than_an_archive_of_a_host_may_have_is_refused_and_nothing_is_written(
    content: bytes, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_runtime, "MAX_FETCHED_FILES", 10)
    monkeypatch.setattr(host_runtime, "MAX_FETCHED_FILE_BYTES", 2000)
    monkeypatch.setattr(host_runtime, "MAX_FETCHED_BYTES", 4000)
    monkeypatch.setattr(host_runtime, "_MAX_TAR_BYTES", 4000 + 10 * 2048)
    with pytest.raises(LaunchError, match=rf"files of a host: .*{text}.*Look at that host: it runs another program"):
        host_runtime.unpack_files(content, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
