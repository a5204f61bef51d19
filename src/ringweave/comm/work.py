"""Pending work: the asynchronous result that a collective returns while it is still running."""

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from ringweave.errors import CommunicationError


class DeviceResult(Protocol):
    """Result on a device, where what uses it must come later on a stream."""

    @property
    def device(self) -> torch.device: ...

    def order_ahead(self) -> bool:
        """Let the current stream wait for the result, which may still be to come; return False if it cannot."""
        ...

    def order_stream(self) -> None:
        """Let the current stream wait for the result, once the host's part is done."""
        ...

    def is_complete(self) -> bool:
        """Return True if the tensors hold the result now."""
        ...

    def result_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the current stream holds the result."""
        ...


class PendingWork(Work):
    """The work of a collective that another thread runs; `wait` raises that thread's error.

    torch's own future-wrapping work cannot carry a Python exception to both of its users, a script that waits and
    DDP's C++ reducer that chains on the future; this one does.
    """

    def __init__(self, tensors: list[Tensor], on_device: DeviceResult | None = None) -> None:
        """`on_device` orders the streams of tensors that are not on the CPU."""
        super().__init__()
        self._tensors = tensors
        self._on_device = on_device
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_resolved = False
        self._trigger: torch.futures.Future[object] | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def set_finished(self, error: BaseException | None = None) -> None:
        """Wake the waiting threads; called once by the thread that ran the collective."""
        self._error = error
        self._finished.set()

    def finish_without_future(self) -> bool:
        """Return True, after `set_finished`, if no one requested the future: `resolve_future` is then not needed."""
        with self._lock:
            self._is_resolved = self._trigger is None
            return self._is_resolved

    def resolve_future(self) -> None:
        """Run the callbacks of the future; called once after `set_finished`, in a thread that may block."""
        with self._lock:
            self._is_resolved, trigger = True, self._trigger
        if trigger is not None:
            self._trigger_callbacks(trigger)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensors hold the result, or let the current stream wait for it.

        A stream waits where it can, and without a limit; then a later failure is raised by the group's next collective.

        Raises:
            CommunicationError: The collective failed, or `timeout` passed first.
        """
        may_wait_ahead = not timeout and self._on_device is not None and not self._finished.is_set()
        if may_wait_ahead and self._on_device is not None and self._on_device.order_ahead():
            return True
        return self.wait_on_host(timeout)

    def wait_on_host(self, timeout: timedelta | None = None) -> bool:
        """Block until the host's part is done; what is enqueued on the current stream from then on sees the result.

        Raises:
            CommunicationError: The collective failed, or `timeout` passed first.
        """
        limit = timeout.total_seconds() if timeout else 0.0
        if not self._finished.wait(limit if limit > 0 else None):
            raise CommunicationError(f"collective: not finished after {limit:g} s, expected to be. Wait longer.")
        if self._error is not None:
            raise self._error
        if self._on_device is not None:
            self._on_device.order_stream()
        return True

    def is_completed(self) -> bool:
        if self._on_device is None or self._error is not None:
            return self._finished.is_set()
        return self._finished.is_set() and self._on_device.is_complete()

    def is_success(self) -> bool:
        return self._finished.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error, once finished."""
        return self._error

    def result(self) -> list[Tensor]:
        """Wait, then return the tensors."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that resolves to the tensors, or fails with the error."""
        with self._lock:
            if self._future is None:
                on_device = self._on_device
                self._trigger = torch.futures.Future(devices=_future_devices(on_device) if on_device else None)
                self._future = self._trigger.then(self._outcome)
                if self._is_resolved:
                    self._trigger_callbacks(self._trigger)
            return self._future

    def _trigger_callbacks(self, trigger: "torch.futures.Future[object]") -> None:
        """Run the callbacks; those of a device run on streams that wait for the tensors in the trigger's value."""
        if self._on_device is None or self._error is not None:
            trigger.set_result(None)
            return
        with self._on_device.result_stream():
            trigger.set_result(self._tensors)

    def _outcome(self, _trigger: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


class JoinedWork(Work):
    """Several works as one: done when all are."""

    def __init__(self, works: Sequence[Work | None], tensors: list[Tensor]) -> None:
        """A work that is None is done; `tensors` are the results of all."""
        super().__init__()
        self._works = [work for work in works if work is not None]
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensors of all works hold their results.

        Raises:
            CommunicationError: A collective failed, or `timeout` passed first.
        """
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
            work.wait() if left_s is None else work.wait(timedelta(seconds=left_s))
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first work's error that there is."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """Wait, then return the tensors."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that resolves to the tensors, or fails with the first error."""

        def tensors(done: torch.futures.Future[list[torch.futures.Future[list[Tensor]]]]) -> list[Tensor]:
            for future in done.value():
                future.value()
            return self._tensors

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(tensors)


def _future_devices(on_device: DeviceResult) -> list[int | str | torch.device] | None:
    """Return the devices of a future; the CPU, where tests have their device, cannot be one."""
    return [on_device.device] if on_device.device.type != "cpu" else None
