"""The parameters as the server holds them, in versions: a push makes the next one, rings keep the one they compute on.

A version that a ring or a snapshot holds is never changed: the next push copies it first. So there are as many copies
as rings with different versions, the newest among them, and a copy that nobody holds any more is used again. That a
ring's own copy is there when its push comes is what delay compensation needs.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import nn

from ringweave.errors import TrainingError, explain
from ringweave.params.flat import Flat
from ringweave.params.messages import Option, Setup
from ringweave.params.serving import optimizers

_BLOCK = 1 << 18
"""Elements that are compensated at once: what is needed beside the gradient stays in the cache."""


class VersionedModel:
    """Parameters, optimizer and the copies that rings compute on; one thread at a time."""

    def __init__(self, setup: Setup, initial: Flat) -> None:
        """`initial` holds the first parameters, and is the model's from now on.

        Raises:
            TrainingError: The optimizer cannot be made.
        """
        self.setup = setup
        self._now = initial
        self._held: dict[Hashable, Flat] = {}
        self._spare: Flat | None = None
        self._parameters = [nn.Parameter(view) for view in initial.views]
        self.optimizer = optimizers.make(setup.optimizer, setup.groups, self._parameters)

    def hold(self, holder: Hashable) -> Flat:
        """The newest parameters, which stay as they are until the holder holds others or lets go."""
        self.release(holder)
        self._held[holder] = self._now
        return self._now

    def release(self, holder: Hashable) -> None:
        """The holder needs its copy no more."""
        copy = self._held.pop(holder, None)
        if copy is not None and copy is not self._now and not self._is_held(copy):
            self._spare = copy

    def held(self, holder: Hashable) -> Flat | None:
        """The copy that it holds."""
        return self._held.get(holder)

    def apply_gradient(
        self,
        holder: Hashable,
        gradient: Flat,
        factor: float,
        options: Sequence[dict[str, Option]],
        absent: Sequence[int] = (),
    ) -> None:
        """One step of the optimizer.

        Args:
            holder: Who computed the gradient, on the copy that it holds, which it thereby lets go.
            gradient: The mean over its samples; changed.
            factor: What the step counts for: the learning rate is multiplied by it.
            options: Of each group.
            absent: Places of parameters without a gradient.

        Raises:
            TrainingError: Options or places do not belong to this model; nothing is changed.
        """
        if not all(place < len(self._parameters) for place in absent):
            raise TrainingError(
                explain("absent gradients", got=list(absent), expected="places of parameters", do="Push them whole")
            )
        optimizers.adjust(self.optimizer, options, factor)
        base = self.held(holder)
        if base is not None and base is not self._now and self.setup.compensation:
            compensate(gradient, self._now, base, self.setup.compensation)
        self.release(holder)
        self._make_own()
        for place, (parameter, view) in enumerate(zip(self._parameters, gradient.views, strict=True)):
            parameter.grad = None if place in absent else view
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def apply_change(self, holder: Hashable, change: Flat, factor: float) -> None:
        """Move all parameters by a multiple of what changed in a ring's local steps."""
        self.release(holder)
        self._make_own()
        for own, moved in zip(self._now.pieces, change.pieces, strict=True):
            own.add_(moved, alpha=factor)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tensors held: copies, and the optimizer's state."""
        copies = {id(copy): copy for copy in (self._now, self._spare, *self._held.values()) if copy is not None}
        states = self.optimizer.state.values()
        state = sum(value.nbytes for each in states for value in each.values() if isinstance(value, torch.Tensor))
        return sum(copy.num_bytes for copy in copies.values()) + state

    @property
    def state_bytes(self) -> int:
        """Bytes of one set of parameters and of the optimizer's state: what training alone would hold."""
        states = self.optimizer.state.values()
        state = sum(value.nbytes for each in states for value in each.values() if isinstance(value, torch.Tensor))
        return self._now.num_bytes + state

    def _is_held(self, copy: Flat) -> bool:
        return any(each is copy for each in self._held.values())

    def _make_own(self) -> None:
        """See to it that nobody holds the newest parameters, which are about to change."""
        if not self._is_held(self._now):
            return
        fresh, self._spare = self._spare or Flat(self.setup.tensors), None
        fresh.copy_(self._now)
        self._now = fresh
        for parameter, view in zip(self._parameters, fresh.views, strict=True):
            parameter.data = view


def compensate(gradient: Flat, now: Flat, base: Flat, strength: float) -> None:
    """Turn a gradient at older parameters into about that at the newest: g + lambda g g (theta_now - theta_base).

    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (2017), equation 10.
    """
    for own, newest, older in zip(gradient.pieces, now.pieces, base.pieces, strict=True):
        for begin in range(0, len(own), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            own[block].addcmul_(own[block] * own[block], newest[block] - older[block], value=strength)
