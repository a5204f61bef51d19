"""Asynchronous results: what a collective returns while it is still running."""

import threading
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work

from ringweave.errors import CommunicationError


class PendingWork(Work):
    """The work of a collective that another thread runs; `wait` raises what went wrong there.

    torch's own future-wrapping work cannot carry a Python exception to both of its users, a script that waits and
    DDP's C++ reducer that chains on the future; this one does.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_resolved = False
        self._trigger: torch.futures.Future[object] | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def settle(self, error: BaseException | None = None) -> None:
        """Called once by the thread that ran the collective: those who wait go on."""
        self._error = error
        self._ended.set()

    def resolve_unasked(self) -> bool:
        """After `settle`: whether nobody has asked for the future, so that there is nothing left to `resolve`."""
        with self._lock:
            self._is_resolved = self._trigger is None
            return self._is_resolved

    def resolve(self) -> None:
        """Called once after `settle`, in a thread that may be kept waiting: runs what is chained on the future."""
        with self._lock:
            self._is_resolved, trigger = True, self._trigger
        if trigger is not None:
            trigger.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensors hold the result.

        Raises:
            CommunicationError: The collective failed, or `timeout` passed first.
        """
        limit = timeout.total_seconds() if timeout else 0.0
        if not self._ended.wait(limit if limit > 0 else None):
            raise CommunicationError(f"collective: not finished after {limit:g} s, expected to be. Wait longer.")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has finished without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, once finished."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors, after waiting for them."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """The same as `wait`: CPU tensors know no streams."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Resolves to the tensors, or fails with the error's text."""
        with self._lock:
            if self._future is None:
                self._trigger = torch.futures.Future()
                self._future = self._trigger.then(self._outcome)
                if self._is_resolved:
                    self._trigger.set_result(None)
            return self._future

    def _outcome(self, _trigger: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors
