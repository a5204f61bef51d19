"""Numbers that keep the messages of collectives apart, and tell what is run in each."""

import zlib

_SIGNATURE_BITS = 32
UNSIGNED, EXCHANGE = 0, 2**_SIGNATURE_BITS - 1
"""In the place of a program's signature: what comes before it is agreed on, and what each rank says."""


def tag(number: int, signature: int) -> int:
    """Which collective, and what is run in it."""
    return number << _SIGNATURE_BITS | signature


def signature(text: str) -> int:
    """Of a program that is described so."""
    return 1 + zlib.crc32(text.encode()) % (EXCHANGE - 1)
