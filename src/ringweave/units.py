"""Rates, sizes and times as people write them, and back.

Rates are bits per second and always carry a unit (`200Mbit/s`); sizes are bytes (`25MB` = 25e6, `25MiB`); inside the
program every rate is in bytes per second and every time in seconds. Every `format_x` is exact: parsing its text gives
the same number again; a `show_x` is rounded.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal

from ringweave.errors import UsageError, explain

_BIT_UNITS = {
    "bit/s": Decimal(1),
    "kbit/s": Decimal(10**3),
    "Mbit/s": Decimal(10**6),
    "Gbit/s": Decimal(10**9),
    "Tbit/s": Decimal(10**12),
}
_BYTE_UNITS = {
    "": Decimal(1),
    "B": Decimal(1),
    "kB": Decimal(10**3),
    "MB": Decimal(10**6),
    "GB": Decimal(10**9),
    "TB": Decimal(10**12),
    "KiB": Decimal(2**10),
    "MiB": Decimal(2**20),
    "GiB": Decimal(2**30),
    "TiB": Decimal(2**40),
}
_TIME_UNITS = {
    "": Decimal(1),
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
}
_MAX_BYTES = 2**63 - 1
# Three digits of exponent keep the arithmetic small whatever is typed; no rate or size needs more.
_PERCENT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?%")
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?|\.[0-9]+)\s*([^\s0-9]*)\s*")


def parse_rate(text: str) -> float:
    """Parse a rate with a unit to bytes per second.

    Args:
        text: A number and one of `bit/s`, `kbit/s`, `Mbit/s`, `Gbit/s`, `Tbit/s`.

    Raises:
        UsageError: No unit, an unknown unit, or a rate that is not positive and finite.
    """
    bytes_per_s = float(_parse_scaled(text, "rate", _BIT_UNITS, example="200Mbit/s") / 8)
    if not 0 < bytes_per_s < math.inf:
        raise UsageError(_refusal_text("rate", text, "a positive number", _BIT_UNITS, example="200Mbit/s"))
    return bytes_per_s


def parse_bytes(text: str | int) -> int:
    """Parse a size to bytes; a bare number is bytes.

    Raises:
        UsageError: An unknown unit, a negative size, a fraction of a byte, or more than 2**63 - 1 bytes.
    """
    size = _parse_scaled(str(text), "size", _BYTE_UNITS, example="25MB")
    if size > _MAX_BYTES or size != int(size):
        raise UsageError(
            _refusal_text("size", text, "a whole number of bytes below 2**63", _BYTE_UNITS, example="25MB")
        )
    return int(size)


def parse_seconds(text: str | float) -> float:
    """Parse a time to seconds; a bare number is seconds.

    Raises:
        UsageError: An unknown unit, or a time that is negative or infinite.
    """
    seconds = float(_parse_scaled(str(text), "time", _TIME_UNITS, example="50us"))
    if seconds == math.inf:
        raise UsageError(_refusal_text("time", text, "a finite number", _TIME_UNITS, example="50us"))
    return seconds


def parse_percent(text: str, what: str, *, where: str = "") -> float:
    """Parse a percentage with its sign to a fraction: `0.5%` is 0.005.

    Args:
        text: A number above 0 and up to 100, and a percent sign.
        what: Name of the value, for errors.
        where: Its place, for errors; empty if there is none.

    Raises:
        UsageError: The text is none.
    """
    is_valid = isinstance(text, str) and _PERCENT.fullmatch(text) is not None
    fraction = Decimal(text[:-1]) / 100 if is_valid else Decimal(0)
    if not 0 < fraction <= 1:
        expected = "a number above 0 and up to 100 with a percent sign"
        raise UsageError(what, got=text, expected=expected, do="Write it like 0.5%", where=where)
    return float(fraction)


def format_rate(bytes_per_s: float) -> str:
    """Return `200Mbit/s`: the largest unit in which the number is at least 1, exact when parsed again."""
    return _largest_unit(bytes_per_s * 8, _BIT_UNITS, lambda bits_per_s: float(bits_per_s / 8) == bytes_per_s)


def show_rate(bytes_per_s: float) -> str:
    """Return a rate for people, rounded to four digits."""
    return format_rate(float(f"{bytes_per_s * 8:.4g}") / 8)


def format_bytes(num_bytes: int) -> str:
    """Return `25MB`: the largest decimal unit in which the number is at least 1, exact when parsed again."""
    decimal = {unit: factor for unit, factor in _BYTE_UNITS.items() if unit and "i" not in unit}
    return _largest_unit(num_bytes, decimal, lambda size: size == num_bytes)


def format_seconds(seconds: float) -> str:
    """Return `50us`: the largest unit in which the number is at least 1, exact when parsed again."""
    units = {unit: _TIME_UNITS[unit] for unit in ("s", "ms", "us", "ns")}
    return _largest_unit(seconds, units, lambda time: float(time) == seconds)


def show_duration(seconds: float) -> str:
    """Return `3 h`: a time span for people, in whole numbers, at least two of its unit."""
    for unit_s, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{max(0, int(seconds))} s"


def _parse_scaled(text: str, noun: str, units: dict[str, Decimal], *, example: str) -> Decimal:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match.group(2) not in units:
        raise UsageError(_refusal_text(noun, text, "a number", units, example=example))
    return Decimal(match.group(1)) * units[match.group(2)]


def _refusal_text(noun: str, text: object, number: str, units: dict[str, Decimal], *, example: str) -> str:
    names = ", ".join(unit for unit in units if unit)
    return explain(noun, got=text, expected=f"{number} with one of {names}", do=f"Write it like {example}")


def _largest_unit(value: float, units: dict[str, Decimal], is_exact: Callable[[Decimal], bool]) -> str:
    """Return the largest unit that gives at least 1 and loses nothing; else the base unit, all digits."""
    for unit, factor in sorted(units.items(), key=lambda pair: pair[1], reverse=True):
        scaled = value / float(factor)
        number = f"{scaled:.15g}"
        if (scaled >= 1 or (value == 0 and factor == 1)) and is_exact(Decimal(number) * factor):
            return f"{number}{unit}"
    return f"{value!r}{next(unit for unit, factor in units.items() if factor == 1)}"


def count_noun(count: int, noun: str) -> str:
    """Return the number with its noun, in the plural unless it is one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
