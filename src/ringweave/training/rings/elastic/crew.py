"""What a member of a ring knows and does beside its gradients; see `elastic.crew`, which does most of it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave.membership.rules.records import Decree
from ringweave.params.ring.member import Samples
from ringweave.params.rules import Span
from ringweave.params.rules.positions import lifted
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.elastic.books import Books, slice_of
from ringweave.training.elastic.crew import JobCrew
from ringweave.training.elastic.joining.reading import Reading
from ringweave.training.elastic.loader import Place
from ringweave.training.elastic.rosters import Roster, Rosters
from ringweave.training.elastic.rows import Commit, Row
from ringweave.training.rings.elastic.accounts import Said
from ringweave.training.rings.elastic.places import RingPlace
from ringweave.wire.pacing import Pace


@dataclass(frozen=True, kw_only=True, slots=True)
class _Open:
    """A batch that is not reduced yet."""

    batch_share: float
    first: int
    num_samples: int
    roster: Roster

    def spans_of(self, members: Collection[str]) -> Iterator[Span]:
        """Where the parts of these members are."""
        for member in self.roster.members:
            if member in members:
                part = slice_of(self.num_samples, self.roster, member)
                yield self.first + part.start, part.stop - part.start


class RingCrew:
    """See `seams.Crew`. Counts what its ring pushes: the samples of those who are left, and their part of a batch."""

    def __init__(self, crew: JobCrew, place: RingPlace, pausing: Callable[[Decree], object]) -> None:
        """`pausing` is told which epoch the ring is about to form, unless it is the first with this member."""
        self._crew, self.ring_place, self._pausing = crew, place, pausing
        self.samples = Samples()
        """Those of the next push."""
        self._open: list[_Open] = []
        """Batches that were drawn and are not reduced yet."""
        self.is_whole = True
        """The ring has been there since the begin of the epoch of the data."""
        self.is_spreading = False
        """What counts next are no gradients."""
        self._has_begun = False

    @property
    def books(self) -> Books:
        """Of the ring's samples."""
        return self._crew.books

    @property
    def place(self) -> Place:
        """In the data."""
        return self._crew.place

    @property
    def rosters(self) -> Rosters:
        """Of the ring."""
        return self._crew.rosters

    @property
    def state_place(self) -> str:
        """See `seams.Crew`."""
        return self._crew.state_place

    @property
    def can_be_followed(self) -> bool:
        """See `seams.Crew`: the optimizer is the server's, which takes no step twice."""
        return False

    @property
    def is_between_steps(self) -> bool:
        """See `seams.Crew`: what is accumulated and not pushed yet a newcomer would not have."""
        return self.samples.num_batches == 0 and self._crew.is_between_steps

    def draw(self, batch: Indices, batch_share: float, first: int = 0) -> None:
        """The ring computes this batch now.

        Args:
            batch: Its samples.
            batch_share: Which part of a train step of all rings it is.
            first: Place of its first sample in the order of what was to be drawn of the epoch.
        """
        place = self._crew.place
        roster = self._crew.rosters.of(place.num_drawn)
        self._crew.books.draw(batch, roster)
        self._open.append(_Open(batch_share=batch_share, first=first, num_samples=len(batch), roster=roster))
        place.num_drawn += 1
        place.num_since_commit += 1

    @property
    def batch_part(self) -> float:
        """The train steps that the batch makes which was drawn last."""
        return self._open[-1].batch_share if self._open else 1.0

    @property
    def drawn_last(self) -> Roster:
        """Who shares that batch: whatever epoch begins meanwhile, the books have it so."""
        return self._open[-1].roster

    def open_epoch(self, number: int) -> None:
        """A new epoch of the data, from its begin."""
        self._crew.place.epoch, self.is_whole = number, True
        self._crew.books.open_epoch(number)

    def go_on(self, place: Sequence[int], epoch: int, left: Said) -> None:
        """The ring begins, or begins again: in this epoch, at the place that the server says, with what is left."""
        self.ring_place.load(place)
        if epoch != self._crew.place.epoch:
            self.open_epoch(epoch)
        if left.get("epoch") == epoch:
            self._crew.books.load(epoch, left["books"])
        self.is_whole = self.ring_place.num_tickets == 0

    def drop(self) -> None:
        """What was drawn and not pushed is given up: the pass was broken off."""
        books, place = self._crew.books, self._crew.place
        books.load(books.epoch, books.to_words())
        self._open.clear()
        self.samples.clear()
        place.num_since_commit = 0

    def end_step(self) -> None:
        """Measure the step that has ended."""
        self._crew.end_step()

    def row(self) -> Row:
        """What this member's gradients are of."""
        return self._crew.row()

    def note(self) -> dict[str, Any]:
        """What the others have to know when an epoch begins."""
        ring = {"ring": self.ring_place.to_words(), "is_whole": self.is_whole}
        return {**self._crew.note(), **ring}

    def drawn(self) -> tuple[int, str]:
        """See `seams.Crew`."""
        return self._crew.drawn()

    def commit(self, commit: Commit) -> None:
        """Gradients count, or what was spread does."""
        if self.is_spreading:
            return
        if self._open:
            part = commit.account.num_samples / max(1, commit.num_planned)
            self.samples.add(commit.account.num_samples, part * sum(each.batch_share for each in self._open))
            self._note(commit.members)
            self.samples.num_batches += len(self._open) - 1
            self._open.clear()
        self._crew.commit(commit)

    def _note(self, members: Collection[str]) -> None:
        """The parts of these members are in the ring's next push."""
        epoch = self._crew.place.epoch
        done = self.ring_place.done_of(epoch)
        spans = [span for each in self._open for span in each.spans_of(members)]
        self.samples.note(epoch, epoch, [part for span in spans for part in lifted(done, *span)])

    def check(self, decree: Decree, notes: Sequence[dict[str, Any]]) -> None:
        """Refuse to join those who have prepared something else."""
        self._crew.check(decree, notes)
        if self._has_begun:
            self._pausing(decree)

    def begin(
        self, decree: Decree, notes: Sequence[dict[str, Any]], *, is_newcomer: bool, followers: Collection[str]
    ) -> None:
        """An epoch begins."""
        holders = [index for index, each in enumerate(decree.standings) if each.has_state]
        if is_newcomer:
            first = notes[holders[0] if holders else 0]
            self.ring_place.load(first["ring"])
            self.is_whole = first["is_whole"]
        self._crew.begin(decree, notes, is_newcomer=is_newcomer, followers=followers)
        self._has_begun = True

    def capture(self) -> None:
        """Note what the state is."""
        self._crew.capture()

    def offer(self, name: str, *, is_lasting: bool) -> None:
        """Let newcomers read what was captured."""
        self._crew.offer(name, is_lasting=is_lasting)

    def withdraw(self) -> None:
        """The state is about to change."""
        self._crew.withdraw()

    def pull(self, place: str, name: str, reading: Reading, pace: Pace | None = None) -> None:
        """Read the state of the member that listens there."""
        self._crew.pull(place, name, reading, pace)
