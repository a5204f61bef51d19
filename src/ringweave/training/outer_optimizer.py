"""Outer optimizer of mode `local`: parameters as of the last outer steps, and the outer gradients that sites exchange.

The parameters are divided into fragments. Each outer step is of one fragment, or of all, and is begun and applied at
different times: meanwhile this site goes on computing. What it has computed meanwhile stays in its parameters.

Source: Douillard et al., "DiLoCo" (arXiv 2311.08105) and "Streaming DiLoCo with overlapping communication"
(arXiv 2501.18512); error feedback as in SparseLoCo (arXiv 2603.08163).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringweave.planning import sites
from ringweave.training.options import Local
from ringweave.training.outer_formats import OuterFormat

_NUM_TRIED_STEPS = 8
"""RAdam begins with five steps of another kind."""


class OuterGradient:
    """Outer gradient of this site for some fragments, between its begin and the outer step that applies it.

    `encode` and `set_mean` run in the thread of the exchange.
    """

    def __init__(self, places: Sequence[int], sent: list[Tensor], values: Tensor, buffers: Tensor) -> None:
        """Create it.

        Args:
            places: Indices of the parameters.
            sent: Copies of these parameters.
            values: (num_elements,) outer parameters minus these, plus what was not sent before.
            buffers: (num_buffer_elements,) values of the model's buffers, which go along exactly.
        """
        self.places, self.sent, self.values, self.buffers = places, sent, values, buffers
        self.unsent: Tensor | None = None
        """(num_elements,) what the encoded values lack."""
        self.mean, self.mean_buffers = values, buffers

    def num_bytes(self, wire: OuterFormat) -> int:
        """Return the length of the message; the same on all sites."""
        return wire.num_bytes(self.values) + self.buffers.nbytes

    def encode(self, wire: OuterFormat) -> Tensor:
        """Return the message, (num_bytes,) uint8."""
        content = wire.encode(self.values)
        if not wire.is_exact:
            self.unsent = (self.values - wire.decode(content, self.values)).nan_to_num_(0.0, 0.0, 0.0)
        return torch.cat((content, self.buffers.view(torch.uint8)))

    def set_mean(self, wire: OuterFormat, messages: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Set the weighted mean of all sites' messages: the same bits on all ranks, as all add in the same order.

        Raises:
            MessageError: A message is damaged.
        """
        total, length = sum(weights), wire.num_bytes(self.values)
        self.mean, self.mean_buffers = torch.zeros_like(self.values), torch.zeros_like(self.buffers)
        for message, weight in zip(messages, weights, strict=True):
            if weight:
                self.mean.add_(wire.decode(message[:length], self.values), alpha=weight / total)
                self.mean_buffers.add_(message[length:].clone().view(self.buffers.dtype), alpha=weight / total)


