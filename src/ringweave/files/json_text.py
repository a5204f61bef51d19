"""JSON from outside as plain Python values: of bounded length, and all that can be wrong with it is a ValueError."""

import json
import os
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
"""As many as a file may have that people write. Values take up to some twenty times as much memory."""


def loads(text: str | bytes, most: int = MAX_BYTES) -> Any:
    """The value of a text.

    Args:
        text: Bytes are UTF-8, or another encoding of Unicode that JSON allows.
        most: How long it may be, in bytes or, of a str, characters.

    Raises:
        ValueError: It is longer, is nested too deeply for Python's stack, or is no JSON.
    """
    if len(text) > most:
        raise ValueError(f"{len(text)} {'characters' if isinstance(text, str) else 'bytes'}, more than {most}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets in brackets, too many to read") from None


def load(path: str | os.PathLike[str], most: int = MAX_BYTES) -> Any:
    """The value of a file, of which no more is read than it may have.

    Raises:
        OSError: It cannot be read.
        ValueError: As of `loads`.
    """
    with Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"a file of more than {most} bytes")
    return loads(content, most)
