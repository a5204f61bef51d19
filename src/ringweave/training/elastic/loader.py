"""The loader of an elastic job: this member's part of every batch, from one set of members to the next."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ringweave.errors import TrainingError, explain
from ringweave.planning import balancing
from ringweave.planning.balancing import Account, EpochOrder
from ringweave.training.elastic.books import Books, ElasticAccount, part_of
from ringweave.training.elastic.rosters import Rosters
from ringweave.training.elastic.session import Session
from ringweave.training.loading import orders
from ringweave.training.loading.loader import subset
from ringweave.training.loading.orders import Reading
from ringweave.training.loading.portions import Portion, stand_ins
from ringweave.training.loading.prepared import PreparedLoader
from ringweave.training.loading.sources import IndexedSource
from ringweave.training.reducing import SampleWeights
from ringweave.training.timing import StepTimer


@dataclass(kw_only=True, slots=True)
class Place:
    """Where the job is in its data: the same on all members that are between two steps."""

    epoch: int = 0
    position: int = 0
    """Samples of the epoch that were handed out."""
    num_drawn: int = 0
    """Batches that were handed out, through all epochs."""
    num_since_commit: int = 0
    """Batches since the last reduction that counts."""
    counted: tuple[int, int] = (0, 0)
    """Epoch and position after the last reduction that counts."""
    num_steps_before: int = 0
    """Train steps, as the script counts them, before the first reduction of this job."""
    is_latecomer: bool = False
    """This member has got the job's state from another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticParts:
    """What the loader works with."""

    member: str
    session: Session
    rosters: Rosters
    books: Books
    place: Place
    weights: SampleWeights
    timer: StepTimer
    end_step: Callable[[], None]
    """The step before has ended: measure it."""
    note: Callable[[ElasticAccount], object]


