"""Safe reader of untrusted XML: bounded in size, depth and number of elements; no entities, nothing fetched."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

from ringweave.errors import UsageError

MAX_XML_BYTES = 32 * 2**20
"""The largest machines in hwloc's own tests take 4 MB."""
MAX_XML_DEPTH = 100
MAX_XML_ELEMENTS = 500_000

_EXPORT_AGAIN = "Write the file again, such as by lstopo --of xml FILE"


@dataclass(slots=True)
class XmlElement:
    """An element of an XML document."""

    tag: str
    attributes: dict[str, str]
    line: int
    """First line of the element, from 1."""
    children: list["XmlElement"] = field(default_factory=list)
    text: str = ""

    def find_all(self, tag: str) -> Iterator["XmlElement"]:
        return (child for child in self.children if child.tag == tag)


def read_xml(path: Path) -> XmlElement:
    """Return the root element of a file.

    Raises:
        UsageError: The file cannot be read, is too large, or is not well-formed XML within the bounds.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_XML_BYTES + 1)
    except OSError as cause:
        raise UsageError(
            "topology file", got=str(path), expected="a file that can be read", do=f"{cause.strerror or cause}"
        ) from cause
    return parse_xml(content, str(path))


def parse_xml(content: bytes, where: str) -> XmlElement:
    """Return the root element of a document; `where` names it in errors.

    Raises:
        UsageError: It is too large, or not well-formed XML within the bounds.
    """
    if len(content) > MAX_XML_BYTES:
        raise UsageError(
            "topology file",
            got=f"more than {MAX_XML_BYTES // 2**20} MiB",
            expected=f"at most {MAX_XML_BYTES // 2**20} MiB",
            do="Export the machine without Misc objects, or check that this is a topology file",
            where=where,
        )
    tree = _ElementBuilder(where)
    # hwloc's files name a DTD, so a DTD must be allowed; it is never fetched, and entities are refused.
    parser = DefusedXMLParser(target=tree, forbid_dtd=False, forbid_entities=True, forbid_external=True)
    tree.parser = parser.parser
    try:
        parser.feed(content)
        parser.close()
    except DefusedXmlException as cause:
        raise topology_file_error(
            "topology file", f"{type(cause).__name__}", "XML without entities of its own", "Remove the entities", where
        ) from cause
    except (ParseError, ValueError, LookupError) as cause:
        raise _malformed_error(cause, content, tree, where) from cause
    return tree.root()


def topology_file_error(what: str, got: object, expected: str, do: str, where: str) -> UsageError:
    """Return an error in the standard form."""
    return UsageError(what, got=got, expected=expected, do=do, where=where)


class _ElementBuilder:
    """Parser target: builds elements and counts them."""

    def __init__(self, where: str) -> None:
        self.parser: Any = None
        self.open: list[XmlElement] = []
        self._where = where
        self._num_elements = 0
        self._root: XmlElement | None = None

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._num_elements += 1
        element = XmlElement(tag, attributes, self.parser.CurrentLineNumber)
        if len(self.open) >= MAX_XML_DEPTH or self._num_elements > MAX_XML_ELEMENTS:
            raise topology_file_error(
                "topology file",
                f"{self._num_elements} elements, {len(self.open) + 1} inside each other",
                f"at most {MAX_XML_ELEMENTS} elements, {MAX_XML_DEPTH} inside each other",
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

    def root(self) -> XmlElement:
        """Return the root element; a parsed document has one."""
        assert self._root is not None
        return self._root


def _malformed_error(cause: Exception, content: bytes, tree: _ElementBuilder, where: str) -> UsageError:
    position = getattr(cause, "position", None)
    line = f"{where}:{position[0]}" if position else where
    if not content.strip():
        return topology_file_error("topology file", "an empty file", "XML of hwloc or of NCCL", _EXPORT_AGAIN, where)
    if tree.open and position and position[0] >= content.count(b"\n"):
        inside = " inside ".join(f"<{element.tag}> of line {element.line}" for element in reversed(tree.open[-2:]))
        return topology_file_error("topology file", f"it ends inside {inside}", "a complete file", _EXPORT_AGAIN, line)
    return topology_file_error("topology file", str(cause), "well-formed XML of hwloc or of NCCL", _EXPORT_AGAIN, line)
