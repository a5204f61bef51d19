"""Checks of calls, for TORCH_DISTRIBUTED_DEBUG=DETAIL: all ranks must make the same collective on equal tensors.

torch wraps a group of Gloo or NCCL in its ProcessGroupWrapper, which compares operation, sequence number, shapes,
dtypes and devices before each collective, and names a rank that does not come. It wraps no process group that is
written in Python. So this module lets the same wrapper, around a backend that does nothing, make each call before the
group does.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FakeProcessGroup, _ProcessGroupWrapper
from torch.distributed import PrefixStore, Store, Work

from ringweave.comm.backend import RingweaveProcessGroup
from ringweave.comm.group_info import GroupInfo
from ringweave.comm.native_backend import COLLECTIVE_METHODS, abort_gloo, make_gloo, transfer_failure
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.errors import DisagreementError

_METHOD_OF_WRAPPER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods of process groups that have another name in backends, in torch 2.13."""

_MISMATCH = "Detected mismatch between collectives on ranks"
"""Part of the text of torch's wrapper."""


class CallChecker:
    """Makes each call of a group beforehand, as a comparison of the ranks' calls and no more."""

    def __init__(self, store: Store, group: GroupInfo, timeout: timedelta) -> None:
        """All ranks of the group make theirs together; `timeout` limits the wait for a rank that does not call."""
        self._group = group
        self._gloo = make_gloo(PrefixStore("calls/", store), group, timeout)
        # The backend that does nothing leaves inputs alone. It may write outputs, which the collective writes again.
        nothing = FakeProcessGroup._create_internal(group.group_rank, group.group_size)
        self._wrapper: Any = _ProcessGroupWrapper(nothing, self._gloo)

    def check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Block until all ranks have made a call, and compare it with this one.

        Raises:
            DisagreementError: They differ; the text is torch's. The group can go on.
            TransferFailedError: A rank did not come.
        """
        try:
            getattr(self._wrapper, _METHOD_OF_WRAPPER.get(name, name))(*args, **kwargs)
        except RuntimeError as cause:
            if _MISMATCH in str(cause):
                raise DisagreementError(str(cause)) from cause
            raise transfer_failure(cause) from cause

    def abort(self) -> None:
        """End every check that waits, from any thread."""
        abort_gloo(self._gloo, self._group)


class DebugProcessGroup(RingweaveProcessGroup):
    """Ringweave's process group with a check before each collective."""

    def __init__(self, *args: Any) -> None:
        """Arguments are those of RingweaveProcessGroup."""
        super().__init__(*args)
        self._checker = CallChecker(self._store, self.members, self._timeout)
        self._end.attach(self._checker.abort)

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a call, unless the group has ended, which the call itself finds out."""
        if self._end.error is not None:
            return
        try:
            self._checker.check(name, args, kwargs)
        except TransferFailedError as failure:
            raise self.fail(failure, name.strip("_")) from failure


def _checked_method(name: str) -> Callable[..., Work | None]:
    """Make a method that checks the call before the process group makes it."""

    def collective(self: DebugProcessGroup, *args: Any, **kwargs: Any) -> Work | None:
        self._check(name, args, kwargs)
        return getattr(super(DebugProcessGroup, self), name)(*args, **kwargs)

    collective.__name__ = name
    collective.__doc__ = "See torch.distributed.ProcessGroup."
    return collective


for _name in COLLECTIVE_METHODS:
    if hasattr(RingweaveProcessGroup, _name):
        setattr(DebugProcessGroup, _name, _checked_method(_name))
