"""What the two servers of a job say to each other."""

from typing import ClassVar

import pydantic

from ringweave import wire
from ringweave.params.messages import Count, Leave, Push


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


class Left(wire.Message):
    """A ring has left."""

    kind: ClassVar[str] = "params.left"

    leave: Leave


class Renew(wire.Message):
    """Asks whether the standby still follows."""

    kind: ClassVar[str] = "params.renew"
