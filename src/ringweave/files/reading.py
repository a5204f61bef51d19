"""A file of some kind read: text, values, object; every mistake becomes the kind's error with file, line and key."""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ringweave import errors
from ringweave.errors import UsageError
from ringweave.files import yaml_text
from ringweave.files.problems import Problem, ProblemsError, dotted, screenful

MAX_FILE_BYTES = 16 * 2**20
"""A cluster file of 100,000 nodes written one by one has about 10 MB."""

_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """What is particular to files of one kind."""

    noun: str
    """`cluster file`."""
    error: type[UsageError]
    """What is raised for a wrong one."""
    keys: str
    """What there must be, completing "expected ...", where a file is empty."""
    begin: str
    """What to do about an empty one."""
    shrink: str
    """What to do about one that is too large."""


def load(path: str | os.PathLike[str], kind: FileKind, build: Callable[[Any], _Made]) -> _Made:
    """What `build` makes of the file's values.

    Raises:
        UsageError: Of the kind: the file cannot be read or is wrong; the text says where and what to do, on one screen.
    """
    source = _one_line(os.fspath(path))
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise kind.error(_unreadable(Path(path), error, kind)) from error
    if len(content) > MAX_FILE_BYTES:
        raise kind.error(_refusal(kind, f"more than {MAX_FILE_BYTES} bytes", "a smaller file", kind.shrink, source))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        got = content[error.start : error.start + 1]
        raise kind.error(_refusal(kind, got, "UTF-8 text", "Save the file as UTF-8", f"{source}:{line}")) from error
    return loads(text, kind, build, source=source)


def loads(text: str, kind: FileKind, build: Callable[[Any], _Made], *, source: str = "<text>") -> _Made:
    """What `build` makes of the text's values; it may raise ProblemsError with paths in the words of the file.

    Raises:
        UsageError: Of the kind: the text is wrong; the error says where and what to do, on one screen.
    """
    document = yaml_text.Document()
    try:
        document = yaml_text.read(text)
        if document.value is None:
            raise kind.error(_refusal(kind, "nothing", kind.keys, kind.begin, f"{_one_line(source)}:1"))
        return build(document.value)
    except ProblemsError as error:
        problems = tuple(sorted(error.problems, key=lambda problem: _line(problem, document) or 0))
        raise kind.error(screenful(problems, lambda problem: _where(problem, document, _one_line(source)))) from error


def _line(problem: Problem, document: yaml_text.Document) -> int | None:
    return problem.line or document.line(problem.path)


def _where(problem: Problem, document: yaml_text.Document, source: str) -> str:
    line = _line(problem, document)
    return ": ".join(part for part in (f"{source}:{line}" if line else source, dotted(problem.path)) if part)


def _refusal(kind: FileKind, got: object, expected: str, do: str, where: str) -> str:
    return errors.explain(kind.noun, got=got, expected=expected, do=do, where=where)


def _unreadable(path: Path, error: OSError | ValueError, kind: FileKind) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    names = _yaml_files(path.parent) if isinstance(error, FileNotFoundError) else []
    matches = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    do = f'Did you mean "{path.parent / matches[0]}"?' if matches else f"Give the path of a {kind.noun} you may read"
    return _refusal(kind, reason, "a YAML file that can be read", do, _one_line(str(path)))


def _yaml_files(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.suffix in (".yaml", ".yml")]
    except OSError:
        return []


def _one_line(source: str) -> str:
    return source if source.isprintable() else errors.shorten(source)
