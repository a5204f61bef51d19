"""What comes out of a simulation, and how it says meanwhile how far it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Tell = Callable[[int, int], None]
"""Gets how much is done, and of how much."""


def silent(done: int, total: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank did from when to when."""

    rank: int
    what: str
    peer: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What a link carries from some time on."""

    link: str
    at_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What came out; all of it simulated."""

    finish_s: tuple[float, ...]
    """When each rank is through; infinite for one that never is."""
    bytes_on_link: Mapping[str, float]
    """Link -> bytes that it carried, without headers."""
    died: tuple[int, ...] = ()
    """Ranks that were killed before they were through."""
    noticed_s: Mapping[int, float] = field(default_factory=dict)
    """Rank that gives up -> when it notices that a peer is gone, or that its time is up."""
    num_wakes: int = 0
    """How often ranks woke up, all together; 0 where a schedule was followed round by round."""
    spans: tuple[Span, ...] = ()
    """What ranks did, if that was to be kept."""
    loads: tuple[LinkLoad, ...] = ()
    """What links carried, if that was to be kept."""

    @property
    def seconds(self) -> float:
        """Of the slowest rank; infinite if one never finishes."""
        return max(self.finish_s)
