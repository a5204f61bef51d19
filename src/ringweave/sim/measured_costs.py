"""What messages and bytes cost the processors of a machine, as it was measured there: read from a file.

`bench/simulation/processor_costs.py` writes such files: a JSON document whose `costs` are fields of `Machine`.
"""

import dataclasses
import json
import math
from pathlib import Path

from ringweave.errors import UsageError, explain
from ringweave.files.problems import closest
from ringweave.sim.machine import Machine

COSTS = (
    *("message_s", "inside_message_s", "wake_s", "kernel_s_per_byte"),
    *("inside_s_per_byte", "combine_s_per_byte", "start_s"),
)
"""What such a file may say; the rest of the machine is assumed."""


def load(path: str | Path) -> Machine:
    """The machine that is assumed, with the costs of a file.

    Raises:
        UsageError: The file cannot be read, has no costs, or one that is none or not a time.
    """
    where = str(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        costs = document["costs"]
        named = dict(costs.items())
    except OSError as cause:
        do = "Name a file, or take none or assumed"
        raise UsageError(explain("costs of processors", got=where, expected="a file", do=f"{do} ({cause})")) from cause
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
        expected, do = 'a JSON document with "costs"', "Write one with bench/simulation/processor_costs.py --out"
        raise UsageError(explain("costs of processors", got=where, expected=expected, do=do)) from cause
    for name, value in named.items():
        _check(name, value, where)
    return dataclasses.replace(Machine.assumed(), **named)


def _check(name: str, value: object, where: str) -> None:
    if name not in COSTS:
        do = closest(name, COSTS) or "Leave it out"
        raise UsageError(explain("cost of processors", got=name, expected=", ".join(COSTS), do=do, where=where))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        expected, do = "seconds, not negative", "Measure it again"
        raise UsageError(explain(name, got=value, expected=expected, do=do, where=where))
