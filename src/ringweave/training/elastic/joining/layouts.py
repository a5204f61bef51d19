"""What the buckets of a model's gradients are, as text: a member that joins takes part before it has any of its own."""

import base64
import binascii
import json
import zlib
from collections.abc import Sequence
from typing import Annotated, Any

import pydantic
import torch
from pydantic import Field

from ringweave.errors import TrainingError, explain
from ringweave.membership.messages import MAX_LAYOUT
from ringweave.training.elastic.refusals import in_words

Layout = Sequence[Sequence[Any]]
"""(number of elements, dtype without `torch.`, type of device) of each bucket."""

MOST_BYTES = 4 << 20
"""Of a layout that is not compressed: a hundred thousand buckets. Its text may be a thousandth of that."""


def _known(dtype: str) -> str:
    if isinstance(getattr(torch, dtype, None), torch.dtype):
        return dtype
    raise ValueError("no dtype of torch")


_Bucket = tuple[
    Annotated[int, Field(gt=0, lt=2**48)],
    Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$"), pydantic.AfterValidator(_known)],
    Annotated[str, Field(pattern=r"^[a-z]{1,16}$")],
]
_ADAPTER = pydantic.TypeAdapter(list[_Bucket], config=pydantic.ConfigDict(strict=True))


def to_text(layout: Layout) -> str:
    """Short where buckets repeat, and a quarter of the words at worst; empty if there are none."""
    if not layout:
        return ""
    return base64.b64encode(zlib.compress(json.dumps(layout).encode())).decode()


def of_text(text: str) -> list[list[Any]]:
    """The layout that `to_text` put so.

    Raises:
        TrainingError: It is none, or a larger one than any model has.
    """
    if not text:
        return []
    if len(text) > MAX_LAYOUT:
        raise _refusal(f"{len(text)} characters", f"at most {MAX_LAYOUT}")
    try:
        unpacking = zlib.decompressobj()
        words = unpacking.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise _refusal(str(error), "compressed text") from None
    if not unpacking.eof:
        raise _refusal(f"{len(words)} bytes and more, or the begin of some", f"all of at most {MOST_BYTES}")
    try:
        return [list(bucket) for bucket in _ADAPTER.validate_json(words)]
    except pydantic.ValidationError as error:
        raise _refusal(in_words(error), "elements, dtype and device of each bucket") from None


def _refusal(got: str, expected: str) -> TrainingError:
    do = "Run the same ringweave on all workers"
    return TrainingError(explain("layout of the buckets", got=got, expected=expected, do=do))
