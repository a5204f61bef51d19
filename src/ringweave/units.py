"""Rates and sizes as people write them, and back.

Rates are bits per second and always carry a unit (`200Mbit/s`); sizes are bytes (`25MB` = 25e6, `25MiB`); inside the
program every rate is in bytes per second and every time in seconds.
"""

import re

from ringweave.errors import UsageError, explain

_BIT_UNITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12}
_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([^\s0-9]*)\s*")


def parse_rate(text: str) -> float:
    """Bytes per second from a rate with a unit.

    Args:
        text: A number and one of `bit/s`, `kbit/s`, `Mbit/s`, `Gbit/s`, `Tbit/s`.

    Raises:
        UsageError: No unit, an unknown unit, or a rate that is not positive.
    """
    value, unit = _split(text, "rate")
    if unit not in _BIT_UNITS:
        raise UsageError(_refusal("rate", text, _BIT_UNITS, example="200Mbit/s"))
    if not 0 < value < float("inf"):
        raise UsageError(_refusal("rate", text, _BIT_UNITS, example="200Mbit/s"))
    return value * _BIT_UNITS[unit] / 8


def parse_bytes(text: str | int) -> int:
    """Bytes from a size; a bare number is bytes.

    Raises:
        UsageError: An unknown unit, a negative size, or a fraction of a byte.
    """
    value, unit = _split(str(text), "size")
    if unit not in _BYTE_UNITS or not value * _BYTE_UNITS[unit] == int(value * _BYTE_UNITS[unit]):
        raise UsageError(_refusal("size", text, _BYTE_UNITS, example="25MB"))
    return int(value * _BYTE_UNITS[unit])


def parse_seconds(text: str | float) -> float:
    """Seconds from a time; a bare number is seconds.

    Raises:
        UsageError: An unknown unit or a negative time.
    """
    value, unit = _split(str(text), "time")
    if unit not in _TIME_UNITS:
        raise UsageError(_refusal("time", text, _TIME_UNITS, example="50us"))
    return value * _TIME_UNITS[unit]


def format_rate(bytes_per_s: float) -> str:
    """`200Mbit/s`: the largest unit in which the number is at least 1, exact when parsed again."""
    return _largest_unit(bytes_per_s * 8, list(_BIT_UNITS.items()))


def format_bytes(num_bytes: int) -> str:
    """`25MB`: a decimal size, exact when parsed again."""
    decimal = [(unit, float(factor)) for unit, factor in _BYTE_UNITS.items() if unit and "i" not in unit]
    return _largest_unit(num_bytes, decimal)


def format_seconds(seconds: float) -> str:
    """`50us`: the largest unit in which the number is at least 1, exact when parsed again."""
    units = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)]
    return _largest_unit(seconds, units)


def _split(text: str, noun: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise UsageError(
            explain(noun, got=text, expected="a number followed by a unit", do=f"Write the {noun} as number and unit")
        )
    return float(match.group(1)), match.group(2)


def _refusal(noun: str, text: object, units: dict[str, float] | dict[str, int], *, example: str) -> str:
    names = ", ".join(unit for unit in units if unit)
    return explain(noun, got=text, expected=f"a positive number with one of {names}", do=f"Write it like {example}")


def _largest_unit(value: float, units: list[tuple[str, float]]) -> str:
    """The shortest exact text: units from large to small, first one that gives at least 1 and survives a round trip."""
    for unit, factor in reversed(units):
        scaled = value / factor
        text = f"{scaled:.15g}"
        if scaled >= 1 and float(text) * factor == value:
            return f"{text}{unit}"
    unit, factor = units[0]
    return f"{value / factor!r}{unit}"
