"""Checkpoint format: state as JSON with tensors beside it, and the states of the random number generators.

No pickle: write access to a checkpoint must not allow running code.

JSON's own values stand for themselves and a list for a list. Everything else is an object with one key that names its
kind: `{"map": [[key, value], ...]}`, `{"tuple": [...]}`, `{"tensor": name}`, `{"array": name}`, `{"bytes": hex}`,
`{"shards": [name, shape, dtype]}` of a tensor whose parts lie in the files of several ranks.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringweave.errors import TrainingError

MAX_DEPTH = 50
"""Limit of nested containers; the states of torch's own optimizers and schedules have five levels."""
SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the safetensors format."""
DTYPE_BY_NAME: Mapping[str, torch.dtype] = {str(each).removeprefix("torch."): each for each in SAFETENSORS_DTYPES}
"""Torch's own names; a name from outside is looked up here, so it cannot name another attribute of torch."""
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class SavedShards:
    """A tensor whose parts lie in the files of several ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name."""


class StateEncoder:
    """Encodes states as JSON; `tensors` holds the tensors found, not copied, by the path at which they stood."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return the JSON of a state.

        Args:
            value: Result of `state_dict`, or a part of it. Subclasses of dict become dicts.
            path: Path of the value, such as `optimizer.state.0`; names tensors, and values that cannot be saved.
            depth: Number of containers around it.

        Raises:
            TrainingError: JSON and tensors cannot hold a value in it.
        """
        if depth > MAX_DEPTH:
            raise _encoding_error(path, f"{depth} containers in each other", f"at most {MAX_DEPTH}")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, _SCALARS):
            return value
        if isinstance(value, Mapping):
            return {
                "map": [
                    [_encode_key(key, path), self._encode_item(each, path, key, depth)] for key, each in value.items()
                ]
            }
        if isinstance(value, (list, tuple)):
            found = [self._encode_item(each, path, place, depth) for place, each in enumerate(value)]
            return found if isinstance(value, list) else {"tuple": found}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, np.ndarray):
            return {"array": self._add_tensor(_array_to_tensor(value, path), path)}
        if isinstance(value, Tensor):
            return self.encode_tensor(value.detach(), path)
        raise _encoding_error(path, type(value).__name__, "numbers, text, tensors, and lists and dicts of them")

    def encode_tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        """Return the JSON of a tensor."""
        return {"tensor": self._add_tensor(tensor, path)}

    def _encode_item(self, value: Any, path: str, key: object, depth: int) -> Any:
        return self.encode(value, f"{path}.{key}", depth + 1)

    def _add_tensor(self, tensor: Tensor, path: str) -> str:
        if (
            tensor.dtype not in SAFETENSORS_DTYPES
            or tensor.layout != torch.strided
            or hasattr(tensor, "__tensor_flatten__")
        ):
            got = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
            raise _encoding_error(path, got, "a dense tensor that is whole on this rank")
        name = path
        while name in self.tensors:  # as of {0: ..., "0": ...}
            name += "'"
        self.tensors[name] = tensor
        return name


def decode_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode an encoded state; its tensors are those given, not copies.

    Raises:
        ValueError: `StateEncoder` did not write it.
    """
    if isinstance(tree, list):
        return [decode_state(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    match list(tree.items()):
        case [("map", list(pairs))]:
            return dict(_decode_pair(pair, tensors) for pair in pairs)
        case [("tuple", list(items))]:
            return tuple(decode_state(each, tensors) for each in items)
        case [("bytes", str(digits))]:
            return bytes.fromhex(digits)
        case [("tensor" | "array" as form, str(name))] if name in tensors:
            return tensors[name] if form == "tensor" else tensors[name].numpy()
        case [("shards", [str(name), list(shape), str(dtype)])] if dtype in DTYPE_BY_NAME:
            return SavedShards(name, tuple(map(int, shape)), dtype)
    raise ValueError(f"an object of keys {sorted(tree)[:4]}")


def _decode_pair(pair: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    match pair:
        case [str() | int() | float() | None as key, value]:
            return key, decode_state(value, tensors)
    raise ValueError("a map whose entries are not pairs of key and value")


def _encode_key(key: Any, path: str) -> Any:
    if isinstance(key, np.generic):
        key = key.item()
    if not isinstance(key, _SCALARS):
        raise _encoding_error(path, f"the key {key!r}", "keys that are text or numbers")
    return key


def _array_to_tensor(array: np.ndarray, path: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except TypeError as error:
        raise _encoding_error(path, f"an array of {array.dtype}", "an array of numbers") from error


def _encoding_error(path: str, got: str, expected: str) -> TrainingError:
    do = "Leave it out of the state, or save it on your own"
    return TrainingError(f"state of {path}", got=got, expected=expected, do=do)


def capture_rng_state(gpu: torch.device | None = None) -> dict[str, Any]:
    """Return the states of the random number generators; of one GPU's too, if a GPU is in use.

    `gpu` is the model's; None is the current one of this thread.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(gpu or "cuda") if torch.cuda.is_initialized() else None,
    }


def restore_rng_state(state: dict[str, Any], gpu: torch.device | None = None) -> None:
    """Restore the states of the generators; the GPU's if a GPU is in use on both sides."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], gpu or "cuda")
