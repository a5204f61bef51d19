"""Training state as named buffers that a joining member reads from a peer: parameters, optimizer, extra objects.

A peer's state is read and checked as a whole before anything is changed here. Any holder of the job's credentials may
be the peer. A state that does not fit this job is refused; wrong numbers in it cannot be detected.
"""

import copy
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Buffer

from ringweave import rpc
from ringweave.comm.peer_data import BackgroundCall
from ringweave.errors import ConnectionLostError, MessageError, RingweaveError, TrainingError
from ringweave.files import file_io
from ringweave.rpc import RpcClient, framing, state_transfer
from ringweave.rpc.state_transfer import ReadThrottle, StateDescription
from ringweave.training.checkpoints import format

REST_BUFFER = "rest"
"""Name of the buffer with everything that is no tensor, as JSON, and with the types of the optimizer's tensors."""
MAX_REST_BYTES = file_io.MAX_JSON_BYTES
MAX_OPTIMIZER_FACTOR = 16
"""Limit of the optimizer state's bytes, in multiples of the parameters': more than any known optimizer needs."""
_STATE_DTYPES = {**format.DTYPE_BY_NAME, "complex128": torch.complex128}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedState:
    """Objects of this process that a peer's state has to fit."""

    tensors: Mapping[str, Tensor]
    """Tensors of the model and extra tensors, by the name of the buffer."""
    groups: Sequence[Mapping[str, Any]]
    """Groups of the optimizer, as in its `state_dict`."""
    extra_names: Collection[str]
    """Names of the extra objects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerState:
    """State of a peer that fits."""

    tensors: dict[str, Tensor]
    """Tensors like our own, over the memory that was read."""
    optimizer: dict[str, Any]
    """State for the optimizer's `load_state_dict`."""
    extra_state: dict[str, Any]
    """State of each extra object, by name, for its `load_state_dict`."""


def check_state_sizes(sizes: Sequence[tuple[str, int]], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a state that cannot be this job's, before memory is allocated for it.

    Args:
        sizes: Name and bytes of each buffer of the peer.
        tensors: Tensors of this process, as in `ExpectedState`.

    Raises:
        MessageError: The names or sizes differ.
    """
    named, expected_sizes = dict(sizes), {name: tensor.nbytes for name, tensor in tensors.items()}
    theirs = {name: size for name, size in sizes if name.startswith(("model/", "beside/"))}
    total, max_bytes = (
        sum(size for _, size in sizes),
        MAX_OPTIMIZER_FACTOR * sum(expected_sizes.values()) + MAX_REST_BYTES,
    )
    what, do = "state of a peer", "Run the same script on all workers"
    if theirs != expected_sizes or total > max_bytes or REST_BUFFER not in named or len(named) < len(sizes):
        got = sorted(set(theirs.items()) ^ set(expected_sizes.items()))[:4] or total
        raise MessageError(what, got=got, expected="tensors of the same names and sizes as here", do=do)
    if named[REST_BUFFER] > MAX_REST_BYTES:
        do = "Let what goes along have a smaller state"
        got, expected = f"{named[REST_BUFFER]} bytes beside tensors", f"at most {MAX_REST_BYTES}"
        raise MessageError(what, got=got, expected=expected, do=do)


def parse_peer_state(buffers: Mapping[str, memoryview], expected: ExpectedState) -> PeerState:
    """Parse the buffers of a peer.

    Raises:
        MessageError: They are no state, or the state of another model or optimizer.
        TrainingError: An extra object of this process is missing.
    """
    try:
        rest = file_io.parse_json(bytes(buffers[REST_BUFFER]), MAX_REST_BYTES)
        optimizer, groups, extra_state = (rest[key] for key in ("optimizer", "groups", "extra_state"))
        _check_are_objects({"optimizer": optimizer, "extra_state": extra_state})
        peer_state = PeerState(
            tensors={
                name: _tensor_over(buffers[name], each.dtype, list(each.shape))
                for name, each in expected.tensors.items()
            },
            optimizer={
                "state": _optimizer_state_of(optimizer, buffers, expected),
                "param_groups": _param_groups_of(groups, expected),
            },
            extra_state=extra_state,
        )
        _check_buffer_names(buffers, {REST_BUFFER, *expected.tensors, *_optimizer_tensor_names(optimizer)})
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as cause:
        raise peer_state_error(cause) from cause
    if missing := sorted(set(expected.extra_names) - peer_state.extra_state.keys()):
        raise TrainingError(
            "what goes along with the state",
            got=sorted(peer_state.extra_state),
            expected=f"{', '.join(missing)} as well",
            do="Give prepare the same on all workers",
        )
    return peer_state


def peer_state_error(cause: Exception) -> MessageError:
    """Return the error for a peer's state that cannot be taken over."""
    do = "Run the same script and the same ringweave on all workers; it is read again from another one"
    expected = "one of the same model, optimizer and what goes along"
    return MessageError("state of a peer", got=f"{type(cause).__name__}: {cause}", expected=expected, do=do)


def _check_are_objects(objects: Mapping[str, object]) -> None:
    for name, each in objects.items():
        if not isinstance(each, dict):
            raise TypeError(f"{name} is no object")


def _check_buffer_names(buffers: Mapping[str, object], known: set[str]) -> None:
    if buffers.keys() != known:
        raise ValueError(f"also {sorted(buffers.keys() - known)[:4]}")


def _optimizer_tensor_names(optimizer: Mapping[str, Any]) -> list[str]:
    """Return the buffer names of an optimizer's tensors."""
    entries = [(index, name, entry) for index, values in optimizer.items() for name, entry in values.items()]
    return [f"optimizer/{index}/{name}" for index, name, entry in entries if "tensor" in entry]


def _optimizer_state_of(
    optimizer: Mapping[str, Any], buffers: Mapping[str, memoryview], expected: ExpectedState
) -> dict[int, dict[str, Any]]:
    """Return the optimizer state of each parameter, by its index in the groups."""
    indices = {str(place): place for group in expected.groups for place in group["params"]}
    return {
        indices[index]: {
            name: _optimizer_value(entry, buffers, f"optimizer/{index}/{name}") for name, entry in values.items()
        }
        for index, values in optimizer.items()
    }


def _optimizer_value(entry: Mapping[str, Any], buffers: Mapping[str, memoryview], key: str) -> Any:
    match entry:
        case {"value": value, **others} if not others:
            return value
        case {"tensor": {"dtype": str(dtype), "shape": list(shape), **more}, **others} if not others and not more:
            return _tensor_over(buffers[key], _STATE_DTYPES[dtype], shape).clone()
    raise ValueError(f"{key} is neither a value nor a tensor")


def _tensor_over(view: memoryview, dtype: torch.dtype, shape: Sequence[Any]) -> Tensor:
    is_shape = all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) * dtype.itemsize != view.nbytes:
        raise ValueError(f"{view.nbytes} bytes for {dtype} of shape {shape}")
    flat = torch.from_numpy(np.frombuffer(view, np.uint8)) if view.nbytes else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(tuple(shape))


