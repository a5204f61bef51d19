"""Wall clocks that jump: each node's by itself.

No namespace of Linux moves the wall clock, and libfaketime 0.9.10 breaks Python's sleeps (decision 0025). So a library
of forty lines is compiled here and loaded into every process of the job: it adds what a file says to the wall clock. In
a lab that file lies in the node's own /dev/shm. Monotonic clock, sleeps and deadlines stay the kernel's.
"""

import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.errors import LabError, explain
from ringweave.lab import Lab

FILE = "/dev/shm/ringweave-clock"
"""In the mount namespace of each node: nanoseconds."""
_SOURCE = Path(__file__).parents[2] / "programs" / "shifted.c"


def environ(happens: Iterable[Fault], lab: Lab, folder: Path) -> Mapping[str, str]:
    """Make ready what the job has to be started with so that clocks can jump; nothing if none shall.

    Args:
        happens: The faults.
        lab: Where the job will run.
        folder: For the library.

    Returns:
        Variables of the environment of every process of the job.

    Raises:
        LabError: They shall, and this machine has no C compiler.
    """
    if all(fault.kind != faults.CLOCK for fault in happens):
        return {}
    for node in lab.cluster.nodes:
        shift(lab, node.name, 0.0)
    return {"LD_PRELOAD": str(compile_in(folder)), "RINGWEAVE_CLOCK": FILE}


def compile_in(folder: Path) -> Path:
    """The library, compiled.

    Raises:
        LabError: This machine has no C compiler, or it fails.
    """
    compiler, library = shutil.which("cc"), folder.absolute() / "shifted.so"
    try:
        if compiler is None:
            raise FileNotFoundError("no cc")
        build = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
        subprocess.run(build, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        do = "Install a C compiler, or leave clock out"
        raise LabError(explain("clocks that jump", got=said, expected="a C compiler called cc", do=do)) from error
    return library


def shift(lab: Lab, node: str, shift_s: float) -> None:
    """Let the clock of a node's processes be ahead by so many seconds from now on; 0: as it is."""
    octal = "".join(f"\\{byte:03o}" for byte in to_bytes(shift_s))
    write = f"printf '{octal}' | dd of={FILE} conv=notrunc status=none"
    subprocess.run(lab.command(node, ["/bin/sh", "-c", write]), check=True, stdin=subprocess.DEVNULL)


def to_bytes(shift_s: float) -> bytes:
    """What the file says."""
    return struct.pack("<q", round(shift_s * 1e9))
