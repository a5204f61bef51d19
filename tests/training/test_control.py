"""What other ranks say beside the gradients: whoever reaches a collective can say anything there."""

import json
import random

import pytest
import torch
from torch import Tensor

from ringweave.errors import DisagreementError
from ringweave.training.collectives import ControlGroup
from tests.rpc.mutations import mutated


class Told(ControlGroup):
    """Rank 0 of two; the other one says these bytes, and that they are so many."""

    def __init__(self, theirs: bytes, length: int | None = None) -> None:
        self.rank, self.world_size = 0, 2
        self._theirs, self._length = theirs, len(theirs) if length is None else length

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        if tensor.dtype == torch.int64:
            return [tensor, torch.tensor([self._length])]
        said = torch.frombuffer(bytearray(self._theirs), dtype=torch.uint8)
        return [tensor, torch.nn.functional.pad(said, (0, len(tensor) - len(said)))]


def test_what_ranks_say_is_heard() -> None:
    assert Told(b'{"b": 2}').gather_json({"long": "x" * 50}) == [{"long": "x" * 50}, {"b": 2}]


@pytest.mark.parametrize("theirs", [b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"a":'])
def test_rubbish_is_a_disagreement(theirs: bytes) -> None:
    expected = r"what a rank tells the others: .*, expected a JSON object\. Run the same ringweave .* \[rank 1\]"
    with pytest.raises(DisagreementError, match=expected):
        Told(theirs).gather_json({"a": 1})


@pytest.mark.parametrize("length", [-1, 0, 2**40])
def test_a_length_that_is_none_takes_no_memory(length: int) -> None:
    with pytest.raises(DisagreementError, match=rf"'{length} bytes', expected 1 to 16777216 bytes.* \[rank 1\]"):
        Told(b"{}", length).gather_json({"a": 1})


def test_mutated_texts_are_heard_or_refused() -> None:
    rng, num_refused, good = random.Random(11), 0, json.dumps({"mode": "sync", "shares": [1, 2.5, None]}).encode()
    for _ in range(1_000):
        try:
            assert isinstance(Told(mutated(rng, good)).gather_json({})[1], dict)
        except DisagreementError:
            num_refused += 1
    assert num_refused > 500
