"""Who computes how many samples of a train step in rings: measured as it goes.

In a ring, where all wait for the slowest, shares change at the borders of steps, as in mode balanced. Rings wait for
each other only where all of them meet, so what a whole ring takes changes there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ringweave.planning.balancing import Change, Rebalancer, Speed
from ringweave.planning.balancing.estimating import WINDOW
from ringweave.planning.balancing.shares import Shares
from ringweave.training.balancer import Balancer
from ringweave.training.control import Control
from ringweave.training.timing import StepTimer

_STEPS_SEEN = WINDOW
"""Train steps that a meeting looks back on: the same for all ranks, whatever their rings have trained."""


class RingShares:
    """Shares of all ranks in a train step of all rings together.

    They are in proportion to speed: in a ring nobody waits for a slower one, and rings push equally often.
    """

    def __init__(
        self,
        shares: Shares,
        timer: StepTimer,
        control: Control,
        on_change: Callable[[int, Change], object],
        *,
        caps: Sequence[int] | None = None,
        num_prefetched: int = 0,
    ) -> None:
        """`sit` comes first; `caps` are the most of each rank, `num_prefetched` the most batches a rank loads ahead."""
        self._agreed = shares
        """Of all ranks, by what all of them know: changes within rings since then are left out."""
        self._timer, self._control, self._on_change, self._caps = timer, control, on_change, caps
        self._ring: tuple[int, ...] = ()
        self._within: Control | None = None
        self._num_batches, self._num_drawn = 0, 0
        self._rebalancer = Rebalancer()
        self._balancer = Balancer(shares, timer, None, num_prefetched=num_prefetched, on_change=self._tell)

    @property
    def of_ring(self) -> tuple[int, ...]:
        """Samples of each rank of this ring in the ticket that is drawn next."""
        return self._balancer.shares_of(self._num_drawn)

    @property
    def recent_s(self) -> tuple[float, ...]:
        """Seconds that a sample has taken this rank lately, in each of several steps."""
        return self._balancer.recent_s

    def begin_pass(self) -> None:
        """An epoch begins; tickets of the one before that nobody has computed are void."""
        self._num_drawn = self._num_batches

    def drawn(self) -> None:
        """A ticket was drawn for the ring; with workers that load ahead, long before it is computed."""
        self._num_drawn += 1

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A ticket is asked for: the server's time, and the representative's, is not this rank's."""
        self._timer.open()
        yield
        self._timer.close_wait()

    def begin(self) -> None:
        """The next batch is asked for; what was computed before is over."""
        self._balancer.border(self._num_batches)
        self._timer.begin()

    def give(self, num_samples: int) -> None:
        """The batch is there."""
        self._num_batches += 1
        self._timer.give(num_samples)

    def sit(self, ring: Sequence[int], within: Control) -> None:
        """This rank is in that ring from here on; all of its ranks call this. `within` is among them alone."""
        self._ring, self._within = tuple(ring), within
        self._renew()

    def meet(self) -> list[Speed] | None:
        """All ranks of all rings call this: the shares from here on, and speeds if those of all ranks are known."""
        speeds = self._control.start_exchange(self._balancer.speed).wait()
        change = self._rebalancer.look(self._agreed, speeds, self._caps, _STEPS_SEEN) if speeds else None
        if change is not None:
            self._agreed = change.shares
            self._renew(change.gain)
            self._on_change(self._num_batches, change)
        return speeds

    def _renew(self, gain: float = 0.0) -> None:
        """Shares of the ring as all ranks know them, which promise that gain; no ticket is under way."""
        self._num_drawn = self._num_batches
        caps = None if self._caps is None else [self._caps[rank] for rank in self._ring]
        within = self._within if len(self._ring) > 1 else None
        shares = tuple(self._agreed[rank] for rank in self._ring)
        self._balancer.renew(self._num_batches, shares, within, caps, gain)

    def _tell(self, batch_number: int, change: Change) -> None:
        """The ring has changed its shares: told with those of the other ranks as this one knows them."""
        own = dict(zip(self._ring, change.shares, strict=True))
        shares = tuple(own.get(rank, share) for rank, share in enumerate(self._agreed))
        self._on_change(batch_number, replace(change, shares=shares))
