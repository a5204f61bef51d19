"""`ringweave operator` as a process of a test; never left behind, and one that does not exit dumps its stacks."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

OPERATOR_EXIT_TIMEOUT_S = 250.0


class OperatorProcess:
    """Operator process; a context manager. It can be killed and started again meanwhile."""

    def __init__(self, kubeconfig: Path, arguments: Sequence[str], log: Path) -> None:
        """Start nothing before the context.

        Args:
            kubeconfig: Kubeconfig of its API server.
            arguments: Arguments of `ringweave operator`.
            log: File to which its output is appended.
        """
        self._environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self._command = [sys.executable, "-X", "faulthandler", "-m", "ringweave", "operator", *arguments]
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the operator, or another one after it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environ, stdout=log, stderr=log)

    def kill(self) -> None:
        """End it as `kill -9` does; no effect after its end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(OPERATOR_EXIT_TIMEOUT_S)

    def stop(self) -> int:
        """End it by SIGTERM and return its exit code. An operator that does not exit dumps its stacks and is killed.

        Raises:
            AssertionError: It did not exit.
        """
        process = self._process
        assert process is not None
        process.terminate()
        try:
            return process.wait(OPERATOR_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait(OPERATOR_EXIT_TIMEOUT_S)
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
