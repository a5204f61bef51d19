"""The header of a block that comes from another rank: whoever reaches a collective can say anything there."""

import json
import random

import pytest
import torch
from torch import Tensor

from ringweave.errors import TrainingError
from ringweave.pipeline import migration
from tests.rpc.mutations import mutated

HEADER = {"error": "", "parts": {"parameter a": {"shape": [2], "dtype": "float32"}}, "facts": {}}


class Group:
    """What is received of a rank that sends these bytes as a header."""

    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    def recv(self, tensor: Tensor, src: int, group: object) -> None:
        if tensor.dtype == torch.int64:
            tensor.fill_(len(self._sent))
        else:
            tensor.copy_(torch.frombuffer(bytearray(self._sent), dtype=torch.uint8))


def received(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> migration.BlockHeader:
    monkeypatch.setattr(migration, "dist", Group(sent))
    return migration.receive_header(1, None)  # pyrefly: ignore


@pytest.mark.parametrize("sent", [b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_rubbish_is_refused(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match=r"header of a block: .*, expected JSON of what follows\. Run the same ver"):
        received(sent, monkeypatch)


def test_mutated_headers_are_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, good, num_refused = random.Random(12), json.dumps(HEADER).encode(), 0
    assert received(good, monkeypatch) == HEADER
    for _ in range(1_000):
        try:
            received(mutated(rng, good), monkeypatch)
        except TrainingError:
            num_refused += 1
    assert num_refused > 500


@pytest.mark.parametrize(
    "parts",
    [
        {"parameter weight": {"shape": [2, 2]}},
        {"parameter weight": {"shape": [2, "2"], "dtype": "float32"}},
        {"parameter weight": {"shape": [-1, 2], "dtype": "float32"}},
        {"parameter weight": {"shape": [2, 2], "dtype": "nn"}},
        {"parameter weight": {"shape": [2, 2], "dtype": "no such thing"}},
        {"parameter weight": {"shape": [2, 2], "dtype": "float32", "data": "AAAA"}},
        {"parameter weight": {"shape": [2, 2], "dtype": "float32", "data": 5}},
        {"parameter weight": [2, 2]},
        ["parameter weight"],
    ],
)
def test_what_describes_no_tensors_is_refused(parts: object) -> None:
    block = torch.nn.Linear(2, 2)
    before = block.weight.detach().clone()
    with pytest.raises(TrainingError, match=r"parts of a block: .*, expected shape, dtype and data of each tensor\."):
        migration.BlockReceiver({"error": "", "parts": parts, "facts": {}}, block)
    assert torch.equal(block.weight, before)
