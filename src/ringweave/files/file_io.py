"""File I/O helpers: bounded JSON, checksums, fsync, and output files named on the command line."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import xxhash

from ringweave.errors import UsageError

_TextT = TypeVar("_TextT", bound=str | bytes)


def file_checksum(path: Path) -> str:
    """xxh3 (64 bits) of all bytes of a file, as 16 hexadecimal digits.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


class _OpenFile(Protocol):
    def fileno(self) -> int: ...


def fsync_file(file: _OpenFile) -> None:
    """Wait until an open file's contents are on the disk.

    Raises:
        OSError: The disk refuses.
    """
    os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, after a file was renamed into it.

    Raises:
        OSError: The disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str | bytes, *, is_durable: bool = False, mode: int = 0o666) -> None:
    """Write a file atomically: a reader sees the old or the new text.

    A text is written as UTF-8. `mode`: permission bits of the file, without those of the process's mask.

    Raises:
        OSError: It cannot be written; an earlier file is unchanged.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            if is_durable:
                fsync_file(file)
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


MAX_JSON_BYTES = 16 * 2**20
"""Largest JSON file or text. Parsed values take up to 28 times as much memory."""
MAX_JSON_DEPTH = 200
"""Most brackets in brackets, as pydantic's parser has it too. A checkpoint has up to 155."""


def bounded(text: _TextT, max_bytes: int = MAX_JSON_BYTES) -> _TextT:
    """Return the text: for parsers that limit depth and types, but not length.

    Raises:
        ValueError: It is longer than `max_bytes`, in bytes or, for a str, in characters.
    """
    if len(text) > max_bytes:
        raise ValueError(f"{len(text)} {'characters' if isinstance(text, str) else 'bytes'}, more than {max_bytes}")
    return text


def read_bounded(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return a file's content; at most one byte more than `max_bytes` is read.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is longer.
    """
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"a file of more than {max_bytes} bytes")
    return content


def parse_json(text: str | bytes, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse a JSON text of limited length.

    Args:
        text: Bytes are UTF-8, or another encoding of Unicode that JSON allows.
        max_bytes: Greatest length, in bytes or, for a str, in characters.

    Raises:
        ValueError: The text is longer, has more than `MAX_JSON_DEPTH` brackets in brackets, or is no JSON.
    """
    try:
        value = json.loads(bounded(text, max_bytes))
    except RecursionError:
        raise ValueError("brackets in brackets, too many to read") from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > MAX_JSON_DEPTH and _is_deep(value):
        raise ValueError(f"brackets in brackets, more than {MAX_JSON_DEPTH}")
    return value


def _is_deep(value: Any) -> bool:
    """Return whether a value has more lists and objects in each other than allowed."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(MAX_JSON_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for items in inner for each in items if isinstance(each, (list, dict))]
        if not level:
            return False
    return True


def load_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse a JSON file; at most one byte more than `max_bytes` is read.

    Raises:
        OSError: The file cannot be read.
        ValueError: As in `parse_json`.
    """
    return parse_json(read_bounded(path, max_bytes), max_bytes)


def check_writable(option: str, path: str | Path | None) -> None:
    """Refuse an output file that could not be written, before the work begins; its contents stay as they are.

    Args:
        option: The option that named it, such as `--out`.
        path: The file; None: no file, nothing to check.

    Raises:
        UsageError: The file cannot be opened for writing.
    """
    if path is None:
        return
    is_new = not Path(path).exists()
    with report_write_errors(option, path):
        with Path(path).open("ab"):
            pass
        if is_new:
            Path(path).unlink()


def write_output(option: str, path: str | Path, text: str) -> None:
    """Write a text to the file that an option names.

    Raises:
        UsageError: The file cannot be written.
    """
    with report_write_errors(option, path):
        Path(path).write_text(text, encoding="utf-8")


@contextmanager
def report_write_errors(option: str, path: str | Path) -> Iterator[None]:
    """Turn an OSError of the block into an error that names the option.

    Raises:
        UsageError: The block raised an OSError.
    """
    try:
        yield
    except OSError as cause:
        do = cause.strerror or str(cause)
        raise UsageError(option, got=str(path), expected="a file that can be written", do=do) from cause


def is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether a path still names an open file: another process may have removed or renamed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class _Folder(Protocol):
    @property
    def root(self) -> Path: ...


class PathBelow:
    """Path of this name below the root of a folder, as an attribute of the folder's class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: _Folder, owner: type) -> Path:
        return folder.root / self._name
