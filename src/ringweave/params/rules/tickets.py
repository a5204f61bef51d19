"""Which samples a ring computes next: all rings take from one queue for each epoch, as fast as they are.

Fixed shares for rings would let samples of fast rings count more often. Here a sample belongs to the ring that takes
its ticket, and every sample of an epoch is on exactly one ticket.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ringweave.errors import TrainingError, explain


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
            num_samples: How many samples it wants; it gets fewer at the end.
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
        ticket = Ticket(
            ring=ring,
            number=number,
            epoch=epoch,
            first=first,
            num_samples=max(0, min(num_samples, epoch_samples - first)),
        )
        self._taken[epoch] = first + ticket.num_samples
        self._last[ring] = ticket
        return ticket

    def taken(self, epoch: int) -> int:
        """Samples of that epoch that are on tickets."""
        return self._taken.get(epoch, 0)
