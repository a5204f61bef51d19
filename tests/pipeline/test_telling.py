"""A text that another rank of a pipeline tells: how long it is, it says as well."""

import pytest
import torch
from torch import Tensor

from ringweave.errors import DisagreementError
from ringweave.pipeline import pipeline


class Group:
    """What the others hear of a rank that tells these bytes."""

    def __init__(self, told: bytes, length: int | None = None) -> None:
        self._told, self._length = told, len(told) if length is None else length

    def get_rank(self, group: object) -> int:
        return 1

    def broadcast(self, tensor: Tensor, **_: object) -> None:
        if tensor.dtype == torch.int64:
            tensor.fill_(self._length)
        else:
            tensor.copy_(torch.frombuffer(bytearray(self._told), dtype=torch.uint8))


@pytest.mark.parametrize(("told", "heard"), [(b"text", "text"), (b"\0", ""), (b"\xff", "\ufffd")])
def test_it_is_heard(told: bytes, heard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "dist", Group(told))
    assert pipeline.broadcast_text("", None) == heard  # pyrefly: ignore


@pytest.mark.parametrize("length", [-1, 0, 2**40])
def test_a_length_that_is_none_takes_no_memory(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "dist", Group(b"", length))
    expected = rf"text of another rank: '{length} bytes', expected 1 to 16777216 bytes.* \[rank 0 of the group\]"
    with pytest.raises(DisagreementError, match=expected):
        pipeline.broadcast_text("", None)  # pyrefly: ignore
