"""The host library inside a group: Gloo for CPU, NCCL for CUDA tensors, with failures that name who is to blame.

Registered inside the group under their devices, they serve every call of torch.distributed that ringweave does not run
itself. Each method here only hands on to them; what it adds is the name of the rank and node in an error.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ringweave.comm.members import Members
from ringweave.comm.transport import TransferFailedError
from ringweave.comm.works import NamingWork
from ringweave.errors import CommunicationError


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
