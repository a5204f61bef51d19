"""`ringweave operator` as a process of a test: never left behind, and one that does not end says where it was."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SOON_S = 250.0


class OperatorProcess:
    """An operator while the context lasts; may be killed and started again meanwhile."""

    def __init__(self, kubeconfig: Path, arguments: Sequence[str], log: Path) -> None:
        """Starts with the context.

        Args:
            kubeconfig: Where its API server is.
            arguments: Of `ringweave operator`.
            log: What it prints is added to this file.
        """
        self._environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self._command = [sys.executable, "-X", "faulthandler", "-m", "ringweave", "operator", *arguments]
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start another one after it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environ, stdout=log, stderr=log)

    def kill(self) -> None:
        """End it as `kill -9` does; nothing where it has ended."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(SOON_S)

    def stop(self) -> int:
        """End it by SIGTERM; its exit code. One that does not end prints its stacks and is killed.

        Raises:
            AssertionError: It did not end.
        """
        process = self._process
        assert process is not None
        process.terminate()
        try:
            return process.wait(SOON_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait(SOON_S)
            raise AssertionError(f"the operator does not end:\n{self.log.read_text()}") from None
        finally:
            self.kill()

    def __enter__(self) -> "OperatorProcess":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
