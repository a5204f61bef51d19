"""A named pipe that wakes whoever waits at it: a change is seen at once, and nobody has to look all the time."""

import contextlib
import os
import select
from pathlib import Path


class Bell:
    """What somebody waits at."""

    def __init__(self, path: Path) -> None:
        """Makes the pipe if it is not there.

        Raises:
            OSError: It cannot be made.
        """
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Open for writing too, so that the pipe never ends for us when those who ring have gone.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def wait(self, timeout_s: float) -> None:
        """Return when it was rung since the last wait, or after this time."""
        if select.select([self._descriptor], [], [], max(0.0, timeout_s))[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, 4096)

    def close(self) -> None:
        """Wait no more."""
        os.close(self._descriptor)


def ring(path: Path) -> None:
    """Wake who waits there; nothing happens if nobody does."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"!")
        finally:
            os.close(descriptor)
