"""The state of a job as named bytes in memory, for a newcomer to read from a peer: parameters, optimizer, position."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Buffer

from ringweave import wire
from ringweave.errors import RingweaveError, TrainingError, explain
from ringweave.training.elastic.joining import given
from ringweave.training.elastic.joining.given import Own
from ringweave.training.elastic.joining.reading import Reading
from ringweave.wire import states
from ringweave.wire.framing import frames
from ringweave.wire.pacing import Pace
from ringweave.wire.states import Description

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
        found[given.REST] = json.dumps(rest, default=_refuse).encode()
        return found

    def load(self, found: Mapping[str, memoryview]) -> None:
        """Take over what `to_buffers` gave: all of it, or nothing.

        Raises:
            MessageError: It is something else, or of another model or optimizer.
            TrainingError: Something does not go along that does here.
        """
        tensors, before = self._tensors(), self._optimizer.state_dict()
        fitting = given.read(found, Own(tensors=tensors, groups=before["param_groups"], carried=self._carried))
        carried = copy.deepcopy({name: each.state_dict() for name, each in self._carried.items()})
        try:
            self._load_rest(fitting.optimizer, fitting.carried)
        except Exception as cause:  # of classes that are the script's; what they have taken over they give back
            self._load_rest(before, carried)
            if isinstance(cause, RingweaveError):
                raise
            raise given.refusal(cause) from cause
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(fitting.tensors[name])

    def _tensors(self) -> dict[str, Tensor]:
        """Of the model and beside it, by name of the buffer."""
        found = {f"model/{name}": tensor for name, tensor in self._model.state_dict().items()}
        return found | {f"beside/{number}": tensor for number, tensor in enumerate(self._beside)}

    def _load_rest(self, optimizer: dict[str, Any], carried: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(optimizer)
        for name, each in self._carried.items():
            each.load_state_dict(carried[name])

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
            WireError: It could not be read, or is of another model or optimizer; nothing has changed.
            TrainingError: Something does not go along that does here; nothing has changed.
        """
        memory: dict[str, memoryview] = {}
        reading = reading or Reading()

        def place(description: Description) -> dict[str, memoryview]:
            given.check_sizes([(each.name, each.num_bytes) for each in description.pieces], self._tensors())
            reading.begin()
            memory.update({each.name: memoryview(bytearray(each.num_bytes)) for each in description.pieces})
            return memory

        with wire.Client.connect(host, port, trust, role="worker") as client:
            reading.attend(client)
            states.pull(client, name, place, timeout_s=timeout_s, wait_s=_WAIT_S, pace=pace)
        reading.take_over(lambda: self.load(memory))
        return sum(view.nbytes for view in memory.values())


def lasting(buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """A copy, which stays as it is when training goes on.

    numpy lets other threads run while it copies.
    """
    views = {name: frames.flat(each) for name, each in buffers.items()}
    return {name: np.frombuffer(view, np.uint8).copy().data if view.nbytes else b"" for name, view in views.items()}


def _bytes_of(tensor: Tensor) -> Buffer:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}


def _refuse(value: object) -> object:
    raise TrainingError(
        explain(
            "state that goes along",
            got=type(value).__name__,
            expected="numbers, texts, lists and dictionaries, or tensors of the optimizer",
            do="Let its state_dict give plain values",
        )
    )
