"""NVLinks in hwloc's XML: a matrix of bandwidths between GPUs and NVSwitches, in MB/s."""

from collections.abc import Sequence

from ringweave.topology.discovery.machine import NvLinks
from ringweave.topology.discovery.readers.xml_text import Element, refusal

_MAX_OBJECTS = 1024
_NAME = "NVLinkBandwidth"


def nvlinks(root: Element, where: str) -> dict[str, NvLinks]:
    """The NVLinks of each object that has some, by its gp_index; empty where the document tells none.

    Raises:
        UsageError: The matrix is malformed or does not fit its objects.
    """
    found: dict[str, NvLinks] = {}
    for tag in ("distances2", "distances2hetero"):
        for matrix in root.find_all(tag):
            if matrix.attributes.get("name") == _NAME:
                found |= _rows(matrix, tag, f"{where}:{matrix.line}")
    return found


def _rows(matrix: Element, tag: str, where: str) -> dict[str, NvLinks]:
    names = _words(matrix, "indexes")
    if tag == "distances2" and matrix.attributes.get("indexing") != "gp":
        return {}
    values = _words(matrix, "u64values")
    count = len(names)
    is_sound = 0 < count <= _MAX_OBJECTS and len(values) == count * count and all(map(str.isdecimal, values))
    if not is_sound or matrix.attributes.get("nbobjs") != str(count):
        got = f"{count} objects and {len(values)} values"
        expected = f"as many values as the square of the objects, at most {_MAX_OBJECTS} of them"
        raise refusal(f"{_NAME} of a topology file", got, expected, "Export the machine again", where)
    rates = [float(value) * 1e6 for value in values]
    kinds = [name.rpartition(":")[0] for name in names]
    keys = [name.rpartition(":")[2] for name in names]
    found = {}
    for row, key in enumerate(keys):
        linked = [column for column in range(count) if column != row and rates[row * count + column] > 0]
        if linked:
            total = sum(rates[row * count + column] for column in linked)
            found[key] = NvLinks(bytes_per_s=total, peers=tuple(_peer(kinds[c], keys[c]) for c in linked))
    return found


def _peer(kind: str, key: str) -> str:
    """GPUs are OS devices in the matrix, NVSwitches bare PCI functions."""
    return "NVSwitch" if kind == "PCIDev" else f"GPU {key}"


def _words(matrix: Element, tag: str) -> Sequence[str]:
    return [word for part in matrix.find_all(tag) for word in part.text.split()]
