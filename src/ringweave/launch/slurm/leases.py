"""Who may run: a controller beats, and an agent that hears no beat of its allocation ends itself.

That is what makes a replacement safe on a cluster: Slurm can lose a machine that goes on working. An agent that can
still read the shared folder leaves as soon as another allocation beats there; one that cannot has ended itself when the
lease is over. So a controller that has waited longer than the lease knows that nothing of a lost group can run.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ringweave.launch.local.jobs.folders import replace_text

BEAT_S = 1.0
KILL_S = 10.0
"""How long an agent whose lease is over may take to leave, before it is killed with its workers."""
REVOKED = "revoked"
"""What beats when an allocation is given up: no agent belongs to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long things may be silent."""

    lease_s: float = 30.0
    """Without a beat for so long an agent leaves. Longer than a file server's usual hiccup."""
    fence_s: float = 60.0
    """So long after its allocation's end a lost group is surely gone: the lease, `KILL_S`, and a margin."""
    leave_s: float = 20.0
    """An agent that has not left so long after it was told to is killed by Slurm."""
    cut_s: float = 5.0
    """An agent that was ended by somebody else counts as failed when its allocation still runs after this time."""


class Lease:
    """What an agent hears of its controller."""

    def __init__(self, path: Path, key: str, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`key` is of the allocation that the agent belongs to."""
        self._path, self._key, self._lease_s, self._clock = path, key, lease_s, clock
        self._last, self._renewed_s = "", clock()

    def look(self) -> str:
        """Why the group has to leave; empty while it need not. Reads the beat; what cannot be read renews nothing."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError:
            text = self._last
        if text != self._last:
            self._last, self._renewed_s = text, self._clock()
        if text and text.split()[0] != self._key:
            return "its allocation was taken back by Slurm"
        if self.silence_s > self._lease_s:
            return f"nothing was heard of its controller for {self.silence_s:.0f} s"
        return ""

    @property
    def silence_s(self) -> float:
        """Since when nothing was heard; reads nothing, so that it can be asked while a read hangs."""
        return self._clock() - self._renewed_s

    def watch(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Kill this process if its lease is over and it does not leave, as when a read hangs; workers die with it."""
        while self.silence_s <= self._lease_s + KILL_S:
            sleep(BEAT_S)
        os.kill(os.getpid(), signal.SIGKILL)


class Heart:
    """Beats from a thread of its own, so that a controller of Slurm which answers late costs nobody the lease."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def start(self) -> None:
        """Beat from now on; the first beat is there when this returns."""
        self._write(0)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; no beat comes after this returns."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def revoke(self) -> None:
        """Have all agents of the allocation leave, also those that Slurm has lost sight of."""
        self.stop()
        self._write_text(f"{REVOKED}\n")

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(BEAT_S):
            number += 1
            self._write(number)

    def _write(self, number: int) -> None:
        self._write_text(f"{self._key} {os.getpid()} {number}\n")

    def _write_text(self, text: str) -> None:
        try:
            replace_text(self._path, text)
        except OSError:  # the file server hiccups, or the job was forgotten; the lease says what then
            return
