"""What a process of its own says of itself in its log, which is a file on a disk that may be full."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def say(text: str, *, is_error: bool = False) -> None:
    """Print a line at once. Words that nothing takes are lost, and end no process, neither now nor when it exits."""
    output = sys.stderr if is_error else sys.stdout
    try:
        print(text, file=output, flush=True)
    except OSError:
        with suppress(OSError):
            _empty(output)


def _empty(output: TextIO) -> None:
    """Let go of what waits to be written; what is said later is tried again."""
    descriptor = output.fileno()
    kept, null = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
        output.flush()
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(null)
