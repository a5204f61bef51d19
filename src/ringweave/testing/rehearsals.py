"""Asynchronous training in virtual time: the server's real rules, and rings that are simulated one event at a time.

One process computes all gradients, in the order in which rings of given speeds would push them. So what staleness does
to a loss can be told from noise, the same on every machine, in seconds.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ringweave.params import flat
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Setup, TensorSpec
from ringweave.params.rules import Leads, Ledger, StalenessPolicy, TicketOffice
from ringweave.params.serving import optimizers
from ringweave.params.serving.model import GatheredModel
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed

Loss = Callable[[nn.Module, Tensor], Tensor]
"""(model, indices of samples) -> the mean loss of these samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, in either way."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Loss
    epochs: Sequence[Tensor]
    """The order of the samples in each epoch; whole batches."""
    batch_samples: int
    decay: Callable[[int], float] = lambda epoch: 1.0
    """Epoch -> what the learning rate is multiplied by, as a scheduler would."""
    after_epoch: Callable[[nn.Module], object] = lambda model: None
    """Called with the model as it is at the end of each epoch."""


@dataclass(kw_only=True, slots=True)
class Rehearsed:
    """The trained model, and how old pushes were (simulated)."""

    model: nn.Module
    staleness: list[int] = field(default_factory=list)


def synchronous(task: Task) -> nn.Module:
    """One process, the whole batch in each step."""
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


def asynchronous(
    task: Task,
    speeds: Sequence[float],
    stall: float = 0.0,
    seed: int = 0,
    *,
    later_speeds: Sequence[float] | None = None,
) -> Rehearsed:
    """Rings of these speeds, in samples a second, and the server's rules with their defaults.

    Args:
        task: What is trained.
        speeds: Of each ring. Rings share a batch in proportion.
        stall: Probability that a round takes four times as long.
        seed: Of the stalls.
        later_speeds: Speeds from the begin of the middle epoch on; shares follow at the end of that epoch.
    """
    rings = _Rings(task, speeds, stall, seed)
    for epoch, order in enumerate(task.epochs):
        if later_speeds and epoch == len(task.epochs) // 2:
            rings.speeds = later_speeds
        rings.run(epoch, order)
        rings.meet()
        task.after_epoch(rings.found.model)
    return rings.found


class _Rings:
    def __init__(self, task: Task, speeds: Sequence[float], stall: float, seed: int) -> None:
        self._task, self.speeds, self._stall = task, speeds, stall
        self._random = random.Random(seed)
        self.found = Rehearsed(model=task.make_model())
        self._parameters = list(self.found.model.parameters())
        self._optimizer = task.make_optimizer(self.found.model)
        specs = flat.specs_of([(str(place), each) for place, each in enumerate(self._parameters)])
        self._copies = [Flat(specs) for _ in speeds]
        self._tickets, self._numbers = TicketOffice(len(speeds), clock=lambda: self._now_s), [0] * len(speeds)
        self._shares = self._shares_of_speeds()
        policy = StalenessPolicy(num_rings=len(speeds))
        self._ledger, self._leads = Ledger(policy), Leads()
        first = Flat(specs)
        torch._foreach_copy_(first.views, [each.detach() for each in self._parameters])
        self._server = GatheredModel(self._setup(specs, policy), first)
        self._now_s = 0.0

    def run(self, epoch: int, order: Tensor) -> None:
        """One epoch, to the last push."""
        waiting, computing = set(range(len(self.speeds))), []
        decay = self._task.decay(epoch)
        options = [
            {**optimizers.options_of(group), "lr": group["lr"] * decay} for group in self._optimizer.param_groups
        ]
        while waiting or computing:
            for ring in sorted(waiting):
                if self._ledger.can_grant(ring):
                    waiting.discard(ring)
                    self._begin(ring, epoch, order, computing)
            if computing:
                self._now_s, ring, samples = heapq.heappop(computing)
                self._push(ring, samples, options)
                waiting.add(ring)

    def meet(self) -> None:
        """Shares follow speeds, and the model has the server's parameters."""
        self._shares = self._shares_of_speeds()
        self._server.read(self._copies[0])
        self._load(self._copies[0])

    def _shares_of_speeds(self) -> tuple[int, ...]:
        return balancing.apportion(self._task.batch_samples, [Speed(s_per_sample=1 / speed) for speed in self.speeds])

    def _begin(self, ring: int, epoch: int, order: Tensor, computing: list[tuple[float, int, Tensor]]) -> None:
        self._ledger.grant(ring)
        self._server.read(self._copies[ring], self._leads.grant(ring, self._server.progress.total))
        self._numbers[ring] += 1
        ticket = self._tickets.take(ring, self._numbers[ring], epoch, self._shares[ring], len(order))
        if not ticket.num_samples:
            self._ledger.leave(ring)
            self._leads.rest(ring)
            self._tickets.rested(ring)
            return
        samples = order[ticket.first : ticket.first + ticket.num_samples]
        stalled = 4.0 if self._random.random() < self._stall else 1.0
        seconds = len(samples) / self.speeds[ring] * stalled
        heapq.heappush(computing, (self._now_s + seconds, ring, samples))

    def _push(self, ring: int, samples: Tensor, options: list[dict]) -> None:
        self._load(self._copies[ring])
        self.found.model.zero_grad()
        self._task.loss(self.found.model, samples).backward()
        gradient = Flat(self._server.setup.tensors)
        for view, parameter in zip(gradient.views, self._parameters, strict=True):
            assert parameter.grad is not None, "every parameter takes part"
            view.copy_(parameter.grad)
        base = self._ledger.base(ring)
        assert base is not None, "it was granted"
        sequence = self._ledger.pushed[ring].sequence + 1 if ring in self._ledger.pushed else 1
        receipt = self._ledger.push(ring, sequence, base)
        share = len(samples) / self._task.batch_samples
        self._leads.push(ring, self._server.progress.total, share)
        self._tickets.pushed(ring, len(samples))
        self.found.staleness.append(receipt.staleness_versions)
        self._server.apply_gradient(gradient, share, options, damping=receipt.damping)

    def _setup(self, specs: list[TensorSpec], policy: StalenessPolicy) -> Setup:
        places = {parameter: place for place, parameter in enumerate(self._parameters)}
        groups = [
            Group(parameters=[places[each] for each in group["params"]], options=optimizers.options_of(group))
            for group in self._optimizer.param_groups
        ]
        return Setup(
            tensors=specs,
            optimizer=type(self._optimizer).__name__,
            groups=groups,
            rings=[[ring] for ring in range(policy.num_rings)],
            overlaps=policy.overlaps,
            compensation=policy.compensation,
        )

    @torch.no_grad()
    def _load(self, copy: Flat) -> None:
        for parameter, view in zip(self._parameters, copy.views, strict=True):
            parameter.copy_(view)
