"""What rings and the parameter server say to each other of checkpoints."""

from typing import ClassVar, Literal

import pydantic

from ringweave import wire
from ringweave.params.messages import Count, SpanWords

STATE = "snapshot"
"""Name under which a snapshot can be read."""
CHUNK_BYTES = 16 << 20
"""Of a snapshot that is given back, in one message."""


class Snapped(wire.Message):
    """Whether a snapshot can be read now (`wire.states`); if not, a ring with a lower number is there to ask for it."""

    kind: ClassVar[str] = "params.snapped"

    is_there: bool


class Snap(wire.Message):
    """Asks for a snapshot of the state as it is now. Pushes go on."""

    kind: ClassVar[str] = "params.snap"
    reply: ClassVar[type[wire.Message]] = Snapped

    term: Count
    ring: Count


class Forget(wire.Message):
    """The snapshot has been read."""

    kind: ClassVar[str] = "params.forget"

    term: Count
    ring: Count


class Ruled(wire.Message):
    """What all rings go on from."""

    kind: ClassVar[str] = "params.ruled"

    verdict: Literal["nothing", "give", "resumed", "begun"]
    """`give`: the ring's own checkpoint, which it is to give back to the server (`Restore`). `resumed`: the server has
    one. `begun`: rings draw samples already, and none is read any more."""
    train_step: Count = 0
    """That the checkpoint was saved after."""
    check: str = ""
    """Of it."""
    num_done: Count = 0
    """Whole train steps of all rings that the server has by now."""


class Offer(wire.Message):
    """A ring says which checkpoint it could go on from, and hears what all go on from, once all have said so."""

    kind: ClassVar[str] = "params.offer"
    reply: ClassVar[type[wire.Message]] = Ruled

    term: Count
    ring: Count
    train_step: Count = 0
    check: str = pydantic.Field(default="", max_length=64)
    """Empty: it has none."""


class StartWords(pydantic.BaseModel):
    """Where the data go on."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    pass_number: Count
    """Of the first pass over them that follows."""
    epoch: Count
    done: list[SpanWords]
    """Samples of that epoch that are not drawn again."""
    seed: int
    """Of the orders of all epochs."""


class Restore(wire.Message):
    """Gives a snapshot back, piece by piece in their order; with the last one the server goes on from it."""

    kind: ClassVar[str] = "params.restore"

    term: Count
    ring: Count
    num_bytes: pydantic.PositiveInt
    """Of the whole."""
    first_byte: Count
    train_step: Count
    check: str = pydantic.Field(max_length=64)
    """Of the checkpoint that it is from."""
    start: StartWords
