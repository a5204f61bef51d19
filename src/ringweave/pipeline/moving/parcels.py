"""Contents on their way from one rank to another: a header that says what follows, then each large tensor by itself.

Nothing is pickled. Small tensors (an optimizer's counters) travel in the header. Large ones are sent from where they
lie and received where they belong, by the process group's own threads, so that computing goes on meanwhile.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringweave.errors import TrainingError, explain
from ringweave.files import json_text
from ringweave.pipeline.moving import contents
from ringweave.pipeline.moving.contents import Contents

_SMALL_BYTES = 256
_MOST_HEADER_BYTES = 64 * 2**20

Header = Mapping[str, Any]


class Sending:
    """What one rank sends of one block; keeps tensors alive until they have left."""

    def __init__(self, what: Contents | None, error: str = "") -> None:
        self._large: list[Tensor] = []
        parts = {}
        for name, value in what.tensors.items() if what else ():
            parts[name] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            raw = contents.as_bytes(value)
            if len(raw) <= _SMALL_BYTES:
                parts[name]["data"] = base64.b64encode(raw.numpy().tobytes()).decode()
            else:
                self._large.append(raw)
        self._header = json.dumps({"error": error, "parts": parts, "facts": what.facts if what else {}}).encode()

    def send_header(self, dst: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Begin to send what says what follows."""
        raw = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        return _started(dist.isend(each, dst, group=group) for each in (torch.tensor([len(raw)]), raw))

    def send(self, dst: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Begin to send the large tensors."""
        return _started(dist.isend(raw, dst, group=group) for raw in self._large)


class Receiving:
    """What one rank receives of one block."""

    def __init__(self, header: Header, block: nn.Module) -> None:
        """Make room.

        Raises:
            TrainingError: What comes does not fit the block, or is described by something else than `Sending` writes.
        """
        self.arrived = Contents(facts=header["facts"])
        self._large: list[tuple[Tensor, Tensor]] = []
        try:
            for name, part in header["parts"].items():
                self._make_room(name, part, block)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            expected, do = "shape, dtype and data of each tensor", "Run the same version of ringweave on all ranks"
            raise TrainingError(explain("parts of a block", got=str(cause), expected=expected, do=do)) from cause

    def _make_room(self, name: str, part: Mapping[str, Any], block: nn.Module) -> None:
        form = torch.empty(part["shape"], dtype=getattr(torch, part["dtype"]), device="meta")
        own = contents.room_for(name, form, block)
        self.arrived.tensors[name] = own
        if "data" in part:
            raw = bytearray(base64.b64decode(part["data"]))
            if raw:
                own.copy_(torch.frombuffer(raw, dtype=own.dtype).reshape(own.shape))
        else:
            in_place = own.device.type == "cpu" and own.is_contiguous()
            self._large.append((own, own if in_place else torch.empty(own.shape, dtype=own.dtype)))

    def receive(self, src: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Begin to receive the large tensors."""
        return _started(
            dist.irecv(landing.reshape(-1).view(torch.uint8), src, group=group) for _, landing in self._large
        )

    def land(self) -> None:
        """All has come: put what landed elsewhere where it belongs."""
        for own, landing in self._large:
            if own is not landing:
                own.copy_(landing)


def receive_header(src: int, group: dist.ProcessGroup) -> Header:
    """Wait for a header.

    Raises:
        TrainingError: It is longer than any header, or something else.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src, group=group)
    if not 0 < int(length) <= _MOST_HEADER_BYTES:
        expected, do = f"1 to {_MOST_HEADER_BYTES}", "Run the same version of ringweave on all ranks"
        raise TrainingError(explain("bytes of a block's header", got=int(length), expected=expected, do=do))
    raw = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(raw, src, group=group)
    try:
        header = json_text.loads(raw.numpy().tobytes(), _MOST_HEADER_BYTES)
        return {"error": header["error"], "parts": header["parts"], "facts": header["facts"]}
    except (ValueError, TypeError, KeyError) as cause:
        expected, do = "JSON of what follows", "Run the same version of ringweave on all ranks"
        raise TrainingError(explain("header of a block", got=str(cause), expected=expected, do=do)) from cause


def _started(works: Any) -> list[dist.Work]:
    return [work for work in works if work is not None]
