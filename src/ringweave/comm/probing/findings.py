"""What probing found, as data: kept in a cache, shown, and planned with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ringweave import topology, units
from ringweave.errors import RingweaveError
from ringweave.topology import Cluster
from ringweave.topology.describing import describe

_DIGITS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundLink:
    """One direction of an edge of the tree."""

    name: str
    """`a0->s0`."""
    rate_bytes_per_s: float
    """Measured."""
    is_proved: bool
    """It was seen to hold flows back; else it carries at least this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPair:
    """What two nodes get from each other."""

    src: str
    dst: str
    latency_s: float
    """Measured: half of a small message there and back."""
    rate_bytes_per_s: float | None
    """Measured: the fastest single stream, beside those of other pairs; None where none was tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """A cluster as probing saw it. All numbers are measured."""

    time: float
    """When, in seconds of the epoch."""
    wall_s: float
    """How long it took."""
    num_batches: int
    """How many times flows were started together."""
    cluster_text: str
    """The cluster file of what was found, one rate for both directions of a link."""
    links: tuple[FoundLink, ...]
    """Both directions of every edge."""
    pairs: tuple[FoundPair, ...]
    """Both directions of every pair that has met."""
    slow: str | None
    """The slowest part in one line; None where nothing is slow."""
    unsought: str | None = None
    """What was not looked for, in words; None where everything was."""
    offers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Node -> NICs that were looked at, more than the cluster has where some lead nowhere; nodes whose NICs are not
    known are not in it."""
    kind: Literal["measured"] = "measured"
    """What all its numbers are."""

    def cluster(self) -> Cluster:
        """The cluster.

        Raises:
            ClusterError: The text is none.
        """
        return topology.loads(self.cluster_text)

    @property
    def rates(self) -> Mapping[str, float]:
        """Link -> bytes per second, for the planner."""
        return {link.name: link.rate_bytes_per_s for link in self.links}

    def summary(self, now: float) -> dict[str, object]:
        """Fields of the event that says so; `now` in seconds of the epoch."""
        cluster = self.cluster()
        return {
            "nodes": [node.name for node in cluster.nodes],
            "switches": [switch.name for switch in cluster.switches],
            "rates": dict(self.rates),
            "slow": self.slow,
            "unsought": self.unsought,
            "wall_s": self.wall_s,
            "age_s": round(max(0.0, now - self.time), 3),
        }

    def to_json(self) -> str:
        """All of it; `from_json` reads it again."""
        return _ADAPTER.dump_json(self, indent=1).decode()

    def to_text(self) -> str:
        """For people: the tree, what is slow, latency and rate of each pair."""
        cluster = self.cluster()
        names = [node.name for node in cluster.nodes]
        seconds = f"{self.wall_s:.1f} s, {self.num_batches} batches"
        parts = [
            f"{describe(cluster)}\n(measured in {seconds}: what TCP streams deliver)",
            self.slow or "nothing is slow: every NIC has at least 3/4 of the median, every uplink of what needs it",
            *([self.unsought] if self.unsought else []),
            *_two_ways(self.links),
            _matrix("rate of pairs, measured, beside other pairs (Mbit/s)", names, self._rates_of_pairs()),
            _matrix("latency of pairs, measured (us)", names, self._latencies_of_pairs()),
        ]
        return "\n\n".join(parts)

    def _rates_of_pairs(self) -> dict[tuple[str, str], str]:
        known = {(p.src, p.dst): p.rate_bytes_per_s for p in self.pairs}
        return {ends: "" if rate is None else f"{rate * 8e-6:.4g}" for ends, rate in known.items()}

    def _latencies_of_pairs(self) -> dict[tuple[str, str], str]:
        return {(p.src, p.dst): f"{p.latency_s * 1e6:.0f}" for p in self.pairs}


_ADAPTER = TypeAdapter(Findings)


def from_json(text: str) -> Findings:
    """The findings of a text.

    Raises:
        ValueError: The text is none.
    """
    try:
        found = _ADAPTER.validate_json(text)
        found.cluster()
    except (ValidationError, RingweaveError) as cause:
        raise ValueError(str(cause).splitlines()[0]) from cause
    return found


def rounded(value: float) -> float:
    """Four digits: more of a measured number is noise."""
    return float(f"{value:.{_DIGITS}g}")


def rate_rounded(bytes_per_s: float) -> float:
    """Four digits in bits per second, as people read it."""
    return rounded(bytes_per_s * 8) / 8


def _two_ways(links: Sequence[FoundLink]) -> list[str]:
    """Links whose directions differ, and those of which only the least is known; no entry where there are none."""
    lines = []
    for up, down in zip(links[::2], links[1::2], strict=True):
        rates = sorted((up.rate_bytes_per_s, down.rate_bytes_per_s))
        if rates[0] < rates[1] * 0.9 or not (up.is_proved and down.is_proved):
            lines.append("  " + ", ".join(_link_text(link) for link in (up, down)))
    return ["links that differ by direction, or could not be filled:\n" + "\n".join(lines)] if lines else []


def _link_text(link: FoundLink) -> str:
    least = "" if link.is_proved else "at least "
    return f"{link.name} {least}{units.format_rate(rate_rounded(link.rate_bytes_per_s))}"


def _matrix(title: str, names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> str:
    """Senders down, receivers across; only the first dozen of each."""
    shown = names[:12]
    width = max(6, *(len(name) + 1 for name in shown))
    rows = ["".join(f"{cells.get((src, dst), '-'):>{width}}" for dst in shown) for src in shown]
    head = " " * width + "".join(f"{name:>{width}}" for name in shown)
    more = f" of the first {len(shown)} of {len(names)} nodes" if len(names) > len(shown) else ""
    return "\n".join(
        [title + more + ":", head, *(f"{name:<{width}}{row}" for name, row in zip(shown, rows, strict=True))]
    )
