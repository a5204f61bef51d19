"""Trainers of other libraries on `ringweave.prepare`: Transformers, Accelerate, Lightning; one module for each."""

import importlib.metadata

from ringweave.errors import UsageError


def check_version(distribution: str, first: str, below: str) -> None:
    """Refuse a version of a library that its module here was not tested with.

    Args:
        distribution: Name of the library's distribution.
        first: First version that was tested, such as `5.24`.
        below: First version that was not, such as `6`.

    Raises:
        UsageError: The installed version is outside of this range.
    """
    found = importlib.metadata.version(distribution)
    if not _release(first) <= _release(found) < _release(below):
        do = f"Install {distribution}>={first},<{below}, or use another version of ringweave"
        expected = f"from {first} on and below {below}"
        raise UsageError(f"version of {distribution}", got=found, expected=expected, do=do)


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version; `5.0rc1` counts as 5.0."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
