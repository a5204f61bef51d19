"""Files that are on the disk when we say so: a crash of the machine leaves them, names included."""

import os
from pathlib import Path
from typing import Protocol


class _HasDescriptor(Protocol):
    def fileno(self) -> int:
        """Its descriptor."""
        ...


def sync(file: _HasDescriptor) -> None:
    """Wait until what was written to an open file is on the disk.

    Raises:
        OSError: The disk does not take it.
    """
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: after a file was renamed into it.

    Raises:
        OSError: The disk does not take it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
