"""The loader of a member of a ring that may lose members: its part of what the ring takes from the queue."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ringweave.errors import TrainingError, explain
from ringweave.params.resuming import Ruled
from ringweave.params.ring.client import RingClient
from ringweave.planning import balancing
from ringweave.planning.balancing import Account
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.elastic.books import ElasticAccount, part_of
from ringweave.training.elastic.session import Session
from ringweave.training.loading import orders
from ringweave.training.loading.loader import subset
from ringweave.training.loading.orders import Reading
from ringweave.training.loading.portions import Portion, least_of, stand_ins
from ringweave.training.reducing import SampleWeights
from ringweave.training.rings.elastic import accounts
from ringweave.training.rings.elastic.crew import RingCrew
from ringweave.training.rings.elastic.member import RingMember
from ringweave.training.rings.elastic.places import RingPlace
from ringweave.training.rings.resuming import Offered, ServedLoader, rest_of
from ringweave.training.timing import StepTimer


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptParts:
    """What the loader works with."""

    name: str
    session: Session
    crew: RingCrew
    member: RingMember
    weights: SampleWeights
    timer: StepTimer
    num_rings: int
    note: Callable[[ElasticAccount], object]


class KeptRingLoader(ServedLoader):
    """Iterates over this member's parts of its ring's tickets; a pass is an epoch of all rings together.

    At the end of a pass all rings meet, but for those that are gone, and take the same parameters. Batches are loaded
    in the training process: what comes next is known only when the members of the ring have agreed on it.
    """

    def __init__(self, loader: DataLoader, reading: Reading, seed: int, parts: KeptParts) -> None:
        super().__init__(loader, reading, parts.weights)
        self._seed, self._parts = seed, parts
        self._tickets = _Tickets(self._draw)
        self._source = DataLoader(
            loader.dataset,
            batch_sampler=self._tickets,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
        )
        self._pass = 0
        self._broken: int | None = None
        """Epoch of a pass that was broken off, until the rings have met."""
        self._left_behind: int | None = None
        """The last one that ended so."""
        self.account: ElasticAccount | None = None
        """That of the last epoch that was completed."""

    is_elastic = True

    @property
    def is_latecomer(self) -> bool:
        """See `ServedLoader`: it has joined members of its ring, or the ring was training before."""
        return self._parts.crew.place.is_latecomer or self.ring_place.num_tickets > 0

    def has_begun(self) -> bool:
        """See `ServedLoader`: the server has applied a push."""
        return self._parts.member.has_begun()

    @property
    def may_save(self) -> bool:
        """See `ServedLoader`."""
        return self._parts.member.is_first

    @property
    def num_samples(self) -> int:
        """See `ServedLoader`: without those that `drop_last` leaves out."""
        return self._epoch_samples

    @property
    def seed(self) -> int:
        """See `ServedLoader`."""
        start = self.ring_place.start
        return self._seed if start is None else start.seed

    def connect(self) -> RingClient:
        """See `ServedLoader`."""
        return self._parts.member.connect()

    def save_at_end(self, save: Callable[[], str]) -> None:
        """See `ServedLoader`."""
        self._parts.session.save_last = save

    def resume(self, offered: Offered | None) -> Ruled:
        """See `ServedLoader`. What the ring's first member offers counts for the ring."""
        ruled = self._parts.member.resume(offered, self._epoch_samples)
        self._pass = self._parts.crew.place.epoch
        return ruled

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each member of the ring in a whole ticket."""
        return self._parts.crew.rosters.of(self._parts.crew.place.num_drawn).shares

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the ring's members, by rank."""
        return self._parts.session.decree.members

    @property
    def ring_place(self) -> RingPlace:
        """Where the ring stands with the server."""
        return self._parts.crew.ring_place

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass is, or is the rest of: the ring's, where that is further."""
        return max(self._pass, self._parts.crew.place.epoch)

    def __len__(self) -> int:
        """Train steps of all rings together in an epoch; each ring has fewer or more batches, as fast as it is."""
        whole, rest = divmod(self._epoch_samples, self.batch_size)
        return whole + (rest > 0)

    def __iter__(self) -> Iterator[Any]:
        """This member's batches of the next epoch; none if the others are through with it.

        Raises:
            TrainingError: This script has broken off its pass of that epoch.
        """
        parts, place, number = self._parts, self._parts.crew.place, self._pass
        self._leave_behind()
        self._pass += 1
        if number < place.epoch:
            if number == self._left_behind:
                raise _is_over(number)
            return
        if number > place.epoch:
            parts.session.change(lambda: self._open_epoch(number))
        expected = self._indices(number)
        self._tickets.begin(number, expected)
        try:
            for batch in self._source:
                own = self._tickets.given
                parts.weights.set(len(own.indices), own.num_total, parts.crew.batch_part)
                parts.timer.give(len(own.indices))
                parts.session.sign()
                yield batch
        except GeneratorExit:
            self._broken = number
            parts.member.rest()
            raise
        self._meet(number, Account.of(expected))

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Numbers of the epochs that are left of so many, for the script's outer loop."""
        while (number := self.next_epoch) < num_epochs:
            self._pass = number
            yield number
            if self._pass == number:  # the script has not begun this pass
                self._pass = number + 1

    def leave(self) -> None:
        """Have this worker go as on SIGTERM: after its train step it says so, and its process ends with code 143.

        For scripts that handle SIGTERM themselves, or hear otherwise that their machine is to be taken away. Returns at
        once, also in a signal handler; go on with the loop as ever.
        """
        self._parts.session.leave()

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass is; without it passes count up from 0."""
        self._pass = epoch

    def split(self, loader: DataLoader) -> DataLoader:
        """A loader for evaluation: this member's part of its samples; each ring has all of them."""
        roster = self._parts.crew.rosters.latest
        samples = orders.evaluated(loader)
        shares = balancing.scale(roster.shares, len(samples))
        return subset(loader, samples[balancing.cut(shares, roster.members.index(self._parts.name))])

    @property
    def _epoch_samples(self) -> int:
        total = self._reading.num_samples or 0
        return total - total % self.batch_size if self._reading.drop_last else total

    def _indices(self, epoch: int) -> Indices:
        """The samples that are to be drawn of it."""
        found = orders.indices_of(self._loader, self._reading, self.seed, epoch, lambda drawn: drawn)
        return rest_of(found[: self._epoch_samples], self.ring_place.done_of(epoch))

    def _open_epoch(self, number: int) -> None:
        self._parts.crew.open_epoch(number)

    def _draw(self, epoch: int, indices: Indices) -> Portion | None:
        """The ring's next ticket, and this member's part of it; None at the end of the epoch."""
        parts, crew = self._parts, self._parts.crew
        crew.end_step()
        parts.session.border(lambda: None)
        parts.member.send()
        first, count = parts.member.take(epoch, sum(self.shares), len(indices), least_of(self.shares))
        if count == 0:
            return None
        parts.timer.begin()
        batch = indices[first : first + count]
        at = first + self._epoch_samples - len(indices)
        part = balancing.batch_part(at, count, batch_samples=self.batch_size, num_samples=self._epoch_samples)
        parts.session.change(lambda: crew.draw(batch, part, first))
        own = part_of(batch, crew.drawn_last, parts.name)
        return Portion(indices=own, num_total=len(batch), stand_ins=stand_ins(batch))

    def _leave_behind(self) -> None:
        """End a pass that was broken off: nobody gets further samples of it, and all take the same parameters."""
        if self._broken is None:
            return
        number, self._broken = self._broken, None
        parts, self._left_behind = self._parts, number
        parts.session.change(parts.crew.drop)
        parts.member.meet(number, {}, use_up=self._epoch_samples)
        parts.session.change(lambda: self._open_epoch(number + 1))

    def _meet(self, number: int, expected: Account) -> None:
        """The ring is through with the epoch: meet the others, and prove that no sample was lost or doubled."""
        parts = self._parts
        by_ring = parts.member.meet(number, accounts.say(parts.crew.books, is_whole=parts.crew.is_whole))
        parts.session.change(lambda: self._open_epoch(number + 1))
        if not by_ring or not all(by_ring.values()):
            return  # the others were through with it long before, or one of them has broken off its pass
        self.account = accounts.add_up(number, expected, list(by_ring.values()), parts.num_rings)
        if accounts.speaker(by_ring) == parts.crew.ring_place.ring:
            parts.note(self.account)
        if not self.account.is_accounted:
            raise TrainingError(
                f"account of epoch {number}: {self.account}, expected every sample once. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )


def _is_over(number: int) -> TrainingError:
    return TrainingError(
        explain(
            "epoch of an elastic job of rings",
            got=number,
            expected="one whose pass was not broken off, since it is over for all rings",
            do="Name the next one; look at a batch of the DataLoader that prepare was given",
        )
    )


class _Tickets(Iterable[list[int]]):
    """The DataLoader's batch sampler; asked for one ticket after another, as there are no load workers."""

    def __init__(self, draw: Callable[[int, Indices], Portion | None]) -> None:
        self._draw = draw
        self._epoch, self._indices = 0, np.empty(0, np.int64)
        self.given = Portion(indices=self._indices, num_total=0, stand_ins=self._indices)

    def begin(self, epoch: int, indices: Indices) -> None:
        self._epoch, self._indices = epoch, indices

    def __iter__(self) -> Iterator[list[int]]:
        while (drawn := self._draw(self._epoch, self._indices)) is not None:
            self.given = drawn
            yield drawn.to_load
