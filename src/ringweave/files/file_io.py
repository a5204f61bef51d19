"""File I/O helpers: bounded JSON, checksums, fsync, and output files named on the command line."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import xxhash

from ringweave.errors import UsageError, explain


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


MAX_JSON_BYTES = 16 * 2**20
"""Largest JSON file or text. Parsed values take up to some twenty times as much memory."""


def parse_json(text: str | bytes, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse a JSON text of limited length.

    Args:
        text: Bytes are UTF-8, or another encoding of Unicode that JSON allows.
        max_bytes: Greatest length, in bytes or, for a str, in characters.

    Raises:
        ValueError: The text is longer, is nested too deeply for Python's stack, or is no JSON.
    """
    if len(text) > max_bytes:
        raise ValueError(f"{len(text)} {'characters' if isinstance(text, str) else 'bytes'}, more than {max_bytes}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets in brackets, too many to read") from None


def load_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse a JSON file; at most one byte more than `max_bytes` is read.

    Raises:
        OSError: The file cannot be read.
        ValueError: As in `parse_json`.
    """
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"a file of more than {max_bytes} bytes")
    return parse_json(content, max_bytes)


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
        raise UsageError(explain(option, got=str(path), expected="a file that can be written", do=do)) from cause
