"""The host library inside a group: Gloo for CPU, NCCL for CUDA tensors, with failures that name who is to blame.

Registered inside the group under their devices, they serve every call of torch.distributed that ringweave does not run
itself. What is added here is the name of the rank and node in an error.
"""

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ringweave.comm.adapting import hosting
from ringweave.comm.adapting.hosting import StuckError, cut_gloo, failure_of, leave_behind
from ringweave.comm.members import Members
from ringweave.comm.transport.seam import TransferFailedError
from ringweave.errors import CommunicationError

_HANDED_ON = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""Every method of torch's ProcessGroup that starts a collective or a message, in torch 2.12 and 2.13, but allreduce."""
_MESSAGES = frozenset({"recv", "recv_anysource", "send"})
"""They cannot be waited for in slices: a wait that times out closes their connection."""


class NamingWork(Work):
    """A work of the host library whose failure names the rank and node to blame."""

    def __init__(
        self,
        work: Work,
        explain: Callable[[TransferFailedError], CommunicationError],
        after: Callable[[], object] | None = None,
        wait: Callable[[timedelta | None], bool] | None = None,
    ) -> None:
        """`explain` says who is to blame, `after` is done to the result, `wait` takes the place of the work's own."""
        super().__init__()
        self._work = work
        self._wait = wait or (lambda timeout: work.wait() if timeout is None else work.wait(timeout))
        self._explain = explain
        self._future = work.get_future().then(lambda done: (after(), done.value())[1]) if after else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensors hold the result.

        Raises:
            PeerError: The host library gave up.
        """
        try:
            done = self._wait(timeout)
        except RuntimeError as cause:
            failure = failure_of(cause)
            failure.__cause__ = cause
            error = self._explain(failure)
            raise error from error.__cause__  # which may be another failure, one that came before
        if self._future is not None:
            self._future.wait()
        return done

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._work.is_completed()

    def has_ended_soon(self) -> bool:
        """Whether it ends, in whatever way, in the moment that follows a cut."""
        try:
            hosting.wait(self._work, lambda: True)
        except StuckError:
            return False
        except RuntimeError:
            pass
        return True

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

    def _source_rank(self) -> int:
        """Who sent what was received from anybody."""
        return self._work._source_rank()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """The host library's own future."""
        return self._future or self._work.get_future()


class HostedProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are the host library's, where a subclass does not run them itself. Abstract.

    The collectives go to a plain process group inside, and not by `super()`: torch's trampoline for Python subclasses
    (2.13) keeps the GIL while it calls the parent, the parent waits for a lock of Gloo's, and the Gloo thread that
    holds it waits for the GIL to let go of a tensor. See docs/decisions/0004-host-library.md.
    """

    def __init__(self, store: Store, members: Members, timeout: timedelta) -> None:
        # torch's stubs lack this constructor, the one that Python subclasses have.
        super().__init__(members.group_rank, members.group_size)  # pyrefly: ignore
        self.members = members
        self._store = store
        self._timeout = timeout
        self.plain = dist.ProcessGroup(PrefixStore("plain/", store), members.group_rank, members.group_size)
        self._gloo: Any = self._register_hosts()
        self._is_host_cut = self._is_left_behind = False
        self._under_way = weakref.WeakSet[NamingWork]()
        """Collectives on the processor that somebody may wait for."""

    def fail(self, failure: TransferFailedError, doing: str) -> CommunicationError:
        """End the group because of a failed transfer, and return the error that names who is to blame."""
        raise NotImplementedError  # pybind11's metaclass allows no abstract methods

    def count_host(self, num_bytes: int) -> None:
        """Note a collective of so many bytes on this rank that the host library does."""
        raise NotImplementedError

    def named(self, work: Work, doing: str, after: Callable[[], object] | None = None) -> NamingWork:
        """`work`, with an error that says what was being done and who is to blame; `after` is done to its result."""
        return NamingWork(work, lambda failure: self.fail(failure, doing), after)

    def allreduce_by_gloo(
        self, tensor: Tensor, opts: Any, doing: str, after: Callable[[], object] | None = None
    ) -> NamingWork:
        """An allreduce of a contiguous tensor on the processor; arguments as those of `named`."""
        return self.named_of_gloo(self._gloo.allreduce([tensor], opts), doing, after)

    def named_of_gloo(self, work: Work, doing: str, after: Callable[[], object] | None = None) -> NamingWork:
        """As `named`, of a collective of Gloo's, which ends soon once the group was cut, whatever has come of it."""

        def wait(timeout: timedelta | None) -> bool:
            try:
                return hosting.wait(work, lambda: self._is_host_cut, timeout)
            except StuckError:
                self._leave_behind()
                raise

        named = NamingWork(work, lambda failure: self.fail(failure, doing), after, wait)
        self._under_way.add(named)
        return named

    def cut_host(self) -> None:
        """Close the host library's connections: what is in flight fails, here and at the peers."""
        self._is_host_cut = True
        cut_gloo(self._gloo, self.members)

    def let_go_of_host(self) -> None:
        """Before the group is destroyed: see that nobody has to wait for what the cut has not ended."""
        for named in list(self._under_way) if self._is_host_cut else ():
            if not named.has_ended_soon():
                self._leave_behind()
                return

    def _leave_behind(self) -> None:
        if not self._is_left_behind:
            self._is_left_behind = True
            leave_behind(self._gloo)

    def _register_hosts(self) -> ProcessGroupGloo:
        kinds = dist.ProcessGroup.BackendType
        place = (self.members.group_rank, self.members.group_size)
        gloo = ProcessGroupGloo(PrefixStore("host/", self._store), *place, self._timeout)
        gloo._set_sequence_number_for_group()
        cuda: Any = gloo
        cuda_kind = kinds.GLOO
        if torch.cuda.is_available() and dist.is_nccl_available():
            cuda, cuda_kind = self._make_nccl(), kinds.NCCL
        for group in (self, self.plain):
            group._set_default_backend(cuda_kind)
            group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
            if torch.cuda.is_available():
                group._register_backend(torch.device("cuda"), cuda_kind, cuda)
        return gloo

    def _make_nccl(self) -> Any:
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        place = (self.members.group_rank, self.members.group_size)
        nccl = ProcessGroupNCCL(PrefixStore("nccl/", self._store), *place, options)
        nccl._set_sequence_number_for_group()
        return nccl


def _handed_on(name: str) -> Callable[..., Work]:
    """A method that hands a collective on to the host library, under the name that torch gives it."""

    def collective(self: HostedProcessGroup, *args: Any, **kwargs: Any) -> Work:
        self.count_host(_num_bytes(args[:1]))
        work, doing = getattr(self.plain, name)(*args, **kwargs), name.strip("_")
        is_of_gloo = name not in _MESSAGES and (not torch.cuda.is_available() or _is_on_host(args[:1]))
        return self.named_of_gloo(work, doing) if is_of_gloo else self.named(work, doing)

    collective.__name__ = name
    collective.__doc__ = "See torch.distributed.ProcessGroup."
    return collective


for _name in _HANDED_ON:
    if hasattr(dist.ProcessGroup, _name):
        setattr(HostedProcessGroup, _name, _handed_on(_name))


def _is_on_host(value: Any) -> bool:
    """Whether there are tensors in nested lists, and all of them on the processor; a barrier has none."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu"
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_on_host, value))


def _num_bytes(value: Any) -> int:
    """Of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.nbytes if value.layout == torch.strided else 0
    return sum(_num_bytes(item) for item in value) if isinstance(value, list | tuple) else 0
