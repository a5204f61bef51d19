"""Formats of outer gradients: sizes, errors, and messages that are damaged."""

import pytest
import torch

from ringweave.errors import MessageError
from ringweave.training.outer_formats import FORMATS, TopKFormat

LENGTHS = (1, 63, 4096, 4097, 10_000)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_message_has_its_length_and_decodes(name: str, length: int, dtype: torch.dtype) -> None:
    values = torch.randn(length, dtype=dtype, generator=torch.Generator().manual_seed(length))
    wire = FORMATS[name]
    message = wire.encode(values)
    assert (message.dtype, message.shape) == (torch.uint8, (wire.num_bytes(values),))
    decoded = wire.decode(message, values)
    assert (decoded.dtype, decoded.shape) == (dtype, (length,))
    assert (decoded - values).norm() < values.norm(), "closer than nothing at all"
    assert torch.equal(decoded, values) or name != "exact"


def test_top_k_sends_the_largest_values_of_each_chunk() -> None:
    values = torch.randn(3 * TopKFormat.CHUNK, generator=torch.Generator().manual_seed(1))
    wire = FORMATS["top-k"]
    decoded = wire.decode(wire.encode(values), values).view(3, -1)
    for own, found in zip(values.view(3, -1), decoded, strict=True):
        largest = own.abs().topk(TopKFormat.NUM_SENT).indices
        assert set(found.nonzero().flatten().tolist()) == set(largest.tolist())
        assert torch.equal(found[largest].sign(), own[largest].sign())
        assert len(found[largest].abs().unique()) == 2
    assert wire.num_bytes(values) == 3 * 120


@pytest.mark.parametrize("name", FORMATS)
def test_error_feedback_sends_everything_in_the_end(name: str) -> None:
    wire, wanted, sent = FORMATS[name], torch.linspace(-1, 1, 4096), torch.zeros(4096)
    for _ in range(200):
        sent += wire.decode(wire.encode(wanted - sent), wanted)
    assert float((sent - wanted).abs().max()) < 0.05


def test_damaged_messages_of_top_k_decode_to_something_of_the_same_size() -> None:
    """A hundred times a thousand chunks, each with four other bytes. Block formats have their own test."""
    wire, random = TopKFormat(), torch.Generator().manual_seed(0)
    values = torch.randn(1000 * TopKFormat.CHUNK, generator=random)
    rows = wire.encode(values).view(1000, -1).clone()
    for _ in range(100):
        places = torch.randint(rows.shape[1], (1000, 4), generator=random)
        rows.scatter_(1, places, torch.randint(256, (1000, 4), generator=random, dtype=torch.uint8))
        assert wire.decode(rows.flatten(), values).shape == values.shape


@pytest.mark.parametrize("name", FORMATS)
def test_a_message_of_another_length_is_refused(name: str) -> None:
    wire, values = FORMATS[name], torch.randn(100)
    size = wire.num_bytes(values)
    with pytest.raises(MessageError) as caught:
        wire.decode(torch.zeros(size + 1, dtype=torch.uint8), values)
    assert str(caught.value) == (
        f"outer gradient of a site: '{size + 1} bytes', expected {size} bytes. "
        "Run the same version of ringweave on all ranks."
    )