class UnsentGradients:
    """Part of this site's outer gradients that no message has carried yet, by index of the parameter."""

    def __init__(self) -> None:
        self.by_place: dict[int, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"unsent": {str(place): each for place, each in sorted(self.by_place.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.by_place = {int(place): each.clone() for place, each in state["unsent"].items()}


class OuterOptimizer:
    """Outer parameters and their optimizer: the same on all ranks after each outer step."""

    def __init__(self, model: nn.Module, settings: Local, num_fragments: int) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._buffers = [each for each in model.buffers() if each.is_floating_point()]
        self.fragments = sites.divide_into_fragments([each.numel() for each in self._parameters], num_fragments)
        """Indices of the parameters of each fragment."""
        self._settings = settings
        self._outer: list[Tensor] = []
        self.unsent = UnsentGradients()
        self._optimizer: torch.optim.SGD | None = None

    @torch.no_grad()
    def take_parameters_once(self) -> None:
        """Take the present parameters as those of the last outer step, unless there has been one."""
        if self._optimizer is not None:
            return
        self._outer = [_copy_precise(each) for each in self._parameters]
        momentum = self._settings.outer_momentum
        self._optimizer = torch.optim.SGD(
            self._outer, lr=self._settings.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def begin_step(self, fragments: Sequence[int]) -> OuterGradient:
        """Begin an outer step of these fragments; buffers go with the first one."""
        places = [place for fragment in fragments for place in self.fragments[fragment]]
        sent = [self._parameters[place].detach().clone() for place in places]
        values = [self._outer[place] - now for place, now in zip(places, sent, strict=True)]
        for value, unsent in zip(values, map(self.unsent.by_place.get, places), strict=True):
            if unsent is not None:
                value.add_(unsent.view_as(value).to(value))
        buffers = [each.flatten() for each in (self._buffers if 0 in fragments else ())]
        return OuterGradient(places, sent, _join(values), _join(buffers))

    @torch.no_grad()
    def apply_step(self, gradient: OuterGradient) -> None:
        """Do the outer step by the mean of all sites; keep what this site has computed since the step began."""
        assert self._optimizer is not None, "a pass has begun"
        outer = [self._outer[place] for place in gradient.places]
        sizes = [each.numel() for each in outer]
        for each, mean in zip(outer, gradient.mean.split(sizes), strict=True):
            each.grad = mean.view_as(each).to(each)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for place, before, each in zip(gradient.places, gradient.sent, outer, strict=True):
            parameter = self._parameters[place]
            parameter.copy_(each + (parameter.to(each.dtype) - before.to(each.dtype)))
        if gradient.unsent is not None:
            self.unsent.by_place |= dict(zip(gradient.places, gradient.unsent.split(sizes), strict=True))
        if len(gradient.mean_buffers):
            means = gradient.mean_buffers.split([each.numel() for each in self._buffers])
            for buffer, mean in zip(self._buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and momentum as of the last outer steps, and what this site has not sent."""
        self.take_parameters_once()
        assert self._optimizer is not None, "just made"
        state = self._optimizer.state_dict()["state"]
        momentum = [
            state[index].get("momentum_buffer") if index in state else None for index in range(len(self._outer))
        ]
        return {"parameters": list(self._outer), "momentum": momentum, **self.unsent.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: It is that of another model.
        """
        self.take_parameters_once()
        assert self._optimizer is not None, "just made"
        if [each.shape for each in state["parameters"]] != [each.shape for each in self._outer]:
            raise ValueError("outer parameters of other shapes than this model's")
        for own, loaded in zip(self._outer, state["parameters"], strict=True):
            own.copy_(loaded)
        groups = self._optimizer.state_dict()["param_groups"]
        buffers = {index: {"momentum_buffer": each} for index, each in enumerate(state["momentum"]) if each is not None}
        self._optimizer.load_state_dict({"state": buffers, "param_groups": groups})


def is_scale_invariant(optimizer: Optimizer) -> bool:
    """Return whether its steps are about the same for gradients four times as large, as Adam's are and SGD's are not.

    False for an optimizer of which no second one can be made from its defaults to try it.
    """
    accepted = inspect.signature(type(optimizer)).parameters
    defaults, moved = {name: each for name, each in optimizer.defaults.items() if name in accepted}, list[float]()
    for size in (1.0, 4.0):
        tried, before = nn.Parameter(torch.zeros(2, 2)), 0.0
        tried.grad = torch.full_like(tried, size)
        try:
            other = type(optimizer)([tried], **defaults)
            for _ in range(_NUM_TRIED_STEPS):
                before = float(tried.detach().abs().max())
                other.step()
        except (TypeError, ValueError, RuntimeError):
            return False
        moved.append(float(tried.detach().abs().max()) - before)
    return 0 < moved[1] < 2 * moved[0]


def scale_learning_rates(optimizer: Optimizer, factor: Callable[[], float]) -> None:
    """Multiply the learning rates during each step of the optimizer; the script and its schedulers see their own.

    Decoupled weight decay stays as strong as it was.
    """
    own: list[dict[str, Any]] = []

    def restore(*_: object) -> None:
        for group, values in zip(optimizer.param_groups, own, strict=False):
            group.update(values)
        own.clear()

    def scale(*_: object) -> None:
        restore()  # the step before may have raised an error
        for group in optimizer.param_groups:
            scaled = {"lr": group["lr"] * factor()}
            if group.get("decoupled_weight_decay"):
                scaled["weight_decay"] = group["weight_decay"] / factor()
            own.append({name: group[name] for name in scaled})
            group.update(scaled)

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(restore)


def _copy_precise(parameter: Tensor) -> Tensor:
    """Return a copy in float32, or in float64 if the parameter is: sums of small changes need it."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return parameter.detach().to(dtype, copy=True)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in host memory, in float32, or in float64 if one of the tensors is."""
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32
    return torch.cat([torch.empty(0, dtype=dtype), *(each.flatten().to("cpu", dtype) for each in tensors)])
