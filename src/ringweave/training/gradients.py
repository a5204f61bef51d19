"""Gradients of unequal portions of a batch, summed to exactly the gradient of the whole batch.

Two places take part. As soon as a parameter's gradient of this pass is ready, and before it is added to earlier ones,
it is multiplied by N b_i / sum b (N ranks, b_i samples on this rank). DDP's communication hook then takes the mean over
the ranks of the accumulated gradients. So passes without communication (`no_sync`) may have other shares than the last
one, and passes with communication do not change gradients that are the same on all ranks.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from ringweave.comm import wire_scope
from ringweave.environment import AUTO_WIRE, EXACT
from ringweave.errors import TrainingError, explain
from ringweave.training.timing import MeasuredStep, StepTimer

_LOGGER = logging.getLogger("ringweave")
_NUM_SAMPLED = 256
"""Numbers of a bucket that are looked at."""
_FIRST_WAITS_PASS, _WAITS_PASSES = 16, 64
"""Backward passes at which ranks decide whether their links bind: the first, and every so many."""
_LONG_WAITS = 0.1
"""Fraction of a step; a shorter wait leaves less than the gain for which `auto` takes a format."""


@dataclass(kw_only=True, slots=True)
class SampleWeights:
    """Weights of this rank's portion of the present batch, as the loader sets them."""

    num_ranks: int
    is_mean: bool
    """The loss is a mean over the samples of a batch; else their sum."""
    num_samples: int = 1
    num_total: int = 0
    """Samples over all ranks; 0 before the first batch, when all ranks have the same weight."""
    batch_part: float = 1.0
    """Train steps that these samples make. In rings it is less than one, and the server counts a push for just that
    fraction; so a sum of losses is divided by it, to become that of a whole step, as a mean is."""
    weight: float = 1.0
    """Weight of the samples on this rank; their number, unless the script gives weights."""
    total_weight: float | Callable[[], float] = 1.0
    """Weight of the samples over all ranks, or a function that waits for it."""
    weigh_range: Callable[[int, int], float] | None = None
    """Weight of the samples `first` to `until - 1` of this rank; None: their number."""
    is_within_pass: bool = False
    """Gradients are computed within a pass that sums and hands them over later, and are weighted then."""

    def set(self, num_samples: int, num_total: int, batch_part: float = 1.0) -> None:
        """Set the batch that the next passes compute; each sample weighs the same."""
        self.num_samples, self.num_total, self.batch_part = num_samples, num_total, batch_part
        self.weight, self.total_weight, self.weigh_range = num_samples, num_total, None

    def set_weights(
        self,
        weight: float,
        total_weight: float | Callable[[], float],
        weigh_range: Callable[[int, int], float] | None = None,
    ) -> None:
        """Set other weights for this batch: of the samples on this rank, of those over all ranks, and of a range."""
        self.weight, self.total_weight, self.weigh_range = weight, total_weight, weigh_range

    def fraction_of_range(self, first: int, until: int) -> float:
        """Return the factor of a loss of so many samples of this rank, in the loss of all its samples."""
        if not self.is_mean:
            return 1.0
        if self.weigh_range is None:
            return (until - first) / max(1, self.num_samples)
        return self.weigh_range(first, until) / self.weight if self.weight else 0.0

    @property
    def fraction(self) -> float:
        """This rank's fraction of the batch: the sum over ranks of fraction times mean is the mean of all samples."""
        if self.num_total == 0:
            return 1 / self.num_ranks
        return self.weight / self._wait_total_weight() if self.weight else 0.0

    @property
    def factor(self) -> float:
        """Factor of the gradients before the mean over ranks."""
        if self.num_total == 0:
            return 1.0
        if not self.is_mean:
            return self.num_ranks / self.batch_part if self.num_samples else 0.0
        return self.num_ranks * self.weight / self._wait_total_weight() if self.weight else 0.0

    def _wait_total_weight(self) -> float:
        if callable(self.total_weight):
            self.total_weight = self.total_weight()
        return self.total_weight

    @unserializable_hook
    def weigh(self, gradient: Tensor) -> Tensor | None:
        """Multiply a gradient by the factor; the hook of every parameter."""
        if self.is_within_pass:
            return None
        factor = self.factor
        if factor == 1.0:
            return None
        if factor == 0.0:  # a placeholder sample that only keeps DDP going; even its infinities do not count
            return torch.zeros_like(gradient)
        return gradient * factor


