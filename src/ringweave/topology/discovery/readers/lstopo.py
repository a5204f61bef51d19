"""This machine as hwloc sees it: the XML that its program lstopo prints."""

import shutil
import subprocess

TIMEOUT_S = 30
NAMES = ("lstopo-no-graphics", "lstopo")


def find() -> str | None:
    """Path of the program; None where hwloc is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def ask(program: str) -> bytes | None:
    """The XML; None where the program fails, which leaves the machine to sysfs."""
    try:
        answer = subprocess.run([program, "--of", "xml", "-"], capture_output=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
