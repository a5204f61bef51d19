"""Which samples a ring computes next: all rings take from one queue for each epoch, as fast as they are.

Fixed shares for rings would let samples of fast rings count more often. Here a sample belongs to the ring that takes
its ticket, and every sample of an epoch is on exactly one ticket.

The last tickets of an epoch are smaller: at its end all rings meet, and whoever has just begun with a whole ticket
would let all others wait for nearly as long as that takes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ringweave.errors import TrainingError, explain

FINEST = 4
"""The smallest of them is so many times smaller than a whole one: every push costs its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Samples `first` to `first + num_samples - 1` in the order of the epoch; none once the epoch is used up."""

    ring: int
    number: int
    """Among the ring's tickets, from 1."""
    epoch: int
    first: int
    num_samples: int


class TicketOffice:
    """Gives out the samples of every epoch, each once; one thread at a time."""

    def __init__(self, num_rings: int, last: Iterable[Ticket] = (), taken: Mapping[int, int] | None = None) -> None:
        """`last` and `taken` are those of another office, to go on from there."""
        self._last: list[Ticket | None] = [None] * num_rings
        self._taken: dict[int, int] = dict(taken or {})
        self._wanted: dict[int, int] = {}
        """What each ring asked for last."""
        for ticket in last:
            self._last[ticket.ring] = ticket

    @property
    def last(self) -> list[Ticket]:
        """The last ticket of each ring that has taken one."""
        return [ticket for ticket in self._last if ticket]

    @property
    def epochs(self) -> dict[int, int]:
        """Epoch -> samples of it that are on tickets."""
        return dict(self._taken)

    def book(self, ticket: Ticket) -> None:
        """A ticket that another office has given out, and this one follows; once or more often."""
        self._last[ticket.ring] = ticket
        self._taken[ticket.epoch] = max(self._taken.get(ticket.epoch, 0), ticket.first + ticket.num_samples)

    def take(self, ring: int, number: int, epoch: int, num_samples: int, epoch_samples: int) -> Ticket:
        """The ring's next ticket; the same again if it asks for the last one again.

        Args:
            ring: Who asks.
            number: Number of the ticket among the ring's.
            epoch: Which epoch the ring is in; rings may be in different ones.
            num_samples: How many samples it wants; it gets fewer at the end, but for one that wants all there are.
            epoch_samples: Samples of the epoch.

        Raises:
            TrainingError: Tickets are asked for out of their order.
        """
        last = self._last[ring]
        if last is not None and last.number == number and last.epoch == epoch:
            return last
        expected = last.number + 1 if last else 1
        if number != expected or num_samples < 1 or (last is not None and epoch < last.epoch):
            raise TrainingError(
                explain(
                    f"ticket of ring {ring}",
                    got=(number, epoch, num_samples),
                    expected=f"number {expected}, at least one sample, and no epoch that is over",
                    do="Iterate over the loader that prepare returned, from one epoch to the next",
                )
            )
        first = self._taken.get(epoch, 0)
        left = max(0, epoch_samples - first)
        fitting = num_samples if num_samples >= epoch_samples else self._fitting(ring, num_samples, left)
        ticket = Ticket(ring=ring, number=number, epoch=epoch, first=first, num_samples=min(fitting, left))
        self._taken[epoch] = first + ticket.num_samples
        self._last[ring] = ticket
        return ticket

    def _fitting(self, ring: int, num_samples: int, left: int) -> int:
        """The ring's part of what is left, once that is less than a ticket for each ring."""
        self._wanted[ring] = num_samples
        part = -(-num_samples * left // sum(self._wanted.values()))
        return min(num_samples, max(part, -(-num_samples // FINEST)))

    def taken(self, epoch: int) -> int:
        """Samples of that epoch that are on tickets."""
        return self._taken.get(epoch, 0)
