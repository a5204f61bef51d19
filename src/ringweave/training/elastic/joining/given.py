"""What a peer gives as its state: read and checked whole, before anything here is changed by it.

Whoever has credentials of the job may be the peer. What it gives fits this job, or is refused; that numbers are right
nobody can see.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringweave.errors import MessageError, TrainingError, explain
from ringweave.files import json_text
from ringweave.training.checkpoints import encoding

REST = "rest"
"""The buffer that says, in JSON, what is no tensor, and of the optimizer's tensors what they are."""
MAX_REST_BYTES = json_text.MAX_BYTES
MOST_TIMES = 16
"""Bytes of an optimizer's state, by those of the parameters: more than any has that is known."""
_DTYPES = {**encoding.BY_NAME, "complex128": torch.complex128}


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """What there is here for a state to be taken over by."""

    tensors: Mapping[str, Tensor]
    """Of the model, and beside it, by name of the buffer."""
    groups: Sequence[Mapping[str, Any]]
    """Of the optimizer, as its `state_dict` has them."""
    carried: Collection[str]
    """Names of what goes along."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A state that fits."""

    tensors: dict[str, Tensor]
    """Of the model, and beside it, like our own; over the memory that was read."""
    optimizer: dict[str, Any]
    """For `load_state_dict`."""
    carried: dict[str, Any]
    """By name; for `load_state_dict` of each."""


def check_sizes(sizes: Sequence[tuple[str, int]], tensors: Mapping[str, Tensor]) -> None:
    """Refuse what cannot be this job's state before there is memory for it.

    Args:
        sizes: Name and bytes of each buffer that a peer offers.
        tensors: As of `Own`.

    Raises:
        MessageError: The names or sizes are others.
    """
    named, own = dict(sizes), {name: tensor.nbytes for name, tensor in tensors.items()}
    theirs = {name: size for name, size in sizes if name.startswith(("model/", "beside/"))}
    total, most = sum(size for _, size in sizes), MOST_TIMES * sum(own.values()) + MAX_REST_BYTES
    what, do = "state of a peer", "Run the same script on all workers"
    if theirs != own or total > most or REST not in named or len(named) < len(sizes):
        got = sorted(set(theirs.items()) ^ set(own.items()))[:4] or total
        raise MessageError(explain(what, got=got, expected="tensors of the same names and sizes as here", do=do))
    if named[REST] > MAX_REST_BYTES:
        do = "Let what goes along have a smaller state"
        got, expected = f"{named[REST]} bytes beside tensors", f"at most {MAX_REST_BYTES}"
        raise MessageError(explain(what, got=got, expected=expected, do=do))


def read(found: Mapping[str, memoryview], own: Own) -> Given:
    """What is in the buffers of a peer.

    Raises:
        MessageError: They are no state, or that of another model or optimizer.
        TrainingError: Something does not go along that does here.
    """
    try:
        rest = json_text.loads(bytes(found[REST]), MAX_REST_BYTES)
        optimizer, groups, carried = (rest[key] for key in ("optimizer", "groups", "carried"))
        _check_kinds({"optimizer": optimizer, "carried": carried})
        given = Given(
            tensors={name: _over(found[name], each.dtype, list(each.shape)) for name, each in own.tensors.items()},
            optimizer={"state": _state_of(optimizer, found, own), "param_groups": _groups_of(groups, own)},
            carried=carried,
        )
        _check_names(found, {REST, *own.tensors, *_tensors_in(optimizer)})
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as cause:
        raise refusal(cause) from cause
    if missing := sorted(set(own.carried) - given.carried.keys()):
        raise TrainingError(
            explain(
                "what goes along with the state",
                got=sorted(given.carried),
                expected=f"{', '.join(missing)} as well",
                do="Give prepare the same on all workers",
            )
        )
    return given


def refusal(cause: Exception) -> MessageError:
    """What a peer has given cannot be taken over, for this reason."""
    do = "Run the same script and the same ringweave on all workers; it is read again from another one"
    expected = "one of the same model, optimizer and what goes along"
    return MessageError(explain("state of a peer", got=f"{type(cause).__name__}: {cause}", expected=expected, do=do))


def _check_kinds(objects: Mapping[str, object]) -> None:
    for name, each in objects.items():
        if not isinstance(each, dict):
            raise TypeError(f"{name} is no object")


def _check_names(found: Mapping[str, object], known: set[str]) -> None:
    if found.keys() != known:
        raise ValueError(f"also {sorted(found.keys() - known)[:4]}")


def _tensors_in(optimizer: Mapping[str, Any]) -> list[str]:
    """Names of the buffers of an optimizer's tensors."""
    told = [(index, name, said) for index, values in optimizer.items() for name, said in values.items()]
    return [f"optimizer/{index}/{name}" for index, name, said in told if "tensor" in said]


def _state_of(optimizer: Mapping[str, Any], found: Mapping[str, memoryview], own: Own) -> dict[int, dict[str, Any]]:
    """Of each parameter, by its place in the groups."""
    places = {str(place): place for group in own.groups for place in group["params"]}
    return {
        places[index]: {name: _value_of(said, found, f"optimizer/{index}/{name}") for name, said in values.items()}
        for index, values in optimizer.items()
    }


def _value_of(said: Mapping[str, Any], found: Mapping[str, memoryview], key: str) -> Any:
    match said:
        case {"value": value, **others} if not others:
            return value
        case {"tensor": {"dtype": str(dtype), "shape": list(shape), **more}, **others} if not others and not more:
            return _over(found[key], _DTYPES[dtype], shape).clone()
    raise ValueError(f"{key} is neither a value nor a tensor")


def _over(view: memoryview, dtype: torch.dtype, shape: Sequence[Any]) -> Tensor:
    """A tensor over the memory."""
    is_shape = all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) * dtype.itemsize != view.nbytes:
        raise ValueError(f"{view.nbytes} bytes for {dtype} of shape {shape}")
    flat = torch.from_numpy(np.frombuffer(view, np.uint8)) if view.nbytes else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(tuple(shape))


def _groups_of(groups: Any, own: Own) -> list[dict[str, Any]]:
    """The optimizer's groups, of the same parameters as here, and with all the options that they have here."""
    _check_kinds({f"group {place}": group for place, group in enumerate(groups)})
    if [group["params"] for group in groups] != [list(group["params"]) for group in own.groups]:
        raise ValueError("groups of other parameters")
    for theirs, ours in zip(groups, own.groups, strict=True):
        for name, value in ours.items():
            if not _is_alike(value, theirs[name]):
                raise TypeError(f"{name} is {theirs[name]!r}")
    return [_tuples(each) for each in groups]


def _is_alike(ours: Any, theirs: Any) -> bool:
    """Numbers stay numbers; of whatever else no one knows."""
    if isinstance(ours, Tensor):
        ours = ours.tolist()
    if isinstance(ours, list | tuple):
        return isinstance(theirs, list) and (len(ours) == len(theirs) and all(map(_is_alike, ours, theirs)))
    if isinstance(ours, int | float) and not isinstance(ours, bool):
        return isinstance(theirs, int | float) and not isinstance(theirs, bool)
    return True


def _tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; options such as betas are."""
    return {key: tuple(v) if isinstance(v, list) and key != "params" else v for key, v in group.items()}
