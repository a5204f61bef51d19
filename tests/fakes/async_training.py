"""Asynchronous training in virtual time: the server's real rules, with rings simulated event by event.

One process computes all gradients, in the order in which rings of given speeds would push them. So the effect of
staleness on a loss can be told from noise, identically on every machine, in seconds."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ringweave.param_server import flat, optimizers
from ringweave.param_server.data_shards import ShardDispatcher
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ParameterGroup, ServerSetup, TensorSpec
from ringweave.param_server.model import AccumulatingModel
from ringweave.param_server.versions import Ledger, StalenessPolicy, WeightPrediction
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed

LossFunction = Callable[[nn.Module, Tensor], Tensor]
"""(model, indices of samples) -> mean loss of these samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualTask:
    """Training task."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: LossFunction
    epochs: Sequence[Tensor]
    """Order of the samples in each epoch; whole batches."""
    batch_samples: int
    decay: Callable[[int], float] = lambda epoch: 1.0
    """Epoch -> factor of the learning rate, as of a scheduler."""
    after_epoch: Callable[[nn.Module], object] = lambda model: None
    """Called with the model at the end of each epoch."""


@dataclass(kw_only=True, slots=True)
class VirtualRun:
    """Trained model and staleness of all pushes (simulated)."""

    model: nn.Module
    staleness: list[int] = field(default_factory=list)


def train_synchronously(task: VirtualTask) -> nn.Module:
    """Train in one process with the whole batch in each step."""
    model = task.make_model()
    optimizer = task.make_optimizer(model)
    first_lr = [group["lr"] for group in optimizer.param_groups]
    for epoch, order in enumerate(task.epochs):
        for group, lr in zip(optimizer.param_groups, first_lr, strict=True):
            group["lr"] = lr * task.decay(epoch)
        for batch in order.split(task.batch_samples):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
        task.after_epoch(model)
    return model


def train_asynchronously(
    task: VirtualTask,
    speeds: Sequence[float],
    stall: float = 0.0,
    seed: int = 0,
    *,
    later_speeds: Sequence[float] | None = None,
) -> VirtualRun:
    """Train with rings of these speeds, in samples a second, and the server's rules with their defaults.

    Args:
        task: The training task.
        speeds: Speed of each ring. Rings share a batch in proportion.
        stall: Probability that a round takes four times as long.
        seed: Seed of the stalls.
        later_speeds: Speeds from the start of the middle epoch; shares follow at the end of that epoch.
    """
    rings = _VirtualRings(task, speeds, stall, seed)
    for epoch, order in enumerate(task.epochs):
        if later_speeds and epoch == len(task.epochs) // 2:
            rings.speeds = later_speeds
        rings.run_epoch(epoch, order)
        rings.synchronize()
        task.after_epoch(rings.result.model)
    return rings.result


class _VirtualRings:
    def __init__(self, task: VirtualTask, speeds: Sequence[float], stall: float, seed: int) -> None:
        self._task, self.speeds, self._stall = task, speeds, stall
        self._random = random.Random(seed)
        self.result = VirtualRun(model=task.make_model())
        self._parameters = list(self.result.model.parameters())
        self._optimizer = task.make_optimizer(self.result.model)
        specs = flat.tensor_specs([(str(place), each) for place, each in enumerate(self._parameters)])
        self._copies = [FlatTensors(specs) for _ in speeds]
        self._shard_dispatcher, self._numbers = (
            ShardDispatcher(len(speeds), clock=lambda: self._now_s),
            [0] * len(speeds),
        )
        self._shares = self._shares_of_speeds()
        policy = StalenessPolicy(num_rings=len(speeds))
        self._ledger, self._weight_prediction = Ledger(policy), WeightPrediction()
        first = FlatTensors(specs)
        torch._foreach_copy_(first.views, [each.detach() for each in self._parameters])
        self._server = AccumulatingModel(self._setup(specs, policy), first)
        self._now_s = 0.0

    def run_epoch(self, epoch: int, order: Tensor) -> None:
        """Run one epoch to the last push."""
        waiting, computing = set(range(len(self.speeds))), []
        decay = self._task.decay(epoch)
        options = [
            {**optimizers.group_options(group), "lr": group["lr"] * decay} for group in self._optimizer.param_groups
        ]
        while waiting or computing:
            for ring in sorted(waiting):
                if self._ledger.can_grant(ring):
                    waiting.discard(ring)
                    self._begin_round(ring, epoch, order, computing)
            if computing:
                self._now_s, ring, samples = heapq.heappop(computing)
                self._push_gradient(ring, samples, options)
                waiting.add(ring)

    def synchronize(self) -> None:
        """Update the shares by the speeds, and load the server's parameters into the model."""
        self._shares = self._shares_of_speeds()
        self._server.read_parameters(self._copies[0])
        self._load_parameters(self._copies[0])

    def _shares_of_speeds(self) -> tuple[int, ...]:
        return balancing.apportion(self._task.batch_samples, [Speed(s_per_sample=1 / speed) for speed in self.speeds])

    def _begin_round(self, ring: int, epoch: int, order: Tensor, computing: list[tuple[float, int, Tensor]]) -> None:
        self._ledger.grant(ring)
        self._server.read_parameters(
            self._copies[ring], self._weight_prediction.steps_ahead(ring, self._server.progress.total)
        )
        self._numbers[ring] += 1
        shard = self._shard_dispatcher.next_shard(ring, self._numbers[ring], epoch, self._shares[ring], len(order))
        if not shard.num_samples:
            self._ledger.leave(ring)
            self._weight_prediction.note_idle(ring)
            self._shard_dispatcher.note_idle(ring)
            return
        samples = order[shard.first : shard.first + shard.num_samples]
        stalled = 4.0 if self._random.random() < self._stall else 1.0
        seconds = len(samples) / self.speeds[ring] * stalled
        heapq.heappush(computing, (self._now_s + seconds, ring, samples))

    def _push_gradient(self, ring: int, samples: Tensor, options: list[dict]) -> None:
        self._load_parameters(self._copies[ring])
        self.result.model.zero_grad()
        self._task.loss(self.result.model, samples).backward()
        gradient = FlatTensors(self._server.setup.tensors)
        for view, parameter in zip(gradient.views, self._parameters, strict=True):
            assert parameter.grad is not None, "every parameter takes part"
            view.copy_(parameter.grad)
        base = self._ledger.base_version(ring)
        assert base is not None, "it was granted"
        sequence = self._ledger.pushed[ring].sequence + 1 if ring in self._ledger.pushed else 1
        receipt = self._ledger.push(ring, sequence, base)
        share = len(samples) / self._task.batch_samples
        self._weight_prediction.note_push(ring, self._server.progress.total, share)
        self._shard_dispatcher.note_push(ring, len(samples))
        self.result.staleness.append(receipt.staleness_versions)
        self._server.apply_gradient(gradient, share, options, damping=receipt.damping)

    def _setup(self, specs: list[TensorSpec], policy: StalenessPolicy) -> ServerSetup:
        places = {parameter: place for place, parameter in enumerate(self._parameters)}
        groups = [
            ParameterGroup(
                parameters=[places[each] for each in group["params"]], options=optimizers.group_options(group)
            )
            for group in self._optimizer.param_groups
        ]
        return ServerSetup(
            tensors=specs,
            optimizer=type(self._optimizer).__name__,
            groups=groups,
            rings=[[ring] for ring in range(policy.num_rings)],
            overlaps=policy.overlaps,
            compensation=policy.compensation,
        )

    @torch.no_grad()
    def _load_parameters(self, copy: FlatTensors) -> None:
        for parameter, view in zip(self._parameters, copy.views, strict=True):
            parameter.copy_(view)
