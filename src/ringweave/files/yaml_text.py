"""YAML text as plain Python values and back, with the line of every key; refuses what our files have no use for.

Works on ruamel.yaml's node graph, which still has marks and tags. An alias is refused: `count` repeats nodes, and
without aliases the values are never larger than the text.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ringweave.files.problems import Path, Problem, ProblemsError

_WELL_FORMED = "well-formed YAML"
_SYNTAX = "Check quotes, brackets and indentation on this line and the line above; indent with spaces, not with tabs"
_NUMBER_TEXT = re.compile(
    r"[-+]?(?:0x[0-9a-fA-F]{1,20}|0o[0-7]{1,20}|[0-9]{1,20}|[0-9.]{1,40}(?:[eE][-+]?[0-9]{1,3})?)"
)
_WORDS = {"null": None, "~": None, "": None, "true": True, "false": False, ".inf": float("inf"), ".nan": float("nan")}


@dataclass(kw_only=True, slots=True)
class Document:
    """A text that has been read."""

    value: Any = None
    """Maps, lists, text, numbers, booleans and None; every key of a map is text."""
    lines: dict[Path, int] = field(default_factory=dict)
    """Line of each key and each item, from 1."""

    def line(self, path: Path) -> int | None:
        """Line of the path, or of the nearest thing around it that has one."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def read(text: str) -> Document:
    """The values and lines of one YAML document.

    Raises:
        ProblemsError: The text is not YAML, or uses a tag, an alias, a key twice or something else out of place.
    """
    document = Document()
    try:
        root = _compose(text)
        if root is not None:
            document.value = _Reader(document.lines).value_of(root, ())
    except ProblemsError:
        raise
    except YAMLError as error:
        raise ProblemsError((_syntax_problem(text, error),)) from error
    except RecursionError as error:
        raise ProblemsError((_depth_problem(text),)) from error
    return document


def dumps(content: Any) -> str:
    """The values as the house writes YAML; maps and lists of ruamel.yaml keep the style that was set for them."""
    yaml = YAML(typ="rt", pure=True)
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump(content, stream)
    return stream.getvalue()


def _compose(text: str) -> Node | None:
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False
    return yaml.compose(text)


class _Reader:
    """Walks the node graph once, noting lines."""

    def __init__(self, lines: dict[Path, int]) -> None:
        self._lines = lines
        self._seen: set[int] = set()

    def value_of(self, node: Node, path: Path) -> Any:
        """The plain value of a node."""
        self._lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._seen:
            do = "Write it out, or use count for nodes that are alike"
            raise _refusal(path, node, "YAML alias", node.anchor, "no aliases", do)
        self._seen.add(id(node))
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if isinstance(node, MappingNode) and kind == "map":
            return dict(self._items(node, path))
        if isinstance(node, SequenceNode) and kind == "seq":
            return [self.value_of(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return _scalar(node, kind, path)
        raise _refusal(path, node, "YAML tag", str(node.tag), "plain values", "Remove the tag")

    def _items(self, node: MappingNode, path: Path) -> Iterator[tuple[str, Any]]:
        used = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise _refusal(path, key_node, "key", "a list or map", "text as key", "Write name: value pairs")
            key = key_node.value
            if key in used:
                first = self._lines[(*path, key)]
                do = f"Keep one of them; the first is on line {first}"
                raise _refusal((*path, key), key_node, "key that is there twice", key, "each key once", do)
            used.add(key)
            self._lines[(*path, key)] = key_node.start_mark.line + 1
            yield key, self.value_of(value_node, (*path, key))


def _scalar(node: ScalarNode, kind: str, path: Path) -> Any:
    text = node.value
    if kind in ("str", "timestamp", "value", "merge"):
        return text
    if kind in ("null", "bool", "float") and text.lstrip("+").lower() in _WORDS:
        return _WORDS[text.lstrip("+").lower()]
    if kind == "float" and text.lower() == "-.inf":
        return -float("inf")
    if kind in ("int", "float") and _NUMBER_TEXT.fullmatch(text):
        try:
            return int(text, 0) if kind == "int" else float(text)
        except ValueError:
            pass
    what = "number" if kind in ("int", "float") else "YAML tag"
    got = text if what == "number" else str(node.tag)
    raise _refusal(path, node, what, got, "plain values such as 4, 0.5, true, text", "Write it plainly, or in quotes")


def _refusal(path: Path, node: Node, what: str, got: object, expected: str, do: str) -> ProblemsError:
    line = node.start_mark.line + 1
    return ProblemsError((Problem(path=path, what=what, got=got, expected=expected, do=do, line=line),))


def _syntax_problem(text: str, error: YAMLError) -> Problem:
    if isinstance(error, ReaderError):
        what, line = "character", text.count("\n", 0, error.position) + 1
        got: object = error.character
        do = "Remove it: it is invisible in most editors; retyping the line helps"
        return Problem(path=(), what=what, got=got, expected="printable text", do=do, line=line)
    mark = error.problem_mark or error.context_mark if isinstance(error, MarkedYAMLError) else None
    line = mark.line + 1 if mark else 1
    rows = text.splitlines()
    got = rows[line - 1].strip() if line <= len(rows) else "the end of the file"
    reason = " ".join(str(getattr(error, "problem", "") or error).split())[:120]
    printable = "".join(char if char.isprintable() else "?" for char in reason)
    return Problem(path=(), what="YAML", got=got, expected=f"{_WELL_FORMED} ({printable})", do=_SYNTAX, line=line)


def _depth_problem(text: str) -> Problem:
    rows = text.splitlines()
    line = 1 + max(range(len(rows)), key=lambda index: sum(map(rows[index].count, "[{-?")))
    do = "Close the brackets, and write one item a line; this line has most of them"
    return Problem(path=(), what="depth", got=rows[line - 1], expected="a few levels", do=do, line=line)
