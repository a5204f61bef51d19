"""YAML files with checked syntax, keys and types; every mistake is reported with file, line and key.

The parser works on ruamel.yaml's node graph, which still has marks and tags. Aliases are refused, so the values are
never larger than the text. Keys and types are pydantic models: a field's `description` completes "expected ...", and
its first example is shown as the fix. The owner of a file kind checks the meaning of the values.
"""

import difflib
import io
import os
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from ringweave import errors
from ringweave.errors import UsageError
from ringweave.files.problems import InputError, InputProblem, KeyPath, dotted_path, problems_text, suggest_closest

if TYPE_CHECKING:  # imported where a text is read or written: most commands do neither
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

_EXPECTED_YAML = "well-formed YAML"
_SYNTAX_FIX = (
    "Check quotes, brackets and indentation on this line and the line above; indent with spaces, not with tabs"
)
_NUMBER_TEXT = re.compile(
    r"[-+]?(?:0x[0-9a-fA-F]{1,20}|0o[0-7]{1,20}|[0-9]{1,20}|[0-9.]{1,40}(?:[eE][-+]?[0-9]{1,3})?)"
)
_SPECIAL_VALUES = {
    "null": None,
    "~": None,
    "": None,
    "true": True,
    "false": False,
    ".inf": float("inf"),
    ".nan": float("nan"),
}


@dataclass(kw_only=True, slots=True)
class YamlDocument:
    """Values of a YAML text, and their lines."""

    value: Any = None
    """Values: maps with text keys, lists, text, numbers, booleans and None."""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """Line of each key and each item, from 1."""

    def line(self, path: KeyPath) -> int | None:
        """Return the line of a path, or of the nearest enclosing key that has one."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def parse_yaml(text: str) -> YamlDocument:
    """Parse the values and lines of one YAML document.

    Raises:
        InputError: The text is not YAML, or contains a tag, an alias, a duplicate key or another unsupported feature.
    """
    from ruamel.yaml.error import YAMLError

    document = YamlDocument()
    try:
        root = _compose_nodes(text)
        if root is not None:
            document.value = _NodeReader(document.lines).value_of(root, ())
    except InputError:
        raise
    except YAMLError as error:
        raise InputError((_syntax_problem(text, error),)) from error
    except RecursionError as error:
        raise InputError((_depth_problem(text),)) from error
    return document


def dump_yaml(content: Any) -> str:
    """Return values as YAML text; ruamel.yaml's maps and lists keep the style that was set for them."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt", pure=True)
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump(content, stream)
    return stream.getvalue()


def _compose_nodes(text: str) -> "Node | None":
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False
    return yaml.compose(text)


