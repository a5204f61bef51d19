"""Representatives of rings that call a service as `ring_functions` does, in this thread and without a connection."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringweave import rpc
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ParameterGroup, Pull, Push, ServerSetup, StartJob, TensorSpec
from ringweave.param_server.optimizers import group_options
from ringweave.param_server.service import ParameterService
from ringweave.rpc import IncomingCall, RpcCall, RpcReply

NUM_ELEMENTS = 50
_FOREVER_S = 60.0
"""What waits here waits for nobody: a minute without an answer is never."""


class Callers:
    """All rings of a job whose model is one tensor of 50 numbers, at first zero, under SGD."""

    def __init__(
        self,
        service: ParameterService,
        num_rings: int,
        *,
        compensation: float,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        """`options` are those of SGD. Starts the job."""
        self._handlers = {each.message: each for each in service.handlers()}
        self._sequence, self._base = [0] * num_rings, [0] * num_rings
        self._options = group_options(torch.optim.SGD([torch.zeros(1)], **options).param_groups[0])
        specs = [TensorSpec(name="weight", shape=[NUM_ELEMENTS], dtype=str(dtype).removeprefix("torch."))]
        setup = ServerSetup(
            tensors=specs,
            optimizer="SGD",
            groups=[ParameterGroup(parameters=[0], options=self._options)],
            rings=[[ring] for ring in range(num_rings)],
            overlaps=False,
            compensation=compensation,
        )
        self.handle(
            0, StartJob(term=0, setup=setup), FlatTensors(specs, [torch.zeros(NUM_ELEMENTS, dtype=dtype)]).buffers()
        )
        self._num_bytes = NUM_ELEMENTS * dtype.itemsize

    def pull(self, ring: int) -> int:
        """The version; nothing of the answer is kept."""
        self._base[ring] = self.handle(ring, self._pull_of(ring, self._sequence[ring])).message.version
        return self._base[ring]

    def push(
        self,
        ring: int,
        *,
        gradient: Callable[[int], bytes] | None = None,
        arriving: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> None:
        """The ring's next push.

        Args:
            ring: Whose.
            gradient: Gives the content of the push with that sequence number; None: zeros.
            arriving: Called when the push has room and its content has not come.
            more: Fields of the message.
        """
        self._sequence[ring] += 1
        push = Push(
            term=0,
            ring=ring,
            sequence=self._sequence[ring],
            base_version=self._base[ring],
            num_samples=1,
            options=[self._options],
            **{"content": "gradient", "batch_share": 1 / len(self._base), **more},
        )
        (room,) = rooms = self._handlers[Push].allocate(IncomingCall(peer_of(ring), push, (self._num_bytes,)))
        room[:] = gradient(push.sequence) if gradient else bytes(self._num_bytes)
        arriving()
        self.handle(ring, push, rooms)

    def call_of(self, ring: int, after_sequence: int = 0) -> RpcCall:
        """A pull, to be handled by `pull_with`."""
        return _call(ring, self._pull_of(ring, after_sequence), (), _FOREVER_S)

    def pull_with(self, call: RpcCall) -> RpcReply:
        """Handle a call that the test has prepared."""
        answer = self._handlers[Pull].handle(call)
        assert isinstance(answer, RpcReply)
        return answer

    def handle(self, ring: int, message: rpc.RpcMessage, buffers: Sequence[memoryview] = ()) -> RpcReply:
        """What the service answers."""
        limit_s = _FOREVER_S if isinstance(message, Pull) else float("inf")
        answer = self._handlers[type(message)].handle(_call(ring, message, buffers, limit_s))
        return answer if isinstance(answer, RpcReply) else RpcReply(answer)

    def _pull_of(self, ring: int, after_sequence: int) -> Pull:
        return Pull(term=0, ring=ring, after_sequence=after_sequence)


def _call(ring: int, message: rpc.RpcMessage, buffers: Sequence[memoryview], limit_s: float) -> RpcCall:
    return RpcCall(peer=peer_of(ring), message=message, buffers=buffers, deadline_s=time.monotonic() + limit_s)


def peer_of(ring: int) -> rpc.Identity:
    return rpc.Identity(job="test", role="worker", name=str(ring))
