"""The cluster file read: YAML in, `Cluster` out; every mistake is a ClusterError that names file, line and key.

`dumps` in `writing.py` is the way back. The format is described in docs/cluster-file.md.
"""

import difflib
import os
from pathlib import Path

from ringweave import errors
from ringweave.errors import ClusterError
from ringweave.topology import building, entries, yaml_text
from ringweave.topology.cluster import Cluster
from ringweave.topology.problems import Problem, ProblemsError, dotted, screenful

MAX_FILE_BYTES = 16 * 2**20
"""A file of 100,000 nodes written one by one has about 10 MB."""


def load(path: str | os.PathLike[str]) -> Cluster:
    """The cluster that a file describes.

    Raises:
        ClusterError: The file cannot be read or is wrong; the text says where and what to do, on one screen.
    """
    source = _one_line(os.fspath(path))
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ClusterError(_unreadable(Path(path), error)) from error
    if len(content) > MAX_FILE_BYTES:
        raise ClusterError(
            _refusal(f"more than {MAX_FILE_BYTES} bytes", "a smaller file", "Use count for like nodes", source)
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        got = content[error.start : error.start + 1]
        raise ClusterError(_refusal(got, "UTF-8 text", "Save the file as UTF-8", f"{source}:{line}")) from error
    return loads(text, source=source)


def loads(text: str, *, source: str = "<text>") -> Cluster:
    """The cluster that a text describes.

    Args:
        text: The content of a cluster file.
        source: What errors call the text; a file's path.

    Raises:
        ClusterError: The text is wrong; the error says where and what to do, on one screen.
    """
    document = yaml_text.Document()
    try:
        document = yaml_text.read(text)
        if document.value is None:
            do = 'Begin with "name: my-cluster", then list the nodes'
            raise ClusterError(_refusal("nothing", "a map with the keys name and nodes", do, f"{_one_line(source)}:1"))
        return building.build(entries.read(document.value))
    except ProblemsError as error:
        problems = tuple(sorted(error.problems, key=lambda problem: _line(problem, document) or 0))
        raise ClusterError(screenful(problems, lambda problem: _where(problem, document, _one_line(source)))) from error


def _line(problem: Problem, document: yaml_text.Document) -> int | None:
    return problem.line or document.line(problem.path)


def _where(problem: Problem, document: yaml_text.Document, source: str) -> str:
    line = _line(problem, document)
    return ": ".join(part for part in (f"{source}:{line}" if line else source, dotted(problem.path)) if part)


def _refusal(got: object, expected: str, do: str, where: str) -> str:
    return errors.explain("cluster file", got=got, expected=expected, do=do, where=where)


def _unreadable(path: Path, error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    names = _yaml_files(path.parent) if isinstance(error, FileNotFoundError) else []
    matches = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    do = f'Did you mean "{path.parent / matches[0]}"?' if matches else "Give the path of a cluster file you may read"
    return _refusal(reason, "a YAML file that can be read", do, _one_line(str(path)))


def _yaml_files(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.suffix in (".yaml", ".yml")]
    except OSError:
        return []


def _one_line(source: str) -> str:
    return source if source.isprintable() else errors.shorten(source)
