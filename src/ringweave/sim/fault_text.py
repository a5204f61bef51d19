"""Faults as people write them, as in `ringweave simulate --straggle ... --fail ...`."""

from ringweave import units
from ringweave.errors import UsageError, explain
from ringweave.sim.faults import Death, Delay, Fault, RateChange, Slowdown

RANK = "rank:"
STRAGGLE = "NODE=2 (twice as slow), LINK=50Mbit/s or LINK=50Mbit/s@0.5s (from then on), rank:3=20ms (begins late)"
FAIL = "rank:3@0.1s, LINK@0.1s, or either without @ for the beginning"


def parse_straggle(text: str) -> Fault:
    """The straggler of a text.

    Raises:
        UsageError: It cannot be read.
    """
    what, equals, value = text.partition("=")
    if not what or not equals or not value:
        raise _refusal("straggler", text, STRAGGLE)
    if what.startswith(RANK):
        return Delay(rank=_rank(what, "straggler", text, STRAGGLE), seconds=units.parse_seconds(value))
    if "->" in what:
        rate, _, at = value.partition("@")
        return RateChange(link=what, bytes_per_s=units.parse_rate(rate), at_s=units.parse_seconds(at or "0"))
    try:
        times = float(value)
    except ValueError:
        times = 0.0
    if not 0 < times < float("inf"):
        raise _refusal("straggler", text, STRAGGLE)
    return Slowdown(node=what, times=times)


def parse_fail(text: str) -> Fault:
    """The failure of a text.

    Raises:
        UsageError: It cannot be read.
    """
    what, _, at = text.partition("@")
    at_s = units.parse_seconds(at or "0")
    if what.startswith(RANK):
        return Death(rank=_rank(what, "failure", text, FAIL), at_s=at_s)
    if "->" not in what:
        raise _refusal("failure", text, FAIL)
    return RateChange(link=what, bytes_per_s=0.0, at_s=at_s)


def _rank(what: str, what_for: str, text: str, expected: str) -> int:
    number = what.removeprefix(RANK)
    if not number.isdecimal() or len(number) > 9:
        raise _refusal(what_for, text, expected)
    return int(number)


def _refusal(what_for: str, text: str, expected: str) -> UsageError:
    return UsageError(explain(what_for, got=text, expected=expected, do="Write it in one of these forms"))
