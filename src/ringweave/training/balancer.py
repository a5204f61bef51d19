"""Which shares every batch has: decided at the borders of train steps, by all ranks alike."""

from collections.abc import Callable, Sequence

from ringweave.planning.balancing import Change, Rebalancer, Speed, SpeedEstimator
from ringweave.planning.balancing.shares import Shares
from ringweave.training.control import Control, SpeedExchange
from ringweave.training.timing import StepTimer

EXCHANGE_EVERY = 2
"""Borders from one exchange of speeds to the next. What is begun at one is taken at the next but one: a rank that is
throttled may not have spoken within one step."""


class Balancer:
    """Measures this rank, tells the others, and changes the shares when that pays.

    All ranks count batches alike, get the same numbers and compute the same from them, so they agree without a leader.
    A change holds from the first batch on whose samples no rank has handed to its loader's workers yet.
    """

    def __init__(
        self,
        shares: Shares,
        timer: StepTimer,
        control: Control | None,
        *,
        caps: Sequence[int] | None = None,
        num_prefetched: int = 0,
        on_change: Callable[[int, Change], object] = lambda _batch, _change: None,
    ) -> None:
        """`control` None keeps the first shares; `num_prefetched` is the most batches that any rank loads ahead."""
        self._history: list[tuple[int, Shares]] = [(0, shares)]
        self._timer, self._control, self._caps = timer, control, caps
        self._num_prefetched = num_prefetched
        self._on_change = on_change
        self._estimator, self._rebalancer = SpeedEstimator(), Rebalancer(begins_with_guess=True)
        self._pending: SpeedExchange | None = None
        self._num_borders = 0
        """Since these ranks exchange speeds: batches may have been counted otherwise on each, in other rings."""

    def shares_of(self, batch_number: int) -> Shares:
        """The shares of a whole batch; batches are counted through all epochs."""
        return next(shares for first, shares in reversed(self._history) if first <= batch_number)

    @property
    def latest(self) -> Shares:
        """Those decided last; they may hold only a few batches from now."""
        return self._history[-1][1]

    @property
    def speed(self) -> Speed | None:
        """This rank's, by now."""
        return self._estimator.speed

    @property
    def recent_s(self) -> tuple[float, ...]:
        """Seconds that a sample has taken this rank lately, in each of several steps."""
        return self._estimator.recent_s

    def renew(
        self,
        batch_number: int,
        shares: Shares,
        control: Control | None,
        caps: Sequence[int] | None = None,
        gain: float = 0.0,
    ) -> None:
        """Other shares, among other ranks or the same, from a batch on that nobody has loaded yet.

        They are predicted to shorten the step by the fraction `gain`.
        All ranks that were heard until now call it alike; what this one has measured still counts.
        """
        if self._pending is not None:
            self._pending.wait()
        self._pending, self._rebalancer, self._num_borders = None, Rebalancer(), 0
        self._rebalancer.settle(gain)
        self._control, self._caps = control, caps
        self._history = [(batch_number, shares)]

    def border(self, batch_number: int) -> None:
        """Between two steps; `batch_number` is the batch that is asked for next."""
        self._timer.end()
        for step in self._timer.measured():
            self._estimator.observe(step.num_samples, step.seconds, step.outside)
        if self._control is None:
            return
        self._num_borders += 1
        if self._num_borders % EXCHANGE_EVERY == 1:
            pending, self._pending = self._pending, None
            if pending is not None:
                self._decide(batch_number, pending)
            self._pending = self._control.start_exchange(self._estimator.speed)

    def _decide(self, batch_number: int, exchange: SpeedExchange) -> None:
        speeds = exchange.wait()
        change = self._rebalancer.look(self.latest, speeds, self._caps, EXCHANGE_EVERY) if speeds else None
        if change is not None:
            self._change(batch_number, change)

    def _change(self, batch_number: int, change: Change) -> None:
        first = batch_number + self._num_prefetched
        current = self.shares_of(batch_number)
        kept = [(0, current), *(entry for entry in self._history if entry[0] > batch_number)]
        self._history = [*kept, (first, change.shares)]
        self._on_change(first, change)
