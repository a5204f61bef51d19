"""The model under DDP in an elastic job: whatever DDP wants summed passes through the session.

DDP looks for parameters that a pass has not used, and leaves the gradient of one that no rank has used as it is: to an
optimizer it is not there. For that it sums over the ranks who has used what. Its group is of this process alone, so
that passes through the session as well, with what members say of each reduction when they have its sums: it is of those
that the gradients are of, and who joins, or does a step later, takes the same over.
"""

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from ringweave.errors import TrainingError, explain
from ringweave.training import reducing
from ringweave.training.elastic.session import Session
from ringweave.training.reducing import SampleWeights
from ringweave.training.timing import StepTimer


def wrap(
    model: nn.Module, options: Mapping[str, Any], session: Session, weights: SampleWeights, timer: StepTimer
) -> DistributedDataParallel:
    """The model under DDP, its gradients weighed and summed by the session.

    The buckets are the same on a member that joins as on the others: DDP orders its buckets anew after a process's
    first backward pass, unless it looks for unused parameters.

    Raises:
        TrainingError: An option would give a member that joins other buckets.
    """
    if options.get("static_graph"):
        do = "Leave static_graph out: a worker that joins could not have the same buckets as the others"
        raise TrainingError(explain("option static_graph of an elastic job", got=True, expected="False", do=do))
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    uses = Uses(weights)
    wanted: dict[str, Any] = {**options, "find_unused_parameters": True}
    parallel = DistributedDataParallel(model, process_group=_alone(session, uses), **wanted)
    uses.watch(_parameters_of(parallel))
    reducing.weigh(parallel, weights)
    parallel.register_comm_hook(_Hook(session=session, timer=timer), _reduce)
    return parallel


class Uses:
    """Which parameters a reduction is of: on this member alone, then on all.

    A pass over samples that do not count, as a member makes that has no others, uses nothing. DDP does not know that,
    and gives such a parameter a gradient of zeros even if no member has used it; it is taken away again.
    """

    def __init__(self, weights: SampleWeights) -> None:
        """`weights` say what the samples of the present pass count for."""
        self._weights = weights
        self._parameters: Sequence[nn.Parameter] = ()
        self._counted: set[int] = set()
        """Those used by samples that count, since the last reduction."""
        self._stood_in: dict[int, bool] = {}
        """Those used by samples that do not -> whether there was no gradient before."""

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note of which of these there are gradients; in the order in which DDP numbers them."""
        self._parameters = parameters
        for index, parameter in enumerate(parameters):
            hook: Any = functools.partial(self._note, index)
            parameter.register_hook(unserializable_hook(hook))

    def of_samples(self, used: Tensor) -> int:
        """Bits for what DDP has seen used here, (num_parameters,), without what no sample that counts has used."""
        found = used.cpu().numpy() != 0
        found[list(self._stood_in.keys() - self._counted)] = False
        return int.from_bytes(np.packbits(found, bitorder="little").tobytes(), "little")

    def take(self, used: int) -> None:
        """Bits of all members; DDP finishes its gradients now, and then what nobody has used is taken away."""
        absent = [index for index, was_absent in self._stood_in.items() if was_absent]
        unused = [index for index in absent if not used >> index & 1]
        self._counted.clear()
        self._stood_in.clear()
        if unused:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._take_away(unused))

    def _take_away(self, unused: Sequence[int]) -> None:
        for index in unused:
            self._parameters[index].grad = None

    def _note(self, index: int, gradient: Tensor) -> None:
        del gradient
        if self._weights.num_samples:
            self._counted.add(index)
        else:
            self._stood_in.setdefault(index, self._parameters[index].grad is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hook:
    """State of DDP's communication hook."""

    session: Session
    timer: StepTimer


def _reduce(state: _Hook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP calls for every bucket; it asks who has used what after the last one."""
    if bucket.is_last():
        state.timer.gradients_ready()
        # At the end of backward, before DDP's own: torch cannot hand a Python error on from a future to DDP.
        with contextlib.suppress(RuntimeError):  # outside of backward: all parameters of the bucket are unused
            torch.autograd.Variable._execution_engine.queue_callback(state.session.wait_counted)
    return state.session.reduce(bucket.buffer())


class _Alone(dist.ProcessGroup):
    """A group of this process only, in which DDP sums nothing but what was used."""

    def __init__(self, session: Session, uses: Uses) -> None:
        super().__init__(0, 1)  # pyrefly: ignore - of its constructors the one that lets Python override
        self._session, self._uses = session, uses

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # pyrefly: ignore - one of its forms
        """What any member has used; there once the reduction counts."""
        del opts
        (used,) = tensors
        future = self._session.end_pass(self._uses.of_samples(used))
        return _Counted(future, used, self._uses)


class _Counted(dist.Work):
    """What DDP waits for at the end of a backward pass, when the reduction counts already."""

    def __init__(self, future: torch.futures.Future[int], used: Tensor, uses: Uses) -> None:
        super().__init__()
        self._future, self._used, self._uses = future, used, uses

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Hand it to DDP."""
        del timeout
        used = self._future.wait()
        num_parameters = self._used.numel()
        packed = np.frombuffer(used.to_bytes(-(-num_parameters // 8), "little"), dtype=np.uint8)
        found = np.unpackbits(packed, bitorder="little", count=num_parameters)
        self._used.copy_(torch.from_numpy(found))
        self._uses.take(used)
        return True


def _alone(session: Session, uses: Uses) -> dist.ProcessGroup:
    store, kinds = dist.HashStore(), dist.ProcessGroup.BackendType
    group = _Alone(session, uses)
    group._set_default_backend(kinds.GLOO)
    gloo = ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), kinds.GLOO, gloo)
    return group


def _parameters_of(parallel: DistributedDataParallel) -> list[nn.Parameter]:
    """Those that DDP reduces, as it numbers them."""
    ignored = parallel.parameters_to_ignore
    named = parallel.module.named_parameters()
    return [each for name, each in named if each.requires_grad and name not in ignored]
