"""Share balancer: at step boundaries, all ranks decide alike how many samples of a batch each rank computes."""

from collections.abc import Callable, Sequence

from ringweave.planning.balancing import MemoryLimit, Rebalancer, ShareChange, Speed, SpeedEstimator
from ringweave.planning.balancing.shares import Shares
from ringweave.training.collectives import ControlGroup
from ringweave.training.timing import StepTimer

EXCHANGE_INTERVAL = 2
"""Step boundaries from one exchange of speeds to the next. An exchange that starts at one is completed at the next but
one: a throttled rank may not have sent its speed within one step."""


class ShareBalancer:
    """Measures this rank, exchanges speeds, and changes the shares when that pays.

    All ranks count batches alike, get the same numbers and compute the same from them, so they agree without a leader.
    A change takes effect at the first batch that no rank has handed to its loader's workers yet.
    """

    def __init__(
        self,
        shares: Shares,
        timer: StepTimer,
        control: ControlGroup | None,
        *,
        caps: Sequence[int] | None = None,
        num_prefetched: int = 0,
        on_change: Callable[[int, ShareChange], object] = lambda _batch, _change: None,
    ) -> None:
        """Create it; `control` None keeps the first shares, `num_prefetched` is the longest read-ahead."""
        self._history: list[tuple[int, Shares]] = [(0, shares)]
        self._timer, self._control, self._caps = timer, control, caps
        self._num_prefetched = num_prefetched
        self._on_change = on_change
        self._estimator, self._rebalancer = SpeedEstimator(), Rebalancer(begins_with_guess=True)
        self._wait_pending: Callable[[], list[Speed] | None] | None = None
        """Waits for the exchange of speeds in progress."""
        self._num_boundaries = 0
        """Boundaries since these ranks exchange speeds: in other rings, batches may have been counted differently."""

    def shares_of(self, batch_number: int) -> Shares:
        """Return the shares of a whole batch; batches are counted through all epochs."""
        return next(shares for first, shares in reversed(self._history) if first <= batch_number)

    @property
    def latest(self) -> Shares:
        """Shares that were decided last; they may take effect only a few batches from now."""
        return self._history[-1][1]

    @property
    def speed(self) -> Speed | None:
        """Present speed of this rank."""
        return self._estimator.speed

    @property
    def recent_s(self) -> tuple[float, ...]:
        """Seconds of a sample on this rank, in each of several recent steps."""
        return self._estimator.recent_s

    def set_memory(self, limit: MemoryLimit) -> None:
        """Set the limit of this rank's memory, which all ranks learn with its speed."""
        self._estimator.memory = limit

    def reset_shares(
        self,
        batch_number: int,
        shares: Shares,
        control: ControlGroup | None,
        caps: Sequence[int] | None = None,
        gain: float = 0.0,
    ) -> None:
        """Set other shares, among other ranks or the same, from a batch on that no rank has loaded yet.

        The shares are predicted to shorten the step by the fraction `gain`. All ranks of the former exchange call it
        alike; this rank keeps its measurements.
        """
        if self._wait_pending is not None:
            self._wait_pending()
        self._wait_pending, self._rebalancer, self._num_boundaries = None, Rebalancer(), 0
        self._rebalancer.record_other_change(gain)
        self._control, self._caps = control, caps
        self._history = [(batch_number, shares)]

    def pass_step_boundary(self, batch_number: int) -> None:
        """Pass a step boundary; `batch_number` is the batch that is requested next."""
        self._timer.end_step()
        for step in self._timer.take_measured_steps():
            self._estimator.observe(step.num_samples, step.seconds, step.outside_ratio)
        if self._control is None:
            return
        self._num_boundaries += 1
        if self._num_boundaries % EXCHANGE_INTERVAL == 1:
            if self._wait_pending is not None:
                self._decide(batch_number, self._wait_pending())
            self._wait_pending = self._control.start_speed_exchange(self._estimator.speed)

    def _decide(self, batch_number: int, speeds: list[Speed] | None) -> None:
        change = self._rebalancer.propose_change(self.latest, speeds, self._caps, EXCHANGE_INTERVAL) if speeds else None
        if change is not None:
            self._change(batch_number, change)

    def _change(self, batch_number: int, change: ShareChange) -> None:
        first = batch_number + self._num_prefetched
        current = self.shares_of(batch_number)
        logged = [(0, current), *(entry for entry in self._history if entry[0] > batch_number)]
        self._history = [*logged, (first, change.shares)]
        self._on_change(first, change)
