"""Rates of links as they were measured, read from a file, to be planned and simulated with instead of a cluster's.

Two kinds of documents have them: findings of `python -m ringweave.comm.probing --json`, and results of
`ringweave bench allreduce --out`, where a link that could not be measured has none and keeps that of the cluster.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringweave.errors import UsageError, explain
from ringweave.files.problems import closest
from ringweave.topology import Cluster

_NAMES = ("name", "link")
_RATES = ("rate_bytes_per_s", "measured_bytes_per_s")


def load(path: str | Path, cluster: Cluster) -> dict[str, float]:
    """Bytes per second by directed link name (`a0->r0`), of a file about this cluster.

    Raises:
        UsageError: The file cannot be read, has no links, one that the cluster lacks, or a rate that is none.
    """
    where = str(path)
    try:
        found = list(_links(json.loads(Path(path).read_text(encoding="utf-8"))))
    except OSError as cause:
        do = cause.strerror or str(cause)
        raise UsageError(explain("--rates", got=where, expected="a file that can be read", do=do)) from cause
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        expected, do = 'a JSON document with measured "links"', "Give findings of probing, or a result of bench --out"
        raise UsageError(explain("--rates", got=where, expected=expected, do=do)) from cause
    known = {link.name for link in cluster.links()}
    for name, rate in found:
        _check(name, rate, known, where)
    return {name: float(rate) for name, rate in found if rate is not None}


def _links(document: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Name and rate of each link.

    Raises:
        KeyError: One has neither name nor rate, or there are none.
    """
    if not document["links"]:
        raise KeyError("links")
    for each in document["links"]:
        (name,) = (each[key] for key in _NAMES if key in each)
        (rate,) = (each[key] for key in _RATES if key in each)
        yield name, rate


def _check(name: Any, rate: Any, known: set[str], where: str) -> None:
    if not isinstance(name, str) or name not in known:
        do = closest(str(name), known) or "Give the cluster file that was measured, such as the one of probing --write"
        raise UsageError(explain("measured link", got=name, expected="a link of the cluster", do=do, where=where))
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (is_number and 0 < rate < math.inf):
        expected, do = "a positive number of bytes per second", "Measure it again, or leave it out"
        raise UsageError(explain(f"measured rate of {name}", got=rate, expected=expected, do=do, where=where))
