"""The host library inside a group: Gloo for CPU, NCCL for CUDA tensors, with failures that name who is to blame.

Registered inside the group under their devices, they serve every call of torch.distributed that ringweave does not run
itself. Each method here only hands on to them; what it adds is the name of the rank and node in an error.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ringweave.comm.members import Members
from ringweave.comm.transport import TransferFailedError
from ringweave.errors import CommunicationError

_ABORT_TAG = 2**31 - 1
"""A tag that no message carries."""


class NamingWork(Work):
    """A work of the host library whose failure names the rank and node to blame."""

    def __init__(self, work: Work, explain: Callable[[TransferFailedError], CommunicationError]) -> None:
        super().__init__()
        self._work = work
        self._explain = explain

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensors hold the result.

        Raises:
            PeerError: The host library gave up.
        """
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as cause:
            raise self._explain(_failure_of(cause)) from cause

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it has finished without an error."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """What went wrong, once finished."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """The tensors, after waiting for them."""
        self.wait()
        return self._work.result()

    def synchronize(self) -> None:
        """The same as `wait`: CPU tensors know no streams."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """The host library's own future."""
        return self._work.get_future()


class HostedProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are the host library's, where a subclass does not run them itself. Abstract.

    The methods call their parent by `super()` directly: that is how pybind11 knows that it must not call them again.
    """

    def __init__(self, store: Store, members: Members, timeout: timedelta) -> None:
        # torch's stubs lack this constructor, the one that Python subclasses have.
        super().__init__(members.group_rank, members.group_size)  # pyrefly: ignore
        self.members = members
        self._gloo: Any = self._register_hosts(store, timeout)

    def fail(self, failure: TransferFailedError, doing: str) -> CommunicationError:
        """End the group because of a failed transfer, and return the error that names who is to blame."""
        raise NotImplementedError  # pybind11's metaclass allows no abstract methods

    def named(self, work: Work, doing: str) -> NamingWork:
        """`work`, with an error that says what was being done and who is to blame."""
        return NamingWork(work, lambda failure: self.fail(failure, doing))

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().broadcast(*args, **kwargs), "broadcast")

    def reduce(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().reduce(*args, **kwargs), "reduce")

    def allgather(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().allgather(*args, **kwargs), "allgather")

    def all_gather_single(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().all_gather_single(*args, **kwargs), "allgather")

    def gather(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().gather(*args, **kwargs), "gather")

    def scatter(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().scatter(*args, **kwargs), "scatter")

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().reduce_scatter(*args, **kwargs), "reduce-scatter")

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().reduce_scatter_single(*args, **kwargs), "reduce-scatter")

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().all_to_all_single(*args, **kwargs), "all-to-all")

    def alltoall(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().alltoall(*args, **kwargs), "all-to-all")

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        """See torch.distributed.ProcessGroup."""
        return self.named(super().barrier(*args, **kwargs), "barrier")

    def _register_hosts(self, store: Store, timeout: timedelta) -> ProcessGroupGloo:
        kinds = dist.ProcessGroup.BackendType
        place = (self.members.group_rank, self.members.group_size)
        gloo = ProcessGroupGloo(PrefixStore("host/", store), *place, timeout)
        gloo._set_sequence_number_for_group()
        nccl_works = torch.cuda.is_available() and dist.is_nccl_available()
        self._set_default_backend(kinds.NCCL if nccl_works else kinds.GLOO)
        self._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if nccl_works:
            from torch.distributed.distributed_c10d import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = ProcessGroupNCCL(PrefixStore("nccl/", store), *place, options)
            nccl._set_sequence_number_for_group()
            self._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        elif torch.cuda.is_available():
            self._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
        return gloo

    def cut_host(self) -> None:
        """Close the host library's connections: what is in flight fails, here and at the peers.

        Gloo's own abort leaves them open (torch 2.13), and they stay open while any message is pending. But a wait
        that times out closes the pair that it waits on, so we wait for a message that never comes, from each peer.
        """
        for peer in range(self.members.group_size):
            if peer != self.members.group_rank:
                with contextlib.suppress(RuntimeError):
                    self._gloo.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def _failure_of(cause: RuntimeError) -> TransferFailedError:
    """What the host library's error says; it does not say which peer."""
    text = str(cause).strip().partition("\n")[0] or type(cause).__name__
    return TransferFailedError(None, text, hung="imed out" in text or "imeout" in text)
