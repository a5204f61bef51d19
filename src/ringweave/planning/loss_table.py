"""Loss table: the loss that inexact methods cost at equal samples, measured beside synchronous training.

The table is a file of this package. `bench/training/loss_table.py` measured it on two small tasks; other tasks may lose
more. So an increase is known by its spread over tasks and seeds, and counts by its upper end.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ringweave.files import file_io
from ringweave.planning.sites import MIN_INNER_STEPS

FILE = "loss_table.json"
LOCAL_SETTINGS = ("fragments", "outer_lr", "outer_momentum", "inner_lr_factor")
"""Settings of mode local that are the same in all rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossIncrease:
    """Measured: increase of the held-out loss at equal samples, relative to synchronous training."""

    lowest: float
    mean: float
    highest: float

    def __str__(self) -> str:
        return f"{self.lowest:+.2%} to {self.highest:+.2%}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTable:
    """Measured increases by method."""

    wires: Mapping[str, LossIncrease]
    """Wire format of gradients -> increase."""
    local: Mapping[tuple[int, str, int], LossIncrease]
    """(number of sites, format of outer gradients, inner steps) -> increase, in mode local."""
    local_settings: Mapping[str, float | None]
    """Settings of mode local in all rows, by the names in LOCAL_SETTINGS."""

    def of_local(self, num_sites: int, wire: str, inner_steps: int) -> LossIncrease | None:
        """Return the increase with so many inner steps: between measured numbers of them, that of the worse one.

        None if that format, number of sites or more inner steps were not measured.
        """
        rows = dict(self._local_rows(num_sites, wire))
        above = min((steps for steps in rows if steps >= inner_steps), default=None)
        below = max((steps for steps in rows if steps <= inner_steps), default=above)
        if above is None or below is None:
            return None
        return max(rows[above], rows[below], key=lambda each: each.highest)

    def max_inner_steps(self, num_sites: int, wire: str, max_increase: float) -> int:
        """Return the most measured inner steps up to which derived ones have no increase above the bound; 0 if none."""
        allowed = 0
        for steps, each in self._local_rows(num_sites, wire):
            if steps >= MIN_INNER_STEPS and each.highest > max_increase:
                break
            allowed = steps
        return allowed if allowed >= MIN_INNER_STEPS else 0

    def _local_rows(self, num_sites: int, wire: str) -> list[tuple[int, LossIncrease]]:
        """Return (inner steps, increase), by growing steps."""
        rows = {steps: each for (sites, name, steps), each in self.local.items() if (sites, name) == (num_sites, wire)}
        return sorted(rows.items(), key=lambda row: row[0])


def load_loss_table() -> LossTable:
    """Return the package's table."""
    return parse_loss_table(file_io.parse_json(resources.files("ringweave.planning").joinpath(FILE).read_text()))


def parse_loss_table(document: Mapping[str, Any]) -> LossTable:
    """Return the table of a document.

    Raises:
        ValueError: A number is missing, not finite, or a loss of less than nothing.
        KeyError: A key is missing.
    """
    wires, local = {}, {}
    for row in document["rows"]:
        increase = _increase(row["increase"])
        if row["method"] == "wire":
            wires[row["format"]] = increase
        else:
            local[row["num_sites"], row["format"], row["inner_steps"]] = increase
    settings = {name: document["local"][name] for name in LOCAL_SETTINGS}
    return LossTable(wires=wires, local=local, local_settings=settings)


def _increase(by_task: Mapping[str, list[float]]) -> LossIncrease:
    found = [each for seeds in by_task.values() for each in seeds]
    if not found or not all(math.isfinite(each) and each > -1 for each in found):
        raise ValueError(f"loss increases {by_task}, expected numbers above -1 of each task and seed")
    return LossIncrease(lowest=min(found), mean=statistics.fmean(found), highest=max(found))
