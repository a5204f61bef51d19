"""When shares change: a gain must be promised, a small one for long, and more of it where that has come to nothing."""

from collections.abc import Sequence

from ringweave.planning.balancing import shares as rules
from ringweave.planning.balancing.shares import MAX_NOISE, MIN_GAIN, Change, Shares
from ringweave.planning.balancing.speeds import Speed

_MEMORY = 0.985
"""What is left of doubts, and of what was moved, at the next look: half after 46 looks, about a hundred train steps."""

_PATIENCE_STEPS = 2.0
"""So many train steps a gain must have been promised, if it is a half. The smaller it is, the less is lost by waiting,
and the likelier it is noise."""
_FIRST_PATIENCE_STEPS = 0.5
"""Likewise, where the shares until then are a guess that no step has borne out: those by a cluster file's speeds."""
_LARGE_GAIN = 1 / 3
_SETTLING_STEPS = 24
"""For so long after a change with a large gain further ones need not wait: speeds are being learnt anew."""


class Rebalancer:
    """Decides on changes one after the other, and learns from what becomes of them.

    Noise that lasts for some steps (a neighbour on the machine) looks like another speed, and shares that follow it
    come too late: what one change takes from a rank, a later one gives back. A lasting change of speed is followed
    once. So what is given back counts as a doubt, and each doubt doubles the gain that the next change has to promise,
    up to `MAX_NOISE`: a step that can be halved is halved. And as long as it is the same rank, or one of the same, that
    seems to hold up the others, what is promised adds up until it is enough, by its third power: a half for two train
    steps, a quarter for 16, a tenth for 250; a quarter of that where the first shares are a guess, and nothing for a
    time after a large change.
    """

    def __init__(self, *, begins_with_guess: bool = False) -> None:
        """`begins_with_guess`: the first shares are not from measured speeds."""
        self._doubts = 0.0
        self._moved: tuple[float, ...] = ()
        """Samples that each rank was given more or less, the latest changes most."""
        self._slow = frozenset[int]()
        """Ranks that have held the others up at every look since a gain was first promised."""
        self._seen_steps = 0.0
        """For how long it was seen that relieving them is worth it, in steps that could be halved."""
        self._settling_steps = 0
        self._patience_steps = _FIRST_PATIENCE_STEPS if begins_with_guess else _PATIENCE_STEPS

    def settle(self, gain: float) -> None:
        """Shares have changed in another way, which promised that gain; if it is large, speeds are learnt anew."""
        if gain > _LARGE_GAIN:
            self._settling_steps = _SETTLING_STEPS

    @property
    def min_gain(self) -> float:
        """What a change has to promise now, as a fraction of the predicted time."""
        return min(MAX_NOISE, MIN_GAIN * 2**self._doubts)

    def look(
        self, current: Shares, speeds: Sequence[Speed], caps: Sequence[int] | None = None, num_steps: int = 1
    ) -> Change | None:
        """Better shares, if they are worth it; all ranks that look alike at the same speeds decide alike.

        Args:
            current: The shares that hold now, or are decided already.
            speeds: Speed of each rank by now.
            caps: The most that each rank's memory takes.
            num_steps: Train steps since the last look.
        """
        if len(self._moved) != len(current):
            self._moved = (0.0,) * len(current)
        self._doubts *= _MEMORY
        self._moved = tuple(moved * _MEMORY for moved in self._moved)
        self._settling_steps = max(0, self._settling_steps - num_steps)
        change = rules.rebalance(current, speeds, caps, self.min_gain)
        if change is None:
            self._slow = frozenset()
            return None
        if not self._has_waited(change, rules.held_up_by(change, current, speeds), num_steps):
            return None
        moves = [after - before for before, after in zip(current, change.shares, strict=True)]
        self._doubts += _given_back(self._moved, moves)
        self._moved = tuple(moved + move for moved, move in zip(self._moved, moves, strict=True))
        return change

    def _has_waited(self, change: Change, slow: frozenset[int], num_steps: int) -> bool:
        """Whether the gain was promised for long enough; from the next look on it has to be anew then."""
        self._slow &= slow
        if not self._slow:
            self._slow, self._seen_steps = slow, 0.0
        self._seen_steps += num_steps * (2 * change.gain) ** 3
        if self._seen_steps < self._patience_steps and not self._settling_steps:
            return False
        self._seen_steps, self._patience_steps = 0.0, _PATIENCE_STEPS
        self.settle(change.gain)
        return True


def _given_back(moved: Sequence[float], moves: Sequence[float]) -> float:
    """Which part of these moves only takes back what was moved before."""
    pairs = zip(moved, moves, strict=True)
    back = sum(min(abs(before), abs(now)) for before, now in pairs if before * now < 0)
    return back / sum(map(abs, moves))