class ElasticLoader(PreparedLoader):
    """Iterates like the DataLoader that it was made of; each pass is an epoch, with an order of its own.

    A member that joins later goes on where the others are: the passes of epochs that are over give no batch. Use
    `epochs` in the place of `range` to leave them out.
    """

    def __init__(self, loader: DataLoader, reading: Reading, seed: int, parts: ElasticParts) -> None:
        check_reading(reading)
        super().__init__(loader, reading, parts.weights)
        self._seed, self._parts = seed, parts
        self._source = IndexedSource(loader, self._portion)
        self._pass = 0
        self._broken: int | None = None
        """Epoch of a pass that was broken off, until the next one begins."""
        self._has_peeked = False
        """It was broken off before a train step."""
        self.account: ElasticAccount | None = None
        """That of the last epoch that was completed."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each member in the next whole batch."""
        return self._parts.rosters.of(self._parts.place.num_drawn).shares

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members, by rank."""
        return self._parts.session.decree.members

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass is, or is the rest of: the members', where they are further."""
        return max(self._pass, self._parts.place.epoch)

    def __len__(self) -> int:
        """Train steps in a whole epoch."""
        whole, rest = divmod(self._num_samples, self.batch_size)
        return whole + (rest > 0 and not self._reading.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """This member's batches of the next epoch; none if the others are through with it.

        Raises:
            TrainingError: The pass before was broken off before its first train step.
        """
        if self._has_peeked:
            raise _has_peeked()
        place, number = self._parts.place, self._pass
        broken, self._broken = self._broken, None
        self._pass += 1
        if number < place.epoch:
            return
        if number > place.epoch:
            self._open_epoch(number)
        elif number == broken:
            self._parts.books.drop()
            place.num_since_commit = 0
            self._open_epoch(number)
        if place.position < self._end:
            yield from self._rest_of(number)
        self.account = self._parts.books.account()
        self._open_epoch(number + 1)
        self._parts.note(self.account)
        if not self.account.is_accounted:
            raise TrainingError(
                f"account of epoch {number}: {self.account}, expected every sample once. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Numbers of the epochs that are left of so many, for the script's outer loop."""
        while self._parts.place.epoch < num_epochs:
            self._pass = number = self._parts.place.epoch
            yield number
            if self._parts.place.epoch == number:  # the script broke off its pass
                self._open_epoch(number + 1)

    def leave(self) -> None:
        """Have this worker go as on SIGTERM: after its train step it says so, and its process ends with code 143.

        For scripts that handle SIGTERM themselves, or hear otherwise that their machine is to be taken away. Returns at
        once, also in a signal handler; go on with the loop as ever.
        """
        self._parts.session.leave()

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass is. Without it passes count up from 0.

        One whose pass this script has broken off begins anew; of one that the others are in, it is the rest.
        """
        self._pass = epoch

    def state_dict(self) -> dict[str, int]:
        """Epoch and position: the same on all members."""
        place = self._parts.place
        return {"epoch": place.epoch, "position": place.position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the state was taken, unless the job's other members are further."""
        place = self._parts.place
        if place.num_drawn:
            return
        place.epoch, place.position, self._seed = state["epoch"], state["position"], state["seed"]
        self._parts.books.open_epoch(place.epoch)
        if place.position >= self._end:
            place.epoch, place.position = place.epoch + 1, 0
        place.counted = (place.epoch, place.position)
        self._pass = place.epoch

    @property
    def is_latecomer(self) -> bool:
        """This member has come when others were training: it has their state, and needs no other."""
        return self._parts.place.is_latecomer

    @property
    def num_train_steps(self) -> int:
        """Train steps that count, as the script counts them; see `count_train_steps`."""
        return self._parts.place.num_steps_before + self._parts.session.num_committed

    def count_train_steps(self, num_train_steps: int) -> None:
        """So many are done by the script's own count: those who join later go on from there."""
        self._parts.place.num_steps_before = num_train_steps - self._parts.session.num_committed

    def save_at_end(self, save: Callable[[dict[str, int]], str]) -> None:
        """Have the state saved when the job ends before its time and this member is the one to do it.

        `save` gets this loader's state after the last train step that counts, and says in words what came of it.
        """
        place = self._parts.place

        def counted() -> str:
            epoch, position = place.counted
            return save({"epoch": epoch, "position": position, "seed": self._seed})

        self._parts.session.save_last = counted

    def split(self, loader: DataLoader) -> DataLoader:
        """A loader for evaluation: this member's part of its samples by the present shares."""
        roster = self._parts.rosters.latest
        samples = orders.evaluated(loader)
        shares = balancing.scale(roster.shares, len(samples))
        return subset(loader, samples[balancing.cut(shares, roster.members.index(self._parts.member))])

    @property
    def _num_samples(self) -> int:
        assert self._reading.num_samples is not None, "checked"
        return self._reading.num_samples

    @property
    def _end(self) -> int:
        """Position at which an epoch is over."""
        return len(self) * self.batch_size if self._reading.drop_last else self._num_samples

    def _open_epoch(self, number: int) -> None:
        self._parts.place.epoch, self._parts.place.position = number, 0
        self._parts.books.open_epoch(number)

    def _rest_of(self, number: int) -> Iterator[Any]:
        """The rest of the epoch; notes it where the script breaks off its pass."""
        place = self._parts.place
        num_before = place.num_drawn
        try:
            yield from self._rest()
        except GeneratorExit:
            self._broken = number
            self._has_peeked = place.num_since_commit >= place.num_drawn - num_before
            raise

    def _rest(self) -> Iterator[Any]:
        """Batches from the present position on; read again after every change of members."""
        parts, place = self._parts, self._parts.place
        order, version = self._order(), parts.rosters.version
        due = parts.books.drawn + Account.of(order.passed(order.num_batches))
        batches, index = self._source.batches(order, place.num_drawn), 0
        while index < order.num_batches:
            parts.end_step()
            batch_indices = order.batch(index)
            parts.session.border(lambda indices=batch_indices: self._draw(indices))
            parts.timer.begin()
            if parts.rosters.version != version:  # what was read ahead is of other members
                version, order, index = parts.rosters.version, self._order(len(batch_indices)), 0
                batches = self._source.batches(order, place.num_drawn - 1)
            batch, own = next(batches)
            parts.books.check_given(own.indices, parts.member)
            index += 1
            parts.weights.set(len(own.indices), own.num_total)
            parts.timer.give(len(own.indices))
            parts.session.sign()
            yield batch
        parts.books.check_drawn(due)

    def _draw(self, indices: np.ndarray) -> None:
        """The next batch is taken; with the session's lock held."""
        place, parts = self._parts.place, self._parts
        parts.books.draw(indices, parts.rosters.of(place.num_drawn))
        place.position += len(indices)
        place.num_drawn += 1
        place.num_since_commit += 1

    def _order(self, num_back: int = 0) -> EpochOrder:
        """The epoch's order from the present position on, or from so many samples before it."""
        place = self._parts.place
        return EpochOrder(
            indices=orders.indices_of(self._loader, self._reading, self._seed, place.epoch, lambda drawn: drawn),
            batch_samples=self.batch_size,
            drop_last=self._reading.drop_last,
            start=place.position - num_back,
        )

    def _portion(self, number: int, batch: np.ndarray) -> Portion:
        own = part_of(batch, self._parts.rosters.of(number), self._parts.member)
        return Portion(indices=own, num_total=len(batch), stand_ins=stand_ins(batch))


def _has_peeked() -> TrainingError:
    return TrainingError(
        explain(
            "pass of the loader of an elastic job",
            got="broken off before its first train step",
            expected="train steps",
            do="Look at a batch of the DataLoader that prepare was given: a worker that joins has to draw what the "
            "others draw, and cannot look at a batch that they have drawn before",
        )
    )


def check_reading(reading: Reading) -> None:
    """Refuse data whose order or place a newcomer cannot know.

    Raises:
        TrainingError: It is such data.
    """
    if reading.order in ("stream", "sampled"):
        raise TrainingError(
            explain(
                "data of an elastic job",
                got="a stream" if reading.order == "stream" else "a sampler of the script's own",
                expected="a data set with an index, in sequence or shuffled",
                do="Leave out the sampler, so that a worker that joins can know the order",
            )
        )
