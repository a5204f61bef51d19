"""How long the stages of a pipeline compute and the links between them transfer, for one microbatch."""

import itertools
from dataclasses import dataclass

from ringweave.errors import UsageError, explain


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

    def __post_init__(self) -> None:
        num_links = len(self.forward_s) - 1
        _check("backward_s", self.backward_s, len(self.forward_s))
        _check("forward_s", self.forward_s, max(1, len(self.forward_s)))
        for what in ("forward_transfer_s", "backward_transfer_s"):
            if getattr(self, what):
                _check(what, getattr(self, what), num_links)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward_s)

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
