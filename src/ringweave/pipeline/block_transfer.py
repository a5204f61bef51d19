"""Transfer of one block between ranks: everything that belongs to it, as named tensors and JSON metadata.

State (parameters, optimizer state) changes only in the optimizer's step. Changes (gradients, buffers, extra state) come
with every forward and backward. Random numbers need no transfer: they follow from the run's seed, the block's index,
the train step and the microbatch. Nothing is pickled. Small tensors travel in the header. Large tensors are sent from
and received into their final memory by the process group's own threads, so computing continues meanwhile.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from ringweave.errors import TrainingError, explain
from ringweave.files import file_io
from ringweave.pipeline import block_store

_PLAIN_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class BlockContents:
    """Tensors by name, and JSON metadata."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def block_state(block: nn.Module, optimizer: Optimizer | None) -> BlockContents:
    """Contents of a block that change only in the optimizer's step: parameters and optimizer state.

    Raises:
        TrainingError: The optimizer's state contains something else than tensors and plain values.
    """
    found = BlockContents({f"parameter {name}": value.detach() for name, value in block.named_parameters()})
    found.metadata["requires_grad"] = {name: value.requires_grad for name, value in block.named_parameters()}
    kept = found.metadata["optimizer"] = {}
    for place, parameter in enumerate(_optimizer_parameters(optimizer)):
        for name, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            key = f"optimizer {place} {name}"
            if isinstance(value, Tensor):
                found.tensors[key] = value.detach()
                kept[key] = {"place": place, "name": name, "device": value.device.type}
            elif isinstance(value, _PLAIN_TYPES):
                kept[key] = {"place": place, "name": name, "value": value}
            else:
                do = "Train with an optimizer whose state can be moved, or without a controller"
                expected = "a tensor, a number, a text or nothing"
                raise TrainingError(explain(f"optimizer's {name}", got=value, expected=expected, do=do))
    return found


def block_changes(block: nn.Module) -> BlockContents:
    """Contents of a block that change in forward and backward: gradients, buffers, extra state.

    Raises:
        TrainingError: A gradient is sparse.
    """
    found = BlockContents({f"buffer {name}": value.detach() for name, value in block.named_buffers()})
    for name, parameter in block.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            do = "Use dense gradients (sparse=False)"
            expected = "a dense one"
            raise TrainingError(explain(f"gradient of {name}", got=parameter.grad.layout, expected=expected, do=do))
        found.tensors[f"gradient {name}"] = parameter.grad.detach()
    for name, value in block_store.extra_states(block):
        found.tensors[f"extra {name}"] = value
    return found


def destination_tensor(name: str, spec: Tensor, block: nn.Module) -> Tensor:
    """Destination of an arriving tensor: the block's own tensor if it has one of that name, else new memory.

    Raises:
        TrainingError: The block's own tensor has another shape or type.
    """
    kind, _, key = name.partition(" ")
    parameters, buffers = dict(block.named_parameters()), dict(block.named_buffers())
    own = parameters.get(key) if kind == "parameter" else buffers.get(key) if kind == "buffer" else None
    if own is None and kind in ("parameter", "buffer"):
        do = "Give the same blocks on all ranks"
        raise TrainingError(explain(f"{name} of a block that arrives", got="unknown here", expected="known", do=do))
    if own is None:
        return torch.empty(spec.shape, dtype=spec.dtype)
    if (own.shape, own.dtype) != (spec.shape, spec.dtype):
        got, expected = (tuple(spec.shape), spec.dtype), f"{tuple(own.shape)}, {own.dtype}, as it is here"
        do = "Give the same blocks on all ranks, and keep the shapes of buffers"
        raise TrainingError(explain(f"{name} of a block that arrives", got=got, expected=expected, do=do))
    return own.detach()


def load_optimizer_state(optimizer: Optimizer | None, received: BlockContents) -> None:
    """Load the previous holder's optimizer state into a new block's optimizer, without converting types."""
    parameters = _optimizer_parameters(optimizer)
    for key, entry in received.metadata["optimizer"].items():
        assert optimizer is not None
        parameter = parameters[entry["place"]]
        value = entry.get("value")
        if key in received.tensors:
            device = parameter.device if entry["device"] != "cpu" else torch.device("cpu")
            value = received.tensors[key].to(device)
        optimizer.state[parameter][entry["name"]] = value


def load_changes(block: nn.Module, received: BlockContents) -> None:
    """Set gradients and extra state; buffers were received in place."""
    parameters = dict(block.named_parameters())
    for name, value in received.tensors.items():
        kind, _, key = name.partition(" ")
        if kind == "gradient":
            parameters[key].grad = value.to(parameters[key].device)
        elif kind == "extra":
            block_store.set_extra_state(block, key, value)


