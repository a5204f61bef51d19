"""What `plan` and `simulate` both say: how far they are, and with which rates they compute."""

import io
import sys
from collections.abc import Mapping

from ringweave.benchmarks.progress import Progress
from ringweave.topology import Cluster


def progress() -> Progress:
    """Lines on a terminal; elsewhere nobody is waiting, and standard error has errors only."""
    return Progress(sys.stderr if sys.stderr.isatty() else io.StringIO())


def of_rates(rates: Mapping[str, float], cluster: Cluster, path: str | None) -> list[str]:
    """One line about rates that were read from a file, none where there is no file."""
    if path is None:
        return []
    return [f"rates    of {len(rates)} of {len(cluster.links())} links as measured: {path}"]
