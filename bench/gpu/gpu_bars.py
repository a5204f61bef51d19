"""Bars of the stages: each takes its number out of the results, or is not run. No torch here."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGE = "25000000"
TRUTH_PARTS = ("2_ranks", "4_ranks", "one_queue")


@dataclass(frozen=True, kw_only=True)
class StageBar:
    """One number with its bar."""

    stage: str
    number: str
    read: Callable[[dict[str, Any]], float | None]
    """Takes the stage's results; raises LookupError, TypeError or ZeroDivisionError where a part was not run."""
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    def row(self, results: dict[str, Any]) -> dict[str, str]:
        """Return the bar as texts of the table."""
        value = None
        with contextlib.suppress(LookupError, TypeError, ZeroDivisionError, ValueError):
            value = self.read(results[self.stage])
        is_met = value is not None and (
            value <= self.at_most if self.at_most is not None else value >= (self.at_least or 0.0)
        )
        bound = f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"
        verdict = "not run" if value is None else "met" if is_met else "missed"
        measured = "-" if value is None else f"{value:.4g} {self.unit}".strip()
        bar = f"{bound} {self.unit}".strip()
        return {"stage": self.stage, "number": self.number, "measured": measured, "bar": bar, "verdict": verdict}


def bar_table(results: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row for each bar."""
    return [bar.row(results) for bar in BARS]


def _median(part: dict[str, Any], system: str, size: str = LARGE) -> float:
    sizes = part["systems"][system]["sizes"]
    return sizes[size if size in sizes else next(iter(sizes), size)]["median_s"]


def _ratio(part: str, slower: str, faster: str = "ringweave_device") -> Callable[[dict[str, Any]], float]:
    return lambda found: _median(found[part], slower) / _median(found[part], faster)


def _bound_share(found: dict[str, Any]) -> float:
    """Return bound over measured: each uplink carries the message once, at the measured rate of a link."""
    part = found["in_order"]
    if "no_lab" in found:
        raise LookupError
    size = int(next(iter(part["systems"]["ringweave_device"]["sizes"]), ""))
    return size / part["link_bytes_per_s"] / _median(part, "ringweave_device")


def _count(found: dict[str, Any], name: str) -> float:
    own = "counts" if name == "done" else "all_ranks"
    return sum(found[part][own][name] for part in TRUTH_PARTS)


def _missing_ms(found: dict[str, Any]) -> float:
    part = found["2_ranks"]
    return 1e3 * (_median(part, "ringweave_device") - _median(part, "ringweave_cpu"))


def _survivors(found: dict[str, Any], read: Callable[[dict[str, Any]], float]) -> float:
    return max(read(each) for each in found["kill"]["survivors"])


def _step_ratio(found: dict[str, Any]) -> float:
    own = found["ringweave"]
    return own["step_s"] / max(own["compute_s"], own["buckets_s"])


def _loss_gap(found: dict[str, Any]) -> float:
    if len(found["ringweave"]["losses"]) < 2:
        raise LookupError
    return found["loss_gap"]


def _wrong(found: dict[str, Any]) -> float:
    return _count(found, "wrong") + _count(found, "garbage_overwritten")


def _successors(found: dict[str, Any]) -> float:
    return sum(not name.endswith(".0") for name in found["elastic"]["workers"])


def _failed_runs(found: dict[str, Any]) -> float:
    return sum(found[part]["error"] is not None for part in TRUTH_PARTS)


def _name_failures(found: dict[str, Any]) -> float:
    return sum(not each["names_the_rank"] for each in found["kill"]["survivors"])


def _growth_mb(found: dict[str, Any]) -> float:
    def growth(each: dict[str, Any]) -> float:
        return (each["memory_after"]["reserved_bytes"] - each["memory_before"]["reserved_bytes"]) / 1e6

    return _survivors(found, growth)


BARS = (
    StageBar(stage="install", number="exit code of doctor", read=lambda f: f["rc"], at_most=0),
    StageBar(stage="tests", number="exit code of test_on_cuda.py", read=lambda f: float(f["rc"]), at_most=0),
    StageBar(stage="native", number="collectives that are not right", read=lambda f: f["of"] - f["right"], at_most=0),
    StageBar(stage="truth", number="collectives compared", read=lambda f: _count(f, "done"), at_least=5000),
    StageBar(stage="truth", number="runs that an error ended", read=_failed_runs, at_most=0),
    StageBar(stage="truth", number="wrong results", read=_wrong, at_most=0),
    StageBar(stage="truth", number="other bits than the CPU path", read=lambda f: _count(f, "bits_differ"), at_most=0),
    StageBar(
        stage="truth", number="call, median", read=lambda f: 1e6 * f["2_ranks"]["call_median_s"], at_most=200, unit="us"
    ),
    StageBar(
        stage="truth",
        number="calls that synchronise",
        read=lambda f: float(len(f["2_ranks"]["sync_errors"])),
        at_most=0,
    ),
    StageBar(
        stage="racks",
        number="device / CPU time",
        read=_ratio("in_order", "ringweave_device", "ringweave_cpu"),
        at_most=1.03,
    ),
    StageBar(stage="racks", number="bound / time", read=_bound_share, at_least=0.9),
    StageBar(
        stage="racks",
        number="faster than Gloo, in order",
        read=_ratio("in_order", "gloo_device"),
        at_least=1.6,
        unit="x",
    ),
    StageBar(
        stage="racks", number="faster than NCCL, in order", read=_ratio("in_order", "nccl"), at_least=1.5, unit="x"
    ),
    StageBar(
        stage="racks", number="faster than Gloo, shuffled", read=_ratio("shuffled", "gloo_device"), at_least=3, unit="x"
    ),
    StageBar(
        stage="racks", number="faster than NCCL, shuffled", read=_ratio("shuffled", "nccl"), at_least=1.5, unit="x"
    ),
    StageBar(
        stage="racks",
        number="shuffled / in order",
        read=lambda f: _median(f["shuffled"], "ringweave_device") / _median(f["in_order"], "ringweave_device"),
        at_most=1.05,
    ),
    StageBar(stage="local", number="device - CPU time, 25 MB, 2 ranks", read=_missing_ms, at_most=2, unit="ms"),
    StageBar(
        stage="local",
        number="faster than Gloo, 25 MB, 2 ranks",
        read=_ratio("2_ranks", "gloo_device"),
        at_least=1.5,
        unit="x",
    ),
    StageBar(stage="ddp", number="step / max(compute, buckets)", read=_step_ratio, at_most=1.08),
    StageBar(
        stage="ddp",
        number="backward / backward alone",
        read=lambda f: f["ringweave"]["backward_s"] / f["ringweave"]["backward_alone_s"],
        at_most=1.03,
    ),
    StageBar(stage="ddp", number="loss apart from Gloo's, relative", read=_loss_gap, at_most=1e-6),
    StageBar(
        stage="faults",
        number="death to error",
        read=lambda f: _survivors(f, lambda e: e["seconds_to_error"]),
        at_most=2,
        unit="s",
    ),
    StageBar(stage="faults", number="survivors that do not name the rank", read=_name_failures, at_most=0),
    StageBar(
        stage="faults",
        number="next allreduce",
        read=lambda f: _survivors(f, lambda e: e["next"]["seconds"] if e["next"].get("right") else 999.0),
        at_most=0.5,
        unit="s",
    ),
    StageBar(stage="faults", number="GPU memory kept after the death", read=_growth_mb, at_most=50, unit="MB"),
    StageBar(
        stage="faults",
        number="exit code of the elastic run",
        read=lambda f: f["elastic"]["ended"]["exit_codes"][0],
        at_most=0,
    ),
    StageBar(stage="faults", number="deaths in the elastic run", read=lambda f: f["elastic"]["kills"], at_least=2),
    StageBar(stage="faults", number="successors in the elastic run", read=_successors, at_least=2),
    StageBar(
        stage="faults",
        number="longest stand-still of the elastic run",
        read=lambda f: f["elastic"]["workers"]["elastic.0.0"]["longest_step_s"] - 0.1,
        at_most=0.5,
        unit="s",
    ),
    StageBar(
        stage="balanced",
        number="step / ideal step",
        read=lambda f: f["balanced"]["step_s"] / f["ideal_step_s"],
        at_most=1.1,
    ),
)
