"""Network measurement as data: shown, planned with, and cached in a file per set of nodes."""

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from ringweave import topology, units
from ringweave.environment import FINDINGS, MAX_MEASUREMENT_AGE_S
from ringweave.errors import RingweaveError
from ringweave.files import file_io
from ringweave.topology import Cluster
from ringweave.topology.cluster import describe_cluster
from ringweave.topology.inference.tree import NodeSpec

_DIGITS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedLink:
    """One direction of an edge of the tree."""

    name: str
    """Name, such as `a0->s0`."""
    rate_bytes_per_s: float
    """Measured."""
    is_proved: bool
    """The link was seen to limit flows; otherwise the rate is a lower bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedPair:
    """Latency and rate from one node to another."""

    src: str
    dst: str
    latency_s: float
    """Measured: half of a small message's round trip."""
    rate_bytes_per_s: float | None
    """Measured: the fastest single stream, beside those of other pairs; None where none was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkMeasurement:
    """A cluster as measured by probing. All numbers are measured."""

    time: float
    """Time of the measurement, in seconds since 1970."""
    wall_s: float
    num_batches: int
    """Number of times flows were started together."""
    cluster_text: str
    """The cluster file, one rate for both directions of a link."""
    links: tuple[ProbedLink, ...]
    """Both directions of every edge."""
    pairs: tuple[ProbedPair, ...]
    """Both directions of every measured pair."""
    slow: str | None
    """The slowest part in one line; None if nothing is slow."""
    not_searched: str | None = None
    """Skipped measurements, in words; None if nothing was skipped."""
    offers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Node -> NICs that were checked, including those that lead nowhere; nodes with unknown NICs are absent."""
    kind: Literal["measured"] = "measured"

    def cluster(self) -> Cluster:
        """Parse the cluster text.

        Raises:
            ClusterError: The text is no cluster file.
        """
        return topology.loads(self.cluster_text)

    @property
    def link_rates(self) -> Mapping[str, float]:
        """Link -> bytes per second, for the planner."""
        return {link.name: link.rate_bytes_per_s for link in self.links}

    def summary(self, now: float) -> dict[str, object]:
        """Return the fields of its event; `now` in seconds since 1970."""
        cluster = self.cluster()
        return {
            "nodes": [node.name for node in cluster.nodes],
            "switches": [switch.name for switch in cluster.switches],
            "rates": dict(self.link_rates),
            "slow": self.slow,
            "not_searched": self.not_searched,
            "wall_s": self.wall_s,
            "age_s": round(max(0.0, now - self.time), 3),
        }

    def to_json(self) -> str:
        """Return the JSON text; `measurement_from_json` parses it."""
        return _ADAPTER.dump_json(self, indent=1).decode()

    def to_text(self) -> str:
        """Return a text for people: tree, slowest part, latency and rate of each pair."""
        cluster = self.cluster()
        names = [node.name for node in cluster.nodes]
        seconds = f"{self.wall_s:.1f} s, {self.num_batches} batches"
        parts = [
            f"{describe_cluster(cluster)}\n(measured in {seconds}: what TCP streams deliver)",
            self.slow or "nothing is slow: every NIC has at least 3/4 of the median, every uplink of what needs it",
            *([self.not_searched] if self.not_searched else []),
            *_notable_links(self.links),
            _pair_matrix("rate of pairs, measured, beside other pairs (Mbit/s)", names, self._pair_rates()),
            _pair_matrix("latency of pairs, measured (us)", names, self._pair_latencies()),
        ]
        return "\n\n".join(parts)

    def _pair_rates(self) -> dict[tuple[str, str], str]:
        known = {(p.src, p.dst): p.rate_bytes_per_s for p in self.pairs}
        return {ends: "" if rate is None else f"{rate * 8e-6:.4g}" for ends, rate in known.items()}

    def _pair_latencies(self) -> dict[tuple[str, str], str]:
        return {(p.src, p.dst): f"{p.latency_s * 1e6:.0f}" for p in self.pairs}


_ADAPTER = TypeAdapter(NetworkMeasurement)


def measurement_from_json(text: str | bytes) -> NetworkMeasurement:
    """Parse a measurement.

    Raises:
        ValueError: The text is no measurement.
    """
    try:
        measurement = _ADAPTER.validate_json(file_io.bounded(text))
        measurement.cluster()
    except (ValueError, RingweaveError) as cause:
        raise ValueError(str(cause).splitlines()[0]) from cause
    return measurement


