"""Wall clocks that jump: each node's by itself, with libfaketime, where the machine has it.

No namespace of Linux moves the wall clock. libfaketime does for a process that is started with it, by a file that it
looks at every second; in a lab that file lies in the node's own /dev/shm. Waits go by the monotonic clock, which stays.
"""

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.errors import LabError, explain
from ringweave.lab import Lab

FILE = "/dev/shm/ringweave-clock"
"""In the mount namespace of each node."""
_PLACES = (Path("/usr/lib"), Path("/usr/local/lib"), Path("/lib"))
_LIBRARY = "libfaketimeMT.so.1"


def environ(happens: Iterable[Fault]) -> Mapping[str, str]:
    """What the job is started with so that clocks can jump; nothing if none shall.

    Raises:
        LabError: They shall, and this machine lacks the library.
    """
    if all(fault.kind != faults.CLOCK for fault in happens):
        return {}
    library = _find()
    if library is None:
        expected = f"{_LIBRARY} below {', '.join(map(str, _PLACES))}"
        do = "Install it (Debian: libfaketime), or leave clock out"
        raise LabError(explain("clocks that jump", got="no libfaketime", expected=expected, do=do))
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": FILE,
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def shift(lab: Lab, node: str, shift_s: float) -> None:
    """Let the clock of a node's processes be ahead by so many seconds from about a second on; 0: as it is."""
    write = f"printf '%+gs\\n' {shift_s:g} > {FILE}.new && mv {FILE}.new {FILE}"
    subprocess.run(lab.command(node, ["/bin/sh", "-c", write]), check=True, stdin=subprocess.DEVNULL)


def _find() -> Path | None:
    found = (path for place in _PLACES for path in place.glob(f"*/faketime/{_LIBRARY}"))
    return next(iter([*found, *(path for place in _PLACES for path in place.glob(f"faketime/{_LIBRARY}"))]), None)
