"""When to let workers run, when to stop them, and how hard.

`Supervision` decides and is pure: states, interrupts and the time in, a signal out. `supervise` does it, with a
launcher.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringweave.launch.launcher import Launcher, WorkerState

POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait before each harder measure."""

    grace_s: float = 1.5
    """After the first failure: who else dies by itself is no victim of ours, and may be the cause. Long enough for the
    backend's survivors to hear from each other and say whom they blame."""
    term_s: float = 1.5
    """Between SIGTERM after a failure and SIGKILL; nothing good can come of the run any more."""
    interrupt_s: float = 3.0
    """Between a user's SIGINT or SIGTERM and SIGKILL; long enough to write a small checkpoint."""
    kill_s: float = 5.0
    """After SIGKILL: what then still exists is held by the kernel, and is given up."""


class Supervision:
    """Watches one worker group to its end."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._harder_s: float | None = None
        self._num_interrupts = 0
        self._last: signal.Signals | None = None

    def decide(
        self, states: Sequence[WorkerState], interrupts: Sequence[signal.Signals], now_s: float
    ) -> signal.Signals | None:
        """The signal to send to all workers now, or None.

        Args:
            states: What is seen of the workers.
            interrupts: All SIGINT and SIGTERM that the run itself has received so far.
            now_s: The time.
        """
        if len(interrupts) > self._num_interrupts:
            self._num_interrupts = len(interrupts)
            return self._send(interrupts[-1] if self._last is None else signal.SIGKILL, now_s)
        if self._harder_s is not None:
            return self._send(signal.SIGKILL, now_s) if now_s >= self._harder_s else None
        return self._after_failure(states, now_s)

    def is_over(self, states: Sequence[WorkerState], now_s: float) -> bool:
        """Nothing is left to wait for: all have ended, or those that have not are beyond SIGKILL."""
        given_up = self._last is signal.SIGKILL and self._harder_s is not None and now_s >= self._harder_s
        return given_up or all(state.exit for state in states)

    def _after_failure(self, states: Sequence[WorkerState], now_s: float) -> signal.Signals | None:
        failed = [state.exit.time_s for state in states if state.exit and not state.exit.is_good]
        if failed and now_s >= min(failed) + self._patience.grace_s:
            return self._send(signal.SIGTERM, now_s, wait_s=self._patience.term_s)
        return None

    def _send(self, how: signal.Signals, now_s: float, wait_s: float | None = None) -> signal.Signals | None:
        if self._last is signal.SIGKILL:
            return None
        if wait_s is None:
            wait_s = self._patience.kill_s if how is signal.SIGKILL else self._patience.interrupt_s
        self._last, self._harder_s = how, now_s + wait_s
        return how


def supervise(
    launcher: Launcher,
    interrupts: Sequence[signal.Signals],
    *,
    on_exit: Callable[[WorkerState], None] = lambda state: None,
    look: Callable[[], None] = lambda: None,
    patience: Patience | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[WorkerState]:
    """Wait until all workers have ended, and see to it that they do when one fails or the user wants it.

    Args:
        launcher: Has started the workers.
        interrupts: Grows with every SIGINT and SIGTERM that this process receives.
        on_exit: Called once for each worker when it is seen to have ended.
        look: Called at every look: what else has to be kept alive.
        patience: How long to wait before each harder measure.
        clock: Must be the launcher's.
        sleep: Waits between two looks.

    Returns:
        The last state of every worker.
    """
    supervision = Supervision(patience or Patience())
    reported: set[int] = set()
    while True:
        look()
        states = launcher.observe()
        now_s = clock()
        for state in states:
            if state.exit and state.global_rank not in reported:
                reported.add(state.global_rank)
                on_exit(state)
        if supervision.is_over(states, now_s):
            return states
        how = supervision.decide(states, list(interrupts), now_s)
        if how is not None:
            launcher.stop(how)
        sleep(POLL_S)
