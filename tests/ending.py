"""Programs that a test starts end with it, however it ends: what goes on takes the processor from all that follow."""

import contextlib
import subprocess
from collections.abc import Iterator

_PATIENCE_S = 60.0


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process; afterwards it and its pipes are gone. Launchers are asked first, since they end their workers."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_PATIENCE_S)
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
