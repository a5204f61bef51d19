"""`auto` looks again while it trains in rings: the cluster may have changed since the trials of `prepare`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave.planning.grouping.forecasts import Ring
from ringweave.training.choosing import forecasting
from ringweave.training.control import Control


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconsidering:
    """Forecasts at the ends of epochs, by what steps have taken."""

    said: Sequence[Mapping[str, Any]]
    """What all ranks said in `prepare`: of links and of the model."""
    control: Control
    local_steps: int
    note: Callable[[tuple[Ring, ...], str], object]
    """Told of other rings, and why."""

    def better_rings(self, rings: tuple[Ring, ...], recent_s: Sequence[float]) -> tuple[Ring, ...] | None:
        """Other rings, if they are predicted to be faster by more than they cost; all ranks call it alike.

        Args:
            rings: The present ones.
            recent_s: Seconds of a sample in the latest steps of this rank.
        """
        heard = [each["recent_s"] for each in self.control.gather_json({"recent_s": list(recent_s)})]
        outlook = forecasting.reconsider(self.said, heard, rings, self.local_steps)
        if outlook is None:
            return None
        self.note(outlook.chosen.rings, outlook.reason)
        return outlook.chosen.rings
