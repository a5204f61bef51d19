"""Servers of a job as real processes, for callers that mean no good."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def serving(argv: Sequence[str], timeout_s: float, check_said: Callable[[str], None]) -> Iterator[int]:
    """The port that it says first. In the end it must have lived until it was asked to end, and have ended well.

    `check_said` is given what it said on its stderr.
    """
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().rpartition(":")[2])
            assert process.poll() is None, "it has not ended"
        finally:
            process.terminate()
            said = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, said
        check_said(said[1])