def block_digest(block: nn.Module, optimizer: Optimizer | None) -> int:
    """Digest of a block in 63 bits, without gradients, which are spent; equal bits give equal digests."""
    state, changes = block_state(block, optimizer), block_changes(block)
    found = xxhash.xxh3_64(repr(sorted(state.metadata["optimizer"].items())).encode())
    for contents in (state, changes):
        for name, value in sorted(contents.tensors.items()):
            if not name.startswith("gradient "):
                found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
                found.update(tensor_bytes(value).numpy().data)
    return found.intdigest() >> 1


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Bytes of a tensor in CPU memory, uint8 [bytes]; a view if the tensor is contiguous there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _optimizer_parameters(optimizer: Optimizer | None) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]] if optimizer else []


_MAX_INLINE_BYTES = 256
_MAX_HEADER_BYTES = 64 * 2**20

BlockHeader = Mapping[str, Any]


class BlockSender:
    """Sends one block; keeps its tensors alive until they have left."""

    def __init__(self, block_contents: BlockContents | None, error: str = "") -> None:
        self._large_tensors: list[Tensor] = []
        parts = {}
        for name, value in block_contents.tensors.items() if block_contents else ():
            parts[name] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            raw = tensor_bytes(value)
            if len(raw) <= _MAX_INLINE_BYTES:
                parts[name]["data"] = base64.b64encode(raw.numpy().tobytes()).decode()
            else:
                self._large_tensors.append(raw)
        self._header = json.dumps(
            {"error": error, "parts": parts, "facts": block_contents.metadata if block_contents else {}}
        ).encode()

    def send_header(self, dst: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start sending the header, which describes the large tensors."""
        raw = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        return _without_none(dist.isend(each, dst, group=group) for each in (torch.tensor([len(raw)]), raw))

    def send_tensors(self, dst: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start sending the large tensors."""
        return _without_none(dist.isend(raw, dst, group=group) for raw in self._large_tensors)


class BlockReceiver:
    """Receives one block."""

    def __init__(self, header: BlockHeader, block: nn.Module) -> None:
        """Allocate memory for the tensors that the header describes.

        Raises:
            TrainingError: A tensor does not fit the block, or the header has another format.
        """
        self.received = BlockContents(metadata=header["facts"])
        self._large_tensors: list[tuple[Tensor, Tensor]] = []
        try:
            for name, part in header["parts"].items():
                self._allocate(name, part, block)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            expected, do = "shape, dtype and data of each tensor", "Run the same version of ringweave on all ranks"
            raise TrainingError(explain("parts of a block", got=str(cause), expected=expected, do=do)) from cause

    def _allocate(self, name: str, part: Mapping[str, Any], block: nn.Module) -> None:
        spec = torch.empty(part["shape"], dtype=getattr(torch, part["dtype"]), device="meta")
        own = destination_tensor(name, spec, block)
        self.received.tensors[name] = own
        if "data" in part:
            raw = bytearray(base64.b64decode(part["data"]))
            if raw:
                own.copy_(torch.frombuffer(raw, dtype=own.dtype).reshape(own.shape))
        else:
            in_place = own.device.type == "cpu" and own.is_contiguous()
            self._large_tensors.append((own, own if in_place else torch.empty(own.shape, dtype=own.dtype)))

    def receive_tensors(self, src: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start receiving the large tensors."""
        return _without_none(
            dist.irecv(buffer.reshape(-1).view(torch.uint8), src, group=group) for _, buffer in self._large_tensors
        )

    def copy_into_place(self) -> None:
        """Copy received tensors from their buffers to where they belong."""
        for own, buffer in self._large_tensors:
            if own is not buffer:
                own.copy_(buffer)


def receive_header(src: int, group: dist.ProcessGroup) -> BlockHeader:
    """Wait for a header.

    Raises:
        TrainingError: It is too long, or has another format.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src, group=group)
    if not 0 < int(length) <= _MAX_HEADER_BYTES:
        expected, do = f"1 to {_MAX_HEADER_BYTES}", "Run the same version of ringweave on all ranks"
        raise TrainingError(explain("bytes of a block's header", got=int(length), expected=expected, do=do))
    raw = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(raw, src, group=group)
    try:
        header = file_io.parse_json(raw.numpy().tobytes(), _MAX_HEADER_BYTES)
        return {"error": header["error"], "parts": header["parts"], "facts": header["facts"]}
    except (ValueError, TypeError, KeyError) as cause:
        expected, do = "JSON of what follows", "Run the same version of ringweave on all ranks"
        raise TrainingError(explain("header of a block", got=str(cause), expected=expected, do=do)) from cause


def _without_none(works: Any) -> list[dist.Work]:
    return [work for work in works if work is not None]
