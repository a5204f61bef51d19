"""Lease between a job's controller and its agents: an agent without a renewal of its allocation's lease ends itself.

The lease makes a replacement safe, since Slurm can lose a machine that goes on working. An agent that can still read
the shared folder exits as soon as another allocation renews there; an agent that cannot read it exits when its lease
expires. So after waiting longer than the lease, a controller knows that no process of a lost group can run.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ringweave.files import file_io

RENEW_INTERVAL_S = 1.0
EXPIRED_EXIT_TIMEOUT_S = 10.0
"""Time for an agent with an expired lease to exit, before it is killed with its workers."""
REVOKED_KEY = "revoked"
"""Key in a revoked lease; no agent belongs to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmTimeouts:
    """Timeouts for silence."""

    lease_s: float = 30.0
    """An agent exits after this time without a renewal. Longer than the usual stall of a file server."""
    fence_s: float = 60.0
    """Time after the end of its allocation from which a lost group cannot run: the lease, `EXPIRED_EXIT_TIMEOUT_S`, a
    margin."""
    agent_exit_s: float = 20.0
    """Time for an agent to exit after it was told to; then Slurm kills it."""
    cancelled_step_s: float = 5.0
    """Time after which a cancelled agent counts as failed, if its allocation still runs."""


class AgentLease:
    """An agent's view of its controller's lease."""

    def __init__(self, path: Path, key: str, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`key` is the key of the allocation that the agent belongs to."""
        self._path, self._key, self._lease_s, self._clock = path, key, lease_s, clock
        self._last, self._renewed_s = "", clock()

    def check(self) -> str:
        """Return why the group has to exit, or an empty text. Reads the lease; an unreadable file renews nothing."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError:
            text = self._last
        if text != self._last:
            self._last, self._renewed_s = text, self._clock()
        if text and text.split()[0] != self._key:
            return "Slurm revoked its allocation"
        if self.unrenewed_s > self._lease_s:
            return f"its controller has not renewed the lease for {self.unrenewed_s:.0f} s"
        return ""

    @property
    def unrenewed_s(self) -> float:
        """Seconds without a renewal. Reads no file, so it is usable while a read hangs."""
        return self._clock() - self._renewed_s

    def kill_when_expired(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Kill this process and its workers if it does not exit after its lease expired, as when a read hangs."""
        while self.unrenewed_s <= self._lease_s + EXPIRED_EXIT_TIMEOUT_S:
            sleep(RENEW_INTERVAL_S)
        os.kill(os.getpid(), signal.SIGKILL)


class LeaseRenewer:
    """Thread that renews the lease, so that a slow Slurm controller costs no agent its lease."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_repeatedly, name="lease-renewer", daemon=True)

    def start(self) -> None:
        """Start renewing; the first renewal is written when this returns."""
        self._write_renewal(0)
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing; no renewal follows after this returns."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def revoke(self) -> None:
        """Tell all agents of the allocation to exit, including those that Slurm has lost."""
        self.stop()
        self._write_text(f"{REVOKED_KEY}\n")

    def _renew_repeatedly(self) -> None:
        number = 0
        while not self._stop.wait(RENEW_INTERVAL_S):
            number += 1
            self._write_renewal(number)

    def _write_renewal(self, number: int) -> None:
        self._write_text(f"{self._key} {os.getpid()} {number}\n")

    def _write_text(self, text: str) -> None:
        try:
            file_io.replace_text(self._path, text)
        except OSError:  # a stall of the file server, or a deleted job; the lease covers both
            return