@dataclass(kw_only=True, slots=True)
class GradientReducer:
    """State of DDP's communication hook: the one place where gradients of different ranks are summed."""

    process_group: dist.ProcessGroup | None
    """None is the default group."""
    timer: StepTimer
    script_hook: "Callable[[dist.GradBucket], torch.futures.Future[Tensor]] | None" = None
    """Communication hook of the script with its state, such as PowerSGD; it takes the mean over the ranks instead."""
    wire: str = EXACT
    """Wire format of the gradients, or `auto`."""
    residuals: "GradientResiduals | None" = None
    """Errors that encoding has left for the next step; None in an exact format."""

    waits: "GradientWaits | None" = None
    """Opens `auto`; None if the wire format is not `auto`."""
    has_named_itself: bool = False
    """The last gradients of this rank were not finite, and it has said so."""

    def __post_init__(self) -> None:
        self.residuals = None if self.wire == EXACT else GradientResiduals()
        if self.wire == AUTO_WIRE:
            self.waits = GradientWaits(self.process_group)
            self.timer.add_listener(self.waits.record)

    def register_comm_hook(self, state: object, hook: Callable[[Any, dist.GradBucket], Any]) -> None:
        """Use the script's hook; the prepared model has this in place of DDP's function, which takes one hook only.

        The hook gets gradients that are weighted by samples already, so the mean over the ranks stays exact.

        Raises:
            TrainingError: The script has registered a hook before, or trains in rings or sites.
        """
        if self.process_group is not None:
            do = "Leave the hook out, or use mode sync or balanced"
            raise TrainingError("communication hook in rings or sites", got="one", expected="none", do=do)
        if self.script_hook is not None:
            do = "Register one hook; it may call others"
            raise TrainingError("communication hook", got="a second one", expected="one", do=do)
        self.script_hook = functools.partial(hook, state)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start the mean over all ranks of one bucket, in place."""
        if bucket.is_last():
            self.timer.gradients_ready()
            self._name_own_fault(bucket)
        if self.script_hook is not None:
            with wire_scope.encoded_as(EXACT, None):  # it sends what it likes, which need not be gradients
                return self.script_hook(bucket)
        wire = self.wire
        if self.waits is not None and bucket.index() == 0:
            self.waits.begin_pass()
        if self.waits is not None and not self.waits.are_long:
            wire = EXACT
        buffer = bucket.buffer()
        buffer.div_(dist.get_world_size(self.process_group))
        is_encoded = wire != EXACT and buffer.dtype == torch.float32
        residual = self.residuals.of_bucket(bucket) if self.residuals is not None and is_encoded else None
        with wire_scope.encoded_as(wire, residual):  # divided before: a residual is in the unit of the mean
            work = dist.all_reduce(buffer, group=self.process_group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    def _name_own_fault(self, bucket: dist.GradBucket) -> None:
        """Name this rank in its log if its own gradients are not finite although its parameters are.

        It looks at some numbers of the last bucket, of the first layers, on the CPU: what is not finite in the loss or
        in a later layer makes all of them so. Looking at all gradients would cost a pass over the memory.
        """
        buffer = bucket.buffer()
        if not (buffer.is_cpu and buffer.is_floating_point()):
            return
        sample = buffer[:: max(1, buffer.numel() // _NUM_SAMPLED)]
        is_finite = math.isfinite(sample.sum(dtype=torch.float64).item())
        if not is_finite and not self.has_named_itself:
            if not all(bool(each.detach().isfinite().all()) for each in bucket.parameters()):
                return  # a fault of an earlier step, perhaps of another rank
            text = explain(
                f"gradients of rank {dist.get_rank()}",
                got="not finite, and so the sum over all ranks",
                expected="finite numbers",
                do="Look at the samples and the loss of this worker, or clip gradients",
            )
            _LOGGER.warning("ringweave: %s", text)
        self.has_named_itself = not is_finite


class GradientWaits:
    """Time that a step waits for gradients beyond the backward pass; it says whether the links bind.

    A reduction that hides behind the backward pass costs nothing, whatever the links could do in another format. So
    `auto` begins exact, and asks the forecast of each message only once the rank that waits least, which waits for
    transfers and not for other ranks, has waited for a tenth of its steps.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group
        self.are_long = False
        """All ranks wait for long; it stays so."""
        self._waited_s, self._steps_s, self._num_passes = 0.0, 0.0, 0

    def record(self, step: MeasuredStep) -> None:
        """Count a measured step of this rank."""
        self._waited_s, self._steps_s = self._waited_s + step.exchange_s, self._steps_s + step.wall_s

    def begin_pass(self) -> None:
        """Count a backward pass; at some, which are the same on all ranks, these decide together."""
        self._num_passes += 1
        is_due = self._num_passes == _FIRST_WAITS_PASS or self._num_passes % _WAITS_PASSES == 0
        if self.are_long or not is_due:
            return
        share = torch.tensor([self._waited_s / self._steps_s if self._steps_s else 0.0])
        dist.all_reduce(share, dist.ReduceOp.MIN, group=self._process_group)
        self.are_long = share.item() >= _LONG_WAITS
        self._waited_s = self._steps_s = 0.0


