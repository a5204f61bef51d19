"""How long the stages of a pipeline compute and the links between them transfer, for one microbatch."""

import itertools
from dataclasses import dataclass, replace
from operator import add

from ringweave.errors import UsageError, explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Seconds that a step takes beside computing blocks and moving bytes: those of the host that runs it."""

    action_s: tuple[float, ...] = ()
    """Of each stage: a forward or a backward, beside its blocks; empty: nothing."""
    message_s: float = 0.0
    """Of a stage, for each transfer that it begins."""
    step_s: float = 0.0
    """Of a step, when all stages are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds for one microbatch. Links are full duplex; in one direction a transfer waits for the one before it.

    Raises:
        UsageError: Lengths that do not fit each other, or a time below zero.
    """

    forward_s: tuple[float, ...]
    """Of each stage."""
    backward_s: tuple[float, ...]
    """Of each stage."""
    forward_transfer_s: tuple[float, ...] = ()
    """Of activations, from each stage but the last to the next one; empty: no time."""
    backward_transfer_s: tuple[float, ...] = ()
    """Of gradients, to each stage but the last from the next one; empty: no time."""
    before_s: tuple[float, ...] = ()
    """Of each stage, before its first action: the update that follows from the step before; empty: nothing."""
    message_s: float = 0.0
    """Of a stage's own time, for each transfer that it begins, sending or receiving."""
    after_s: float = 0.0
    """When all stages are done: until all know the loss."""

    def __post_init__(self) -> None:
        num_links = len(self.forward_s) - 1
        _check("backward_s", self.backward_s, len(self.forward_s))
        _check("forward_s", self.forward_s, max(1, len(self.forward_s)))
        if self.before_s:
            _check("before_s", self.before_s, self.num_stages)
        _check("message_s and after_s", (self.message_s, self.after_s), 2)
        for what in ("forward_transfer_s", "backward_transfer_s"):
            if getattr(self, what):
                _check(what, getattr(self, what), num_links)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward_s)

    @property
    def slowest_s(self) -> float:
        """Forward and backward of the stage that takes longest for both."""
        return max(map(add, self.forward_s, self.backward_s))

    def beside(self, overheads: Overheads) -> "StageTimes":
        """The same with what a step takes beside computing blocks and moving bytes.

        Raises:
            UsageError: Overheads for another number of stages.
        """
        actions = overheads.action_s or (0.0,) * self.num_stages
        _check("action_s", actions, self.num_stages)
        return replace(
            self,
            forward_s=tuple(map(add, self.forward_s, actions)),
            backward_s=tuple(map(add, self.backward_s, actions)),
            message_s=self.message_s + overheads.message_s,
            after_s=self.after_s + overheads.step_s,
        )

    def transfer_s(self, link: int) -> tuple[float, float]:
        """Forward and backward, between stages `link` and `link + 1`."""
        forward, backward = self.forward_transfer_s, self.backward_transfer_s
        return forward[link] if forward else 0.0, backward[link] if backward else 0.0

    def bound_s(self, num_microbatches: int) -> float:
        """A time that no order of a step beats: the first microbatch arrives, all are computed, the last one returns.

        Taken over the stages, and in the same way over the directions of the links.
        """
        links = [self.transfer_s(link) for link in range(self.num_stages - 1)]
        there = [0.0, *itertools.accumulate(f + x[0] for f, x in zip(self.forward_s[:-1], links, strict=True))]
        back = [0.0, *itertools.accumulate(b + x[1] for b, x in zip(self.backward_s[:-1], links, strict=True))]
        own = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        stages = [there[i] + num_microbatches * own[i] + back[i] for i in range(self.num_stages)]
        more = num_microbatches - 1
        whole = there[-1] + own[-1] + back[-1]
        return max([*stages, *(whole + more * max(pair) for pair in links)])


def _check(what: str, values: tuple[float, ...], count: int) -> None:
    if len(values) != count:
        do = "Give one for each stage, or for each link between two"
        raise UsageError(explain(f"{what}: how many", got=len(values), expected=str(count), do=do))
    for index, value in enumerate(values):
        if not 0 <= value < float("inf"):
            raise UsageError(explain(f"{what}[{index}]", got=value, expected="a finite time, 0 or more", do="Mend it"))
