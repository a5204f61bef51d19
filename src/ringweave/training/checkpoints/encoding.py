"""State as JSON and tensors beside it. No pickle: whoever can write a checkpoint must not be able to run code.

JSON's own values stand for themselves and a list for a list. Whatever else there is is an object with one key that says
what: `{"map": [[key, value], ...]}`, `{"tuple": [...]}`, `{"tensor": name}`, `{"array": name}`, `{"bytes": hex}`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringweave.errors import TrainingError, explain

MAX_DEPTH = 50
"""Of containers in containers; the states of torch's own optimizers and schedules have five."""
DTYPES: Mapping[torch.dtype, str] = {
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
"""As the safetensors format names them."""
BY_NAME: Mapping[str, torch.dtype] = {str(each).removeprefix("torch."): each for each in DTYPES}
"""As torch names them: a name from outside is looked up here, and is none of torch's other attributes."""
_SCALARS = (str, int, float, bool, type(None))


class Encoder:
    """Takes states apart; `tensors` are what it found, by names that say where, still in their places."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, where: str, depth: int = 0) -> Any:
        """The JSON of a state.

        Args:
            value: What `state_dict` returned, or a part of it. Subclasses of dict become dicts.
            where: Where it is, such as `optimizer.state.0`; names the tensors, and what cannot be saved.
            depth: How many containers it is in.

        Raises:
            TrainingError: There is something in it that JSON and tensors cannot hold.
        """
        if depth > MAX_DEPTH:
            raise _refusal(where, f"{depth} containers in each other", f"at most {MAX_DEPTH}")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, _SCALARS):
            return value
        if isinstance(value, Mapping):
            return {"map": [[_key(key, where), self._inner(each, where, key, depth)] for key, each in value.items()]}
        if isinstance(value, (list, tuple)):
            found = [self._inner(each, where, place, depth) for place, each in enumerate(value)]
            return found if isinstance(value, list) else {"tuple": found}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, np.ndarray):
            return {"array": self._put(_to_tensor(value, where), where)}
        if isinstance(value, Tensor):
            return {"tensor": self._put(value.detach(), where)}
        raise _refusal(where, type(value).__name__, "numbers, text, tensors, and lists and dicts of them")

    def _inner(self, value: Any, where: str, key: object, depth: int) -> Any:
        return self.encode(value, f"{where}.{key}", depth + 1)

    def _put(self, tensor: Tensor, where: str) -> str:
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
            got = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
            raise _refusal(where, got, "a dense tensor that is whole on this rank")
        name = where
        while name in self.tensors:  # as of {0: ..., "0": ...}
            name += "'"
        self.tensors[name] = tensor
        return name


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was encoded; the tensors are those given, not copies.

    Raises:
        ValueError: It is nothing that `Encoder` wrote.
    """
    if isinstance(tree, list):
        return [decode(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    match list(tree.items()):
        case [("map", list(pairs))]:
            return dict(_pair(pair, tensors) for pair in pairs)
        case [("tuple", list(items))]:
            return tuple(decode(each, tensors) for each in items)
        case [("bytes", str(digits))]:
            return bytes.fromhex(digits)
        case [("tensor" | "array" as form, str(name))] if name in tensors:
            return tensors[name] if form == "tensor" else tensors[name].numpy()
    raise ValueError(f"an object of keys {sorted(tree)[:4]}")


def _pair(pair: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    match pair:
        case [str() | int() | float() | None as key, value]:
            return key, decode(value, tensors)
    raise ValueError("a map whose entries are not pairs of key and value")


def _key(key: Any, where: str) -> Any:
    if isinstance(key, np.generic):
        key = key.item()
    if not isinstance(key, _SCALARS):
        raise _refusal(where, f"the key {key!r}", "keys that are text or numbers")
    return key


def _to_tensor(array: np.ndarray, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except TypeError as error:
        raise _refusal(where, f"an array of {array.dtype}", "an array of numbers") from error


def _refusal(where: str, got: str, expected: str) -> TrainingError:
    do = "Leave it out of the state, or save it on your own"
    return TrainingError(explain(f"state of {where}", got=got, expected=expected, do=do))