class _NodeReader:
    """Walks the node graph once and records lines."""

    def __init__(self, lines: dict[KeyPath, int]) -> None:
        self._lines = lines
        self._visited: set[int] = set()

    def value_of(self, node: "Node", path: KeyPath) -> Any:
        from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

        self._lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._visited:
            do = "Write it out, or use count for nodes that are alike"
            raise _node_problem(path, node, "YAML alias", node.anchor, "no aliases", do)
        self._visited.add(id(node))
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if isinstance(node, MappingNode) and kind == "map":
            return dict(self._items(node, path))
        if isinstance(node, SequenceNode) and kind == "seq":
            return [self.value_of(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return _scalar_value(node, kind, path)
        raise _node_problem(path, node, "YAML tag", str(node.tag), "plain values", "Remove the tag")

    def _items(self, node: "MappingNode", path: KeyPath) -> Iterator[tuple[str, Any]]:
        from ruamel.yaml.nodes import ScalarNode

        used = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise _node_problem(path, key_node, "key", "a list or map", "text as key", "Write name: value pairs")
            key = key_node.value
            if key in used:
                first = self._lines[(*path, key)]
                do = f"Keep one of them; the first is on line {first}"
                raise _node_problem((*path, key), key_node, "key that is there twice", key, "each key once", do)
            used.add(key)
            self._lines[(*path, key)] = key_node.start_mark.line + 1
            yield key, self.value_of(value_node, (*path, key))


def _scalar_value(node: "ScalarNode", kind: str, path: KeyPath) -> Any:
    text = node.value
    if kind in ("str", "timestamp", "value", "merge"):
        return text
    if kind in ("null", "bool", "float") and text.lstrip("+").lower() in _SPECIAL_VALUES:
        return _SPECIAL_VALUES[text.lstrip("+").lower()]
    if kind == "float" and text.lower() == "-.inf":
        return -float("inf")
    if kind in ("int", "float") and _NUMBER_TEXT.fullmatch(text):
        try:
            return int(text, 0) if kind == "int" else float(text)
        except ValueError:
            pass
    what = "number" if kind in ("int", "float") else "YAML tag"
    got = text if what == "number" else str(node.tag)
    raise _node_problem(
        path, node, what, got, "plain values such as 4, 0.5, true, text", "Write it plainly, or in quotes"
    )


def _node_problem(path: KeyPath, node: "Node", subject: str, got: object, expected: str, do: str) -> InputError:
    line = node.start_mark.line + 1
    return InputError((InputProblem(path=path, what=subject, got=got, expected=expected, do=do, line=line),))


def _syntax_problem(text: str, error: "YAMLError") -> InputProblem:
    from ruamel.yaml.error import MarkedYAMLError
    from ruamel.yaml.reader import ReaderError

    if isinstance(error, ReaderError):
        what, line = "character", text.count("\n", 0, error.position) + 1
        got: object = error.character
        do = "Remove it: it is invisible in most editors; retyping the line helps"
        return InputProblem(path=(), what=what, got=got, expected="printable text", do=do, line=line)
    mark = error.problem_mark or error.context_mark if isinstance(error, MarkedYAMLError) else None
    line = mark.line + 1 if mark else 1
    rows = text.splitlines()
    got = rows[line - 1].strip() if line <= len(rows) else "the end of the file"
    reason = " ".join(str(getattr(error, "problem", "") or error).split())[:120]
    printable = "".join(char if char.isprintable() else "?" for char in reason)
    return InputProblem(
        path=(), what="YAML", got=got, expected=f"{_EXPECTED_YAML} ({printable})", do=_SYNTAX_FIX, line=line
    )


def _depth_problem(text: str) -> InputProblem:
    rows = text.splitlines()
    line = 1 + max(range(len(rows)), key=lambda index: sum(map(rows[index].count, "[{-?")))
    do = "Close the brackets, and write one item a line; this line has most of them"
    return InputProblem(path=(), what="depth", got=rows[line - 1], expected="a few levels", do=do, line=line)


MAX_YAML_BYTES = 16 * 2**20
"""Largest YAML file; a cluster file of 100,000 nodes written one by one has about 10 MB."""

_BuiltT = TypeVar("_BuiltT")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """Names, error class and error texts of one kind of file."""

    noun: str
    """Name of the kind, such as `cluster file`."""
    error: type[UsageError]
    """Class of the error raised for a wrong file."""
    expected_keys: str
    """Required contents, completing "expected ..."; shown for an empty file."""
    fix_empty: str
    """Fix for an empty file."""
    fix_too_large: str


def load_yaml_file(path: str | os.PathLike[str], kind: FileKind, build: Callable[[Any], _BuiltT]) -> _BuiltT:
    """Load a file and return the result of `build` for its values.

    Raises:
        UsageError: `kind.error`: the file cannot be read or is wrong; the text, at most a screen, has place and fix.
    """
    return load_yaml_text(read_yaml_file(path, kind), kind, build, source=os.fspath(path))


def read_yaml_file(path: str | os.PathLike[str], kind: FileKind) -> str:
    """Return the text of a file.

    Raises:
        UsageError: `kind.error`: it cannot be read, is too large or no UTF-8; the text has place and fix.
    """
    source = _printable_source(os.fspath(path))
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
    except (OSError, ValueError) as error:
        raise kind.error(_unreadable_text(Path(path), error, kind)) from error
    if len(content) > MAX_YAML_BYTES:
        raise kind.error(
            _file_error_text(kind, f"more than {MAX_YAML_BYTES} bytes", "a smaller file", kind.fix_too_large, source)
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        got = content[error.start : error.start + 1]
        raise kind.error(
            _file_error_text(kind, got, "UTF-8 text", "Save the file as UTF-8", f"{source}:{line}")
        ) from error


def load_yaml_text(text: str, kind: FileKind, build: Callable[[Any], _BuiltT], *, source: str = "<text>") -> _BuiltT:
    """Parse a text and return the result of `build`, which may raise InputError with paths of the file's own keys.

    Raises:
        UsageError: `kind.error`: the text is wrong; the error, at most a screen, has the place and the fix.
    """
    document = YamlDocument()
    try:
        document = parse_yaml(text)
        if document.value is None:
            raise kind.error(
                _file_error_text(kind, "nothing", kind.expected_keys, kind.fix_empty, f"{_printable_source(source)}:1")
            )
        return build(document.value)
    except InputError as error:
        problems = tuple(sorted(error.problems, key=lambda problem: _problem_line(problem, document) or 0))
        raise kind.error(
            problems_text(problems, lambda problem: _problem_location(problem, document, _printable_source(source)))
        ) from error


def _problem_line(problem: InputProblem, document: YamlDocument) -> int | None:
    return problem.line or document.line(problem.path)


def _problem_location(problem: InputProblem, document: YamlDocument, source: str) -> str:
    line = _problem_line(problem, document)
    return ": ".join(part for part in (f"{source}:{line}" if line else source, dotted_path(problem.path)) if part)


def _file_error_text(kind: FileKind, got: object, expected: str, do: str, where: str) -> str:
    return errors.explain(kind.noun, got=got, expected=expected, do=do, where=where)


def _unreadable_text(path: Path, error: OSError | ValueError, kind: FileKind) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    names = _yaml_files(path.parent) if isinstance(error, FileNotFoundError) else []
    matches = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    do = f'Did you mean "{path.parent / matches[0]}"?' if matches else f"Give the path of a {kind.noun} you may read"
    return _file_error_text(kind, reason, "a YAML file that can be read", do, _printable_source(str(path)))


def _yaml_files(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.suffix in (".yaml", ".yml")]
    except OSError:
        return []


def _printable_source(source: str) -> str:
    return source if source.isprintable() else errors.shorten(source)


class FileEntry(BaseModel):
    """A map in a file: unknown keys are refused and types are not converted.

    A key whose default is None may be left out, but not left empty.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and cls.model_fields[str(info.field_name)].default is None:
            raise PydanticCustomError("empty", "no value")
        return value


_FileEntryT = TypeVar("_FileEntryT", bound=FileEntry)


def validate_entries(model: type[_FileEntryT], value: Any, noun: str) -> _FileEntryT:
    """Validate keys and types of a file's values.

    `noun`: name of the file's kind: `cluster file`.

    Raises:
        InputError: Lists unknown keys, missing keys and values of the wrong type.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        translator = _ErrorTranslator(model, noun)
        raise InputError(tuple(map(translator.to_problem, translator.drop_consequences(details)))) from error


class _ErrorTranslator:
    """Translates pydantic's errors about one file into `InputProblem`s."""

    def __init__(self, model: type[FileEntry], noun: str) -> None:
        self._model = model
        self._noun = noun

    def drop_consequences(self, details: list[ErrorDetails]) -> list[ErrorDetails]:
        """Drop the second error of a mistyped required key, which pydantic reports as both unknown and missing."""
        mistyped = {
            (*item["loc"][:-1], key)
            for item in details
            if item["type"] == "extra_forbidden"
            for key in self._model_fields(item["loc"][:-1])
            if f'"{key}"' in self._suggestion(item["loc"])
        }
        return [item for item in details if item["type"] != "missing" or item["loc"] not in mistyped]

    def to_problem(self, item: ErrorDetails) -> InputProblem:
        path = self._key_path(item["loc"])
        key, got = str(path[-1]) if path else "", item["input"]
        if item["type"] == "extra_forbidden":
            keys = ", ".join(self._model_fields(path[:-1]))
            do = self._suggestion(path) or "Remove it, or write one of these keys"
            what = f"unknown key {_location_text(path[:-1])}"
            return InputProblem(path=path, what=what, got=key, expected=f"one of {keys}", do=do)
        if self._is_map(path):
            expected = f"a map with the keys {', '.join(self._model_fields(path))}"
            what = dotted_path(path) or self._noun
            return InputProblem(path=path, what=what, got=got, expected=expected, do="Write key: value pairs")
        description, example = self._description_and_example(path)
        if item["type"] == "missing":
            what, expected = f"missing key {_location_text(path[:-1])}", f"{key} ({description})"
            return InputProblem(path=path, what=what, got=got, expected=expected, do=f'Add "{key}: {example}"')
        named = dotted_path(path) if self._is_free_key(path) else key
        key = self._last_model_key(path)
        return InputProblem(
            path=path, what=named, got=got, expected=description, do=f'Write it like "{key}: {example}"'
        )

    def _key_path(self, location: KeyPath) -> KeyPath:
        """Return the key path without the marks that pydantic adds after the keys of a map."""
        return tuple(part for part in location if part != "[key]")

    def _is_map(self, path: KeyPath) -> bool:
        if not path:
            return True
        return isinstance(path[-1], int) and _entry_model(self._field_info(path).annotation) is not None

    def _is_free_key(self, path: KeyPath) -> bool:
        """True if the path leads to an item of a list, or to a key that the author chose."""
        return path[-1] != self._last_model_key(path)

    def _last_model_key(self, path: KeyPath) -> str:
        """Return the last key on the path that a model defines."""
        known = [
            part for end, part in enumerate(path) if isinstance(part, str) and part in self._model_fields(path[:end])
        ]
        return str(known[-1])

    def _description_and_example(self, path: KeyPath) -> tuple[str, str]:
        info = self._field_info(path)
        return str(info.description), str((info.examples or [""])[0])

    def _field_info(self, path: KeyPath) -> Any:
        """Return the field at the end of the path, or the one that holds the item or free key there."""
        model, found_info = self._model, None
        for part in path:
            if isinstance(part, str) and model is not None and part in model.model_fields:
                found_info = model.model_fields[part]
                model = _entry_model(found_info.annotation)
        return found_info

    def _model_fields(self, path: KeyPath) -> dict[str, Any]:
        model = (
            _entry_model(self._field_info(path).annotation)
            if any(isinstance(part, str) for part in path)
            else self._model
        )
        return dict(model.model_fields) if model else {}

    def _suggestion(self, path: KeyPath) -> str:
        return suggest_closest(path[-1], self._model_fields(path[:-1]))


def _entry_model(annotation: Any) -> type[FileEntry] | None:
    """Return the model among the arguments of `list[Model]`, `Model | None` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, FileEntry):
        return annotation
    return next(filter(None, map(_entry_model, typing.get_args(annotation))), None)


def _location_text(path: KeyPath) -> str:
    return f"in {dotted_path(path)}" if path else "at the top of the file"
