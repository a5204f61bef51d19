"""This rank's place in the rings: process groups and the representative's connection, also when rings are formed anew.

Rings are formed anew where all of them meet and rest: the server forgets who pushed what and keeps parameters, state of
the optimizer and version, every rank gets new groups, and the gradients of a model go to the new ring from then on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringweave import wire
from ringweave.params.messages import Setup
from ringweave.params.ring.client import RingClient
from ringweave.params.ring.member import Member, Place
from ringweave.planning.grouping.forecasts import Ring
from ringweave.training.control import Control

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]
"""Of one ring: for tensors, for tickets, for speeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A place in one set of rings."""

    rings: tuple[Ring, ...]
    index: int
    """Of this rank's ring."""
    groups: Groups
    speeds: Control
    """For speeds, that may be told earlier or later among tickets, as ranks load ahead."""
    client: RingClient | None
    """Only the representative has it."""
    member: Member

    @property
    def process_group(self) -> dist.ProcessGroup:
        """For tensors."""
        return self.groups[0]

    @property
    def small_group(self) -> dist.ProcessGroup:
        """For tickets, that shall not queue behind tensors."""
        return self.groups[1]

    @property
    def ring(self) -> Ring:
        """Ranks of this rank's ring, the representative first."""
        return self.rings[self.index]


class Seating:
    """Where this rank sits; `seat` is the present place."""

    def __init__(
        self,
        servers: Sequence[Callable[[], wire.Client]],
        control: Control,
        setup: Setup,
        parameters: Sequence[torch.Tensor],
        groups: Groups,
    ) -> None:
        """Takes the place that `setup` says.

        Args:
            servers: Each connects to one server of the job; the one that leads at the start comes first.
            control: Messages among all ranks.
            setup: The job, which the server knows already.
            parameters: Those that are trained, in the order of the server's.
            groups: This ring's.
        """
        self._servers, self._control, self._parameters = servers, control, list(parameters)
        self._overlaps = setup.overlaps
        self.has_left = False
        self.seat = self._take(tuple(map(tuple, setup.rings)), groups)

    def move(self, rings: Sequence[Ring]) -> None:
        """Sit in other rings. All ranks call it while every ring rests; parameters are taken by the next `refresh`.

        Args:
            rings: Ranks of each ring; all ranks are in one.
        """
        before, wanted = self.seat, tuple(map(tuple, rings))
        if before.client is not None and before.index == 0:
            before.client.regroup(wanted)
        before.member.retire()
        groups = groups_of(wanted, self._control.rank)
        # Nobody takes parameters before the server knows, and connects before all have hung up.
        self._control.gather_json({})
        self.seat = self._take(wanted, groups)

    def leave(self) -> None:
        """Leave the server for good."""
        self.has_left = True
        self.seat.member.leave()

    def take(self, number: int, wanted: int, total: int, least: int) -> tuple[int, int]:
        """The ring's next ticket of the pass of that number: the representative asks the server, and tells its ring."""
        seat = self.seat
        drawn = torch.tensor(seat.client.take(number, wanted, total, least=least) if seat.client else (0, 0))
        dist.broadcast(drawn, seat.ring[0], group=seat.small_group)
        return int(drawn[0]), int(drawn[1])

    def use_up(self, number: int, total: int, epoch: int) -> None:
        """Take all that is left of a pass over that epoch, for nobody: other rings are through with it too.

        Waits for no rank.
        """
        if self.seat.client and not self.has_left:
            self.seat.client.take(number, total, total, ended_epoch=epoch)

    def connect(self) -> RingClient:
        """A connection to the server for this rank's ring, beside that of its representative."""
        return RingClient(self._servers, self.seat.index)

    def _take(self, rings: tuple[Ring, ...], groups: Groups) -> Seat:
        rank = self._control.rank
        index = index_of(rings, rank)
        client = RingClient(self._servers, index) if rank == rings[index][0] else None
        place = Place(process_group=groups[0], representative=rings[index][0], client=client)
        return Seat(
            rings=rings,
            index=index,
            groups=groups,
            speeds=Control(groups[2]),
            client=client,
            member=Member(place, self._parameters, overlaps=self._overlaps),
        )


def index_of(rings: Sequence[Ring], rank: int) -> int:
    """Which ring a rank is in."""
    return next(index for index, ring in enumerate(rings) if rank in ring)


def groups_of(rings: Sequence[Ring], rank: int) -> Groups:
    """A rank's groups for tensors, for tickets and for speeds; all ranks make all of them."""
    found = []
    for backend in ("ringweave", "gloo", "gloo"):
        made = [dist.new_group(list(ring), backend=backend) for ring in rings]
        own = made[index_of(rings, rank)]
        assert isinstance(own, dist.ProcessGroup), "a rank is in its own ring"
        found.append(own)
    return found[0], found[1], found[2]
