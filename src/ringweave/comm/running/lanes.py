"""Lanes: the threads of a group that collectives run in, each with connections and memory of its own."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringweave.comm.running.completing import Completer
from ringweave.comm.running.memory import Scratch
from ringweave.comm.transport.seam import Transport
from ringweave.comm.works import PendingWork


@dataclass(frozen=True, slots=True)
class Job:
    """A collective that waits for its lane."""

    run: Callable[["Lane"], None]
    doing: str
    """The collective in words."""
    work: PendingWork
    end: Callable[[], object]
    """Called when it is over, run or not: whatever waits for a result that it did not make must not wait for ever."""


class Lane:
    """One thread that runs jobs in order, over a transport that no other thread drives.

    Collectives are dealt to lanes by their number, the same on all ranks, so that both ends of every connection see
    the same collectives in the same order.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        outcome_of: Callable[[Job, "Lane"], BaseException | None],
        completer: Completer,
    ) -> None:
        """`transport` is there from the start, used or not: whoever waits for a call by it hears of an abort."""
        self.transport = transport
        self.scratch = Scratch()
        self._completer = completer
        self._outcome_of = outcome_of
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def submit(self, job: Job) -> None:
        """Run the job after those submitted before; never called by two threads at a time."""
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def abort(self) -> None:
        """Cut the connections, from any thread."""
        self.transport.abort()

    def forget(self) -> None:
        """Close this process's ends only: for a child after a fork, which must not keep its parent's alive."""
        self.transport.close()

    def end(self) -> None:
        """Take no more jobs."""
        self._jobs.put(None)

    def wait_ended(self, timeout_s: float) -> bool:
        """After `end`: True if all that were submitted are through within `timeout_s`."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Let go of the connections, after `end`; what is not through fails."""
        if self._thread.is_alive():
            self.abort()
            self._thread.join(timeout_s)
        self.transport.close()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            with torch.inference_mode():
                outcome = self._outcome_of(job, self)
            if outcome is not None:
                self.transport.abort()  # before anybody can use the message again, which others may be reading
            job.work.settle(outcome)
            if not job.work.resolve_unasked():
                self._completer.submit(job.work.resolve)  # whatever is chained on its future, not in inference mode
            del job, outcome  # and lets go of the tensors while we wait
