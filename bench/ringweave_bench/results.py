"""Benchmark results, and the JSON document that `--json` prints and `--out` writes."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave import schedules
from ringweave.errors import UsageError, explain
from ringweave.files import file_io

_DOCUMENT_KEYS = ("cluster", "results")
_RESULT_KEYS = ("system", "bytes", "median_s", "iqr_s", "fraction_of_bound", "order")


def load_results(path: str) -> dict[str, Any]:
    """Load a result document.

    Raises:
        UsageError: The file cannot be read, or is not such a document.
    """
    try:
        document = file_io.load_json(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise UsageError(_bad_document_text(path, reason)) from error
    if not isinstance(document, dict) or any(key not in document for key in _DOCUMENT_KEYS):
        raise UsageError(_bad_document_text(path, "another document"))
    if not document["results"] or any(key not in result for result in document["results"] for key in _RESULT_KEYS):
        raise UsageError(_bad_document_text(path, "a document without results"))
    return document


def _bad_document_text(path: str, got: str) -> str:
    expected = "a JSON document that `ringweave bench` wrote with --out"
    return explain("result of a benchmark", got=got, expected=expected, do="Give such files", where=path)


WIRE_PER_PAYLOAD = 1514 / 1448
"""Bytes on a link for each byte of content, in full-size packets: 14 Ethernet, 20 IP and 32 TCP (with time stamps)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSummary:
    """Median and interquartile range of some rounds."""

    median_s: float
    iqr_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult:
    """Result of one system at one size in one order."""

    system: str
    knob: str
    """Settings of the system: the best of those tried."""
    order: str
    num_bytes: int
    num_ranks: int
    seconds: tuple[float, ...]
    """Seconds of each round's slowest rank, in order."""
    processor_s: float
    """Median processor seconds of a collective, of all ranks together, in user mode and in the kernel."""
    bound_s: float | None
    """Bound at the measured link rates; None without limited links."""
    raw_bound_s: float | None
    """Bound at the rates of the cluster file."""
    wire_bytes: Mapping[str, float]
    """Link -> bytes per collective, headers included."""
    theory_bytes: Mapping[str, float] | None
    """Link -> bytes per collective of the schedule; None if it is unknown."""
    schedule: str | None = None
    """Schedule that ringweave used."""

    @property
    def summary(self) -> TimeSummary:
        """Median and range of all rounds."""
        return summarize(self.seconds)

    @property
    def fraction_of_bound(self) -> float | None:
        """Bound over median time: 1 is optimal."""
        return self.bound_s / self.summary.median_s if self.bound_s else None

    @property
    def processor_s_per_gb(self) -> float:
        """Processor seconds of all ranks for 1e9 bytes of messages."""
        return self.processor_s / self.num_bytes * 1e9

    def document(self) -> dict[str, Any]:
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
            "processor_s_per_gb": self.processor_s_per_gb,
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
        """Return bytes over the size of the message, which noise of the machine does not affect."""
        theory = self.theory_bytes or {}
        return {
            link: {
                "wire_per_byte": count / self.num_bytes,
                "payload_per_byte": count / self.num_bytes / WIRE_PER_PAYLOAD,
                "theory_per_byte": theory[link] / self.num_bytes if link in theory else None,
            }
            for link, count in self.wire_bytes.items()
        }


def summarize(seconds: Sequence[float]) -> TimeSummary:
    """Return median and interquartile range; the range of a single round is 0."""
    if len(seconds) == 1:
        return TimeSummary(median_s=seconds[0], iqr_s=0.0)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return TimeSummary(median_s=statistics.median(seconds), iqr_s=high - low)


def schedule_used(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Return the schedule of the collectives between two counts; barriers count as the native backend's."""
    new = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    own = {name: count for name, count in new.items() if name != schedules.NATIVE}
    return max(own, key=lambda name: own[name]) if own else next(iter(new), None)
