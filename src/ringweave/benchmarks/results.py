"""What was measured, as the document that `--json` prints and `--out` writes. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIRE_PER_PAYLOAD = 1514 / 1448
"""Bytes on a link for each byte of content, in full-size packets: 14 Ethernet, 20 IP and 32 TCP (with time stamps)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Median and interquartile range of some rounds."""

    median_s: float
    iqr_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One system at one size in one order."""

    system: str
    knob: str
    """How the system was set up: the best of those tried."""
    order: str
    num_bytes: int
    num_ranks: int
    seconds: tuple[float, ...]
    """Of each round, in order: its slowest rank."""
    bound_s: float | None
    """At the rates that were measured on the links; None where there are no limited links."""
    raw_bound_s: float | None
    """At the rates of the cluster file."""
    wire_bytes: Mapping[str, float]
    """Link -> bytes per allreduce, headers included."""
    theory_bytes: Mapping[str, float] | None
    """Link -> bytes per allreduce that the schedule asks for; None where it is not known."""
    schedule: str | None = None
    """The schedule that ringweave used."""

    @property
    def summary(self) -> Summary:
        """Of all rounds."""
        return summarize(self.seconds)

    @property
    def fraction_of_bound(self) -> float | None:
        """Least possible time over the time taken: 1 is optimal."""
        return self.bound_s / self.summary.median_s if self.bound_s else None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        summary = self.summary
        algbw = self.num_bytes / summary.median_s
        return {
            "kind": "measured",
            "system": self.system,
            "bytes": self.num_bytes,
            "median_s": summary.median_s,
            "iqr_s": summary.iqr_s,
            "bound_s": self.bound_s,
            "fraction_of_bound": self.fraction_of_bound,
            "rounds": len(self.seconds),
            "rounds_s": list(self.seconds),
            "raw_bound_s": self.raw_bound_s,
            "fraction_of_raw_bound": self.raw_bound_s / summary.median_s if self.raw_bound_s else None,
            "knob": self.knob,
            "schedule": self.schedule,
            "order": self.order,
            "ranks": self.num_ranks,
            "algbw_bytes_per_s": algbw,
            "busbw_bytes_per_s": algbw * 2 * (self.num_ranks - 1) / self.num_ranks,
            "links": self._links(),
        }

    def _links(self) -> dict[str, dict[str, float | None]]:
        """Bytes over the size of the message, which no noise of the machine touches."""
        theory = self.theory_bytes or {}
        return {
            link: {
                "wire_per_byte": count / self.num_bytes,
                "payload_per_byte": count / self.num_bytes / WIRE_PER_PAYLOAD,
                "theory_per_byte": theory[link] / self.num_bytes if link in theory else None,
            }
            for link, count in self.wire_bytes.items()
        }


def summarize(seconds: Sequence[float]) -> Summary:
    """Median and interquartile range; the range of a single round is 0."""
    if len(seconds) == 1:
        return Summary(median_s=seconds[0], iqr_s=0.0)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Summary(median_s=statistics.median(seconds), iqr_s=high - low)


def schedule_used(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Which schedule the allreduces between two counts took: barriers count as the host library's."""
    new = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    own = {name: count for name, count in new.items() if name != "host"}
    return max(own, key=lambda name: own[name]) if own else next(iter(new), None)
