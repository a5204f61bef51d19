"""Wall clocks that jump, separately on each node.

No namespace of Linux moves the wall clock, and libfaketime 0.9.10 breaks Python's sleeps (decision 0022). So a library
of forty lines is compiled here and preloaded into every process of the job: it adds the offset in a file to the wall
clock. In a lab that file lies in the node's own /dev/shm. Monotonic clock, sleeps and deadlines stay the kernel's.
"""

import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from ringweave.errors import LabError
from ringweave.lab import Lab
from ringweave_bench.chaos import fault_script
from ringweave_bench.chaos.fault_script import Fault

CLOCK_FILE = "/dev/shm/ringweave-clock"
"""Path in the mount namespace of each node; the file contains nanoseconds."""
_CLOCK_SOURCE = Path(__file__).parents[1] / "programs" / "shifted.c"


def clock_environ(happens: Iterable[Fault], lab: Lab, folder: Path) -> Mapping[str, str]:
    """Prepare clock jumps for a job; does nothing if no fault is one.

    Args:
        happens: The faults.
        lab: Lab of the job.
        folder: Folder for the library.

    Returns:
        Environment variables for every process of the job.

    Raises:
        LabError: A fault needs the library, and this machine has no C compiler.
    """
    if all(fault.kind != fault_script.CLOCK for fault in happens):
        return {}
    for node in lab.cluster.nodes:
        shift_clock(lab, node.name, 0.0)
    return {"LD_PRELOAD": str(compile_library(folder)), "RINGWEAVE_CLOCK": CLOCK_FILE}


def compile_library(folder: Path) -> Path:
    """Compile the library and return its path.

    Raises:
        LabError: This machine has no C compiler, or it fails.
    """
    compiler, library = shutil.which("cc"), folder.absolute() / "shifted.so"
    try:
        if compiler is None:
            raise FileNotFoundError("no cc")
        build = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_CLOCK_SOURCE)]
        subprocess.run(build, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        do = "Install a C compiler, or leave clock out"
        raise LabError("clocks that jump", got=said, expected="a C compiler called cc", do=do) from error
    return library


def shift_clock(lab: Lab, node: str, shift_s: float) -> None:
    """Shift the wall clock of a node's processes ahead by so many seconds from now on; 0 ends the shift."""
    octal = "".join(f"\\{byte:03o}" for byte in shift_to_bytes(shift_s))
    write = f"printf '{octal}' | dd of={CLOCK_FILE} conv=notrunc status=none"
    subprocess.run(lab.command(node, ["/bin/sh", "-c", write]), check=True, stdin=subprocess.DEVNULL)


def shift_to_bytes(shift_s: float) -> bytes:
    """Return the content of the clock file."""
    return struct.pack("<q", round(shift_s * 1e9))
