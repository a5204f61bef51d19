"""How far training has come, in train steps of as many samples as one of synchronous training."""

from dataclasses import dataclass, field

_WHOLE = 1e-9
"""How near to a whole number of train steps is whole: the shares of rings are fractions that were rounded."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """The present train step, and all before it.

    A train step is full when all shares so far make one more whole step: where shares do not add up to 1, one train
    step is longer and the next one shorter, and there are as many of them as in synchronous training.
    """

    total: float = 0.0
    """Train steps whose samples have been pushed, the present one's part included."""
    num_finished: int = 0
    length: float = 0.0
    """What the present train step has come to: the sum of its shares."""
    weight: float = 0.0
    """The sum of what its gradients count: shares times damping."""
    present: set[int] = field(default_factory=set)
    """Places of the parameters that have a gradient in it."""

    @property
    def num_done(self) -> int:
        """Whole train steps whose samples have been pushed."""
        return int(self.total + _WHOLE)

    @property
    def is_full(self) -> bool:
        """Whether the present train step is to be finished; only where it has any weight."""
        return self.weight > 0 and self.total >= self.num_finished + 1 - _WHOLE

    def add(self, share: float, weight: float, present: set[int]) -> None:
        """One more push."""
        self.total += share
        self.length += share
        self.weight += weight
        self.present |= present

    def clear(self) -> None:
        """The present train step is finished; the next one begins."""
        self.num_finished = max(self.num_finished + 1, int(self.total + _WHOLE))
        self.length, self.weight, self.present = 0.0, 0.0, set()
