"""Representatives of rings that call a service as `ring_functions` does, in this thread and without a connection."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringweave import wire
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Pull, Push, Setup, Start, TensorSpec
from ringweave.params.serving.optimizers import options_of
from ringweave.params.serving.service import ParameterService
from ringweave.wire import Answer, Call, Incoming

_NUM_ELEMENTS = 50
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
        self._options = options_of(torch.optim.SGD([torch.zeros(1)], **options).param_groups[0])
        specs = [TensorSpec(name="weight", shape=[_NUM_ELEMENTS], dtype=str(dtype).removeprefix("torch."))]
        setup = Setup(
            tensors=specs,
            optimizer="SGD",
            groups=[Group(parameters=[0], options=self._options)],
            rings=[[ring] for ring in range(num_rings)],
            overlaps=False,
            compensation=compensation,
        )
        self.handle(0, Start(term=0, setup=setup), Flat(specs, [torch.zeros(_NUM_ELEMENTS, dtype=dtype)]).buffers())
        self._num_bytes = _NUM_ELEMENTS * dtype.itemsize

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
            content="gradient",
            num_samples=1,
            options=[self._options],
            **{"batch_share": 1 / len(self._base), **more},
        )
        (room,) = rooms = self._handlers[Push].allocate(Incoming(peer_of(ring), push, (self._num_bytes,)))
        room[:] = gradient(push.sequence) if gradient else bytes(self._num_bytes)
        arriving()
        self.handle(ring, push, rooms)

    def call_of(self, ring: int, after_sequence: int = 0) -> Call:
        """A pull, to be handled by `pull_with`."""
        return _call(ring, self._pull_of(ring, after_sequence), (), _FOREVER_S)

    def pull_with(self, call: Call) -> Answer:
        """Handle a call that the test has prepared."""
        answer = self._handlers[Pull].handle(call)
        assert isinstance(answer, Answer)
        return answer

    def handle(self, ring: int, message: wire.Message, buffers: Sequence[memoryview] = ()) -> Answer:
        """What the service answers."""
        limit_s = _FOREVER_S if isinstance(message, Pull) else float("inf")
        answer = self._handlers[type(message)].handle(_call(ring, message, buffers, limit_s))
        return answer if isinstance(answer, Answer) else Answer(answer)

    def _pull_of(self, ring: int, after_sequence: int) -> Pull:
        return Pull(term=0, ring=ring, after_sequence=after_sequence)


def _call(ring: int, message: wire.Message, buffers: Sequence[memoryview], limit_s: float) -> Call:
    return Call(peer=peer_of(ring), message=message, buffers=buffers, deadline_s=time.monotonic() + limit_s)


def peer_of(ring: int) -> wire.Identity:
    return wire.Identity(job="test", role="worker", name=str(ring))