def round_measured(value: float) -> float:
    """Round to four digits: more of a measured number is noise."""
    return float(f"{value:.{_DIGITS}g}")


def round_rate(bytes_per_s: float) -> float:
    """Round to four digits in bits per second, the unit that people read."""
    return round_measured(bytes_per_s * 8) / 8


def _notable_links(links: Sequence[ProbedLink]) -> list[str]:
    """List links whose directions differ, and links whose rate is only a lower bound; no entry if there are none."""
    lines = []
    for up, down in zip(links[::2], links[1::2], strict=True):
        rates = sorted((up.rate_bytes_per_s, down.rate_bytes_per_s))
        if rates[0] < rates[1] * 0.9 or not (up.is_proved and down.is_proved):
            lines.append("  " + ", ".join(_link_text(link) for link in (up, down)))
    return ["links that differ by direction, or could not be filled:\n" + "\n".join(lines)] if lines else []


def _link_text(link: ProbedLink) -> str:
    least = "" if link.is_proved else "at least "
    return f"{link.name} {least}{units.format_rate(round_rate(link.rate_bytes_per_s))}"


def _pair_matrix(title: str, names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> str:
    """Format a matrix with senders down and receivers across; only the first dozen of each."""
    shown = names[:12]
    width = max(6, *(len(name) + 1 for name in shown))
    rows = ["".join(f"{cells.get((src, dst), '-'):>{width}}" for dst in shown) for src in shown]
    head = " " * width + "".join(f"{name:>{width}}" for name in shown)
    more = f" of the first {len(shown)} of {len(names)} nodes" if len(names) > len(shown) else ""
    return "\n".join(
        [title + more + ":", head, *(f"{name:<{width}}{row}" for name, row in zip(shown, rows, strict=True))]
    )


_CACHE_VERSION = 1
_LOG = logging.getLogger("ringweave")


class MeasurementCache:
    """Folder of measurements, and those written by this object even where the folder is not writable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[Path, NetworkMeasurement] = {}

    def get(
        self, hosts: Sequence[NodeSpec], now: float, max_age_s: float = MAX_MEASUREMENT_AGE_S
    ) -> NetworkMeasurement | None:
        """Return a measurement of these nodes, by names, addresses and NICs; None if there is none young enough.

        A measurement of more nodes counts too: a group of some of a job's ranks need not be measured again. The newest
        is taken. An unreadable file is logged and ignored.
        """
        wanted = {(host.name, host.address, host.nics) for host in hosts}
        young = [measurement for measurement in self._all() if 0 <= now - measurement.time <= max_age_s]
        for measurement in sorted(young, key=lambda measurement: measurement.time, reverse=True):
            nodes = {
                (node.name, node.address, measurement.offers.get(node.name, ())) for node in measurement.cluster().nodes
            }
            if wanted <= nodes:
                return measurement
        return None

    def _all(self) -> Iterator[NetworkMeasurement]:
        """Yield all measurements; files with the same content as this object's come twice."""
        yield from self._written.values()
        for path in sorted(self._folder.glob("*.json")):
            if (found := self._read_file(path)) is not None:
                yield found

    def _read_file(self, path: Path) -> NetworkMeasurement | None:
        try:
            return measurement_from_json(file_io.read_bounded(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as cause:
            _LOG.warning("ringweave: what probing kept in %s cannot be read and is ignored: %s", path, cause)
            return None

    def put(self, hosts: Sequence[NodeSpec], measurement: NetworkMeasurement) -> None:
        """Store a measurement. If the folder is not writable, log it and keep the measurement in this object only."""
        path = self.path(hosts)
        self._written[path] = measurement
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".new", delete=False) as file:
                file.write(measurement.to_json())
            Path(file.name).replace(path)
        except OSError as cause:
            _LOG.warning("ringweave: what probing found cannot be kept for other jobs: %s", cause)

    def path(self, hosts: Sequence[NodeSpec]) -> Path:
        key = json.dumps(
            [_CACHE_VERSION, *sorted([host.name, host.address, host.num_devices, *host.nics] for host in hosts)]
        )
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


@functools.cache
def process_cache(folder: Path) -> MeasurementCache:
    """Return the cache of all groups of this process, which works even where the folder is not writable.

    It is module state, an exception: torch makes the groups, so nothing else is shared by them.
    """
    return MeasurementCache(folder)


def default_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return RINGWEAVE_FINDINGS, else the cache folder of the XDG base directory specification."""
    if environ.get(FINDINGS):
        return Path(environ[FINDINGS])
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/tmp") / ".cache")
    return Path(home) / "ringweave" / "probes"
