"""Where a ring stands with the parameter server: the same on all of its members that are between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.membership.rules.records import slot_of
from ringweave.params.messages import Seated


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

    def to_words(self) -> list[int]:
        """For a newcomer."""
        return [self.num_pushed, self.base_version, self.num_tickets, self.num_meetings]

    def load(self, words: Sequence[int]) -> None:
        """What `to_words` gave."""
        self.num_pushed, self.base_version, self.num_tickets, self.num_meetings = words


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The ring that a slot belongs to."""

    ring: int
    slots: tuple[int, ...]
    shares: dict[int, int]
    """Slot -> samples of a whole batch of all rings."""

    @classmethod
    def of(cls, slot: int, seated: Seated) -> "Seat | None":
        """None if the slot is in no ring."""
        ring = next((index for index, each in enumerate(seated.rings) if slot in each), None)
        if ring is None:
            return None
        slots = tuple(seated.rings[ring])
        shares = dict(zip(slots, seated.shares[ring], strict=True))
        return cls(ring=ring, slots=slots, shares=shares)

    def samples_of(self, members: Sequence[str]) -> int:
        """Samples of a ticket that these members share: a ring that has lost one takes less, and as often as before."""
        return sum(self.shares[slot_of(member)[0]] for member in members)
