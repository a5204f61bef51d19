"""First program of every worker: ties its life to the launcher's, then becomes the real command.

A bare interpreter runs this file as a script, so it imports nothing of ringweave. A hook between fork and exec could
do the same, but Python's hooks are not safe beside threads.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
MAX_DESCRIPTORS = 65_536
"""Descriptors that a worker may open, if the hard limit permits: callers of torch's store take some of them."""


def tie_life_to(launcher_pid: int) -> None:
    """Ask the kernel to kill this process when its parent, the launcher, dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def main(launcher_pid: int, argv: list[str]) -> None:
    """Tie this process to the launcher, raise its limit of descriptors, become `argv`."""
    tie_life_to(launcher_pid)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < own:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own, hard))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
