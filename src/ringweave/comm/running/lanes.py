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
    abandon: Callable[[], object]
    """Called if it is never run: whatever waits for a result of it must not wait for ever."""


class Lane:
    """One thread that runs jobs in order, over a transport that no other thread drives.

    Collectives are dealt to lanes by their number, the same on all ranks, so that both ends of every connection see
    the same collectives in the same order.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Transport],
        outcome_of: Callable[[Job, "Lane"], BaseException | None],
        completer: Completer,
    ) -> None:
        self.scratch = Scratch()
        self._completer = completer
        self._connect = connect
        self._outcome_of = outcome_of
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._transport: Transport | None = None
        self._cut = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run the job after those submitted before."""
        self._jobs.put(job)

    def transport(self) -> Transport:
        """This lane's connections; called in its thread."""
        if self._transport is None:
            self._transport = self._connect()
            if self._cut:
                self._transport.abort()
        return self._transport

    def abort(self) -> None:
        """Cut the connections, from any thread."""
        self._cut = True
        if self._transport is not None:
            self._transport.abort()

    def forget(self) -> None:
        """Close this process's ends only: for a child after a fork, which must not keep its parent's alive."""
        if self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """Take no more jobs."""
        self._jobs.put(None)

    def wait_ended(self, timeout_s: float) -> bool:
        """After `end`: True if all that were submitted are through within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Let go of the connections, after `end`; what is not through fails."""
        if self._thread.is_alive():
            self.abort()
            self._thread.join(timeout_s)
        if self._transport is not None:
            self._transport.close()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            with torch.inference_mode():
                outcome = self._outcome_of(job, self)
            job.work.settle(outcome)
            self._completer.submit(job.work.resolve)  # whatever is chained on its future, not in inference mode
            del job, outcome  # and lets go of the tensors while we wait
