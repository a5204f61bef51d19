"""The state of a job as named bytes in memory, for a newcomer to read from a peer: parameters, optimizer, position."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Buffer

from ringweave import wire
from ringweave.errors import TrainingError, WireError, explain
from ringweave.training.elastic.joining.reading import Reading
from ringweave.wire import states
from ringweave.wire.framing import frames
from ringweave.wire.pacing import Pace
from ringweave.wire.states import Description

_REST = "rest"
_MAX_REST_BYTES = 64 << 20
_MOST_TIMES = 16
"""Bytes of an optimizer's state, by those of the parameters: more than any has that is known."""
_WAIT_S = 60.0
"""How long a peer may take to offer what it has promised: it copies it while it goes on with its next step."""


class JobState:
    """Gives and takes the state of one model and its optimizer, and whatever else has `state_dict` and goes along."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, carried: Mapping[str, Any], *, beside: Sequence[Tensor] = ()
    ) -> None:
        """What there is of it.

        Args:
            model: With its parameters and buffers.
            optimizer: Likewise.
            carried: Further objects with `state_dict` and `load_state_dict` of plain values, such as schedulers.
            beside: Further tensors of that which trains, the same on all members between two steps.
        """
        self._model, self._optimizer, self._carried, self._beside = model, optimizer, carried, list(beside)

    def to_buffers(self) -> dict[str, Buffer]:
        """Everything, by name. Parameters and optimizer state where they lie, if they are on the CPU; the rest copied.

        They must not change while peers read them; forward and backward passes change none of them.
        """
        parameters = dict(self._model.named_parameters())
        found: dict[str, Buffer] = {}
        for name, tensor in self._model.state_dict().items():
            found[f"model/{name}"] = _bytes_of(tensor if name in parameters else tensor.clone())
        found |= {f"beside/{number}": _bytes_of(tensor) for number, tensor in enumerate(self._beside)}
        saved = self._optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for index, values in saved["state"].items():
            for name, value in values.items():
                said: dict[str, Any] = {"value": value}
                if isinstance(value, Tensor):
                    found[f"optimizer/{index}/{name}"] = _bytes_of(value)
                    said = {"tensor": {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}}
                plain.setdefault(str(index), {})[name] = said
        rest = {
            "optimizer": plain,
            "groups": [_plain(group) for group in saved["param_groups"]],
            "carried": {name: each.state_dict() for name, each in self._carried.items()},
        }
        found[_REST] = json.dumps(rest, default=_refuse).encode()
        return found

    def load(self, found: Mapping[str, memoryview]) -> None:
        """Take over what `to_buffers` gave.

        Raises:
            TrainingError: It is of another model or optimizer.
        """
        rest = json.loads(bytes(found[_REST]))
        own = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(_tensor_of(found[f"model/{name}"], tensor.dtype, tuple(tensor.shape)))
            for number, tensor in enumerate(self._beside):
                tensor.copy_(_tensor_of(found[f"beside/{number}"], tensor.dtype, tuple(tensor.shape)))
        values = {
            int(index): {
                name: _tensor_of(
                    found[f"optimizer/{index}/{name}"], getattr(torch, said["tensor"]["dtype"]), said["tensor"]["shape"]
                )
                if "tensor" in said
                else said["value"]
                for name, said in each.items()
            }
            for index, each in rest["optimizer"].items()
        }
        self._optimizer.load_state_dict({"state": values, "param_groups": [_tuples(each) for each in rest["groups"]]})
        for name, each in self._carried.items():
            if name not in rest["carried"]:
                raise TrainingError(
                    explain(
                        "what goes along with the state",
                        got=sorted(rest["carried"]),
                        expected=f"{name} as well",
                        do="Give prepare the same on all workers",
                    )
                )
            each.load_state_dict(rest["carried"][name])

    def pull(
        self,
        host: str,
        port: int,
        trust: wire.Trust,
        name: str,
        *,
        timeout_s: float,
        pace: Pace | None = None,
        reading: Reading | None = None,
    ) -> int:
        """Read all of it from a peer, and take it over once all of it is there and right.

        Args:
            host: Of the peer.
            port: Of the peer.
            trust: Who is let in.
            name: Under which the peer offers it, now or soon.
            timeout_s: Seconds for all of it.
            pace: How fast; None means as fast as the link lets it.
            reading: What may be given up meanwhile; None means that nobody does.

        Returns:
            Bytes that were read.

        Raises:
            WireError: It could not be read; nothing has changed.
            TrainingError: It is of another model or optimizer.
        """
        memory: dict[str, memoryview] = {}
        reading = reading or Reading()

        def place(description: Description) -> dict[str, memoryview]:
            self._check(description)
            reading.begin()
            memory.update({each.name: memoryview(bytearray(each.num_bytes)) for each in description.pieces})
            return memory

        with wire.Client.connect(host, port, trust, role="worker") as client:
            reading.attend(client)
            states.pull(client, name, place, timeout_s=timeout_s, wait_s=_WAIT_S, pace=pace)
        reading.take_over(lambda: self.load(memory))
        return sum(view.nbytes for view in memory.values())

    def _check(self, description: Description) -> None:
        """Refuse what cannot be this job's before there is memory for it."""
        own = {f"model/{name}": tensor.nbytes for name, tensor in self._model.state_dict().items()}
        own |= {f"beside/{number}": tensor.nbytes for number, tensor in enumerate(self._beside)}
        sizes = {piece.name: piece.num_bytes for piece in description.pieces}
        theirs = {name: size for name, size in sizes.items() if name.startswith(("model/", "beside/"))}
        most = _MOST_TIMES * sum(own.values()) + _MAX_REST_BYTES
        if theirs != own or sum(sizes.values()) > most or _REST not in sizes:
            differing = sorted(set(theirs.items()) ^ set(own.items()))[:4]
            raise WireError(
                explain(
                    "state of a peer",
                    got=differing or sum(sizes.values()),
                    expected="tensors of the same names and sizes as here",
                    do="Run the same script on all workers",
                )
            )


def lasting(buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """A copy, which stays as it is when training goes on.

    numpy lets other threads run while it copies.
    """
    views = {name: frames.flat(each) for name, each in buffers.items()}
    return {name: np.frombuffer(view, np.uint8).copy().data if view.nbytes else b"" for name, view in views.items()}


def _bytes_of(tensor: Tensor) -> Buffer:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _tensor_of(view: memoryview, dtype: torch.dtype, shape: Any) -> Tensor:
    flat = torch.from_numpy(np.frombuffer(view, np.uint8)) if view.nbytes else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).clone()


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}


def _tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; options such as betas are."""
    return {key: tuple(v) if isinstance(v, list) and key != "params" else v for key, v in group.items()}


def _refuse(value: object) -> object:
    raise TrainingError(
        explain(
            "state that goes along",
            got=type(value).__name__,
            expected="numbers, texts, lists and dictionaries, or tensors of the optimizer",
            do="Let its state_dict give plain values",
        )
    )
