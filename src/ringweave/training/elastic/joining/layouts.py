"""What the buckets of a model's gradients are, as text: a member that joins takes part before it has any of its own."""

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

Layout = Sequence[Sequence[Any]]
"""(number of elements, dtype without `torch.`, type of device) of each bucket."""


def to_text(layout: Layout) -> str:
    """Short where buckets repeat, and a quarter of the words at worst; empty if there are none."""
    if not layout:
        return ""
    return base64.b64encode(zlib.compress(json.dumps(layout).encode())).decode()


def of_text(text: str) -> list[list[Any]]:
    """The layout that `to_text` put so."""
    return json.loads(zlib.decompress(base64.b64decode(text))) if text else []
