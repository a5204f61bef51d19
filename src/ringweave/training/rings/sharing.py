"""Who computes how many samples of a train step in rings: measured as it goes, changed where all rings meet."""

from collections.abc import Callable, Sequence

from ringweave.planning import balancing
from ringweave.planning.balancing import Change, Speed, SpeedEstimator
from ringweave.planning.balancing.shares import Shares
from ringweave.training.control import Control
from ringweave.training.timing import StepTimer


class RingShares:
    """Shares of all ranks in a train step of all rings together.

    They are in proportion to speed: in a ring nobody waits for a slower one, and rings push equally often.
    """

    def __init__(
        self,
        shares: Shares,
        ring: Sequence[int],
        timer: StepTimer,
        control: Control,
        on_change: Callable[[int, Change], object],
        *,
        caps: Sequence[int] | None = None,
    ) -> None:
        """`on_change` is called with the number of batches of this ring so far; `caps` are the most of each rank."""
        self._shares, self._ring = shares, tuple(ring)
        self._timer, self._control, self._on_change = timer, control, on_change
        self._caps = caps
        self._estimator = SpeedEstimator()
        self._num_batches = 0

    @property
    def of_ring(self) -> tuple[int, ...]:
        """Samples of each rank of this ring in a whole ticket."""
        return tuple(self._shares[rank] for rank in self._ring)

    def begin(self) -> None:
        """The next batch is asked for; what was computed before is over."""
        self._timer.end()
        for num_samples, seconds in self._timer.take():
            self._estimator.observe(num_samples, seconds)
        self._timer.begin()

    def give(self, num_samples: int) -> None:
        """The batch is there."""
        self._num_batches += 1
        self._timer.give(num_samples)

    def sit(self, ring: Sequence[int]) -> None:
        """This rank is in another ring from here on."""
        self._ring = tuple(ring)

    def meet(self) -> list[Speed] | None:
        """All ranks of all rings call this: the shares from here on, and speeds if those of all ranks are known."""
        speeds = self._control.start_exchange(self._estimator.speed).wait()
        change = balancing.rebalance(self._shares, speeds, self._caps) if speeds else None
        if change is not None:
            self._shares = change.shares
            self._on_change(self._num_batches, change)
        return speeds
