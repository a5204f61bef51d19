"""Channels: threads that run a group's collectives in order, each with its own connections, memory and callbacks."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringweave.comm.engine.executor import ScratchMemory
from ringweave.comm.transport.interface import Transport
from ringweave.comm.work import PendingWork


class CallbackRunner:
    """Runs each callback in a thread that nothing else needs, a new one whenever all others are busy.

    Callbacks chained on one collective may therefore wait for another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` soon."""
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run_calls, name=name, daemon=True))
                self._threads[-1].start()
        self._calls.put(call)

    def close(self, timeout_s: float) -> None:
        """Stop the threads, waiting at most so long for each."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            with self._lock:
                self._num_idle += 1


@dataclass(frozen=True, slots=True)
class CollectiveJob:
    """A collective that waits for its channel."""

    run: Callable[["CollectiveChannel"], None]
    operation: str
    """The collective in words."""
    work: PendingWork
    on_finished: Callable[[], object]
    """Called when the job is over, run or not: other jobs must not wait for ever for its program."""


class CollectiveChannel:
    """One thread that runs jobs in order, over a transport that no other thread drives.

    Collectives are dealt to channels by their number, the same on all ranks, so both ends of every connection see the
    same collectives in the same order.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        run_job: Callable[[CollectiveJob, "CollectiveChannel"], BaseException | None],
        callbacks: CallbackRunner,
    ) -> None:
        """`transport` exists from the start, used or not, so that an abort ends a wait for connections."""
        self.transport = transport
        self.scratch = ScratchMemory()
        self._callbacks = callbacks
        self._run_job = run_job
        self._jobs: queue.SimpleQueue[CollectiveJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)

    def submit(self, job: CollectiveJob) -> None:
        """Run the job after those submitted before; never called by two threads at a time."""
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def abort(self) -> None:
        """Abort the connections, from any thread."""
        self.transport.abort()

    def close_inherited(self) -> None:
        """Close this process's ends only: for a child after a fork, which must not keep its parent's alive."""
        self.transport.close()

    def stop_accepting(self) -> None:
        """Accept no more jobs."""
        self._jobs.put(None)

    def wait_finished(self, timeout_s: float) -> bool:
        """Return True if all submitted jobs finish within `timeout_s`; call `stop_accepting` first."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Close the connections, after `stop_accepting`; unfinished jobs fail."""
        if self._thread.is_alive():
            self.abort()
            self._thread.join(timeout_s)
        self.transport.close()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            with torch.inference_mode():
                error = self._run_job(job, self)
            if error is not None:
                self.transport.abort()  # before the caller can reuse the message, which other ranks may still read
            job.work.set_finished(error)
            if not job.work.finish_without_future():
                # Callbacks of its future must not run in inference mode.
                self._callbacks.submit(job.work.resolve_future)
            del job, error  # release the tensors while this thread waits
