"""Files of the script's directory: found in a folder, sent by their content, laid out in the folder of a run."""

import hashlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pathspec
import platformdirs
from pydantic import Field, TypeAdapter, ValidationError

from ringweave import units
from ringweave.errors import LaunchError, UsageError, explain
from ringweave.files import file_io
from ringweave.platforms.hosts.run_entry import HostFolder

MAX_FILES_BYTES = 256 * 2**20
"""Upper limit of the files that go over the connection; data belongs elsewhere."""
MAX_FILES = 20_000
_NEVER_SENT = (".git", "__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptFile:
    """One file of the script's directory."""

    relative: str
    """Path below the directory."""
    path: Path
    digest: str
    """SHA-256 of its content, as hexadecimal digits."""
    size: int
    mode: int
    """Permission bits."""


def collect_files(directory: Path) -> list[ScriptFile]:
    """Return the files of a directory, without those that its .gitignore files exclude, run directories and venvs.

    Raises:
        UsageError: There are too many bytes or files; the text names the largest.
    """
    found, total = [], 0
    for path in _walk(directory, []):
        size = path.stat().st_size
        total += size
        found.append((path, size))
        if total > MAX_FILES_BYTES or len(found) > MAX_FILES:
            raise UsageError(_too_much_text(directory, found))
    return [_script_file(directory, path, size) for path, size in sorted(found)]


def _script_file(directory: Path, path: Path, size: int) -> ScriptFile:
    return ScriptFile(
        relative=str(path.relative_to(directory)),
        path=path,
        digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        size=size,
        mode=path.stat().st_mode & 0o777,
    )


def _walk(folder: Path, ignores: list[tuple[Path, pathspec.GitIgnoreSpec]]) -> Iterator[Path]:
    ignore_file = folder / ".gitignore"
    if ignore_file.is_file():
        lines = ignore_file.read_text(encoding="utf-8", errors="replace").splitlines()
        ignores = [*ignores, (folder, pathspec.GitIgnoreSpec.from_lines(lines))]
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if _is_left_out(path, is_folder=entry.is_dir(), ignores=ignores):
            continue
        if entry.is_dir():
            if not entry.is_symlink():
                yield from _walk(path, ignores)
        elif entry.is_file():
            yield path


def _is_left_out(path: Path, *, is_folder: bool, ignores: list[tuple[Path, pathspec.GitIgnoreSpec]]) -> bool:
    if is_folder and (path.name in _NEVER_SENT or (path / "pyvenv.cfg").exists() or (path / "run.json").exists()):
        return True
    mark = "/" if is_folder else ""
    return any(spec.match_file(f"{path.relative_to(base)}{mark}") for base, spec in ignores)


def _too_much_text(directory: Path, found: list[tuple[Path, int]]) -> str:
    by_top = sorted(found, key=lambda each: each[0].relative_to(directory).parts[0])
    sums = {
        top: sum(size for _, size in files)
        for top, files in itertools.groupby(by_top, key=lambda each: each[0].relative_to(directory).parts[0])
    }
    largest = sorted(sums.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {units.format_bytes(size)}" for name, size in largest)
    expected = f"at most {units.format_bytes(MAX_FILES_BYTES)} in {MAX_FILES} files"
    do = "Add data and results to .gitignore, or use a directory that the hosts share"
    got = f"more, the largest so far: {named}"
    return explain("files of the script's directory", got=got, expected=expected, do=do, where=str(directory))


def blob_path(digest: str) -> Path:
    """Return the path of a file's content in this host's cache."""
    return platformdirs.user_cache_path("ringweave") / "files" / digest[:2] / digest


def save_blob(content: bytes) -> None:
    """Save the content of a file in this host's cache."""
    path = blob_path(hashlib.sha256(content).hexdigest())
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file_io.replace_text(path, content)


_FILE_ENTRY = tuple[Annotated[str, Field(pattern=r"^[^\x00]+$")], Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], int]
_FILE_LIST = TypeAdapter(Annotated[list[_FILE_ENTRY], Field(max_length=MAX_FILES)])


def check_file_list(files: Any) -> list[tuple[str, str, int]]:
    """Return a list of files that another host has sent: path, digest and mode of each.

    Raises:
        LaunchError: It is something else, or too long.
    """
    try:
        return _FILE_LIST.validate_python(files)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what, expected = "files of the run", f"path, digest and mode of at most {MAX_FILES} files"
        do, where = "Run the same ringweave on all hosts", ".".join(map(str, first["loc"]))
        raise LaunchError(what, got=first["input"], expected=expected, do=do, where=where) from error


def lay_out(files: Sequence[Sequence[Any]], folder: HostFolder) -> None:
    """Lay the files of a run out in its folder, from the cache.

    `files`: path below the directory, digest and mode of each.

    Raises:
        LaunchError: A path leads out of the folder.
        OSError: A content is missing, or cannot be written.
    """
    root = folder.files
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    for relative, digest, mode in check_file_list(list(files)):
        path = (root / relative).resolve()
        if not path.is_relative_to(root.resolve()):
            raise LaunchError(f"file {relative}: outside of the folder, expected a path below it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(blob_path(digest), path)
        path.chmod(mode & 0o777)
    folder.file_list.write_text(json.dumps(files), encoding="utf-8")


class FileOffer:
    """Files of a run on one host, for hosts that join: as they were sent, or as they are in a shared folder."""

    def __init__(self, folder: HostFolder, directory: Path) -> None:
        """`directory` is the workers' directory, which counts if the folder has no copied files."""
        self._folder, self._directory = folder, directory
        self._lock = threading.Lock()
        self._listing = b""
        self._paths: dict[str, Path] = {}

    def read(self, digest: str, start: int, max_bytes: int) -> tuple[int, bytes]:
        """Return the size and a piece of a file, or of the list of all files for an empty digest.

        Raises:
            LaunchError: There is no such file.
            OSError: It cannot be read.
        """
        with self._lock:
            if not self._listing:
                self._listing = self._list_files()
        if not digest:
            return len(self._listing), self._listing[start : start + max_bytes]
        if digest not in self._paths:
            raise LaunchError(f"file of the run: none with digest {digest[:64]!r}, expected one of the list.")
        with self._paths[digest].open("rb") as file:
            file.seek(start)
            return os.fstat(file.fileno()).st_size, file.read(max_bytes)

    def _list_files(self) -> bytes:
        if self._folder.file_list.exists():
            listing = self._folder.file_list.read_bytes()
            self._paths = {digest: blob_path(digest) for _, digest, _ in check_file_list(file_io.parse_json(listing))}
            return listing
        files = collect_files(self._directory)
        self._paths = {file.digest: file.path for file in files}
        return json.dumps([[file.relative, file.digest, file.mode] for file in files]).encode()
