"""DDP in an elastic job: every allreduce that DDP asks for passes through the session.

DDP looks for parameters that a pass has not used, and leaves the gradient of a parameter that no rank has used as it
is. For that it sums a used-parameter map over the ranks. DDP's process group contains this process only, so the map
also passes through the session, together with the rows that members exchange for each reduction. The map therefore
covers exactly the members whose gradients are in the reduction, and a member that joins or replays a step later gets
the same map.
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from ringweave.comm.gloo import make_single_gloo
from ringweave.errors import TrainingError
from ringweave.training import gradients
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.gradients import SampleWeights
from ringweave.training.timing import StepTimer


def wrap_elastic_ddp(
    model: nn.Module, options: Mapping[str, Any], session: ElasticSession, weights: SampleWeights, timer: StepTimer
) -> DistributedDataParallel:
    """Return the model under DDP, with its gradients weighted and summed by the session.

    A joining member has the same buckets as the others: DDP reorders its buckets after a process's first backward pass,
    unless it looks for unused parameters.

    Raises:
        TrainingError: An option would give a joining member other buckets.
    """
    if options.get("static_graph"):
        do = "Leave static_graph out: a worker that joins could not have the same buckets as the others"
        raise TrainingError("option static_graph of an elastic job", got=True, expected="False", do=do)
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    usage = ParameterUsage(weights)
    all_options: dict[str, Any] = {**options, "find_unused_parameters": True}
    parallel = DistributedDataParallel(model, process_group=_session_process_group(session, usage), **all_options)
    usage.watch_parameters(_reduced_parameters(parallel))
    gradients.weigh_gradients(parallel, weights)
    parallel.register_comm_hook(_CommHookState(session=session, timer=timer), _reduce_in_session)
    parallel.register_comm_hook = _refuse_hook  # pyrefly: ignore - DDP takes one hook
    parallel.gradient_residuals = session.commits.residuals  # pyrefly: ignore - a module takes any attribute
    return parallel


def _refuse_hook(state: object, hook: object) -> None:
    """Refuse a communication hook of the script: its own collectives could not be repeated without a lost member."""
    del state
    do = "Leave the hook out, or train without --elastic"
    name = getattr(hook, "__name__", repr(hook))
    raise TrainingError("communication hook of an elastic job", got=name, expected="none", do=do)


class ParameterUsage:
    """Parameters used in a reduction: on this member alone, then on all members.

    A pass over placeholder samples, by a member without samples of its own, uses no parameters. DDP does not know that,
    and gives such a parameter a gradient of zeros even if no member has used it; that gradient is removed again.
    """

    def __init__(self, weights: SampleWeights) -> None:
        """Create it; `weights` has the sample weights of the present pass."""
        self._weights = weights
        self._parameters: Sequence[nn.Parameter] = ()
        self._used_by_samples: set[int] = set()
        """Indices of parameters used by real samples since the last reduction."""
        self._used_by_placeholders: dict[int, bool] = {}
        """Indices of parameters used by placeholder samples -> the gradient was absent before."""

    def watch_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Watch the gradients of these parameters, in DDP's numbering."""
        self._parameters = parameters
        for index, parameter in enumerate(parameters):
            hook: Any = functools.partial(self._record_gradient, index)
            parameter.register_hook(unserializable_hook(hook))

    def used_bits(self, used: Tensor) -> int:
        """Return the bits of used parameters, (num_parameters,), without those of placeholder samples only."""
        found = used.cpu().numpy() != 0
        found[list(self._used_by_placeholders.keys() - self._used_by_samples)] = False
        return int.from_bytes(np.packbits(found, bitorder="little").tobytes(), "little")

    def finish_pass(self, used_bits: int) -> None:
        """Take all members' bits; after DDP has finished its gradients, those of unused parameters are removed."""
        absent = [index for index, was_absent in self._used_by_placeholders.items() if was_absent]
        unused = [index for index in absent if not used_bits >> index & 1]
        self._used_by_samples.clear()
        self._used_by_placeholders.clear()
        if unused:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._clear_gradients(unused))

    def _clear_gradients(self, unused: Sequence[int]) -> None:
        for index in unused:
            self._parameters[index].grad = None

    def _record_gradient(self, index: int, gradient: Tensor) -> None:
        del gradient
        if self._weights.num_samples:
            self._used_by_samples.add(index)
        else:
            self._used_by_placeholders.setdefault(index, self._parameters[index].grad is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CommHookState:
    """State of DDP's communication hook."""

    session: ElasticSession
    timer: StepTimer


def _reduce_in_session(state: _CommHookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket in the session; after the last one, DDP sums the map of used parameters."""
    if bucket.is_last():
        state.timer.gradients_ready()
        # At the end of backward, before DDP's own callback: torch cannot pass a Python error from a future to DDP.
        with contextlib.suppress(RuntimeError):  # outside of backward: all parameters of the bucket are unused
            torch.autograd.Variable._execution_engine.queue_callback(state.session.wait_committed)
    return state.session.commits.add_bucket(bucket.buffer(), bucket.parameters())


class _SessionProcessGroup(dist.ProcessGroup):
    """Process group of this process only, whose one allreduce is DDP's map of used parameters."""

    def __init__(self, session: ElasticSession, usage: ParameterUsage) -> None:
        super().__init__(0, 1)  # pyrefly: ignore - of its constructors the one that lets Python override
        self._session, self._usage = session, usage

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # pyrefly: ignore - one of its forms
        """Return the map of parameters that any member has used, once the reduction is committed."""
        del opts
        (used,) = tensors
        future = self._session.commits.end_backward(self._usage.used_bits(used))
        return _UsageWork(future, used, self._usage)


class _UsageWork(dist.Work):
    """Work of the map of used parameters; the reduction is committed before DDP waits for it."""

    def __init__(self, future: torch.futures.Future[int], used: Tensor, usage: ParameterUsage) -> None:
        super().__init__()
        self._future, self._used, self._usage = future, used, usage

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Copy the map into DDP's tensor."""
        del timeout
        used = self._future.wait()
        num_parameters = self._used.numel()
        packed = np.frombuffer(used.to_bytes(-(-num_parameters // 8), "little"), dtype=np.uint8)
        found = np.unpackbits(packed, bitorder="little", count=num_parameters)
        self._used.copy_(torch.from_numpy(found))
        self._usage.finish_pass(used)
        return True


def _session_process_group(session: ElasticSession, usage: ParameterUsage) -> dist.ProcessGroup:
    store, kinds = dist.HashStore(), dist.ProcessGroup.BackendType
    group = _SessionProcessGroup(session, usage)
    group._set_default_backend(kinds.GLOO)
    gloo = make_single_gloo(store, timedelta(seconds=60))
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), kinds.GLOO, gloo)
    return group


def _reduced_parameters(parallel: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that DDP reduces, in its numbering."""
    ignored = parallel.parameters_to_ignore
    named = parallel.module.named_parameters()
    return [each for name, each in named if each.requires_grad and name not in ignored]