def _param_groups_of(groups: Any, expected: ExpectedState) -> list[dict[str, Any]]:
    """Return the optimizer's groups; they must have the parameters and options of this process."""
    _check_are_objects({f"group {place}": group for place, group in enumerate(groups)})
    if [group["params"] for group in groups] != [list(group["params"]) for group in expected.groups]:
        raise ValueError("groups of other parameters")
    for theirs, ours in zip(groups, expected.groups, strict=True):
        for name, value in ours.items():
            if not _is_same_kind(value, theirs[name]):
                raise TypeError(f"{name} is {theirs[name]!r}")
    return [_lists_to_tuples(each) for each in groups]


def _is_same_kind(ours: Any, theirs: Any) -> bool:
    """Return whether a number is replaced by a number; other types are not checked."""
    if isinstance(ours, Tensor):
        ours = ours.tolist()
    if isinstance(ours, list | tuple):
        return isinstance(theirs, list) and (len(ours) == len(theirs) and all(map(_is_same_kind, ours, theirs)))
    if isinstance(ours, int | float) and not isinstance(ours, bool):
        return isinstance(theirs, int | float) and not isinstance(theirs, bool)
    return True


def _lists_to_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists to tuples, such as betas: JSON has no tuples."""
    return {key: tuple(v) if isinstance(v, list) and key != "params" else v for key, v in group.items()}


_PUBLISH_TIMEOUT_S = 5.0
"""Time that a source that has entered another generation may take to publish the state of the one before. If it heard
of the next generation first, it never publishes that state."""


class StateRead:
    """Read of the state by one joining member from one source; it can be cancelled."""

    def __init__(
        self, is_unneeded: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a read; `is_unneeded` returns true once no thread waits for the state."""
        self._is_unneeded, self._clock = is_unneeded, clock
        self._lock = threading.Lock()
        self._client: RpcClient | None = None
        self._has_begun, self._has_ended = False, False
        self._deadline_s = math.inf

    def run(self, pull: Callable[[], None]) -> None:
        """Run the read in a thread; the thread is left behind if the read is cancelled.

        Raises:
            Exception: Any error that `pull` raised.
            ConnectionLostError: The read was cancelled; nothing is loaded any more.
        """
        try:
            BackgroundCall(pull, "ringweave pull").wait_result(math.inf, self._is_cancelled)
        except TimeoutError:
            with self._lock:  # a load that has begun is completed first
                self._has_ended, client = True, self._client
            if client is not None:
                client.abort()
            raise _cancelled_error() from None

    # The reading thread.

    def use_connection(self, client: RpcClient) -> None:
        """Set the connection that the read uses.

        Raises:
            ConnectionLostError: The read was cancelled.
        """
        with self._lock:
            if self._is_cancelled():
                raise _cancelled_error()
            self._client = client

    def mark_begun(self) -> None:
        """Note that the source has described the state."""
        self._has_begun = True

    def load_unless_cancelled(self, load: Callable[[], None]) -> None:
        """Load the complete state, unless the read was cancelled.

        Raises:
            ConnectionLostError: The read was cancelled.
        """
        with self._lock:
            if self._is_cancelled():
                raise _cancelled_error()
            load()

    # Any other thread.

    def cancel(self) -> None:
        self._has_ended = True

    def limit_wait(self) -> None:
        """Limit the wait for the source, which may have moved on without publishing the state."""
        self._deadline_s = min(self._deadline_s, self._clock() + _PUBLISH_TIMEOUT_S)

    def _is_cancelled(self) -> bool:
        is_late = not self._has_begun and self._clock() > self._deadline_s
        return self._has_ended or is_late or self._is_unneeded()


