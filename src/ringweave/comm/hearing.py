"""What another rank says, read as if a stranger had: whoever reaches the store or a collective can say anything."""

from collections.abc import Callable
from typing import Any, TypeVar

from ringweave.errors import DisagreementError, ScheduleError, explain
from ringweave.files import json_text

MAX_BYTES = json_text.MAX_BYTES
"""Of what a rank says, where nothing smaller is known."""
_DO = "Run the same ringweave on all ranks, and keep others out of the store"

_Found = TypeVar("_Found")


def read(
    value: bytes,
    what: str,
    take: Callable[[Any], _Found],
    *,
    expected: str,
    most: int = MAX_BYTES,
    where: str = "",
) -> _Found:
    """What is taken from a JSON value.

    Args:
        value: As it came.
        what: It should be, for the error.
        take: Gives what is wanted of the value; it may raise what Python raises where that is not in it.
        expected: Completes "expected ..." where it is something else.
        most: Bytes that it may have.
        where: For the error.

    Raises:
        DisagreementError: It is too long, or something else.
    """
    check_length(len(value), what, most=most, where=where)
    try:
        return take(json_text.loads(value, most))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, ScheduleError) as cause:
        raise DisagreementError(explain(what, got=value, expected=expected, do=_DO, where=where)) from cause


def an_object(value: Any) -> dict[str, Any]:
    """A JSON object, for `read`."""
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} instead of an object")
    return value


def check_length(num_bytes: int, what: str, *, least: int = 0, most: int = MAX_BYTES, where: str = "") -> None:
    """Refuse what is longer than anything that ringweave says there, before there is memory for it.

    Raises:
        DisagreementError: It is.
    """
    if not least <= num_bytes <= most:
        got, expected = f"{num_bytes} bytes", f"{least} to {most} bytes"
        raise DisagreementError(explain(what, got=got, expected=expected, do=_DO, where=where))
