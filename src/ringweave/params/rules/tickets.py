"""Which samples a ring computes next: all rings take from one queue for each epoch, as fast as they are.

Fixed shares for rings would let samples of fast rings count more often. Here a sample belongs to the ring that takes
its ticket, and every sample of an epoch is on exactly one ticket.

The last tickets of an epoch are smaller: at its end all rings meet, and whoever has just begun with a whole ticket
would let all others wait for nearly as long as that takes. Where it is known how fast rings get on, they are such that
all end at the same time, and a ring that would come too late with the smallest one gets no more.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ringweave.errors import TrainingError, explain
from ringweave.params.rules.pace import Pace

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
    ended_epoch: int | None = None
    """The pass, which was of that epoch, was broken off: nobody computes these samples."""


class TicketOffice:
    """Gives out the samples of every epoch, each once; one thread at a time."""

    def __init__(
        self,
        num_rings: int,
        last: Iterable[Ticket] = (),
        taken: Mapping[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`last` and `taken` are those of another office, to go on from there; `clock` gives seconds."""
        self._pace, self._clock = Pace(num_rings), clock
        self._last: list[Ticket | None] = [None] * num_rings
        self._taken: dict[int, int] = dict(taken or {})
        self._wanted: dict[int, int] = {}
        """What each ring asked for last."""
        self._least: dict[int, int] = {}
        """Its smallest ticket, likewise."""
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
        if self._last[ticket.ring] != ticket:
            self._pace.take(ticket.ring, ticket.epoch, ticket.num_samples, self._clock())
        self._last[ticket.ring] = ticket
        self._taken[ticket.epoch] = max(self._taken.get(ticket.epoch, 0), ticket.first + ticket.num_samples)

    def take(
        self,
        ring: int,
        number: int,
        epoch: int,
        num_samples: int,
        epoch_samples: int,
        least: int = 1,
        ended_epoch: int | None = None,
    ) -> Ticket:
        """The ring's next ticket; the same again if it asks for the last one again.

        Args:
            ring: Who asks.
            number: Number of the ticket among the ring's.
            epoch: Which epoch the ring is in; rings may be in different ones.
            num_samples: How many samples it wants; it gets fewer at the end, but for one that wants all there are.
            epoch_samples: Samples of the epoch.
            least: Fewer do not suit the ring, if there are so many.
            ended_epoch: See Ticket.

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
        self._wanted[ring] = num_samples
        self._least[ring] = min(num_samples, max(least, -(-num_samples // FINEST)))
        fitting = num_samples if num_samples >= epoch_samples else self._fitting(ring, epoch, left)
        ticket = Ticket(
            ring=ring,
            number=number,
            epoch=epoch,
            first=first,
            num_samples=min(fitting, left),
            ended_epoch=ended_epoch,
        )
        self._pace.take(ring, epoch, ticket.num_samples, self._clock())
        self._taken[epoch] = first + ticket.num_samples
        self._last[ring] = ticket
        return ticket

    def _fitting(self, ring: int, epoch: int, left: int) -> int:
        """The ring's part of what is left, once that is less than it wants; none where the rest is for others.

        No rest is left that is smaller than any ring's smallest ticket. One ring alone takes the batches of a
        synchronous training.
        """
        wanted = self._wanted[ring]
        if len(self._last) == 1:
            return wanted
        least, smallest = self._least[ring], max(self._least.values())
        part = self._pace.part(ring, epoch, left, self._clock())
        if part is None:
            found = max(-(-wanted * left // sum(self._wanted.values())), least)
        elif part < min(least, left) / 2:
            return 0
        else:
            found = math.ceil(max(part, least)) if math.isfinite(part) else wanted
        found = min(found, wanted, left)
        rest = left - found
        if rest == 0 or rest >= smallest:
            return found
        return left if left <= wanted else max(least, left - smallest)

    def pushed(self, ring: int, num_samples: int) -> None:
        """The ring has computed so many samples more, and pushed what came of them."""
        self._pace.push(ring, num_samples, self._clock())

    def rested(self, ring: int) -> None:
        """The ring takes no more tickets of the epoch."""
        self._pace.rest(ring, self._clock())

    def away(self, ring: int) -> None:
        """Nobody knows when the ring takes a ticket again: what is left is for the others."""
        self._pace.away(ring)

    def taken(self, epoch: int) -> int:
        """Samples of that epoch that are on tickets."""
        return self._taken.get(epoch, 0)
