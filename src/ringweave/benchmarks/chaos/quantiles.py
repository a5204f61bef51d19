"""Quantiles of few measured values."""

import statistics
from collections.abc import Sequence


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """Of measured values, to the thousandth, interpolated between neighbours; None of none."""
    if len(values) < 2:
        return values[0] if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[round(fraction * 100) - 1], 3)
