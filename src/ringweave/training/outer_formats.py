"""Formats of outer gradients between sites: exact, the wire formats of schedules, and top-k."""

import abc

import torch
from torch import Tensor

from ringweave.errors import MessageError
from ringweave.schedules import wire_formats
from ringweave.schedules.wire_formats import WireFormat


class OuterFormat(abc.ABC):
    """Format in which the values of an outer gradient travel, (num_values,) float32 or float64."""

    is_exact = False

    @abc.abstractmethod
    def num_bytes(self, values: Tensor) -> int:
        """Return the length of the message with so many values of this dtype."""

    @abc.abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Return the message, (num_bytes,) uint8."""

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """Return the values of a message, of the shape and dtype of `like`; all bytes decode to something.

        Raises:
            MessageError: The message has another length; nothing has been allocated by then.
        """
        expected = self.num_bytes(like)
        if message.dtype != torch.uint8 or message.shape != (expected,):
            do = "Run the same version of ringweave on all ranks"
            got = f"{message.nbytes} bytes"
            raise MessageError("outer gradient of a site", got=got, expected=f"{expected} bytes", do=do)
        return self._decode(message, like)

    @abc.abstractmethod
    def _decode(self, message: Tensor, like: Tensor) -> Tensor:
        """Return the values of a message of the right length."""


class ExactFormat(OuterFormat):
    """Values as they are."""

    is_exact = True

    def num_bytes(self, values: Tensor) -> int:
        return values.nbytes

    def encode(self, values: Tensor) -> Tensor:
        return values.view(torch.uint8)

    def _decode(self, message: Tensor, like: Tensor) -> Tensor:
        return message.clone().view(like.dtype)  # a view has to begin at a multiple of the size of an element


class BlockFormat(OuterFormat):
    """A wire format of schedules: few bits a value, a scale for each block."""

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire

    def num_bytes(self, values: Tensor) -> int:
        return self._wire.encoded_bytes(values.numel())

    def encode(self, values: Tensor) -> Tensor:
        message = torch.empty(self.num_bytes(values), dtype=torch.uint8)
        wire_formats.encode(self._wire, values.float().numpy(), message.numpy())
        return message

    def _decode(self, message: Tensor, like: Tensor) -> Tensor:
        values = torch.empty(like.shape, dtype=torch.float32)
        wire_formats.decode(self._wire, message.numpy(), values.numpy())
        return values.to(like.dtype)


class TopKFormat(OuterFormat):
    """The largest values of each chunk, in two bits each: sign, and one of two magnitudes of the chunk.

    ```text
    values    for each chunk of 4096: 2 magnitudes as float32, 64 places of 12 bits, 64 codes of 2 bits: 120 bytes
    ```

    Source: SparseLoCo (arXiv 2603.08163), which sends a 64th of the values in two bits.
    """

    CHUNK, NUM_SENT = 4096, 64
    _LEVEL_BYTES, _PLACE_BYTES, _CODE_BYTES = 8, 96, 16
    _CHUNK_BYTES = 120

    def num_bytes(self, values: Tensor) -> int:
        return -(-values.numel() // self.CHUNK) * self._CHUNK_BYTES

    def encode(self, values: Tensor) -> Tensor:
        chunks = torch.nn.functional.pad(values.float(), (0, -values.numel() % self.CHUNK)).view(-1, self.CHUNK)
        places = chunks.abs().topk(self.NUM_SENT, dim=1).indices
        sent = chunks.gather(1, places)
        sizes = sent.abs()
        is_high = sizes >= sizes.mean(dim=1, keepdim=True)
        high = (sizes * is_high).sum(1) / is_high.sum(1).clamp_min(1)
        low = (sizes * ~is_high).sum(1) / (~is_high).sum(1).clamp_min(1)
        levels = torch.stack((low, high), dim=1).view(torch.uint8)
        codes = (2 * (sent < 0) + is_high).to(torch.uint8).view(-1, self._CODE_BYTES, 4)
        packed = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
        return torch.cat((levels, _pack_12_bits(places), packed), dim=1).flatten()

    def _decode(self, message: Tensor, like: Tensor) -> Tensor:
        rows = message.view(-1, self._CHUNK_BYTES)
        levels, places, packed = rows.split((self._LEVEL_BYTES, self._PLACE_BYTES, self._CODE_BYTES), dim=1)
        codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1).long()
        sizes = levels.clone().view(torch.float32).gather(1, codes & 1)
        sent = torch.where(codes >= 2, -sizes, sizes)
        chunks = torch.zeros((len(rows), self.CHUNK)).scatter(1, _unpack_12_bits(places), sent)
        return chunks.flatten()[: like.numel()].to(like.dtype)


def _pack_12_bits(numbers: Tensor) -> Tensor:
    """Return pairs of numbers below 4096 in three bytes each: (rows, n) int64 -> (rows, 3 n / 2) uint8."""
    first, second = numbers[:, ::2], numbers[:, 1::2]
    return torch.stack((first & 255, first >> 8 | (second & 15) << 4, second >> 4), dim=2).flatten(1).to(torch.uint8)


def _unpack_12_bits(content: Tensor) -> Tensor:
    low, middle, high = content.long().view(len(content), -1, 3).unbind(2)
    return torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), dim=2).flatten(1)


FORMATS: dict[str, OuterFormat] = {
    "exact": ExactFormat(),
    **{each.name: BlockFormat(each) for each in wire_formats.FORMATS.values() if each is not wire_formats.EXACT},
    "top-k": TopKFormat(),
}
"""Formats by the names that users type."""
