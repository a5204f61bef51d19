"""Barriers: they include this rank's scheduled collectives, and a monitored one names the ranks that do not come.

Gloo's barrier waits for the collectives that Gloo runs before it. Those that run by schedules are not Gloo's.
"""

import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import BarrierOptions

from ringweave.comm.native_backend import transfer_failure
from ringweave.comm.transport.interface import TransferFailedError


def barrier_options(opts: BarrierOptions | timedelta | None, timeout: timedelta | None) -> BarrierOptions:
    """Return the options that the arguments of torch's ProcessGroup.barrier mean."""
    if isinstance(opts, BarrierOptions):
        return opts
    made, limit = BarrierOptions(), opts if timeout is None else timeout
    if limit is not None:
        made.timeout = limit
    return made


class BarrierWork(Work):
    """Asynchronous barrier, done when all ranks have called it and this rank's earlier collectives have finished.

    The native barrier starts at the call, in the order of the script's native collectives. A later start would let it
    meet another one.
    """

    def __init__(self, native: Work, earlier: Sequence[Work]) -> None:
        """`native` is the native barrier; `earlier` are the collectives that it does not know of."""
        super().__init__()
        self._native, self._earlier = native, tuple(earlier)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the barrier is done.

        Raises:
            CommunicationError: An earlier collective failed, or a rank did not come.
        """
        limit = timeout or timedelta()  # 0 means none of its own
        return all(work.wait(limit) for work in (*self._earlier, self._native))

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in (*self._earlier, self._native))

    def is_success(self) -> bool:
        return all(work.is_success() for work in (*self._earlier, self._native))

    def exception(self) -> BaseException | None:
        """Return the error of an earlier collective, or else of the native barrier, once finished."""
        errors = (work.exception() for work in (*self._earlier, self._native))
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Tensor]:
        """Wait; a barrier has no tensors."""
        self.wait()
        return []

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that resolves to no tensors when the barrier is done, or fails with the first error."""
        joined: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        futures = [work.get_future() for work in (*self._earlier, self._native)]
        num_done = itertools.count(1)  # counts atomically: callbacks run in several threads

        def note_done(_: object) -> None:
            if next(num_done) < len(futures):
                return
            try:
                for future in futures:
                    future.wait()
            except Exception as error:
                joined.set_exception(error)
            else:
                joined.set_result([])

        for future in futures:
            future.add_done_callback(note_done)
        return joined


def monitored_barrier(gloo_group: ProcessGroup, timeout: timedelta, *, wait_all_ranks: bool) -> None:
    """Block until all ranks of a Gloo group have called this; only rank 0's time is limited.

    Args:
        gloo_group: The group.
        timeout: Limit on waiting for the others.
        wait_all_ranks: Wait for each rank as long as `timeout`, and name all that did not come instead of the first.

    Raises:
        TransferFailedError: On rank 0, ranks did not come, which the text names. On the others, rank 0 gave up or died.
    """
    try:
        gloo_group.monitored_barrier(timeout, wait_all_ranks)
    except RuntimeError as cause:
        failure = transfer_failure(cause)
        is_hung = failure.hung or "onnection" not in str(cause)
        raise TransferFailedError(None, str(failure), hung=is_hung) from cause
