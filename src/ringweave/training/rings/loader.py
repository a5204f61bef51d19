"""The loader of a rank in a ring: its part of the samples that its ring takes from the queue of all rings."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ringweave.errors import TrainingError, explain
from ringweave.params.resuming import Ruled
from ringweave.params.ring.client import RingClient
from ringweave.params.ring.member import Samples
from ringweave.params.ring.optimizer import PushedOptimizer
from ringweave.params.rules import Spans
from ringweave.params.rules.positions import lifted
from ringweave.planning import balancing
from ringweave.planning.balancing import Account, Speed
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.control import AccountExchange, Control
from ringweave.training.loading import orders, sources
from ringweave.training.loading.loader import EpochAccount, subset
from ringweave.training.loading.orders import Reading
from ringweave.training.loading.portions import Portion, least_of, portion
from ringweave.training.reducing import SampleWeights
from ringweave.training.rings.resuming import Offered, ServedLoader, Start, rest_of
from ringweave.training.rings.seating import Seating
from ringweave.training.rings.sharing import RingShares

_NO_MORE = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class RingParts:
    """What the loader works with."""

    control: Control
    weights: SampleWeights
    samples: Samples
    places: Seating
    shares: RingShares
    pushed: PushedOptimizer
    regroup: Callable[[Sequence[Speed] | None], None]
    """Called where all rings meet and rest, with the speeds of all ranks."""
    note: Callable[[EpochAccount], object]


class RingLoader(ServedLoader):
    """Iterates over this rank's parts of its ring's tickets; a pass is an epoch of all rings together.

    A pass ends when the samples of the epoch are used up, so rings have different numbers of batches. At the end of
    each epoch all rings meet, prove that every sample was taken once, and take the same parameters.

    Who breaks off a pass ends it for all rings: they get no further batch, and have no account of it. Rings that break
    off take the newest parameters at the begin of their next pass, the others at the end of this one.
    """

    def __init__(self, loader: DataLoader, reading: Reading, seed: int, parts: RingParts) -> None:
        if reading.num_samples is None:
            do = "Use mode balanced, or a data set with an index"
            raise TrainingError(
                explain("data of mode ps-hra", got="a stream", expected="a data set with an index", do=do)
            )
        super().__init__(loader, reading, parts.weights)
        self._seed, self._parts = seed, parts
        self._tickets = _Tickets(self._draw)
        self._source = sources.with_batch_sampler(loader, self._tickets)
        self._next_epoch = 0
        self._start: Start | None = None
        """Where the data go on, if they do; until a pass has begun."""
        self._epoch = 0
        self._done: Spans = ()
        """Samples of the epoch of the pass that is running that are not in it."""
        self._num_passes = 0
        """Passes that were begun, on all ranks alike. Tickets are of one: an epoch may be begun anew."""
        self._running: object = None
        """Stands for the pass that has not ended."""
        self._broken: AccountExchange | None = None
        """How other rings are told of a pass that was broken off."""
        self.account: EpochAccount | None = None
        """That of the last epoch that was completed."""

    is_elastic = False
    is_latecomer = False

    def has_begun(self) -> bool:
        """See `ServedLoader`: rings that lose no members begin together."""
        return False

    @property
    def may_save(self) -> bool:
        """See `ServedLoader`: the first ring, which is always there."""
        seat = self._parts.places.seat
        return seat.client is not None and seat.index == 0

    @property
    def num_samples(self) -> int:
        """See `ServedLoader`: without those that `drop_last` leaves out."""
        return self._epoch_samples

    @property
    def seed(self) -> int:
        """See `ServedLoader`."""
        return self._seed

    def connect(self) -> RingClient:
        """See `ServedLoader`."""
        return self._parts.places.connect()

    def save_at_end(self, save: Callable[[], str]) -> None:
        """See `ServedLoader`: such a job ends with the first worker that fails."""

    def resume(self, offered: Offered | None) -> Ruled:
        """See `ServedLoader`. All ranks offer the same."""
        if self._num_passes:
            raise TrainingError(
                explain(
                    "checkpoint to go on from",
                    got="one after the first pass has begun",
                    expected="it before",
                    do="Call Checkpoints.load right after prepare",
                )
            )
        start = Start.of_state(offered.state, self._epoch_samples) if offered else None
        ruled = self._agree(offered, start)
        if start is not None:
            self._start, self._seed, self._next_epoch = start, start.seed, start.epoch
            self._parts.places.seat.member.refresh()
        return ruled

    def _agree(self, offered: Offered | None, start: Start | None) -> Ruled:
        """What the server says to the ring's representative; the other ranks, which do not ask, know it."""
        client = self._parts.places.seat.client
        if client is not None:
            ruled = client.offer(offered.train_step if offered else 0, offered.check if offered else "")
            if ruled.verdict == "give" and offered is not None and start is not None:
                client.restore(offered.content(), ruled, start.to_message(self._num_passes + 1))
        if offered is None:
            return Ruled(verdict="nothing")
        step = offered.train_step
        return Ruled(verdict="resumed", train_step=step, check=offered.check, num_done=step)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank of the ring in a whole ticket."""
        return self._parts.shares.of_ring

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass is."""
        return self._next_epoch

    def __len__(self) -> int:
        """Train steps of all rings together in an epoch; each ring has fewer or more batches, as fast as it is."""
        whole, rest = divmod(self._epoch_samples, self.batch_size)
        return whole + (rest > 0)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next epoch."""
        self._leave_behind()
        epoch = self._next_epoch
        self._next_epoch += 1
        self._num_passes += 1
        start, self._start = self._start, None
        self._epoch, self._done = epoch, start.done_of(epoch) if start else ()
        indices = orders.indices_of(self._loader, self._reading, self._seed, epoch, self._parts.control.broadcast)
        expected = rest_of(indices[: self._epoch_samples], self._done)
        self._tickets.begin(self._num_passes, expected)
        self._parts.shares.begin_pass()
        given, own_pass = Account(), object()
        self._running = own_pass
        try:
            for batch, own in self._batches():
                given += Account.of(own.indices)
                yield batch
        except GeneratorExit:
            if self._running is own_pass:
                self._break_off()
            raise
        self._running = None
        self._parts.pushed.rest()
        self._meet(epoch, given, Account.of(expected))

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass is; without it passes count up from 0.

        Of the one that a checkpoint goes on in, it is the rest.
        """
        self._next_epoch = epoch

    def split(self, loader: DataLoader) -> DataLoader:
        """A loader for evaluation: this rank's part of its samples, each sample on exactly one rank.

        Ranks get equal parts, in the order of the data set. Nothing is communicated; at the end of an epoch all ranks
        have the same parameters.
        """
        control, samples = self._parts.control, orders.evaluated(loader)
        own = balancing.cut(balancing.scale((1,) * control.world_size, len(samples)), control.rank)
        return subset(loader, samples[own])

    @property
    def _epoch_samples(self) -> int:
        total = self._reading.num_samples or 0
        return total - total % self.batch_size if self._reading.drop_last else total

    def _share(self, first: int, count: int) -> float:
        """The train steps of synchronous training that these samples make: each counts as in its batch there."""
        first += sum(done for _, done in self._done)
        return balancing.batch_part(first, count, batch_samples=self.batch_size, num_samples=self._epoch_samples)

    def _batches(self) -> Iterator[tuple[Any, Portion]]:
        """Batches of a pass, each with what it consists of."""
        parts, batches = self._parts, iter(self._source)
        while True:
            parts.shares.begin()
            batch = next(batches, _NO_MORE)
            if batch is _NO_MORE:
                return
            first, own = self._tickets.given.popleft()
            batch_part = self._share(first, own.num_total)
            parts.weights.set(len(own.indices), own.num_total, batch_part)
            parts.samples.add(own.num_total, batch_part)
            parts.samples.note(self._num_passes, self._epoch, lifted(self._done, first, own.num_total))
            parts.shares.give(len(own.indices))
            yield batch, own

    def _break_off(self) -> None:
        """Hold nobody up from here on: no ring gets a further batch of this pass.

        Waits for no other rank, since it is not known whether the script has broken off its loop, or failed in it.
        """
        self._running = None
        self._parts.pushed.break_off()
        self._parts.places.use_up(self._num_passes, self._epoch_samples, self._epoch)
        self._broken = self._parts.control.start_accounts(None)

    def _leave_behind(self) -> None:
        """End a pass that was broken off, or whose iterator was dropped: take the newest parameters."""
        if self._running is not None:
            self._break_off()
        if self._broken is not None:
            self._broken.wait()
            self._broken = None
            self._parts.places.seat.member.refresh()

    def _draw(self, number: int, indices: Indices) -> tuple[int, Portion] | None:
        parts = self._parts
        shares = parts.shares.of_ring
        with parts.shares.asking():
            first, count = parts.places.take(number, sum(shares), len(indices), least_of(shares))
        if count == 0:
            return None
        parts.shares.drawn()
        own = parts.places.seat.ring.index(parts.control.rank)
        return first, portion(indices[first : first + count], shares, own)

    def _meet(self, epoch: int, given: Account, expected: Account) -> None:
        """All rings are through with the epoch: prove it, look at speeds and rings, take the same parameters."""
        parts = self._parts
        by_rank = parts.control.start_accounts(given).wait()
        if by_rank is None:
            parts.places.seat.member.refresh()
            return
        self.account = EpochAccount(epoch=epoch, expected=expected, by_rank=tuple(by_rank))
        parts.note(self.account)
        if not self.account.is_exact:
            raise TrainingError(
                f"account of epoch {epoch}: {self.account.total}, expected {expected}. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )
        parts.regroup(parts.shares.meet())
        parts.places.seat.member.refresh()
        parts.control.gather_accounts(given)  # nobody pushes before all have taken the same parameters


class _Tickets(Iterable[list[int]]):
    """The DataLoader's batch sampler; the ring's tickets as they are drawn, ahead of time if there are load workers."""

    def __init__(self, draw: Callable[[int, Indices], tuple[int, Portion] | None]) -> None:
        self._draw = draw
        self._number, self._indices = 0, np.empty(0, np.int64)
        self.given: deque[tuple[int, Portion]] = deque()

    def begin(self, number: int, indices: Indices) -> None:
        self._number, self._indices = number, indices
        self.given.clear()

    def __iter__(self) -> Iterator[list[int]]:
        while (drawn := self._draw(self._number, self._indices)) is not None:
            self.given.append(drawn)
            yield drawn[1].to_load
