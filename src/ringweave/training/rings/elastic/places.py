"""Where a ring stands with the parameter server: the same on all of its members that are between two steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringweave.membership.rules.records import slot_of
from ringweave.params.messages import Seated
from ringweave.params.rules import Spans
from ringweave.training.rings.resuming import Start, spans_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A push of local steps that the ring has made, and has taken in no answer to."""

    num_samples: int
    batch_share: float
    testament: str
    num_batches: int = 1
    epoch: int = 0
    spans: Spans = ()

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> "Pending":
        """From JSON."""
        own: dict[str, Any] = {**words, "spans": spans_of(words["spans"])}
        return cls(**own)


@dataclass(kw_only=True, slots=True)
class RingPlace:
    """What the ring's representative goes on from, whoever it is."""

    ring: int
    num_pushed: int = 0
    """Pushes of the ring that were answered."""
    base_version: int = 0
    """Of the parameters that its members have."""
    num_tickets: int = 0
    num_meetings: int = 0
    next_version: int = 0
    """With local steps, of the parameters that the push after the next one is computed on."""
    pending: Pending | None = None
    start: Start | None = None
    """Where the data of the job went on, if it goes on from a checkpoint."""

    def done_of(self, epoch: int) -> Spans:
        """Samples of an epoch that are not drawn."""
        return self.start.done_of(epoch) if self.start else ()

    def to_words(self) -> list[Any]:
        """For a newcomer."""
        pending = asdict(self.pending) if self.pending else None
        start = asdict(self.start) if self.start else None
        numbers = [self.num_pushed, self.base_version, self.num_tickets, self.num_meetings, self.next_version]
        return [*numbers, pending, start]

    def load(self, words: Sequence[Any]) -> None:
        """What `to_words` gave."""
        *numbers, pending, start = words
        self.num_pushed, self.base_version, self.num_tickets, self.num_meetings, self.next_version = numbers
        self.pending = Pending.of_words(pending) if pending else None
        self.start = Start.of_words(start) if start else None

    def count_answer(self, version: int | None) -> None:
        """The push that was pending is answered, with parameters of that version; None if they were not asked for."""
        self.num_pushed += 1
        self.pending = None
        if version is not None:
            self.base_version, self.next_version = self.next_version, version


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The ring that a slot belongs to."""

    ring: int
    slots: tuple[int, ...]
    shares: dict[int, int]
    """Slot -> samples of a whole batch of all rings."""
    local_steps: int = 0
    """Of the ring, from one push to the next; 0 pushes the gradients of each step."""

    @classmethod
    def of(cls, slot: int, seated: Seated) -> "Seat | None":
        """None if the slot is in no ring."""
        ring = next((index for index, each in enumerate(seated.rings) if slot in each), None)
        if ring is None:
            return None
        slots = tuple(seated.rings[ring])
        shares = dict(zip(slots, seated.shares[ring], strict=True))
        local_steps = seated.local_steps[ring] if seated.local_steps else 0
        return cls(ring=ring, slots=slots, shares=shares, local_steps=local_steps)

    def samples_of(self, members: Sequence[str]) -> int:
        """Samples of a ticket that these members share: a ring that has lost one takes less, and as often as before."""
        return sum(self.shares[slot_of(member)[0]] for member in members)
