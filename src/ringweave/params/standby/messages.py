"""What the two servers of a job say to each other."""

from dataclasses import asdict
from typing import ClassVar

import pydantic

from ringweave import wire
from ringweave.params.messages import Count, Leave, Meet, Pause, Push
from ringweave.params.rules import Answer, Ticket
from ringweave.params.serving.replicas import Fact


class Follow(wire.Message):
    """A server that has nothing asks the leader for all of it; answered when it is a member, or was refused."""

    kind: ClassVar[str] = "params.follow"


class Copy(wire.Message):
    """Tells a standby to read the whole state, and to be what the leader is from then on."""

    kind: ClassVar[str] = "params.copy"


class Pushing(wire.Message):
    """Comes with a push that the leader applies next."""

    kind: ClassVar[str] = "params.pushing"

    push: Push


class Granted(wire.Message):
    """A ring is given the parameters of that version."""

    kind: ClassVar[str] = "params.granted"

    ring: Count
    version: Count
    ahead: float = pydantic.Field(ge=0, allow_inf_nan=False)
    """How many train steps ahead they are predicted."""


class Ticketed(wire.Message):
    """A ring is given these samples."""

    kind: ClassVar[str] = "params.ticketed"

    ring: Count
    number: pydantic.PositiveInt
    epoch: Count
    first: Count
    num_samples: Count
    ended_epoch: Count | None = None

    @property
    def fact(self) -> Ticket:
        """What it is about."""
        return Ticket(**self.model_dump())


class Left(wire.Message):
    """A ring has left."""

    kind: ClassVar[str] = "params.left"

    fact: Leave


class Paused(wire.Message):
    """A ring forms anew."""

    kind: ClassVar[str] = "params.paused"

    fact: Pause


class Came(wire.Message):
    """A ring has come where rings meet."""

    kind: ClassVar[str] = "params.came"

    fact: Meet


class Answered(wire.Message):
    """What all rings hear that have met: of each that came, and the testaments of those that are gone."""

    kind: ClassVar[str] = "params.answered"

    number: pydantic.PositiveInt
    said: dict[str, str]

    @property
    def fact(self) -> Answer:
        """What it is about."""
        return Answer(number=self.number, said={int(ring): said for ring, said in self.said.items()})


NOTES = (Ticketed, Left, Paused, Came, Answered)


def note_of(fact: Fact) -> wire.Message:
    """The message that says so."""
    match fact:
        case Ticket():
            return Ticketed(**asdict(fact))
        case Leave():
            return Left(fact=fact)
        case Pause():
            return Paused(fact=fact)
        case Meet():
            return Came(fact=fact)
        case Answer():
            return Answered(number=fact.number, said={str(ring): said for ring, said in fact.said.items()})


class Renew(wire.Message):
    """Asks whether the standby still follows."""

    kind: ClassVar[str] = "params.renew"
