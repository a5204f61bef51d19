"""What members and coordinator say to each other over the wire."""

import math
import re
from typing import Annotated, ClassVar

import pydantic

from ringweave.membership.rules.electing import Rejoining
from ringweave.membership.rules.records import Order, Standing
from ringweave.membership.rules.signs import Beat
from ringweave.wire import Message

MAX_NOTE = 64 * 1024
"""Characters of a note; each of the members gets those of all."""
MAX_LAYOUT = 256 * 1024
"""Characters of a layout; each of the members gets one."""
MAX_SHARING = 1024 * 1024
"""Characters of how a batch is shared, by as many members as there may be; likewise."""


MAX_MEMBERS = 65536
"""Of one part of a job."""
JOB = ""
"""The part that is the whole job."""
LOBBY = "lobby"
"""Where members meet before they are told which part they belong to."""
_RING = "ring "
"""What the parts that are rings begin with."""
PLACE = r"^[!-~]{1,255} [0-9]{1,5}$"
"""`HOST PORT`, as a regular expression."""
MEMBER = r"[0-9]{1,9}\.[0-9]{1,9}"
"""`SLOT.INCARNATION`, likewise."""


def _bounded(standing: Standing) -> Standing:
    bounds = (("note", MAX_NOTE), ("layout", MAX_LAYOUT), ("sharing", MAX_SHARING))
    for what, most in bounds:
        text = getattr(standing, what)
        if len(text) > most:
            raise ValueError(f"a {what} of {len(text)} characters, expected at most {most}")
    if not re.fullmatch(MEMBER, standing.member):
        raise ValueError(f"a member {standing.member[:80]!r}, expected SLOT.INCARNATION")
    if standing.place and not re.fullmatch(PLACE, standing.place):
        raise ValueError(f"a place of {standing.place[:80]!r}, expected HOST PORT")
    return standing


def _sound(beat: Beat) -> Beat:
    for what in ("cpu_s", "still_s", "stuck_s"):
        if not 0 <= getattr(beat, what) < math.inf:
            raise ValueError(f"{what} of {getattr(beat, what)}, expected seconds")
    return beat


def _bounded_rejoining(rejoining: Rejoining) -> Rejoining:
    _sound(rejoining.beat)
    for what in ("lost_s", "patience_s"):
        if not 0 <= getattr(rejoining, what) < math.inf:
            raise ValueError(f"{what} of {getattr(rejoining, what)}, expected seconds")
    if rejoining.decree and not rejoining.decree.standings:
        raise ValueError("an epoch without members, expected one at least")
    known = (*rejoining.decree.standings, *rejoining.decree.finished) if rejoining.decree else ()
    for each in (rejoining.standing, *known):
        _bounded(each)
    for member in (each for names in rejoining.decree.forerunners for each in names) if rejoining.decree else ():
        if not re.fullmatch(MEMBER, member):
            raise ValueError(f"a member {member[:80]!r}, expected SLOT.INCARNATION")
    return rejoining


BoundedStanding = Annotated[Standing, pydantic.AfterValidator(_bounded)]
SoundBeat = Annotated[Beat, pydantic.AfterValidator(_sound)]
BoundedRejoining = Annotated[Rejoining, pydantic.AfterValidator(_bounded_rejoining)]


def ring_part(ring: int) -> str:
    """The part of a job that a ring is."""
    return f"{_RING}{ring}"


def is_ring(part: str) -> bool:
    """Whether that is a ring, and not the job or its lobby."""
    return part.startswith(_RING)


class Enter(Message):
    """A process wants to become a member, or, with `rejoining`, has lost its coordinator and asks another one."""

    kind: ClassVar[str] = "membership.enter"

    rejoining: BoundedRejoining | None = None
    part: str = pydantic.Field(default=JOB, pattern=r"^[a-z0-9 ]{0,40}$")
    """Whose membership is meant, where parts of a job have one each; `JOB` is that of the whole job."""
    expected: int = pydantic.Field(default=1, ge=1, le=MAX_MEMBERS)
    """Of a part: members that it has when all are there, which its first epoch waits for; and the most it takes."""


class Told(Message):
    """What holds now for who asked."""

    kind: ClassVar[str] = "membership.told"

    serial: int
    """Grows with every change."""
    is_active: bool
    """This coordinator decides; a standby has nothing to say."""
    order: Order


class Listen(Message):
    """Asks for the order that holds, once it is another than that of `serial`, or after a moment."""

    kind: ClassVar[str] = "membership.listen"
    reply: ClassVar[type[Message]] = Told

    serial: int = pydantic.Field(default=0, ge=0)


class Heartbeat(Message):
    """A sign of life."""

    kind: ClassVar[str] = "membership.beat"

    beat: SoundBeat


class Stand(Message):
    """Where a member stands still for a proposal."""

    kind: ClassVar[str] = "membership.stand"

    ballot: tuple[int, int]
    standing: BoundedStanding


class Accuse(Message):
    """The epoch of this ballot is broken."""

    kind: ClassVar[str] = "membership.accuse"

    ballot: tuple[int, int]
    suspects: list[str] = pydantic.Field(max_length=4096)


class Leave(Message):
    """The member goes: at the next border, or at once because it is done."""

    kind: ClassVar[str] = "membership.leave"

    standing: BoundedStanding
    is_finished: bool


class Count(Message):
    """What the coordinator knows, for people and tests."""

    kind: ClassVar[str] = "membership.count"

    term: int
    is_active: bool
    ballot: tuple[int, int]
    members: list[str]
    committed: int
    present: list[str]
    ended: str
    parts: dict[str, int] = pydantic.Field(default_factory=dict)
    """Part of the job -> the term in which this coordinator decides for it, where parts have memberships each."""
    epochs: dict[str, tuple[int, int]] = pydantic.Field(default_factory=dict)
    """Likewise -> the ballot of its epoch."""


class Ask(Message):
    """Asks for the count."""

    kind: ClassVar[str] = "membership.ask"
    reply: ClassVar[type[Message]] = Count
