"""What goes wrong, as input of a simulation."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """A rank begins late."""

    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """All that a node's processors and memory do takes longer."""

    node: str
    times: float
    """How many times as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateChange:
    """A link carries another rate from some time on."""

    link: str
    bytes_per_s: float
    """0: it is cut, and nobody says so; who waits for it waits until its time is up."""
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A rank is killed; its kernel closes its connections."""

    rank: int
    at_s: float = 0.0


Fault = Delay | Slowdown | RateChange | Death
