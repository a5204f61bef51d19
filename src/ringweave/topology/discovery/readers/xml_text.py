"""XML from strangers, read safely: bounded in size, depth and number of elements; no entities, nothing fetched."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

from ringweave import errors
from ringweave.errors import UsageError

MAX_BYTES = 32 * 2**20
"""The largest machines that hwloc's own tests hold come to 4 MB."""
MAX_DEPTH = 100
MAX_ELEMENTS = 500_000

_WRITE_AGAIN = "Write the file again, such as by lstopo --of xml FILE"


@dataclass(slots=True)
class Element:
    """An element of the document."""

    tag: str
    attributes: dict[str, str]
    line: int
    """Where it begins, from 1."""
    children: list["Element"] = field(default_factory=list)
    text: str = ""

    def find_all(self, tag: str) -> Iterator["Element"]:
        """Its children of a tag."""
        return (child for child in self.children if child.tag == tag)


def read(path: Path) -> Element:
    """The root element of a file.

    Raises:
        UsageError: The file cannot be read, is too large, or is not well-formed XML within the bounds.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as cause:
        raise UsageError(
            errors.explain(
                "topology file", got=str(path), expected="a file that can be read", do=f"{cause.strerror or cause}"
            )
        ) from cause
    return parse(content, str(path))


def parse(content: bytes, where: str) -> Element:
    """The root element of a document; `where` names it in errors.

    Raises:
        UsageError: It is too large, or not well-formed XML within the bounds.
    """
    if len(content) > MAX_BYTES:
        raise UsageError(
            errors.explain(
                "topology file",
                got=f"more than {MAX_BYTES // 2**20} MiB",
                expected=f"at most {MAX_BYTES // 2**20} MiB",
                do="Export the machine without Misc objects, or check that this is a topology file",
                where=where,
            )
        )
    tree = _Tree(where)
    # hwloc's files name a DTD, so a DTD must be allowed; it is never fetched, and entities are refused.
    parser = DefusedXMLParser(target=tree, forbid_dtd=False, forbid_entities=True, forbid_external=True)
    tree.parser = parser.parser
    try:
        parser.feed(content)
        parser.close()
    except DefusedXmlException as cause:
        raise refusal(
            "topology file", f"{type(cause).__name__}", "XML without entities of its own", "Remove the entities", where
        ) from cause
    except (ParseError, ValueError, LookupError) as cause:
        raise _malformed(cause, content, tree, where) from cause
    return tree.root()


def refusal(what: str, got: object, expected: str, do: str, where: str) -> UsageError:
    """An error in the house's form."""
    return UsageError(errors.explain(what, got=got, expected=expected, do=do, where=where))


class _Tree:
    """What the parser calls: builds elements and counts them."""

    def __init__(self, where: str) -> None:
        self.parser: Any = None
        self.open: list[Element] = []
        self._where = where
        self._num_elements = 0
        self._root: Element | None = None

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._num_elements += 1
        element = Element(tag, attributes, self.parser.CurrentLineNumber)
        if len(self.open) >= MAX_DEPTH or self._num_elements > MAX_ELEMENTS:
            raise refusal(
                "topology file",
                f"{self._num_elements} elements, {len(self.open) + 1} inside each other",
                f"at most {MAX_ELEMENTS} elements, {MAX_DEPTH} inside each other",
                "Check that this is a topology file",
                f"{self._where}:{element.line}",
            )
        if self.open:
            self.open[-1].children.append(element)
        else:
            self._root = element
        self.open.append(element)

    def end(self, tag: str) -> None:
        self.open.pop()

    def data(self, text: str) -> None:
        if self.open and self.open[-1].tag in ("indexes", "u64values"):
            self.open[-1].text += text

    def close(self) -> None:
        """The parser is done."""

    def root(self) -> Element:
        """The root element; a document that was parsed has one."""
        assert self._root is not None
        return self._root


def _malformed(cause: Exception, content: bytes, tree: _Tree, where: str) -> UsageError:
    position = getattr(cause, "position", None)
    line = f"{where}:{position[0]}" if position else where
    if not content.strip():
        return refusal("topology file", "an empty file", "XML of hwloc or of NCCL", _WRITE_AGAIN, where)
    if tree.open and position and position[0] >= content.count(b"\n"):
        inside = " inside ".join(f"<{element.tag}> of line {element.line}" for element in reversed(tree.open[-2:]))
        return refusal("topology file", f"it ends inside {inside}", "a complete file", _WRITE_AGAIN, line)
    return refusal("topology file", str(cause), "well-formed XML of hwloc or of NCCL", _WRITE_AGAIN, line)
