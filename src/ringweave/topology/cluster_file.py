"""The cluster file read: YAML in, `Cluster` out; every mistake is a ClusterError that names file, line and key.

`dumps` in `writing.py` is the way back. The format is described in docs/cluster-file.md.
"""

import os
from typing import Any

from ringweave.errors import ClusterError
from ringweave.files import reading
from ringweave.files.reading import FileKind
from ringweave.topology import building, entries
from ringweave.topology.cluster import Cluster

KIND = FileKind(
    noun="cluster file",
    error=ClusterError,
    keys="a map with the keys name and nodes",
    begin='Begin with "name: my-cluster", then list the nodes',
    shrink="Use count for like nodes",
)


def load(path: str | os.PathLike[str]) -> Cluster:
    """The cluster that a file describes.

    Raises:
        ClusterError: The file cannot be read or is wrong; the text says where and what to do, on one screen.
    """
    return reading.load(path, KIND, _build)


def loads(text: str, *, source: str = "<text>") -> Cluster:
    """The cluster that a text describes.

    Args:
        text: The content of a cluster file.
        source: What errors call the text; a file's path.

    Raises:
        ClusterError: The text is wrong; the error says where and what to do, on one screen.
    """
    return reading.loads(text, KIND, _build, source=source)


def _build(value: Any) -> Cluster:
    return building.build(entries.read(value))