class GradientResiduals:
    """Residuals of the error feedback of a model's gradients, bucket by bucket.

    DDP makes other buckets after its first pass; what the earlier ones had left moves along with each parameter.
    """

    def __init__(self) -> None:
        self._of_buckets: dict[int, tuple[list[Tensor], Tensor]] = {}
        """Parameters and residual of each bucket, by its index."""
        self._of_parameters: dict[int, Tensor] = {}
        """What buckets that exist no more have left for a parameter, by its identity."""

    @property
    def is_empty(self) -> bool:
        """No message has a residual yet."""
        return not (self._of_buckets or self._of_parameters)

    def of_bucket(self, bucket: dist.GradBucket) -> Tensor:
        """Return the residual of a bucket, as long as its buffer, on the host."""
        return self.of_message(bucket.index(), bucket.parameters(), bucket.buffer().numel())

    def of_message(self, index: int, parameters: Sequence[Tensor], num_elements: int) -> Tensor:
        """Return the residual of the message with this index, which has gradients of these parameters, in order."""
        known = self._of_buckets.get(index)
        if known is not None and _are_same(known[0], parameters) and known[1].numel() == num_elements:
            return known[1]
        if known is not None:
            self._dissolve()
        residual = wire_scope.new_residual(num_elements)
        for parameter, part in _parts_of_bucket(parameters, residual):
            left = self._of_parameters.pop(id(parameter), None)
            if left is not None:
                part.copy_(left)
        self._of_buckets[index] = list(parameters), residual
        return residual

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return what is left for each of these parameters, by its index; those without a residual are left out."""
        left = dict(self._of_parameters)
        for members, residual in self._of_buckets.values():
            left |= {id(parameter): part for parameter, part in _parts_of_bucket(members, residual)}
        found = {index: left.get(id(parameter)) for index, parameter in enumerate(parameters)}
        return {index: part.clone() for index, part in found.items() if part is not None}

    def load_state_dict(self, state: Mapping[int, Tensor], parameters: Sequence[Tensor]) -> None:
        """Take over what `state_dict` gave, of this rank, or added up over ranks that are gone."""
        self._of_buckets.clear()
        self._of_parameters = {id(parameters[index]): part.clone() for index, part in state.items()}

    def _dissolve(self) -> None:
        for members, residual in self._of_buckets.values():
            self._of_parameters |= {id(each): part.clone() for each, part in _parts_of_bucket(members, residual)}
        self._of_buckets.clear()


def _are_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


def _parts_of_bucket(parameters: Sequence[Tensor], residual: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with its part of a bucket, one after the other as in DDP's buffer."""
    start = 0
    for parameter in parameters:
        yield parameter, residual[start : start + parameter.numel()]
        start += parameter.numel()


def wrap_ddp(
    model: nn.Module, weights: SampleWeights, reducer: GradientReducer, ddp_options: dict[str, Any]
) -> DistributedDataParallel:
    """Return the model under DDP, with weighted gradients and buckets reduced here; a DDP model stays in DDP.

    DDP itself still communicates buffers and the map of used parameters: in the reducer's group from here on. A
    communication hook that the script registers on the returned model runs in place of the reducer's allreduce.

    Raises:
        TrainingError: The model has a communication hook already.
    """
    parallel = model
    if not isinstance(parallel, DistributedDataParallel):
        parallel = DistributedDataParallel(model, process_group=reducer.process_group, **ddp_options)
    elif reducer.process_group is not None:
        parallel._update_process_group(reducer.process_group)
    if parallel._comm_hooks:
        do = "Register it on the model that prepare returns"
        raise TrainingError("communication hook of the model", got="registered", expected="none yet", do=do)
    weigh_gradients(parallel, weights)
    parallel.register_comm_hook(reducer, _reduce_bucket)
    parallel.register_comm_hook = reducer.register_comm_hook  # pyrefly: ignore - DDP takes one hook
    parallel.gradient_residuals = reducer.residuals  # pyrefly: ignore - a module takes any attribute
    return parallel


def residuals_of(part: Any) -> "tuple[GradientResiduals, list[Tensor]] | None":
    """Return the residuals of a prepared model, and its parameters; None if it is none, or its gradients are exact."""
    residuals = getattr(part, "gradient_residuals", None)
    return None if residuals is None else (residuals, list(part.module.parameters()))


def unwrap_ddp(model: Any) -> Any:
    """Return the module inside of DDP; any other object as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    """Return True if a parameter is a part of a tensor that several ranks hold (DTensor), or FSDP1 wraps a module."""
    classes = {*map(type, model.modules()), *map(type, model.parameters())}
    names = {base.__name__ for each in classes for base in each.__mro__}  # their modules take long to import
    return bool(names & {"DTensor", "FullyShardedDataParallel"})


def weigh_gradients(parallel: DistributedDataParallel, weights: SampleWeights) -> None:
    """Weight every gradient of the model by its samples."""
    for parameter in parallel.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(weights.weigh)


def _reduce_bucket(reducer: GradientReducer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket; DDP wants a function with a name."""
    return reducer.reduce(bucket)