def _cancelled_error() -> ConnectionLostError:
    return ConnectionLostError(
        "state of the job",
        got="a member that is to give it and does not",
        expected="one that goes on",
        do="Read it from another one",
    )


_PUBLISH_WAIT_S = 60.0
"""Time that a peer may take to publish its state; it copies the state during its next step."""


class IncompleteStep:
    """Train step that misses samples of lost members: nothing of it takes effect before these samples are computed.

    Its gradients are a part of the whole ones, and the sums are kept elsewhere. So the script's call of the optimizer
    changes nothing: the optimizer's gradients are removed. What the script changes after it, such as a scheduler of
    learning rates, is undone for the optimizer's options and for extra objects before the missing samples are handed
    out. The script then goes through the step again, with these samples, and its second call of the optimizer counts.
    """

    def __init__(self, optimizer: Optimizer, extra_state: Mapping[str, Any], is_incomplete: Callable[[], bool]) -> None:
        self._optimizer, self._extra_state, self._is_incomplete = optimizer, extra_state, is_incomplete
        self._options: list[dict[str, Any]] = []
        self._extra: dict[str, Any] = {}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        optimizer.register_step_pre_hook(self._skip_if_incomplete)

    def restore(self) -> None:
        """Undo what the script changed after it called the optimizer, if it did."""
        self._set_options(self._options)
        for name, state in self._extra.items():
            self._extra_state[name].load_state_dict(state)
        self._forget()

    @torch.no_grad()
    def take_without_missing(self, scale: float) -> None:
        """Take the step after all, with the gradients that the optimizer did not get, multiplied by `scale`."""
        options, gradients, present = self._options, self._gradients, self._copy_options()
        self._forget()
        if not gradients:
            return
        for parameter, gradient in gradients:
            parameter.grad = None if gradient is None else gradient.mul_(scale)
        self._set_options(options)
        self._optimizer.step()
        self._set_options(present)

    def _skip_if_incomplete(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if not self._is_incomplete():
            return
        self._options = self._copy_options()
        self._extra = {name: copy.deepcopy(each.state_dict()) for name, each in self._extra_state.items()}
        self._gradients = [
            (parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]
        ]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _copy_options(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]

    def _set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        for group, each in zip(self._optimizer.param_groups, options, strict=bool(options)):
            group.update(each)

    def _forget(self) -> None:
        self._options, self._extra, self._gradients = [], {}, []


class TrainingState:
    """State of one model, its optimizer and extra objects with `state_dict`, as named buffers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        extra_state: Mapping[str, Any],
        *,
        extra_tensors: Sequence[Tensor] = (),
    ) -> None:
        """Collect the objects of the state.

        Args:
            model: With its parameters and buffers.
            optimizer: With its state.
            extra_state: Further objects with `state_dict` and `load_state_dict` of plain values, such as schedulers.
            extra_tensors: Further tensors of the trainer, the same on all members between two steps.
        """
        self._model, self._optimizer, self._extra_state, self._extra_tensors = (
            model,
            optimizer,
            extra_state,
            list(extra_tensors),
        )

    def to_buffers(self) -> dict[str, Buffer]:
        """Return all buffers by name. CPU parameters and optimizer state are not copied; everything else is.

        The buffers must not change while peers read them; forward and backward passes do not change them.
        """
        parameters = dict(self._model.named_parameters())
        buffers: dict[str, Buffer] = {}
        for name, tensor in self._model.state_dict().items():
            buffers[f"model/{name}"] = _tensor_bytes(tensor if name in parameters else tensor.clone())
        buffers |= {f"beside/{number}": _tensor_bytes(tensor) for number, tensor in enumerate(self._extra_tensors)}
        saved = self._optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for index, values in saved["state"].items():
            for name, value in values.items():
                entry: dict[str, Any] = {"value": value}
                if isinstance(value, Tensor):
                    buffers[f"optimizer/{index}/{name}"] = _tensor_bytes(value)
                    entry = {"tensor": {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}}
                plain.setdefault(str(index), {})[name] = entry
        rest = {
            "optimizer": plain,
            "groups": [_plain_group(group) for group in saved["param_groups"]],
            "extra_state": {name: each.state_dict() for name, each in self._extra_state.items()},
        }
        buffers[REST_BUFFER] = json.dumps(rest, default=_refuse_value).encode()
        return buffers

    def load(self, buffers: Mapping[str, memoryview]) -> None:
        """Load the buffers that `to_buffers` returned: all of them, or nothing.

        Raises:
            MessageError: They are something else, or of another model or optimizer.
            TrainingError: An extra object of this process is missing.
        """
        tensors, optimizer_before = self._tensors(), self._optimizer.state_dict()
        peer_state = parse_peer_state(
            buffers,
            ExpectedState(tensors=tensors, groups=optimizer_before["param_groups"], extra_names=self._extra_state),
        )
        extra_before = copy.deepcopy({name: each.state_dict() for name, each in self._extra_state.items()})
        try:
            self._load_rest(peer_state.optimizer, peer_state.extra_state)
        except Exception as cause:  # an error of the script's own classes; their old states are restored
            self._load_rest(optimizer_before, extra_before)
            if isinstance(cause, RingweaveError):
                raise
            raise peer_state_error(cause) from cause
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(peer_state.tensors[name])

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model and the extra tensors, by the name of the buffer."""
        found = {f"model/{name}": tensor for name, tensor in self._model.state_dict().items()}
        return found | {f"beside/{number}": tensor for number, tensor in enumerate(self._extra_tensors)}

    def _load_rest(self, optimizer: dict[str, Any], extra_state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(optimizer)
        for name, each in self._extra_state.items():
            each.load_state_dict(extra_state[name])

    def fetch_from_peer(
        self,
        host: str,
        port: int,
        authentication: rpc.PeerAuthentication,
        name: str,
        *,
        timeout_s: float,
        throttle: ReadThrottle | None = None,
        state_read: StateRead | None = None,
    ) -> int:
        """Read the state from a peer, and load it once it is complete and valid.

        Args:
            host: Host of the peer.
            port: Port of the peer.
            authentication: Authentication of the peer.
            name: Name under which the peer publishes the state, now or soon.
            timeout_s: Time limit of the whole read.
            throttle: Throttle; None reads at full speed.
            state_read: Read that can be cancelled; None cannot be.

        Returns:
            Number of bytes read.

        Raises:
            RpcError: It could not be read, or is of another model or optimizer; nothing has changed.
            TrainingError: An extra object of this process is missing; nothing has changed.
        """
        state_read = state_read or StateRead()

        def check(description: StateDescription) -> None:
            check_state_sizes([(each.name, each.num_bytes) for each in description.pieces], self._tensors())
            state_read.mark_begun()

        with rpc.RpcClient.connect(host, port, authentication, role="worker") as client:
            state_read.use_connection(client)
            memory = state_transfer.fetch_state(
                client, name, timeout_s=timeout_s, wait_s=_PUBLISH_WAIT_S, check=check, throttle=throttle
            )
        state_read.load_unless_cancelled(lambda: self.load(memory))
        return sum(view.nbytes for view in memory.values())


def copy_buffers(buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Return a copy that does not change when training continues.

    Numpy lets other threads run while it copies.
    """
    views = {name: framing.as_bytes_view(each) for name, each in buffers.items()}
    return {name: np.frombuffer(view, np.uint8).copy().data if view.nbytes else b"" for name, view in views.items()}


def _tensor_bytes(tensor: Tensor) -> Buffer:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}


def _refuse_value(value: object) -> object:
    raise TrainingError(
        "state that goes along",
        got=type(value).__name__,
        expected="numbers, texts, lists and dictionaries, or tensors of the optimizer",
        do="Let its state_dict give plain values",
    )
